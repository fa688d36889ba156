"""Test fold() on difficult networks: each either folds exactly or reports why it does not."""

import copy

import pytest
import torch
import torch.nn.functional as F
from networks import Coded, Residual, image, scramble_
from torch import nn
from torch.nn.utils import parametrizations

import batchnorm as bn
from batchnorm.inference.affine import FixedAffine
from batchnorm.ops import Activation


def check(net, x=None, forward=None, **options):
    """Fold a network, compare the results on the example and on another batch, and return the folded network."""
    net = scramble_(net).double().eval()
    x = (image() if x is None else x).double()
    folded = bn.fold(net, x, forward=forward, **options)
    for batch in (x, torch.randn_like(x)):
        with torch.no_grad():
            a, b = (n(batch.clone()) if forward is None else forward(n, batch.clone()) for n in (folded, net))
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-10)
    return folded


def conv(inputs=3, outputs=3, **options):
    return nn.Conv2d(inputs, outputs, 3, padding=1, **options)


def test_a_parametrized_weight_is_baked_in():
    net = nn.Sequential(parametrizations.weight_norm(conv()), nn.BatchNorm2d(3))
    folded = check(net)
    assert folded.report["1"].action == "folded into '0'"
    assert not hasattr(folded[0], "parametrizations")
    assert hasattr(net[0], "parametrizations")


@pytest.mark.filterwarnings("ignore:.*weight_norm.*is deprecated")
def test_old_weight_norm_works_by_hooks_and_is_left_alone():
    net = nn.Sequential(nn.utils.weight_norm(conv()), nn.BatchNorm2d(3))
    net(image()).sum().backward()
    folded = check(net)
    assert "has hooks" in folded.report["1"].reason


def test_hooks_on_a_convolution_or_a_norm_keep_it():
    seen = []
    net = nn.Sequential(conv(), nn.BatchNorm2d(3), conv(), nn.BatchNorm2d(3))
    net[0].register_forward_hook(lambda m, a, out: seen.append(out.clone()))
    net[3].register_forward_pre_hook(lambda m, args: (args[0] * 2,))
    with pytest.warns(UserWarning, match="1 left: it has hooks"):
        folded = check(net)
    assert [site.action for site in folded.report] == ["fixed affine map", "kept"]
    x = image().double()
    seen.clear()
    folded(x), net(x)
    torch.testing.assert_close(seen[0], seen[1])


def test_a_hook_on_a_container_sees_what_it_saw():
    seen = []
    net = nn.Sequential(nn.Sequential(conv()), nn.BatchNorm2d(3))
    net[0].register_forward_hook(lambda m, a, out: seen.append(out.clone()))
    folded = check(net)
    assert folded.report["1"].action == "fixed affine map"
    x = image().double()
    seen.clear()
    folded(x), net(x)
    torch.testing.assert_close(seen[0], seen[1])


@pytest.mark.parametrize("between", [nn.Identity(), nn.Dropout(), nn.Flatten(0, 0)])
@pytest.mark.parametrize("before", [True, False])
def test_a_hook_between_sees_what_it_saw(between, before):
    between, norm, seen = copy.deepcopy(between), nn.BatchNorm2d(3), []
    net = nn.Sequential(conv(), between, norm) if before else nn.Sequential(norm, between, conv())
    between.register_forward_hook(lambda m, a, out: seen.append(out.clone()))
    name = "2" if before else "0"
    folded = check(net)
    assert "has hooks, which would see other values after folding" in folded.report[name].reason
    x = image().double()
    seen.clear()
    folded(x), net(x)
    torch.testing.assert_close(seen[0], seen[1])


def test_the_convolutions_output_leaves_the_network():
    net = Coded(lambda n, x: (lambda y: (y, n.bn(y)))(n.conv(x)), conv=conv(), bn=nn.BatchNorm2d(3))
    assert "also feeds an output of the network or untraced code" in check(net).report["bn"].reason


def test_the_convolutions_output_is_read_twice():
    net = Coded(lambda n, x: (lambda y: n.bn(y) + y.relu())(n.conv(x)), conv=conv(), bn=nn.BatchNorm2d(3))
    assert "also feeds relu in the network" in check(net).report["bn"].reason


def test_the_norms_output_is_read_twice():
    net = Coded(lambda n, x: (lambda y: y.sigmoid() * y)(n.bn(n.conv(x))), conv=conv(), bn=nn.BatchNorm2d(3))
    assert check(net).report["bn"].action == "folded into 'conv'"


def test_a_value_read_by_python_is_read():
    def code(n, x):
        y = n.conv(x)
        return n.bn(y) * float(y.mean())

    folded = check(Coded(code, conv=conv(), bn=nn.BatchNorm2d(3)))
    assert folded.report["bn"].action == "fixed affine map"
    assert "for other inputs" in folded.report.notes[0]


def test_values_read_by_an_extension_that_no_hook_sees():
    class Peek(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.exp()

        @staticmethod
        def backward(ctx, g):
            return g

    net = Coded(lambda n, x: (lambda y: n.bn(y) + Peek.apply(y))(n.conv(x)), conv=conv(), bn=nn.BatchNorm2d(3))
    assert check(net).report["bn"].action == "fixed affine map"


def test_in_place_activations_between_and_after():
    def code(n, x):
        y = n.bn(n.conv(x))
        y.relu_()
        z = n.bn2(y)
        z += y
        return z.tanh_()

    folded = check(Coded(code, conv=conv(), bn=nn.BatchNorm2d(3), bn2=nn.BatchNorm2d(3)))
    assert [site.action for site in folded.report] == ["folded into 'conv'", "fixed affine map"]


def test_an_in_place_change_between_convolution_and_norm():
    def code(n, x):
        y = n.conv(x)
        y[:, 0] = 1.0
        return n.bn(y)

    assert "comes from __setitem__" in check(Coded(code, conv=conv(), bn=nn.BatchNorm2d(3))).report["bn"].reason


def test_a_change_through_a_view_between_convolution_and_norm():
    def code(n, x):
        y = n.conv(x)
        y.flatten(1)[:, :5].zero_()
        return n.bn(y)

    assert check(Coded(code, conv=conv(), bn=nn.BatchNorm2d(3))).report["bn"].action == "fixed affine map"


def test_tied_weights_come_apart_without_harm():
    net = nn.Sequential(conv(), nn.BatchNorm2d(3), nn.ReLU(), conv())
    net[3].weight = net[0].weight
    folded = check(net)
    assert folded.report["1"].action == "folded into '0'"
    assert folded[0].weight is not folded[3].weight


def test_weights_that_other_code_reads_are_not_touched():
    net = Coded(lambda n, x: F.conv2d(n.bn(n.conv(x)), n.conv.weight), conv=conv(), bn=nn.BatchNorm2d(3))
    assert "are also read by conv2d" in check(net).report["bn"].reason


def test_dropout_between_convolution_and_norm_is_no_obstacle():
    assert (
        check(nn.Sequential(conv(), nn.Dropout2d(), nn.Identity(), nn.BatchNorm2d(3))).report["3"].action
        == "folded into '0'"
    )


def test_modules_kept_in_plain_python_containers():
    def code(n, x):
        first, second, (third,) = n.steps["all"]
        return third(second(first(x)))

    net = Coded(code, conv=conv(), bn=nn.BatchNorm2d(3))
    net.steps = {"all": [net.conv, net.bn.__call__, (torch.relu,)]}
    assert check(net).report["bn"].action == "folded into 'conv'"


def test_forward_called_past_the_hooks():
    net = Coded(lambda n, x: n.bn(n.conv.forward(x)), conv=conv(), bn=nn.BatchNorm2d(3))
    folded = check(net)
    assert "its input comes from conv2d" in folded.report["bn"].reason
    net = Coded(lambda n, x: n.bn.forward(n.conv(x)), conv=conv(), bn=nn.BatchNorm2d(3))
    assert "folded into 'conv'" in {site.action for site in check(net).report}


def test_pixel_shuffle_and_flatten_between():
    net = nn.Sequential(conv(3, 8), nn.PixelShuffle(2), nn.BatchNorm2d(2))
    assert check(net).report["2"].action == "folded into '0'"
    net = nn.Sequential(nn.Conv2d(3, 6, 8), nn.Flatten(), nn.BatchNorm1d(6))
    assert check(net).report["2"].action == "folded into '0'"
    net = nn.Sequential(nn.Conv2d(3, 2, 7), nn.Flatten(), nn.BatchNorm1d(8))
    assert "not the feature dimension" in check(net).report["2"].reason


def test_a_linear_over_the_last_dimension_after_a_norm_over_channels():
    net = nn.Sequential(nn.BatchNorm1d(4), nn.Linear(5, 2))
    assert "not the feature dimension" in check(net, torch.randn(3, 4, 5)).report["0"].reason
    net = Coded(lambda n, x: n.linear(n.bn(x).transpose(1, 2)), bn=nn.BatchNorm1d(4), linear=nn.Linear(4, 2))
    assert check(net, torch.randn(3, 4, 5)).report["bn"].action == "folded into 'linear'"


def test_a_norm_read_by_several_convolutions():
    def code(n, x):
        y = n.bn(x)
        return n.a(y) + n.b(y)

    a, b = nn.Conv2d(3, 4, 3), nn.Conv2d(3, 4, 3)
    assert check(Coded(code, bn=nn.BatchNorm2d(3), a=a, b=b)).report["bn"].action == "folded into 'a', 'b'"
    padded = nn.Conv2d(3, 4, 5, padding=1)
    assert "pads with zeros" in check(Coded(code, bn=nn.BatchNorm2d(3), a=a, b=padded)).report["bn"].reason


def test_a_norm_between_two_convolutions_goes_into_the_first():
    folded = check(nn.Sequential(conv(), nn.BatchNorm2d(3), nn.Conv2d(3, 2, 1), nn.BatchNorm2d(2), nn.BatchNorm2d(2)))
    assert [site.action for site in folded.report] == ["folded into '0'", "folded into '2'", "folded into '2'"]


def test_both_sides_of_one_convolution():
    folded = check(nn.Sequential(nn.BatchNorm2d(4), nn.Conv2d(4, 6, 3, groups=2), nn.BatchNorm2d(6)), image(2, 4, 6, 6))
    assert [site.action for site in folded.report] == ["folded into '1'", "folded into '1'"]


@pytest.mark.parametrize("sizes", [(4, 3, 1), (1, 3, 5)])
def test_a_dimension_of_size_1_does_not_hide_that_a_reshape_mixes_features(sizes):
    dim = sizes.index(1)
    net = Coded(
        lambda n, x: n.bn(n.conv(x).transpose(dim, 1).reshape(x.shape)), conv=nn.Conv1d(3, 3, 1), bn=nn.BatchNorm1d(3)
    )
    folded = bn.fold(scramble_(net).double(), torch.randn(sizes).double())
    assert "moves a dimension of size 1 past the features" in folded.report["bn"].reason
    x = torch.randn(4, 3, 5).double()
    torch.testing.assert_close(folded(x), net.eval()(x))


def test_dimensions_of_size_1_that_a_view_adds_or_removes():
    net = Coded(lambda n, x: n.bn(n.conv(x).view(len(x), 4)), conv=nn.Conv2d(3, 4, 8), bn=nn.BatchNorm1d(4))
    assert check(net).report["bn"].action == "folded into 'conv'"
    net = Coded(lambda n, x: n.conv(n.bn(x).view(-1, 4, 1, 1)), conv=nn.Conv2d(4, 3, 1), bn=nn.BatchNorm1d(4))
    assert check(net, torch.randn(3, 4)).report["bn"].action == "folded into 'conv'"


def test_dimensions_of_size_1_that_a_view_may_join_with_the_batch():
    down = Coded(lambda n, x: n.linear(n.bn(x).view(-1, 2)), bn=nn.BatchNorm2d(2), linear=nn.Linear(2, 3))
    up = Coded(lambda n, x: n.bn(n.conv(x).view(-1, 2)), conv=nn.Conv2d(2, 2, 1), bn=nn.BatchNorm1d(2))
    larger = torch.randn(4, 2, 3, 3).double()
    for net in (down, up):
        folded = bn.fold(scramble_(net).double(), torch.randn(4, 2, 1, 1).double())
        assert "has a dimension of size 1; if that dimension were larger" in folded.report["bn"].reason
        torch.testing.assert_close(folded(larger), net.eval()(larger))
    net = Coded(
        lambda n, x: n.linear(n.bn(x).permute(0, 2, 3, 1).reshape(-1, 2)), bn=nn.BatchNorm2d(2), linear=nn.Linear(2, 3)
    )
    folded = check(net, torch.randn(4, 2, 1, 1))
    assert folded.report["bn"].action == "folded into 'linear'"
    torch.testing.assert_close(folded(larger), net(larger))


def test_before_a_transposed_convolution_only_a_scale_could_go():
    net = nn.Sequential(nn.BatchNorm2d(4), nn.ConvTranspose2d(4, 6, 3, groups=2))
    assert "a bias cannot express" in check(net, image(2, 4, 5, 5)).report["0"].reason

    net = Coded(lambda n, x: n.up(n.bn(x)), bn=nn.BatchNorm2d(4, affine=False), up=net[1]).double().eval()
    net.bn.running_var.uniform_(0.5, 2)
    x = image(2, 4, 5, 5).double()
    folded = bn.fold(net, x)
    assert folded.report["bn"].action == "folded into 'up'"
    torch.testing.assert_close(folded(x), net(x))


def test_an_input_that_is_changed_before_the_output_is_read():
    def code(n, x):
        x = x * 1
        y = n.bn(x)
        x.relu_()
        return n.conv(y) + x.mean()

    net = Coded(code, bn=nn.BatchNorm2d(3), conv=nn.Conv2d(3, 2, 1))
    assert "changes this layer's input in place" in check(net).report["bn"].reason


def test_lazy_layers_that_never_ran_are_refused():
    with pytest.raises(ValueError, match=r"0\.weight is not initialized"):
        bn.fold(nn.Sequential(nn.LazyConv2d(3, 3), nn.BatchNorm2d(3)), image())
    with pytest.raises(ValueError, match=r"1.running_mean is not initialized: run the network once"):
        bn.fold(nn.Sequential(nn.Conv2d(3, 3, 3), nn.LazyBatchNorm2d(affine=False)), image())


def test_a_norm_that_keeps_no_statistics_is_kept():
    net = nn.Sequential(conv(), nn.BatchNorm2d(3, track_running_stats=False))
    with pytest.warns(UserWarning, match="by mini-batch statistics"):
        check(net)


def test_a_norm_without_finite_statistics_is_kept():
    net = scramble_(nn.Sequential(conv(), nn.BatchNorm2d(3))).eval()
    net[1].running_var[0] = float("nan")
    with pytest.warns(UserWarning, match="not finite"):
        bn.fold(net, image())


def test_a_layer_that_is_not_reached_becomes_its_map():
    net = Coded(lambda n, x: n.conv(x), conv=conv(), bn=nn.BatchNorm2d(3))
    folded = check(net)
    assert folded.report["bn"].reason == "not called on the example"
    assert isinstance(folded.bn, FixedAffine)
    x = image().double()
    torch.testing.assert_close(folded.bn(x), net.bn(x))


def test_frozen_and_fused_layers_of_this_library():
    net = nn.Sequential(
        conv(), bn.BatchNorm2d(3, activation="leaky_relu"), conv(), bn.BatchNorm2d(3, activation="sigmoid")
    )
    bn.freeze_(net)
    folded = check(net)
    assert [type(m) for m in folded] == [nn.Conv2d, nn.LeakyReLU, nn.Conv2d, nn.Sigmoid]


def test_a_mask_in_the_call():
    norm = bn.BatchNorm1d(4, activation="relu")
    check(Coded(lambda n, x: n.bn(n.conv(x), mask=x[:, 0] > 0), conv=nn.Conv1d(3, 4, 1), bn=norm), torch.randn(2, 3, 7))
    net = Coded(lambda n, x: n.bn(x, mask=x[:, 0] > 0), bn=bn.BatchNorm1d(3))
    check(net, torch.randn(2, 3, 7))


def test_masked_padding_does_not_reach_the_gradients():
    affine = FixedAffine(torch.rand(3), torch.rand(3), Activation("silu"))
    mask = torch.tensor([[True, True, False]])
    inputs = [torch.randn(1, 3, 3).requires_grad_() for _ in range(2)]
    padded = [t.detach().masked_fill(~mask, float("nan")).requires_grad_() for t in inputs]
    found, expected = (torch.autograd.grad(affine(*given, mask).sum(), given) for given in (padded, inputs))
    torch.testing.assert_close(found, expected)


def test_converted_networks_fold_too():
    net = scramble_(Residual()).double()
    x = image().double()
    converted = bn.convert(net, x)
    folded = bn.fold(converted, x)
    torch.testing.assert_close(folded(x), net.eval()(x), rtol=1e-10, atol=1e-10)
    assert not any("BatchNorm" in type(m).__name__ or "Fused" in type(m).__name__ for m in folded.modules())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("ours", [False, True])
def test_half_precision(dtype, ours):
    net = scramble_(nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.BatchNorm1d(8), nn.Tanh())).to(
        dtype
    )
    x = torch.randn(4, 8).to(dtype)
    if ours:
        net = bn.convert(net.eval(), x)
    folded = bn.fold(net, x)
    assert folded(x).dtype == dtype
    exact = copy.deepcopy(net).double().eval()(x.double())
    torch.testing.assert_close(folded(x).double(), exact, rtol=3e-2, atol=3e-2)


def test_memory_formats_and_requires_grad_stay():
    net = scramble_(nn.Sequential(conv(4, 8), nn.BatchNorm2d(8))).to(memory_format=torch.channels_last)
    net[0].weight.requires_grad_(False)
    folded = bn.fold(net, image(2, 4, 5, 5))
    assert folded[0].weight.is_contiguous(memory_format=torch.channels_last)
    assert not folded[0].weight.requires_grad
    assert not folded.training


def test_a_network_that_is_one_layer():
    net = scramble_(nn.BatchNorm2d(3)).eval()
    x = image()
    folded = bn.fold(net, x)
    assert isinstance(folded, FixedAffine)
    torch.testing.assert_close(folded(x), net(x), rtol=1e-5, atol=1e-5)


def test_the_folded_network_compiles():
    for net, x in ((Residual(), image()), (nn.Sequential(nn.BatchNorm2d(3), nn.ReLU(), conv()), image())):
        folded = bn.fold(scramble_(net), x)
        compiled = torch.compile(folded, fullgraph=True, backend="aot_eager")
        torch.testing.assert_close(compiled(x), folded(x), rtol=1e-5, atol=1e-5)
        torch._dynamo.reset()


def test_a_network_that_computes_something_else_each_time_is_refused():
    class Restless(nn.Module):
        calls = 0

        def __init__(self):
            super().__init__()
            self.linear, self.bn = nn.Linear(3, 3), nn.BatchNorm1d(3)

        def forward(self, x):
            Restless.calls += 1
            return self.bn(self.linear(x)) * Restless.calls

    with pytest.raises(ValueError, match="differs from the original's by"):
        bn.fold(scramble_(Restless()), torch.randn(4, 3))


def test_random_numbers_in_evaluation_are_the_same_for_both():
    check_once = nn.Sequential(conv(), nn.BatchNorm2d(3))
    net = scramble_(Coded(lambda n, x: n.body(x) + torch.rand_like(x), body=check_once)).eval()
    assert bn.fold(net, image()).report.relative_error < 1e-5


def test_wrong_verification_says_what_to_do():
    with pytest.raises(ValueError, match="the original was not changed"):
        bn.fold(scramble_(Residual()), image(), tolerance=0.0)


def test_traced_refuses_what_fx_cannot_trace():
    net = Coded(lambda n, x: n.bn(x) if x.mean() > 0 else x, bn=nn.BatchNorm2d(3))
    with pytest.raises(ValueError, match=r"torch\.fx cannot trace"):
        bn.fold(net, image(), traced=True)


def test_a_view_that_names_the_batch_size():
    net = Coded(lambda n, x: n.linear(n.bn(x).view(x.shape[0], -1)), bn=nn.BatchNorm2d(3), linear=nn.Linear(3 * 64, 2))
    assert check(net).report["bn"].action == "folded into 'linear'"


def test_spectral_norm_in_training_mode():
    net = scramble_(nn.Sequential(parametrizations.spectral_norm(conv()), nn.BatchNorm2d(3))).train()
    before = copy.deepcopy(net.state_dict())
    folded = bn.fold(net, image())
    assert folded.report["1"].action == "folded into '0'"
    torch.testing.assert_close(net.state_dict(), before, rtol=0, atol=0)
    x = image()
    torch.testing.assert_close(folded(x), net.eval()(x), rtol=1e-5, atol=1e-5)


def test_settings_that_the_code_reads():
    def code(n, x):
        y = n.bn(n.conv(x)) * n.bn.num_features
        return n.relu(n.bn2(y)) + n.relu.inplace

    net = Coded(code, conv=conv(), bn=nn.BatchNorm2d(3), bn2=nn.BatchNorm2d(3), relu=nn.ReLU())
    net.bn2.scale = 5.0  # the module that replaces bn2 has a buffer of this name
    assert [s.action for s in check(net).report] == ["folded into 'conv'", "fixed affine map"]


@pytest.mark.parametrize(
    ("read", "reason"),
    [
        (lambda n, y: y * n.bn.weight.mean(), "its weight is also read by mean"),
        (lambda n, y: y.to(n.bn.running_var.dtype), "the network's code reads its attribute 'running_var'"),
        (lambda n, y: (y, n.bn.bias), "the network's code reads its attribute 'bias'"),
    ],
)
def test_tensors_that_the_code_reads_keep_their_layer_alone(read, reason):
    def code(n, x):
        return read(n, n.bn(n.body(x)))

    net = Coded(code, body=nn.Sequential(conv(), nn.BatchNorm2d(3), conv()), bn=nn.BatchNorm2d(3))
    with pytest.warns(UserWarning, match=f"1 of 2 batch norms folded.*1 left: {reason}"):
        folded = check(net)
    assert folded.report["body.1"].action == "folded into 'body.0'"


def test_a_graph_module_child_that_reads_a_layers_parameter():
    reading = Coded(lambda n, x: n.bn(n.conv(x)) + n.bn.weight.sum(), conv=conv(), bn=nn.BatchNorm2d(3))
    net = nn.Sequential(torch.fx.symbolic_trace(reading), conv(), nn.BatchNorm2d(3))
    with pytest.warns(UserWarning, match="1 of 2 batch norms folded.*its weight is also read by sum"):
        check(net)


def test_a_graph_module_child_with_modules_that_it_does_not_call():
    child = torch.fx.symbolic_trace(nn.Sequential(conv(), nn.BatchNorm2d(3)))
    child.extra = nn.Sequential(nn.BatchNorm2d(3))
    child.register_buffer("count", torch.zeros(3))
    check(nn.Sequential(child, conv(), nn.BatchNorm2d(3)))


def test_reports_are_attached_unless_the_name_is_taken():
    class Reporting(nn.Sequential):
        def report(self):
            return "mine"

    folded = bn.fold(Reporting(conv(), nn.BatchNorm2d(3)), image())
    assert folded.report() == "mine"


def test_a_copy_that_fails_is_an_error_with_its_reason():
    net = nn.Sequential(nn.BatchNorm1d(3))
    net.lock = __import__("threading").Lock()
    with pytest.raises(ValueError, match=r"cannot be copied with copy\.deepcopy"):
        bn.fold(net, torch.randn(2, 3))


def test_a_note_names_the_batch_norms_that_the_example_does_not_reach():
    norms = nn.ModuleList(nn.BatchNorm2d(3) for _ in range(5))
    (note,) = check(Coded(lambda n, x: n.norms[0](n.conv(x)), conv=conv(), norms=norms)).report.notes
    assert note.startswith("the example does not reach 'norms.1', 'norms.2', 'norms.3' and 1 more, so outputs")


@pytest.mark.parametrize("examples", [1, 4])
def test_heads_that_only_training_uses_are_not_noted(examples):
    def code(n, x):
        y = n.norm(n.conv(x))
        return (y, n.head(y.mean((2, 3)))) if n.training else y

    net = Coded(code, conv=conv(), norm=nn.BatchNorm2d(3), head=nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2)))
    assert check(net, image()[:examples]).report.notes == ()


def test_heads_of_a_rewritten_network_that_only_training_uses_are_not_noted():
    def code(n, x):
        y = F.batch_norm(n.conv(x), n.mean, n.var, training=n.training)
        return (y, n.head(y.mean((2, 3)))) if n.training else y

    net = Coded(code, conv=conv(), head=nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2)))
    net.register_buffer("mean", torch.ones(3))
    net.register_buffer("var", torch.full((3,), 2.0))
    assert not any("does not reach" in note for note in check(net).report.notes)
