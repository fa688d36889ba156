"""Test that batch normalization in a module's own forward is folded, and that all other modules keep their code."""

import copy
import pickle
from dataclasses import dataclass
from enum import Enum
from types import MethodType

import onnx
import pytest
import torch
import torch.nn.functional as F
from networks import Coded, Functional, NormWithActivation, image, scramble_
from torch import fx, nn
from torch.nn.modules.batchnorm import _BatchNorm

import batchnorm as bn


def check(net, x=None, **options):
    """Fold, compare on the example and on another batch, and return the folded network."""
    net = scramble_(net).double().eval()
    x = (image() if x is None else x).double()
    folded = bn.fold(net, x, **options)
    for batch in (x, torch.randn_like(x)):
        torch.testing.assert_close(folded(batch), net(batch), rtol=1e-9, atol=1e-10)
    return folded


def left(net):
    return [m for m in net.modules() if isinstance(m, _BatchNorm)]


class NormActDrop(nn.BatchNorm2d):
    """A batch norm as timm writes it: F.batch_norm, then the child modules."""

    def __init__(self, features, act):
        super().__init__(features)
        self.drop, self.act = nn.Identity(), act

    def forward(self, x):
        torch._assert(x.ndim == 4, f"expected 4D input (got {x.ndim}D input)")
        x = F.batch_norm(x, self.running_mean, self.running_var, self.weight, self.bias, self.training, 0.0, self.eps)
        return self.act(self.drop(x))


class Data(nn.Module):
    """A module that torch.fx cannot trace, because its forward branches on the data."""

    def __init__(self, act):
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, 4, 3), NormActDrop(4, act)

    def forward(self, x):
        return self.norm(self.conv(x)) if x.mean() < 100 else x


def test_a_layer_with_its_own_forward_is_opened_alone():
    net = nn.Sequential(Data(nn.ReLU()), nn.Conv2d(4, 4, 3), nn.ReLU(), NormActDrop(4, nn.SiLU()))
    folded = check(net)
    assert [(s.path, s.action) for s in folded.report] == [
        ("0.norm", "folded into '0.conv'"),
        ("3", "fixed affine map"),
    ]
    assert not left(folded)
    assert type(folded[0]) is Data
    norm = folded[0].norm
    assert type(norm).__name__ == "NormActDrop"
    assert norm.num_features == 4
    assert isinstance(norm.act, nn.ReLU)
    assert not list(norm.parameters())
    assert not list(norm.buffers())
    assert folded.report.summary.startswith(
        "fold: 1 of 2 batch norms folded into weights, 1 as a fixed affine map, rel"
    )
    (_, note) = folded.report.notes
    assert note.startswith("batch norm subclasses"), "no note on '0', because Data keeps its own forward"


@pytest.mark.parametrize("name", ["net.onnx", "net.pt2"])
def test_the_file_has_no_batch_normalization(tmp_path, name):
    net = scramble_(nn.Sequential(nn.Conv2d(3, 4, 3), NormActDrop(4, nn.ReLU()), Functional2(), nn.Conv2d(4, 2, 1)))
    bn.export(net.eval(), image(), tmp_path / name)
    if name == "net.onnx":
        operators = {node.op_type for node in onnx.load(tmp_path / name).graph.node}
    else:
        operators = {str(node.target) for node in torch.export.load(tmp_path / name).graph.nodes}
    assert not any("norm" in op.lower() for op in operators), operators


class Functional2(nn.Module):
    """A module that calls F.batch_norm on a child's output, and has arguments that are not tensors."""

    def __init__(self):
        super().__init__()
        self.conv, self.stride = nn.Conv2d(4, 4, 1), 7
        self.gamma = nn.Parameter(torch.rand(4) + 0.5)
        self.register_buffer("mean", torch.randn(4))
        self.register_buffer("var", torch.rand(4) + 0.5)

    def forward(self, x, mask=None, scale=1.0):
        y = F.batch_norm(self.conv(x), self.mean, self.var, self.gamma)
        return (y if mask is None else y * mask) * scale

    def answer(self):
        return 42


def test_the_module_stays_of_its_class_and_travels():
    net = nn.Sequential(nn.Conv2d(3, 4, 3), Functional2())
    folded = check(net)
    block = folded[1]
    assert isinstance(block, Functional2)
    assert (block.answer(), block.stride) == (42, 7)
    assert folded.report["1.functional_batch_norm"].action == "folded into '1.conv'"
    assert folded.report.notes == (
        "'1' runs a traced form of its forward, which ignores attributes that are set later",
    )
    assert not list(block.buffers())
    x = image().double()
    for twin in (copy.deepcopy(folded), pickle.loads(pickle.dumps(folded))):
        assert isinstance(twin[1], Functional2)
        torch.testing.assert_close(twin(x), folded(x), rtol=0, atol=0)
    compiled = torch.compile(folded, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(x), folded(x))
    torch._dynamo.reset()


def test_arguments_that_tracing_made_constants_are_checked():
    stem, inner = nn.Conv2d(3, 4, 3), Functional2()
    folded = check(Coded(lambda n, x: n.inner(n.stem(x), scale=n.scale), stem=stem, inner=inner, scale=2.0))
    folded.scale = 3.0
    with pytest.raises(AssertionError, match=r"scale has been specialized to have value 2\.0"):
        folded(image().double())


def test_calls_that_differ_are_traced_with_the_module_around():
    def code(n, x):
        x = n.stem(x)
        return n.inner(x, scale=2.0) - n.inner(x)

    folded = check(nn.Sequential(Coded(code, stem=nn.Conv2d(3, 4, 3), inner=Functional2()), nn.ReLU()))
    assert folded.report.notes == (
        "'0' runs a traced form of its forward, which ignores attributes that are set later",
    )
    assert isinstance(folded[0], Coded)


def test_a_patched_forward_is_traced_with_the_module_around():
    norm = nn.BatchNorm2d(4)
    norm.forward = MethodType(lambda self, x: nn.BatchNorm2d.forward(self, x).relu(), norm)
    folded = check(nn.Sequential(nn.Conv2d(3, 4, 3), norm))
    assert folded.report.summary.startswith("fold: 1 of 1 batch norm folded")
    assert isinstance(folded, nn.Sequential)
    assert not left(folded)


@pytest.mark.filterwarnings("ignore:.*LeafSpec:FutureWarning")  # from torch, when a program is copied
def test_torch_batch_norm_and_exported_programs():
    def code(n, x):
        b = n.bn
        y = torch.batch_norm(n.conv(x), b.weight, b.bias, b.running_mean, b.running_var, False, 0.0, b.eps, False)
        return y.relu()

    folded = check(Coded(code, conv=nn.Conv2d(3, 4, 3), bn=nn.BatchNorm2d(4)))
    assert "folded into 'conv'" in {site.action for site in folded.report}
    x = image().double()
    net = scramble_(nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4))).double().eval()
    program = nn.Sequential(torch.export.export(net, (x,)).module())
    folded = bn.fold(program, x)
    assert folded.report.summary.startswith("fold: 1 of 1 batch norm folded")
    torch.testing.assert_close(folded(x), net(x))


class Untraceable(nn.Module):
    """A module that calls F.batch_norm at two places, twice each, and branches on the data."""

    def __init__(self):
        super().__init__()
        for name in "ab":
            self.register_buffer(f"mean_{name}", torch.randn(3))
            self.register_buffer(f"var_{name}", torch.rand(3) + 0.5)

    def forward(self, x):
        for _ in range(2):
            x = F.batch_norm(x, self.mean_a, self.var_a)
            x = F.batch_norm(x, self.mean_b, self.var_b)
        return x if x.mean() < 100 else -x


def test_what_cannot_be_traced_is_counted_and_warned_of_once():
    net = nn.Sequential(nn.Conv2d(3, 3, 3), nn.BatchNorm2d(3), nn.Sequential(Untraceable()))
    with pytest.warns(UserWarning, match="2 left") as caught:
        folded = check(net)
    assert [str(w.message) for w in caught] == [folded.report.summary]
    assert "1 of 3 batch norms folded" in folded.report.summary
    assert "2 left: its forward cannot be rewritten for folding: symbolically traced variables" in folded.report.summary
    assert caught[0].filename == __file__
    assert [site.path for site in folded.report if site.action == "kept"] == ["2.0", "2.0"]


def test_code_that_assigns_to_attributes_is_not_traced():
    class Counting(Functional2):
        def forward(self, x):
            self.stride += 1
            return super().forward(x) * self.stride

    class CountingNorm(nn.BatchNorm2d):
        calls = 0

        def forward(self, x):
            self.calls += 1
            return super().forward(x)

    net = nn.Sequential(nn.Conv2d(3, 4, 3), CountingNorm(4), Counting())
    with pytest.warns(UserWarning, match="0 of 2 batch norms folded"):
        folded = bn.fold(net, image())
    assert folded.report["1"].reason == "CountingNorm has its own forward; its code assigns to the attribute 'calls'"
    assert folded.report["2"].reason == "its code assigns to the attribute 'stride'"
    assert [type(module) for module in folded] == [type(module) for module in net]
    assert (folded[1].calls, folded[2].stride) == (0, 7)
    with pytest.raises(ValueError, match=r"cannot trace the network \(its code assigns to the attribute 'calls'"):
        bn.fold(net, image(), traced=True)


class InPlace(Functional2):
    def __init__(self):
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x):
        self.calls.add_(1)
        return super().forward(x) / self.calls


class PlainTensor(Functional2):
    def __init__(self):
        super().__init__()
        self.calls = torch.zeros(())

    def forward(self, x):
        self.calls.add_(1)
        return super().forward(x) / self.calls


class History(Functional2):
    def __init__(self):
        super().__init__()
        self.history = {"calls": []}

    def forward(self, x):
        self.history["calls"].append(x.shape)
        return super().forward(x) / len(self.history["calls"])


class CountingNorm(nn.BatchNorm2d):
    def __init__(self, features):
        super().__init__(features)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x):
        self.calls += 1
        return F.batch_norm(x, self.running_mean, self.running_var) / self.calls


@pytest.mark.parametrize(
    ("kind", "changed"), [(InPlace, "calls"), (PlainTensor, "calls"), (History, r"history\['calls'\]\[\d\]")]
)
def test_code_that_changes_tensors_or_lists_is_not_traced(kind, changed):
    net, x = nn.Sequential(nn.Conv2d(3, 4, 3), kind()).double().eval(), image().double()
    with pytest.warns(UserWarning, match=f"1 left: its code changes '{changed}'"):
        folded = bn.fold(net, x)
    for _ in range(3):
        torch.testing.assert_close(folded(x), net(x))
    with pytest.raises(ValueError, match=rf"cannot trace the network \(its code changes '1\.{changed}'"):
        bn.fold(net, x, traced=True)


def test_a_layer_that_counts_its_calls():
    net, x = nn.Sequential(nn.Conv2d(3, 4, 3), CountingNorm(4)).eval(), image()
    with pytest.warns(UserWarning, match="1 left"):
        folded = bn.fold(net, x)
    for _ in range(3):
        torch.testing.assert_close(folded(x), net(x))


class Mode(Enum):
    PLAIN = 1
    TANH = 2


class Switched(Functional2):
    def forward(self, x, mode=Mode.PLAIN):
        y = super().forward(x)
        return y if mode is Mode.PLAIN else y.tanh()


def test_an_argument_that_traced_code_cannot_check():
    net, x = Switched().eval(), torch.randn(2, 4, 5, 5)
    with pytest.warns(UserWarning, match="1 left: .* its argument 'mode' is a Mode, and traced code cannot check that"):
        folded = bn.fold(net, x)
    for mode in Mode:
        torch.testing.assert_close(folded(x, mode), net(x, mode))


@dataclass
class Config:
    scale: float | torch.Tensor = 1.0


class Configured(Functional2):
    def forward(self, x, config=Config()):  # noqa: B008
        return super().forward(x) * config.scale


@pytest.mark.parametrize("scale", [2.0, torch.tensor(2.0)])
def test_an_unhashable_default_does_not_damage_the_copy(scale):
    net, batch = Configured().eval(), {"x": torch.randn(2, 4, 5, 5), "config": Config(scale)}
    with pytest.warns(UserWarning, match="1 left"):
        folded = bn.fold(net, batch)
    assert folded.state_dict().keys() == net.state_dict().keys()
    torch.testing.assert_close(folded(**batch), net(**batch))


@pytest.mark.parametrize(
    "factor",
    [
        lambda net, x: {2: 1.0, 7: 3.0}.get(x.shape[0], 1.0),
        lambda net, x: 3.0 if x.size(0) in {7} else 1.0,
        lambda net, x: getattr(net, f"factor_{x.shape[0]}", 1.0),
        lambda net, x: getattr(net, "factor_" + str(x.shape[0]), 1.0),
        lambda net, x: 3.0 if "%s" % x.shape[0] == "7" else 1.0,  # noqa: UP031
    ],
)
def test_code_that_looks_up_a_shape_is_not_traced(factor):
    class Lookup(Functional2):
        factor_7 = 3.0

        def forward(self, x):
            return super().forward(x) * factor(self, x)

    net, x = nn.Sequential(nn.Conv2d(3, 4, 3), Lookup()).eval(), image()
    with pytest.warns(UserWarning, match="1 left: its code (uses|turns) a tensor"):
        folded = bn.fold(net, x)
    more = torch.randn(7, *x.shape[1:])
    torch.testing.assert_close(folded(more), net(more))


def test_code_that_asks_for_types_and_buffers_is_traced():
    class Asking(Functional2):
        def forward(self, x):
            if type(self.conv) is not nn.Conv2d or self.__class__ is not Asking or self.__dict__["training"]:
                return self.conv(x)
            return F.batch_norm(self.conv(x), dict(self.named_buffers())["mean"], self.var, self.gamma)

    net, x = nn.Sequential(nn.Conv2d(3, 4, 3), Asking()).eval(), image()
    folded = bn.fold(net, x)
    assert "1 of 1" in folded.report.summary
    torch.testing.assert_close(folded(x), net(x))


def test_the_report_says_which_modules_are_traced():
    class Scaled(nn.BatchNorm2d):
        gain = 2.0

        def forward(self, x):
            return super().forward(x) * self.gain

    folded = check(nn.Sequential(nn.Conv2d(3, 4, 3), Scaled(4), nn.Conv2d(4, 4, 3), Scaled(4)))
    assert folded.report.notes == (
        "batch norm subclasses run a traced form of their forward, which ignores attributes that are set later",
    )


def test_export_and_the_command_warn_of_what_is_left(tmp_path, monkeypatch, capsys):
    net = scramble_(nn.Sequential(nn.Conv2d(3, 3, 3), nn.BatchNorm2d(3, track_running_stats=False))).eval()
    told = "0 of 1 batch norm folded.*1 left: even in evaluation mode, it normalizes by mini-batch"
    with pytest.warns(UserWarning, match=told) as caught:
        done = bn.export(net, image(), tmp_path / "net.pt2")
    assert len(caught) == 1
    assert caught[0].filename == __file__
    assert "1 left" in str(done).splitlines()[1]
    (tmp_path / "leaves.py").write_text(
        "import torch\nfrom torch import nn\n"
        "def net():\n    return nn.Sequential(nn.BatchNorm2d(3, track_running_stats=False)), torch.randn(2, 3, 4, 4)\n"
    )
    monkeypatch.chdir(tmp_path)
    from batchnorm.train.fold_command import fold

    fold("leaves:net", tmp_path / "net.pt2")
    printed = capsys.readouterr()
    assert "0 of 1 batch norm folded" in printed.out
    assert printed.err.startswith("warning: fold: 0 of 1")
    assert printed.err.count("\n") == 1


def test_weight_standardization_is_no_batch_normalization():
    class Standardized(nn.Conv2d):
        def forward(self, x):
            weight = F.batch_norm(self.weight.flatten(1)[None], None, None, training=True).reshape_as(self.weight)
            return F.conv2d(x, weight, self.bias)

    folded = check(nn.Sequential(Standardized(3, 4, 3), nn.BatchNorm2d(4)))
    assert [site.path for site in folded.report] == ["1"]


def test_a_traced_form_that_computes_something_else_is_not_used():
    class Sly(Functional2):
        def forward(self, x):
            return super().forward(x) * (2 if type(x) is torch.Tensor else 1)

    with pytest.warns(UserWarning, match=r"1 left: its traced form failed: .* differs .*\(relative\)"):
        check(nn.Sequential(nn.Conv2d(3, 4, 3), Sly()))


@pytest.mark.parametrize("whole", [False, True])
def test_scripted_layers_are_counted(whole):
    norm = nn.BatchNorm2d(4)
    scripted = torch.jit.script(nn.Sequential(norm, nn.ReLU()) if whole else norm)
    with pytest.warns(UserWarning, match="1 of 2 batch norms folded.*1 left: it is scripted"):
        check(nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), scripted, nn.Conv2d(4, 2, 3)))


def test_never_traced():
    with pytest.warns(UserWarning, match="1 left: NormWithActivation has its own forward"):
        check(nn.Sequential(nn.Conv2d(3, 4, 3), NormWithActivation(4)), traced=False)


def test_a_graph_module_child_with_a_functional_batch_norm():
    folded = check(nn.Sequential(fx.symbolic_trace(Functional().eval())))
    assert isinstance(folded[0], fx.GraphModule)
    assert [site.action for site in folded.report] == ["folded into '0.functional_conv2d'", "folded into '0.conv'"]


def test_a_network_that_was_traced_as_a_whole_can_be_saved(tmp_path):
    net = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU())
    folded = check(net, traced=True)
    torch.save(folded, tmp_path / "net.pt")
    x = image().double()
    for copied in (torch.load(tmp_path / "net.pt", weights_only=False), pickle.loads(pickle.dumps(folded))):
        torch.testing.assert_close(copied(x), folded(x))
