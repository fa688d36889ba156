"""Test lines 1 to 5 of Algorithm 2: insert puts batch normalization between each affine layer and its nonlinearity."""

import copy

import pytest
import torch
import torch.nn.functional as F
from networks import Coded, Residual, scramble_
from torch import nn

import batchnorm as bn
from batchnorm.layers import BatchNorm
from batchnorm.layers.normalized import Normalized

VGG = [8, "M", 16, 16, "M"]


def vgg(norm: bool):
    """Return a small VGG, built like the published one: Sequential(conv, [bn,] relu, ..., pool) and a linear head."""
    layers, channels = [], 3
    for v in VGG:
        if v == "M":
            layers.append(nn.MaxPool2d(2))
        else:
            layers += [nn.Conv2d(channels, v, 3, padding=1, bias=not norm), *([nn.BatchNorm2d(v)] if norm else [])]
            layers.append(nn.ReLU(inplace=True))
            channels = v
    return nn.Sequential(nn.Sequential(*layers), nn.Flatten(), nn.Linear(16 * 4, 5))


def leaves(net):
    """Return the modules without children, in order, as text."""
    return [repr(m) for m in net.modules() if not list(m.children())]


def test_vgg_gets_the_structure_of_its_published_form():
    inserted = bn.insert(vgg(norm=False), torch.randn(2, 3, 8, 8))
    assert leaves(inserted) == leaves(vgg(norm=True))
    assert inserted.report.paths("inserted") == ["0.0", "0.3", "0.5"]
    assert inserted.report["2"].reason == "feeds no nonlinearity"


def test_training_it_equals_training_the_published_form_step_by_step():
    inserted, published = bn.insert(vgg(norm=False), torch.randn(2, 3, 8, 8)).double(), vgg(norm=True).double()
    published.load_state_dict(dict(zip(published.state_dict(), inserted.state_dict().values(), strict=True)))
    optimizers = [torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9) for net in (inserted, published)]
    for _ in range(5):
        x, y = torch.randn(6, 3, 8, 8).double(), torch.randint(5, (6,))
        for net, optimizer in zip((inserted, published), optimizers, strict=True):
            optimizer.zero_grad()
            loss = F.cross_entropy(net(x), y)
            loss.backward()
            optimizer.step()
    for a, b in zip(inserted.state_dict().values(), published.state_dict().values(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-11)


class Plain(nn.Module):
    """A network with a gate, and functional nonlinearities after a sum, a concatenation, a pool and a LayerNorm."""

    def __init__(self):
        super().__init__()
        self.a, self.b, self.c = (nn.Conv2d(3, 4, 3, padding=1) for _ in range(3))
        self.d, self.e = nn.Conv2d(8, 4, 1), nn.ConvTranspose2d(4, 4, 2, stride=2)
        self.gated = nn.Conv2d(4, 4, 1)
        self.normed, self.norm = nn.Linear(4, 4), nn.LayerNorm(4)
        self.unused = nn.Linear(3, 3)
        self.head = nn.Linear(4, 2)

    def forward(self, x):
        y = F.relu(self.a(x) + self.b(x))
        y = torch.cat([self.c(x), y], 1).relu_()
        y = torch.sigmoid(F.max_pool2d(self.e(self.d(y)), 2))
        y = y * self.gated(y)
        y = torch.tanh(self.norm(self.normed(y.mean((2, 3)))))
        return self.head(y)


def test_sites_are_found_through_functions_sums_joins_and_pools():
    inserted = bn.insert(Plain(), torch.randn(2, 3, 8, 8))
    report = inserted.report
    assert report.paths("inserted") == ["a", "b", "c", "e"]
    assert report["d"].reason == "feeds 'e' (ConvTranspose2d), not a nonlinearity"
    assert report["gated"].reason == "feeds mul in the network, not a nonlinearity"
    assert report["normed"].reason == "already normalized by 'norm' (LayerNorm)"
    assert report["unused"].reason == "not called on the example"
    assert report["head"].reason == "feeds no nonlinearity"
    for name in ("a", "b", "c", "e"):
        container = inserted.get_submodule(name)
        assert isinstance(container, Normalized)
        assert container.affine.bias is None
        assert container.out_channels == 4, "attributes of the affine layer are still there"
        torch.testing.assert_close(container.norm.weight, torch.ones(4))
        torch.testing.assert_close(container.norm.bias, torch.zeros(4))


def test_residual_blocks_are_normalized_before_the_sum():
    def code(n, x):
        y = n.conv2(n.relu(n.conv1(x)))
        y += x
        return n.relu(y)

    block = Coded(code, conv1=nn.Conv2d(3, 3, 3, padding=1), conv2=nn.Conv2d(3, 3, 3, padding=1), relu=nn.ReLU(True))
    net = nn.Sequential(block, copy.deepcopy(block))
    inserted = bn.insert(net, torch.randn(2, 3, 5, 5))
    assert inserted.report.paths("inserted") == ["0.conv1", "0.conv2", "1.conv1", "1.conv2"]
    inserted(torch.randn(4, 3, 5, 5)).sum().backward()


def test_a_batch_normalized_network_gets_nothing():
    report = bn.insert(Residual(), torch.randn(2, 3, 8, 8)).report
    assert report.paths("inserted") == []
    assert report["blocks.0.conv2"].reason == "already normalized by 'blocks.0.bn2' (BatchNorm2d)"


@pytest.mark.parametrize("where", [["0"], lambda name, module: isinstance(module, nn.Linear) and name == "0"])
def test_where_chooses_another_subset(where):
    net = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2))
    report = bn.insert(net, torch.zeros(2, 3), where=where).report
    assert report.paths("inserted") == ["0"]
    assert report["2"].reason == "where= does not select it"
    assert bn.insert(net, torch.zeros(2, 3), where=["4"]).report.paths("inserted") == ["4"]


def test_a_wrong_name_is_refused():
    with pytest.raises(ValueError, match=r"where= contains head, but batch normalization cannot .*: 0, 2$"):
        bn.insert(nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2)), torch.zeros(2, 3), where=["head", "0"])


def test_per_activation():
    net = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU())
    inserted = bn.insert(net, torch.zeros(2, 3, 6, 6), per_activation=True)
    assert inserted[0].norm.num_features == (4, 4, 4)


def test_linear_with_features_last_is_normalized_over_all_positions():
    net = nn.Sequential(nn.Linear(3, 4), nn.ReLU())
    inserted = bn.insert(net, torch.zeros(2, 5, 3))
    y = inserted[0](torch.randn(2, 5, 3) * 7)
    torch.testing.assert_close(y.mean((0, 1)), torch.zeros(4), rtol=0, atol=1e-5)
    torch.testing.assert_close(y.var((0, 1), correction=0), torch.ones(4), rtol=1e-3, atol=0)


@pytest.mark.parametrize("per_activation", [False, True])
def test_identity_computes_what_the_network_computed(per_activation):
    net, data = Plain().double().train(), [torch.randn(4, 3, 8, 8).double() for _ in range(3)]
    inserted = bn.insert(net, data[0], init="identity", batches=data, per_activation=per_activation)
    assert inserted.training
    assert inserted.report.relative_error < 1e-12
    torch.testing.assert_close(inserted.eval()(data[1]), net.eval()(data[1]), rtol=1e-12, atol=1e-12)
    norm = inserted.a.norm
    torch.testing.assert_close(norm.weight, torch.sqrt(norm.running_var + norm.eps), rtol=1e-12, atol=0)
    x = torch.cat([net.a(batch) for batch in data])
    if not per_activation:
        torch.testing.assert_close(norm.bias, x.mean((0, 2, 3)), rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(norm.running_var, x.var((0, 2, 3), correction=0), rtol=1e-12, atol=1e-12)


def test_folding_the_identity_gives_the_original_back():
    net, data = vgg(norm=False).double(), [torch.randn(4, 3, 8, 8).double() for _ in range(2)]
    folded = bn.fold(bn.insert(net, data[0], init="identity", batches=data), data[0])
    assert repr(folded) == repr(net)
    torch.testing.assert_close(folded.state_dict(), net.state_dict(), rtol=1e-11, atol=1e-11)


def test_identity_needs_batches():
    with pytest.raises(ValueError, match="pass batches="):
        bn.insert(nn.Sequential(nn.Linear(3, 3), nn.ReLU()), torch.zeros(2, 3), init="identity")


def test_placement_after_the_nonlinearity():
    net = nn.Sequential(
        nn.Conv2d(3, 4, 3, padding=1), nn.ReLU(), nn.Conv2d(4, 4, 3), nn.Tanh(), nn.Flatten(), nn.Linear(64, 2)
    )
    x = torch.randn(3, 3, 6, 6)
    inserted = bn.insert(net, x, placement="after")
    assert inserted.report.paths("inserted") == ["1", "3"]
    assert inserted[0].bias is not None, "BN after the nonlinearity does not absorb the bias"
    expected = nn.Sequential(net[0], net[1], nn.BatchNorm2d(4), net[2], net[3], nn.BatchNorm2d(4), net[4], net[5])
    torch.testing.assert_close(inserted(x), expected(x))
    folded = bn.fold(scramble_(inserted), x)
    torch.testing.assert_close(folded(x), inserted.eval()(x), rtol=1e-4, atol=1e-5)


def test_placement_after_needs_modules_called_once():
    report = bn.insert(Plain(), torch.randn(2, 3, 8, 8), placement="after").report
    assert all("function" in site.reason for site in report)
    relu = nn.ReLU()
    report = bn.insert(
        nn.Sequential(nn.Linear(3, 3), relu, nn.Linear(3, 3), relu), torch.zeros(2, 3), placement="after"
    ).report
    assert {site.reason for site in report} == {"it is called more than once"}


def rearranged(affine, rearrange):
    return Coded(lambda n, x: n.act(rearrange(n.affine(x))), affine=affine, act=nn.Tanh())


@pytest.mark.parametrize(
    ("rearrange", "size", "over"),
    [
        (lambda y: y.mT, 4, (0, 2)),
        (lambda y: y.permute(0, 2, 1).unsqueeze(-1), 4, (0, 2, 3)),
        (lambda y: y.transpose(0, 1), 4, (0, 1)),
        (lambda y: y.reshape(-1, 4), 4, (0,)),
        (lambda y: y.mean(1), 4, (0,)),
        (lambda y: y.chunk(2, -1)[1] + 1, 2, (0, 1)),
        (lambda y: torch.cat([y, 2 * y], -1).mT, 8, (0, 2)),
    ],
)
def test_placement_after_finds_the_features(rearrange, size, over):
    x = torch.randn(6, 4, 3)  # as many positions as features
    inserted = bn.insert(rearranged(nn.Linear(3, 4), rearrange), x, placement="after")
    torch.testing.assert_close(inserted(x).mean(over), torch.zeros(size), rtol=0, atol=1e-5)


def test_placement_after_finds_the_features_of_a_convolution():
    net = rearranged(nn.Conv2d(3, 4, 1), lambda y: y.flatten(2).transpose(1, 2))
    x = torch.randn(6, 3, 2, 2)
    torch.testing.assert_close(bn.insert(net, x, placement="after")(x).mean((0, 1)), torch.zeros(4), rtol=0, atol=1e-5)
    net = rearranged(nn.Conv2d(3, 4, 1), lambda y: y.view(len(y), -1))
    assert bn.insert(net, x, placement="after").report["act"].action == "inserted BatchNorm1d(16)"
    net = rearranged(nn.Conv2d(3, 4, 1), lambda y: F.pixel_shuffle(y, 2))
    assert bn.insert(net, x, placement="after").report["act"].action == "inserted BatchNorm2d(1)"


@pytest.mark.parametrize(
    "rearrange",
    [
        lambda y: y.unflatten(-1, (2, 2)),
        lambda y: y.unsqueeze(-1),
        lambda y: y.permute(2, 0, 1),
        lambda y: y[..., 0],
        lambda y: torch.stack([y, y], -1),
        lambda y: y + y.mT,
        lambda y: y.view_as(y.new_empty(6, 2, 8)),
    ],
)
def test_placement_after_skips_features_that_it_cannot_find(rearrange):
    net = rearranged(nn.Linear(3, 4), rearrange)
    report = bn.insert(net, torch.randn(6, 4, 3), placement="after").report
    assert report["act"].reason.startswith(
        "cannot find the features in dimension 1 or the last dimension of its output"
    )


def test_a_shared_layer_gets_one_normalization_for_its_calls():
    linear = nn.Linear(3, 3)
    net = nn.Sequential(linear, nn.Tanh(), linear, nn.Tanh())
    inserted = bn.insert(net, torch.randn(4, 3))
    assert inserted[0] is inserted[2]
    assert inserted.report["0"].action == "inserted BatchNorm1d(3), shared by 2 calls"


def test_tied_weights_stay_tied():
    net = nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 3), nn.Tanh())
    net[2].weight = net[0].weight
    inserted = bn.insert(net, torch.randn(4, 3))
    assert inserted[0].affine.weight is inserted[2].affine.weight


def test_the_argument_is_left_alone():
    net = Plain()
    before, text = copy.deepcopy(net.state_dict()), repr(net)
    x = torch.randn(2, 3, 8, 8)
    inserted = bn.insert(net, x)
    with torch.no_grad():
        for p in inserted.parameters():
            p.add_(1)
    assert repr(net) == text
    torch.testing.assert_close(net.state_dict(), before, rtol=0, atol=0)
    assert not any(isinstance(m, BatchNorm) for m in net.modules())


def test_devices_dtypes_and_modes_follow_the_affine_layer():
    net = nn.Sequential(nn.Linear(3, 3), nn.Tanh()).double().eval()
    norm = bn.insert(net, torch.zeros(2, 3).double())[0].norm
    assert norm.weight.dtype == norm.running_mean.dtype == torch.float64
    assert not norm.training
    norm = bn.insert(net, torch.zeros(2, 3).double(), placement="after")[1].norm
    assert {t.dtype for t in (norm.weight, norm.bias, norm.running_mean, norm.running_var)} == {torch.float64}
    assert not norm.training
    net = nn.Sequential(nn.Linear(3, 3), nn.Tanh()).to("meta")
    inserted = bn.insert(net, torch.zeros(2, 3, device="meta"), placement="after")
    assert {t.device.type for t in inserted.state_dict().values()} == {"meta"}


def test_identity_after_the_nonlinearity_in_double_precision():
    net = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU()).double()
    x = torch.randn(4, 3, 8, 8).double()
    inserted = bn.insert(net, x, placement="after", init="identity", batches=[x]).eval()
    torch.testing.assert_close(inserted(x), net(x))


@pytest.mark.parametrize("placement", ["before", "after"])
def test_a_difference_names_a_possible_cause(placement):
    def code(n, x):
        y = n.act(n.linear(x))
        return y if type(n.linear) is nn.Linear and type(n.act) is nn.Tanh else 2 * y

    net, x = Coded(code, linear=nn.Linear(3, 3), act=nn.Tanh()), torch.randn(4, 3)
    with pytest.raises(ValueError, match="whose type is checked in the network's code") as error:
        bn.insert(net, x, placement=placement, init="identity", batches=[x])
    assert ("weight or bias" in str(error.value)) == (placement == "before")


def test_weights_that_other_code_reads_are_not_touched():
    tied = Coded(lambda n, x: F.linear(torch.relu(n.linear(x)), n.linear.weight), linear=nn.Linear(3, 3))
    report = bn.insert(tied, torch.randn(4, 3)).report
    assert report["linear"].reason == "its weights are also read by linear in the network"
    # In evaluation, torch's encoder layer passes the weights of its linear layers to one fused function.
    encoder = nn.Sequential(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True))
    report = bn.insert(encoder, torch.randn(2, 5, 8)).report
    assert report["0.linear1"].reason == "its weights are also read by 0 (TransformerEncoderLayer) in evaluation mode"
    report = bn.insert(encoder[0], torch.randn(2, 5, 8)).report
    assert (
        report["linear1"].reason
        == "its weights are also read by the network (TransformerEncoderLayer) in evaluation mode"
    )


def test_a_recurrent_layer_is_named_with_the_reason():
    embed, gru, head = nn.Linear(3, 4), nn.GRU(4, 4, batch_first=True), nn.Linear(4, 2)
    net = Coded(lambda n, x: n.head(n.gru(torch.tanh(n.embed(x)))[0]), embed=embed, gru=gru, head=head)
    report = bn.insert(net, torch.randn(4, 5, 3)).report
    assert report.paths("inserted") == ["embed"]
    assert report["gru"].reason == "a recurrent layer applies its nonlinearities internally"


def test_heads_that_only_training_has_are_found():
    def code(n, x):
        x = torch.relu(n.body(x))
        return (n.head(x), torch.relu(n.aux(x))) if n.training else n.head(x)

    net = Coded(code, body=nn.Linear(3, 3), aux=nn.Linear(3, 3), head=nn.Linear(3, 2)).eval()
    assert bn.insert(net, torch.randn(4, 3)).report.paths("inserted") == ["body", "aux"]


def test_a_network_whose_training_needs_more_than_the_example():
    class Targets(nn.Module):
        def __init__(self):
            super().__init__()
            self.body = nn.Linear(3, 3)

        def forward(self, x, targets=None):
            y = torch.relu(self.body(x))
            return y if not self.training else y - targets["boxes"]

    inserted = bn.insert(Targets(), torch.randn(4, 3))
    assert inserted.report.paths("inserted") == ["body"]
    assert "training mode fails on this example: 'NoneType' object is not subscriptable" in inserted.report.notes[0]


def test_weight_norm_stays():
    net = nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Linear(3, 4)), nn.ReLU())
    inserted = bn.insert(net, torch.randn(4, 3))
    assert nn.utils.parametrize.is_parametrized(inserted[0].affine)
    inserted(torch.randn(4, 3)).sum().backward()
    assert bn.fold(scramble_(inserted), torch.randn(4, 3)).report.paths("folded") == ["0.norm"]


def test_a_transposed_convolution_is_called_with_its_output_size():
    up = nn.ConvTranspose2d(3, 4, 3, stride=2, padding=1)
    net, x = Coded(lambda n, x: torch.relu(n.up(x, output_size=[8, 8])), up=up), torch.randn(2, 3, 4, 4)
    assert bn.insert(net, x)(x).shape == (2, 4, 8, 8)


def test_outputs_that_no_layer_can_normalize():
    report = bn.insert(nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU()), torch.randn(3, 5, 5)).report
    assert report["0"].reason == "its output of shape (4, 3, 3) has no batch dimension"
    net = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Unflatten(1, (2, 2, 1)), nn.ReLU())
    report = bn.insert(net, torch.randn(2, 3, 5, 5), placement="after").report
    assert report["2"].reason == "its output of shape (2, 2, 2, 1, 3, 3) has more than 5 dimensions"


def test_torch_fx_can_trace_the_result():
    net = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
    x = torch.randn(4, 3)
    inserted = bn.insert(net, x).eval()
    torch.testing.assert_close(torch.fx.symbolic_trace(inserted)(x), inserted(x))
    folded = bn.fold(scramble_(inserted), x, traced=True)
    torch.testing.assert_close(folded(x), inserted(x), rtol=1e-4, atol=1e-5)


def test_a_loader_that_breaks_leaves_the_network_as_it_was():
    def batches():
        yield torch.randn(4, 3, 8, 8)
        raise OSError("disk")

    net = Plain()
    before = copy.deepcopy(net.state_dict())
    with pytest.raises(OSError, match="disk"):
        bn.insert(net, torch.randn(4, 3, 8, 8), init="identity", batches=batches())
    torch.testing.assert_close(net.state_dict(), before, rtol=0, atol=0)
    assert not any(m._forward_hooks for m in net.modules())


def test_a_convolution_with_its_own_forward_is_listed():
    class Same(nn.Conv2d):
        def forward(self, x):
            return F.conv2d(F.pad(x, (1, 1, 1, 1)), self.weight, self.bias)

    report = bn.insert(nn.Sequential(Same(3, 4, 3), nn.ReLU()), torch.randn(2, 3, 5, 5)).report
    assert report["0"].reason == "Same has its own forward"


class Strided(nn.Module):
    """A network that changes an attribute of its convolution in each call."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3, padding=1)

    def forward(self, x):
        self.conv.stride = (2, 2) if x.shape[-1] > 8 else (1, 1)
        return self.conv(x).relu()


def test_writes_to_attributes_reach_the_normalized_layer():
    net = Strided()
    new = bn.insert(net, torch.randn(4, 3, 6, 6)).eval()
    assert new(torch.randn(2, 3, 12, 12)).shape == (2, 4, 6, 6)
    new.conv.weight = nn.Parameter(torch.zeros(4, 3, 3, 3))
    assert new.conv.affine.weight.eq(0).all()
    new.conv.note = "mine"
    assert "note" in vars(new.conv)
