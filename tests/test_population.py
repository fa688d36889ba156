"""Compare the population statistics of Algorithm 2, lines 8 to 10, with their formulas in float64."""

import copy

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from networks import Coded, Recurrent, Residual, scramble_
from torch import nn

import batchnorm as bn

KINDS = {"ours": bn.BatchNorm2d, "torch": nn.BatchNorm2d}


def unequal_batches(*shape, sizes=(7, 2, 5)):
    return [(torch.randn(n, *shape) * 3 + 5).double() for n in sizes]


@pytest.mark.parametrize("kind", KINDS)
def test_the_papers_rule(kind):
    net, data = KINDS[kind](3).double(), unequal_batches(3, 4, 5)
    bn.estimate_(net, data, rule="paper")
    m = torch.tensor([b.shape[0] * 20 for b in data]).double()[:, None]
    means = torch.stack([b.mean((0, 2, 3)) for b in data])
    variances = torch.stack([b.var((0, 2, 3), correction=0) for b in data])
    torch.testing.assert_close(net.running_mean, (m * means).sum(0) / m.sum(), rtol=1e-12, atol=0)
    torch.testing.assert_close(net.running_var, (m * variances).sum(0) / (m - 1).sum(), rtol=1e-12, atol=0)


def test_the_papers_rule_for_equal_batches_is_its_formula():
    net, data = bn.BatchNorm1d(3).double(), unequal_batches(3, sizes=(6, 6, 6, 6))
    bn.estimate_(net, data)
    m = 6
    expected = m / (m - 1) * torch.stack([b.var(0, correction=0) for b in data]).mean(0)
    torch.testing.assert_close(net.running_var, expected, rtol=1e-12, atol=0)
    torch.testing.assert_close(net.running_mean, torch.stack([b.mean(0) for b in data]).mean(0), rtol=1e-12, atol=0)


@pytest.mark.parametrize("kind", KINDS)
def test_the_pooled_rule_is_the_moments_of_all_samples(kind):
    net, data = KINDS[kind](3).double(), unequal_batches(3, 4, 5)
    bn.estimate_(net, data, rule="pooled")
    everything = torch.cat(data)
    torch.testing.assert_close(net.running_mean, everything.mean((0, 2, 3)), rtol=1e-12, atol=0)
    torch.testing.assert_close(net.running_var, everything.var((0, 2, 3), correction=0), rtol=1e-12, atol=0)


def deep(norm=bn.BatchNorm1d):
    return nn.Sequential(nn.Linear(4, 6), norm(6), nn.Sigmoid(), nn.Linear(6, 5), norm(5), nn.Tanh()).double()


class SharedTwice(nn.Module):
    """Call ``shared`` on the input, and again after the layer ``before``; ``behind`` reads the first call's output.

    With ``around``, ``before`` reads the output of ``behind``, so the second call depends on the first.
    """

    def __init__(self, around):
        super().__init__()
        self.shared, self.before, self.behind = (bn.BatchNorm1d(4) for _ in range(3))
        self.around = around

    def forward(self, x):
        first = self.shared(x)
        seen = self.behind(first.sigmoid() * 3)
        before = self.before((seen if self.around else x) * 2 + 1)
        return seen, self.shared(before.tanh())


def test_layers_wait_for_the_statistics_of_a_shared_layer_above_them():
    net, data = SharedTwice(around=False).double(), unequal_batches(4)
    bn.estimate_(net, data, rule="pooled", upstream="population")
    inputs = {}
    for layer in (net.before, net.behind):
        layer.register_forward_pre_hook(lambda layer, x: inputs.setdefault(layer, x[0]))
    net.eval()(torch.cat(data))
    for layer, x in inputs.items():
        torch.testing.assert_close(layer.running_mean, x.mean(0), rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(layer.running_var, x.var(0, correction=0), rtol=1e-12, atol=0)


def test_a_shared_layer_that_depends_on_itself_comes_last():
    net, (x,) = SharedTwice(around=True).double(), unequal_batches(4, sizes=(9,))
    bn.estimate_(net, [x], rule="pooled", upstream="population")
    # The shared layer normalizes by the mini-batch until its population statistics are estimated.
    seen = (F.batch_norm(x, None, None, training=True).sigmoid()) * 3
    torch.testing.assert_close(net.behind.running_mean, seen.mean(0), rtol=1e-12, atol=1e-12)
    scaled = F.batch_norm(seen, seen.mean(0), seen.var(0, correction=0)) * 2 + 1
    torch.testing.assert_close(net.before.running_mean, scaled.mean(0), rtol=1e-12, atol=1e-12)
    last = F.batch_norm(scaled, scaled.mean(0), scaled.var(0, correction=0)).tanh()
    torch.testing.assert_close(net.shared.running_mean, torch.cat([x, last]).mean(0), rtol=1e-12, atol=1e-12)


@given(cut=st.lists(st.integers(2, 9), min_size=1, max_size=5), upstream=st.sampled_from(["batch", "population"]))
def test_rebatching_the_same_data_changes_nothing(cut, upstream):
    x = torch.randn(sum(cut), 4, generator=torch.Generator().manual_seed(len(cut))).double() * 2 + 1
    a = deep()
    b = copy.deepcopy(a)
    bn.estimate_(a, [x], rule="pooled", upstream=upstream)
    bn.estimate_(b, x.split(cut), rule="pooled", upstream=upstream)
    # With upstream "batch", only the first layer's statistics agree, because later inputs are normalized by mini-batch.
    for layer in (1, 4) if upstream == "population" else (1,):
        torch.testing.assert_close(b[layer].running_mean, a[layer].running_mean, rtol=1e-10, atol=1e-12)
        torch.testing.assert_close(b[layer].running_var, a[layer].running_var, rtol=1e-10, atol=1e-12)


def test_upstream_batch_is_what_training_saw():
    net, data = deep(), unequal_batches(4)
    twin = copy.deepcopy(net).train()
    inputs = [twin[:4](batch) for batch in data]
    bn.estimate_(net, data, rule="pooled", upstream="batch")
    torch.testing.assert_close(net[4].running_mean, torch.cat(inputs).mean(0), rtol=1e-12, atol=1e-12)


def test_upstream_population_uses_the_statistics_already_found():
    net, data = deep(), unequal_batches(4)
    bn.estimate_(net, data, rule="pooled", upstream="population")
    inputs = torch.cat([net.eval()[:4](batch) for batch in data])
    torch.testing.assert_close(net[4].running_mean, inputs.mean(0), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(net[4].running_var, inputs.var(0, correction=0), rtol=1e-12, atol=1e-12)


def test_upstream_population_on_a_residual_network():
    net, data = Residual().double(), [torch.randn(5, 3, 8, 8).double() for _ in range(2)]
    bn.estimate_(net, data, rule="pooled", upstream="population")
    seen = {}
    for name, m in net.named_modules():
        if isinstance(m, nn.BatchNorm2d):
            m.register_forward_pre_hook(lambda m, args, name=name: seen.setdefault(name, []).append(args[0].clone()))
    for batch in data:
        net.eval()(batch)
    assert len(seen) == 6
    for name, inputs in seen.items():
        x = torch.cat(inputs)
        torch.testing.assert_close(net.get_submodule(name).running_mean, x.mean((0, 2, 3)), rtol=1e-10, atol=1e-12)


class OneShot:
    """An iterable that yields its batches only once but is not an iterator, such as tqdm(generator)."""

    def __init__(self, batches):
        self.batches = iter(batches)

    def __iter__(self):
        yield from self.batches


@pytest.mark.parametrize("kind", [iter, OneShot])
def test_upstream_population_needs_batches_that_can_be_read_again(kind):
    net = deep()
    before = copy.deepcopy(net.state_dict())
    with pytest.raises(ValueError, match="pass a list or a DataLoader"):
        bn.estimate_(net, kind(unequal_batches(4)), upstream="population")
    torch.testing.assert_close(net.state_dict(), before, rtol=0, atol=0)


def test_batches_that_end_while_the_layers_are_ordered():
    net, batches = Domains(), [{"x": torch.randn(8, 3), "camera": k} for k in (0, 1)]
    with pytest.raises(ValueError, match="pass a list or a DataLoader"):
        bn.estimate_(net, OneShot(batches), upstream="population")


class Domains(nn.Module):
    """One batch normalization per camera, and one after both."""

    def __init__(self):
        super().__init__()
        self.norms = nn.ModuleList(nn.BatchNorm1d(3) for _ in range(2))
        self.head, self.out = nn.Linear(3, 3), nn.BatchNorm1d(3)

    def forward(self, x, camera):
        return self.out(self.head(torch.relu(self.norms[camera](x))))


@pytest.mark.parametrize("first", [0, 1])
def test_upstream_population_reaches_layers_that_the_first_batch_skips(first):
    net = Domains().double()
    batches = [{"x": torch.randn(8, 3).double() * (1 + 2 * (k % 2)) + 4 * (k % 2), "camera": k % 2} for k in range(6)]
    bn.estimate_(net, batches[first:] + batches[:first], rule="pooled", upstream="population")
    inputs = [torch.cat([b["x"] for b in batches if b["camera"] == camera]) for camera in (0, 1)]
    whitened = [(x - x.mean(0)) / (x.var(0, correction=0) + 1e-5).sqrt() for x in inputs]
    after = net.head(torch.relu(torch.cat(whitened)))
    for layer, x in zip([*net.norms, net.out], [*inputs, after], strict=True):
        torch.testing.assert_close(layer.running_mean, x.mean(0), rtol=1e-10, atol=1e-12)
        torch.testing.assert_close(layer.running_var, x.var(0, correction=0), rtol=1e-10, atol=1e-12)


def test_upstream_population_looks_for_skipped_layers_until_all_are_found():
    calls = []

    def forward(net, batch):
        calls.append(batch["camera"])
        return net(**batch)

    batches = [{"x": torch.randn(8, 3), "camera": k % 2} for k in range(6)]
    bn.estimate_(Domains(), batches, upstream="population", forward=forward)
    passes = 2 * [b["camera"] for b in batches]
    assert calls[: -len(passes)] == [0, 1, 1]  # trace the first batch; run the second, and trace it
    assert calls[-len(passes) :] == passes


def test_upstream_population_needs_one_order_of_the_layers():
    class EitherOrder(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b, self.last = (nn.BatchNorm1d(3) for _ in range(3))

        def forward(self, x, swap):
            x = self.a(self.b(x)) if swap else self.b(self.a(x))
            return self.last(x) if swap else x

    batches = [{"x": torch.randn(8, 3), "swap": swap} for swap in (False, True)]
    with pytest.raises(ValueError, match="in different orders"):
        bn.estimate_(EitherOrder(), batches, upstream="population")


@pytest.mark.parametrize("upstream", ["batch", "population"])
def test_a_loader_of_unknown_length(upstream):
    class Stream(torch.utils.data.IterableDataset):
        def __iter__(self):
            return iter(torch.arange(12.0).reshape(12, 1))

    net = nn.Sequential(nn.BatchNorm1d(1))
    bn.estimate_(net, torch.utils.data.DataLoader(Stream(), batch_size=4), rule="pooled", upstream=upstream)
    assert net[0].running_mean.item() == 5.5


def test_the_default_device_is_not_used():
    torch.set_default_device("meta")
    try:
        net = nn.Sequential(nn.BatchNorm1d(1, device="cpu"))
        bn.estimate_(net, [torch.tensor([[0.0], [2.0]], device="cpu"), torch.tensor([[4.0], [6.0]], device="cpu")])
    finally:
        torch.set_default_device(None)
    assert net[0].running_mean.item() == 3.0


def test_a_layer_called_several_times_gets_the_moments_of_all_its_calls():
    net, x = Recurrent().double(), torch.randn(6, 3, 5).double()
    report = bn.estimate_(net, [x], rule="pooled")
    inputs = torch.cat([net.w(step) for step in x.unbind(1)])
    torch.testing.assert_close(net.norm_w.running_mean, inputs.mean(0), rtol=1e-12, atol=1e-12)
    assert [layer.batches for layer in report.layers] == [3, 3]
    bn.estimate_(net, [x], rule="pooled", upstream="population")
    torch.testing.assert_close(net.norm_w.running_var, inputs.var(0, correction=0), rtol=1e-12, atol=1e-12)


def test_masked_positions_do_not_count():
    class Masked(nn.Module):
        def __init__(self):
            super().__init__()
            self.bn = bn.BatchNorm1d(2)

        def forward(self, x, mask):
            return self.bn(x, mask=mask)

    net = Masked().double()
    x, mask = torch.randn(4, 2, 5).double(), torch.rand(4, 5) > 0.4
    bn.estimate_(net, [{"x": x, "mask": mask}], rule="pooled")
    kept = x.movedim(1, -1)[mask]
    torch.testing.assert_close(net.bn.running_mean, kept.mean(0), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(net.bn.running_var, kept.var(0, correction=0), rtol=1e-12, atol=1e-12)


def test_per_activation_layers():
    net, data = bn.BatchNorm2d((2, 3, 3)).double(), unequal_batches(2, 3, 3)
    bn.estimate_(net, data, rule="pooled")
    torch.testing.assert_close(net.running_var, torch.cat(data).var(0, correction=0), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("statistics", [bn.Ghost(4), bn.Renorm(), bn.Sync()])
def test_layers_with_statistics_of_their_own(statistics):
    net, data = bn.BatchNorm1d(3, statistics=statistics).double(), unequal_batches(3)
    bn.estimate_(net, data, rule="pooled")
    torch.testing.assert_close(net.running_mean, torch.cat(data).mean(0), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(net.running_var, torch.cat(data).var(0, correction=0), rtol=1e-12, atol=1e-12)


def test_subclasses_with_their_own_forward_are_measured_from_outside():
    class Odd(nn.BatchNorm1d):
        def forward(self, x):
            return super().forward(x).relu() * 2

    net, data = Odd(3, momentum=0.3).double(), unequal_batches(3)
    bn.estimate_(net, data, rule="pooled")
    torch.testing.assert_close(net.running_mean, torch.cat(data).mean(0), rtol=1e-12, atol=1e-12)


def changing_their_input(base):
    class Scaled(base):
        def forward(self, x):
            return super().forward(2 * x)

    class ChannelsLast(base):
        def forward(self, x):
            return super().forward(2 * x.mT).mT

    return Scaled, ChannelsLast


class Functionally(nn.BatchNorm1d):
    def forward(self, x):
        return F.batch_norm(2 * x, self.running_mean, self.running_var, training=self.training)


@pytest.mark.parametrize("upstream", ["batch", "population"])
@pytest.mark.parametrize("rule", ["paper", "pooled"])
@pytest.mark.parametrize(
    "kind", [*changing_their_input(nn.BatchNorm1d), *changing_their_input(bn.BatchNorm1d), Functionally]
)
def test_subclasses_that_change_their_input(kind, rule, upstream):
    last = kind.__name__ == "ChannelsLast"
    net, data = nn.Sequential(kind(4)).double(), unequal_batches(*((5, 4) if last else (4, 5)))
    before = set(vars(net[0]))
    bn.estimate_(net, data, rule=rule, upstream=upstream)
    same = nn.Sequential(nn.BatchNorm1d(4)).double()
    bn.estimate_(same, [2 * (x.mT if last else x) for x in data], rule=rule)
    torch.testing.assert_close(net[0].running_mean, same[0].running_mean, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(net[0].running_var, same[0].running_var, rtol=1e-12, atol=0)
    assert set(vars(net[0])) == before


def test_a_subclass_of_this_librarys_layers_counts_each_batch_once():
    class Scaled(bn.BatchNorm2d):
        def forward(self, x, *args, **kwargs):
            return super().forward(2 * x, *args, **kwargs)

    net = nn.Sequential(Scaled(3))
    batches = [torch.randn(4, 3, 5, 5) + k for k in range(3)]
    bn.estimate_(net, batches)
    assert net[0].num_batches_tracked == 3
    torch.testing.assert_close(net[0].running_mean, 2 * torch.cat(batches).mean((0, 2, 3)))


def test_a_mask_reaches_the_layer_through_a_subclass():
    class Scaled(bn.BatchNorm1d):
        def forward(self, x, keep):
            return super().forward(2 * x, mask=keep)

    net, x, mask = Scaled(2).double(), torch.randn(4, 2, 5).double(), torch.rand(4, 5) > 0.4
    bn.estimate_(net, [{"x": x, "keep": mask}], rule="pooled")
    torch.testing.assert_close(net.running_mean, 2 * x.movedim(1, -1)[mask].mean(0), rtol=1e-12, atol=1e-12)


def test_a_subclass_that_hides_what_it_normalizes_is_named():
    class ByHand(nn.BatchNorm1d):
        def forward(self, x):
            return (x - x.mean(0)) / x.std(0)

    class Wide(nn.BatchNorm1d):
        def forward(self, x):
            return F.batch_norm(x.reshape(-1, 6), None, None, training=True).reshape(x.shape)

    net, data = nn.Sequential(bn.BatchNorm1d(3), ByHand(3)), [torch.randn(8, 3)]
    with pytest.raises(ValueError, match=r"layer '1': the forward of ByHand never called F\.batch_norm"):
        bn.estimate_(net, data)
    net.train()[1].eval()
    assert [site.path for site in bn.estimate_(net, data).left_alone] == ["1"]
    with pytest.raises(ValueError, match=r"layer '0': its forward normalizes an input of shape \(4, 6\)"):
        bn.estimate_(nn.Sequential(Wide(3)), data)


def test_half_precision_layers_are_measured_in_full():
    net, data = nn.BatchNorm1d(3).bfloat16(), [b.bfloat16() for b in unequal_batches(3)]
    bn.estimate_(net, data, rule="pooled")
    expected = torch.cat(data).double().mean(0).bfloat16()
    torch.testing.assert_close(net.running_mean, expected, rtol=0, atol=0)


@pytest.mark.parametrize("form", ["tuple", "list", "dict", "forward"])
def test_batches_of_every_form(form):
    net, x = nn.Sequential(nn.BatchNorm1d(3)), torch.randn(5, 3)
    wrap = {"tuple": (x, 1), "list": [x, 1], "dict": {"input": x}, "forward": {"images": [x]}}[form]
    forward = (lambda net, batch: net(batch["images"][0])) if form == "forward" else None
    bn.estimate_(net, [wrap], forward=forward)
    torch.testing.assert_close(net[0].running_mean, x.mean(0))


def test_other_forms_are_refused():
    with pytest.raises(TypeError, match="forward="):
        bn.estimate_(nn.Sequential(nn.BatchNorm1d(3)), ["text"])


def test_dropout_is_off_and_modes_momentum_and_other_buffers_come_back():
    class Counting(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("calls", torch.zeros(()))
            self.drop, self.bn = nn.Dropout(0.9), bn.BatchNorm1d(3, momentum=0.37)

        def forward(self, x):
            self.calls += 1
            return self.bn(self.drop(x))

    net, data = Counting().double().train(), unequal_batches(3)
    buffers = dict(net.named_buffers())
    bn.estimate_(net, data, rule="pooled")
    torch.testing.assert_close(net.bn.running_mean, torch.cat(data).mean(0), rtol=1e-12, atol=1e-12)
    assert net.drop.training
    assert net.bn.training
    assert net.bn.momentum == 0.37
    assert net.calls == 0
    assert all(buffers[name] is b for name, b in net.named_buffers()), (
        "a buffer was replaced, although other code may hold it"
    )
    assert net.bn.num_batches_tracked == 3
    assert not net.bn._forward_hooks
    assert not net.bn._forward_pre_hooks


@pytest.mark.parametrize("upstream", ["batch", "population"])
@pytest.mark.parametrize("broken", ["loader", "forward", "values", "single"])
def test_an_exception_leaves_the_network_bit_for_bit_as_it_was(upstream, broken):
    net = scramble_(nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Dropout(), nn.Linear(4, 4), bn.BatchNorm1d(4)))
    net[1].eval()
    net.train()[4].momentum = None
    before, modes = copy.deepcopy(net.state_dict()), [m.training for m in net.modules()]
    good = torch.randn(5, 3)

    class Loader:
        def __iter__(self):
            yield good
            if broken == "loader":
                raise OSError("disk")
            yield {"forward": torch.randn(5, 2), "values": torch.full((5, 3), float("nan"))}.get(broken, good[:1])

    if (broken, upstream) == ("single", "population"):
        return  # no error: no layer normalizes by the statistics of the single example
    with pytest.raises((OSError, RuntimeError, ValueError)):
        bn.estimate_(net, Loader(), upstream=upstream)
    torch.testing.assert_close(net.state_dict(), before, rtol=0, atol=0)
    assert modes == [m.training for m in net.modules()]
    assert net[4].momentum is None
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in net.modules())


@pytest.mark.parametrize("kind", KINDS)
def test_infinite_statistics_name_the_layer(kind):
    net = nn.Sequential(KINDS[kind](3))
    with pytest.raises(ValueError, match="layer '0': a batch gave no usable statistics"):
        bn.estimate_(net, [torch.randn(2, 3, 4, 4), torch.full((2, 3, 4, 4), float("inf"))])


def test_frozen_layers_are_left_alone():
    net = scramble_(
        nn.Sequential(
            bn.BatchNorm1d(3), bn.BatchNorm1d(3), nn.BatchNorm1d(3), nn.BatchNorm1d(3, track_running_stats=False)
        )
    )
    bn.freeze_(net[0])
    net.train()[2].eval()
    kept = [copy.deepcopy(net[i].state_dict()) for i in (0, 2)]
    x = torch.randn(8, 3)
    report = bn.estimate_(net, [x])
    for i, state in zip((0, 2), kept, strict=True):
        torch.testing.assert_close(dict(net[i].state_dict()), dict(state), rtol=0, atol=0)
    assert [layer.path for layer in report.layers] == ["1"]
    assert [site.path for site in report.left_alone] == ["0", "2", "3"]
    frozen = copy.deepcopy(net[0]).eval()
    torch.testing.assert_close(net[1].running_mean, frozen(x).mean(0).detach(), rtol=1e-5, atol=1e-6)


def test_nothing_to_estimate_is_an_error():
    with pytest.raises(ValueError, match="no batch normalization layers"):
        bn.estimate_(nn.Linear(2, 2), [torch.zeros(1, 2)])
    with pytest.raises(ValueError, match="no batch had values"):
        bn.estimate_(nn.BatchNorm1d(2), [])


def test_the_gap_and_the_standard_error():
    net = nn.Sequential(bn.BatchNorm1d(1))
    net[0].running_mean.fill_(3.0)
    net[0].running_var.fill_(2.0)
    torch.manual_seed(1)
    population = torch.randn(400, 100, 1) * 2 + 1
    report = bn.estimate_(net, list(population[:25]))
    (layer,) = report.layers
    assert layer.mean_gap == pytest.approx(
        abs(3 - net[0].running_mean.item()) / net[0].running_var.item() ** 0.5, rel=1e-4
    )
    assert layer.var_gap == pytest.approx(abs(2 - net[0].running_var.item()) / net[0].running_var.item(), rel=1e-4)
    # mean_error is the standard error of the mean of 25 batches, in units of the standard deviation, which is 2.
    # Compare it with the scatter of the means of 16 blocks of 25 batches.
    scatter = torch.stack([block.mean() for block in population.split(25)]).std() / 2
    assert layer.mean_error == pytest.approx(scatter.item(), rel=0.5)
    assert report.more_batches(tolerance=0.001) > report.more_batches(tolerance=0.01) >= 0
    assert report.more_batches(tolerance=1.0) == 0
    assert "mean gap" in str(report)


@pytest.mark.parametrize(
    ("rule", "upstream", "m", "shift"),
    [
        ("paper", "batch", 2, 0.0),
        ("paper", "batch", 16, 0.0),
        ("pooled", "population", 1, 0.0),
        ("pooled", "batch", 16, 0.0),
        ("pooled", "batch", 16, 3.0),
    ],
)
def test_the_standard_error_of_the_variance(rule, upstream, m, shift):
    torch.manual_seed(0)
    found = []
    for _ in range(200):
        batches = list(torch.randn(40, m, 1) + shift * torch.randn(40, 1, 1))
        layer = bn.BatchNorm1d(1, eps=0).train()
        (seen,) = bn.estimate_(layer, batches, rule=rule, upstream=upstream).layers
        variance = layer.running_var.item()
        found.append((variance, seen.var_error * variance))
    variances, errors = torch.tensor(found).unbind(1)
    assert errors.mean().item() == pytest.approx(variances.std().item(), rel=0.25)


def test_ghost_batches_are_the_batches_of_the_paper():
    # Each group of 8 has its own mean, as if a batch held groups of similar images.
    batches = [torch.randn(32, 3) + torch.arange(4.0).repeat_interleave(8)[:, None] * 5 for _ in range(6)]
    layer = bn.BatchNorm1d(3, momentum=None, statistics=bn.Ghost(8))
    for batch in batches:
        layer(batch)
    trained = layer.running_var.clone()
    seen = bn.estimate_(layer, batches).layers[0]
    torch.testing.assert_close(layer.running_var, trained, rtol=1e-5, atol=1e-6)
    assert (seen.batches, seen.m) == (24, 8)
    assert "stale_averages" not in {finding.rule for finding in bn.diagnose(layer, batches).findings}
    bn.estimate_(layer, batches, rule="pooled")
    torch.testing.assert_close(layer.running_var, torch.cat(batches).var(0, correction=0), rtol=1e-5, atol=1e-5)


def test_statistics_that_half_precision_buffers_cannot_hold():
    net = nn.Sequential(nn.BatchNorm1d(2).half())
    with pytest.raises(ValueError, match=r"'0': the statistics are too large for its half-precision buffers"):
        bn.estimate_(net, [(400 * torch.randn(64, 2)).half()] * 3)
    assert (net[0].running_var == 1).all()


@pytest.mark.parametrize("mean", [1e4, 1e6])
def test_large_means_in_layers_of_torch(mean):
    x = torch.randn(4, 64, 9, 9).contiguous(memory_format=torch.channels_last) + mean
    net = nn.BatchNorm2d(64)
    bn.estimate_(net, [x, x + 1])
    both = torch.stack([x, x + 1]).double()
    torch.testing.assert_close(net.running_var.double(), both.var((1, 3, 4)).mean(0), rtol=1e-5, atol=0)


def test_one_batch_says_nothing_about_its_error():
    report = bn.estimate_(nn.BatchNorm1d(3), [torch.randn(8, 3)])
    assert report.layers[0].mean_error == float("inf")
    assert report.more_batches() == 1


def test_a_layer_that_is_not_called_is_left_alone():
    report = bn.estimate_(Coded(lambda n, x: n.a(x), a=bn.BatchNorm1d(2), b=bn.BatchNorm1d(2)), [torch.randn(4, 2)])
    assert [site.reason for site in report.left_alone] == [
        "not called on these batches, or only on empty or fully masked inputs"
    ]


@pytest.mark.parametrize("upstream", ["batch", "population"])
@pytest.mark.parametrize("kind", [nn.BatchNorm1d, bn.BatchNorm1d])
def test_an_empty_batch_says_nothing(kind, upstream):
    net, x = kind(3), torch.randn(6, 3)
    report = bn.estimate_(net, [x[:0], x, x[:0]], rule="pooled", upstream=upstream)
    torch.testing.assert_close(net.running_mean, x.mean(0), rtol=1e-5, atol=1e-6)
    assert report.layers[0].batches == 1


def test_a_fully_masked_batch_says_nothing():
    net, x = bn.BatchNorm1d(3), torch.randn(6, 3, 4)
    batches = [{"input": x, "mask": torch.full((6, 4), kept)} for kept in (True, False)]
    assert bn.estimate_(net, batches, rule="pooled").layers[0].batches == 1
    torch.testing.assert_close(net.running_mean, x.mean((0, 2)), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("kind", [nn.BatchNorm1d, bn.BatchNorm1d])
def test_layers_that_stopped_tracking_are_measured_from_outside(kind):
    net, x = kind(3), torch.randn(6, 3)
    net.track_running_stats = False  # evaluation still normalizes by the running statistics
    bn.estimate_(net, x.split(3), rule="pooled")
    torch.testing.assert_close(net.running_mean, x.mean(0), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(net.running_var, x.var(0, correction=0), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("upstream", ["batch", "population"])
@pytest.mark.parametrize("kind", [nn.BatchNorm1d, bn.BatchNorm1d])
def test_a_layer_whose_forward_is_called_directly(kind, upstream):
    net = Coded(lambda n, x: n.norm.forward(x), norm=kind(3))
    with pytest.raises(ValueError, match=r"layer\(x\).*layer\.forward\(x\)"):
        bn.estimate_(net, [torch.randn(6, 3)], upstream=upstream)
    assert net.norm.running_mean.eq(0).all()


def test_many_batches_are_merged_in_chunks():
    net, data = bn.BatchNorm1d(2).double(), [b + 1e6 for b in unequal_batches(2, sizes=[3] * 150)]
    bn.estimate_(net, data, rule="pooled")
    torch.testing.assert_close(net.running_mean, torch.cat(data).mean(0), rtol=1e-13, atol=0)
    torch.testing.assert_close(net.running_var, torch.cat(data).var(0, correction=0), rtol=1e-6, atol=0)


@pytest.mark.parametrize("name", ["rule", "upstream"])
def test_unknown_words_are_refused(name):
    with pytest.raises(ValueError, match=f"{name}='mean' is unknown: choose '"):
        bn.estimate_(nn.BatchNorm1d(3), [torch.randn(8, 3)], **{name: "mean"})


def test_a_bare_tensor_is_no_sequence_of_batches():
    net = nn.Sequential(nn.BatchNorm1d(3))
    with pytest.raises(
        ValueError, match=r"not a tensor \(got one of shape \(8, 3\)\): pass \[x\] for one batch, or x\.split\(64\)"
    ):
        bn.estimate_(net, torch.randn(8, 3))
    assert net[0].num_batches_tracked == 0


@pytest.mark.parametrize("empty", [False, True])
def test_one_value_per_feature_in_every_batch_has_no_variance_under_the_papers_rule(empty):
    net, data = deep(), torch.randn(6, 4).double()
    before = copy.deepcopy(net.state_dict())
    batches = [data[:0], *data.split(1)] if empty else data.split(1)
    with pytest.raises(ValueError, match=r"layer '1': every batch has only one value per feature.*rule='pooled'"):
        bn.estimate_(net, batches, upstream="population")
    assert all(torch.equal(v, before[k]) for k, v in net.state_dict().items())
    bn.estimate_(net, batches, upstream="population", rule="pooled")
    torch.testing.assert_close(net[1].running_var, net[0](data).var(0, correction=0))


def test_a_single_value_in_all_has_no_variance():
    with pytest.raises(ValueError, match="layer '1': all batches together have only one value"):
        bn.estimate_(deep(), [torch.randn(1, 4).double()], upstream="population", rule="pooled")


@pytest.mark.parametrize("upstream", ["batch", "population"])
def test_empty_batches_alone_leave_the_statistics_alone(upstream):
    net = deep()
    with pytest.raises(ValueError, match="no batch had values"):
        bn.estimate_(net, [torch.randn(0, 4).double()], upstream=upstream)
    assert (net[1].running_var == 1).all()


class Functional(nn.Module):
    """A module that calls F.batch_norm instead of a layer."""

    def __init__(self):
        super().__init__()
        self.register_buffer("mean", torch.zeros(3))
        self.register_buffer("var", torch.ones(3))

    def forward(self, x):
        return F.batch_norm(x, self.mean, self.var, training=self.training)


def test_functional_calls_are_listed():
    net = nn.Sequential(Functional(), bn.BatchNorm1d(3), nn.BatchNorm1d(3)).train()
    report = bn.estimate_(net, [torch.randn(8, 3) * 2 for _ in range(2)])
    assert [layer.path for layer in report.layers] == ["1", "2"]
    (site,) = report.left_alone
    assert site.path == "0"
    assert "calls F.batch_norm with a running mean '0.mean' that was not updated" in str(report)


def test_scripted_layers_are_listed():
    net, x = nn.Sequential(torch.jit.script(nn.Sequential(nn.BatchNorm1d(3))), nn.BatchNorm1d(3)), torch.randn(8, 3)
    (site,) = bn.estimate_(net, [x, x + 1]).left_alone
    assert (site.path, site.reason) == ("0.0", "it is scripted; call estimate_ before scripting the network")
    with pytest.raises(ValueError, match=r"no statistics to estimate: 0: left alone \(it is scripted"):
        bn.estimate_(net[0], [x])


def test_frozen_scripted_modules_have_no_mode():
    inside = torch.jit.freeze(torch.jit.script(nn.Sequential(nn.Linear(3, 3))).eval())
    net, x = nn.Sequential(inside, nn.BatchNorm1d(3)), torch.randn(8, 3)
    bn.estimate_(net, [x])
    torch.testing.assert_close(net[1].running_mean, inside(x).mean(0))


def test_functional_calls_alone_are_named():
    net, x = nn.Sequential(nn.Linear(3, 3), Functional()), torch.randn(8, 3)
    with pytest.raises(ValueError, match=r"no statistics to estimate: 1: left alone \(it calls F.batch_norm.*'1.mean'"):
        bn.estimate_(net, [x])
    net[1].forward = lambda x: F.batch_norm(x, None, None, training=True)
    with pytest.raises(ValueError, match=r"calls F\.batch_norm without running statistics"):
        bn.estimate_(net, iter([x]))


def test_a_tuple_that_the_network_cannot_take_names_forward():
    class Pair(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm = bn.BatchNorm1d(3)

        def forward(self, a, b):
            return self.norm(a + b)

    net, x = Pair(), torch.randn(8, 3)
    with pytest.raises(TypeError, match=r"net\(batch\[0\]\).*missing a required argument: 'b'.*forward="):
        bn.estimate_(net, [(x, x)])
    bn.estimate_(net, [(x, x)], forward=lambda net, batch: net(*batch))
    torch.testing.assert_close(net.norm.running_mean, 2 * x.mean(0))


@pytest.mark.parametrize("upstream", ["batch", "population"])
def test_batches_are_copied(upstream):
    data = [torch.randn(64, 3) for _ in range(4)]
    net = nn.Sequential(Coded(lambda n, x: x.mul_(2)), nn.BatchNorm1d(3), nn.Linear(3, 3), nn.BatchNorm1d(3))
    before = [x.clone() for x in data]
    bn.estimate_(net, data, rule="pooled", upstream=upstream)
    torch.testing.assert_close(data, before, rtol=0, atol=0)
    torch.testing.assert_close(net[1].running_mean, 2 * torch.cat(data).mean(0))
