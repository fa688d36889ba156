"""Test that the exported file computes what the network computes in evaluation mode, for any batch size."""

import copy
import sys
import warnings

import pytest
import torch
from full_disk import no_room
from networks import ZOO, Coded, Residual, scramble_
from torch import nn
from torch.utils._pytree import register_pytree_node

import batchnorm as bn
from batchnorm.optional_packages import MissingExtraError

FORMATS = ["net.onnx", "net.pt2"]


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("network", ["residual", "dense", "fused_residual"])
def test_files_are_checked_on_several_batch_sizes(tmp_path, name, network):
    make, example, _ = ZOO[network]
    net = scramble_(make()).eval()
    done = bn.export(net, example()[:2], tmp_path / name)
    assert done.path.stat().st_size > 0
    assert done.batch_sizes == (1, 2, 3, 16)
    assert done.relative_error < 1e-5
    assert [p.name for p in tmp_path.iterdir()] == [name], "one file, nothing left beside it"
    assert f"{name}: relative error" in str(done)
    assert "on batches of 1, 2, 3 and 16" in str(done)


def test_a_path_in_the_wrong_place(tmp_path):
    with pytest.raises(TypeError, match=r"path must be a file name, not Tensor: call export\(net, example, path\)"):
        bn.export(nn.Linear(3, 2).eval(), str(tmp_path / "net.pt2"), torch.randn(2, 3))


@pytest.mark.parametrize("name", FORMATS)
def test_a_single_example_still_gives_a_dynamic_batch(tmp_path, name):
    done = bn.export(scramble_(Residual()).eval(), torch.randn(1, 3, 8, 8), tmp_path / name)
    assert done.batch_sizes == (1, 2, 3, 16)


def returning(code):
    """Return a network whose output is ``code`` of a batch normalization's output."""
    net = Coded(lambda n, x: code(n.norm(n.linear(x))), linear=nn.Linear(3, 4), norm=nn.BatchNorm1d(4))
    return scramble_(net).eval()


@pytest.mark.parametrize(
    ("name", "size", "special", "wrong"),
    [
        ("net.onnx", 2, lambda n: n > 8, 16),
        ("net.onnx", 3, lambda n: n % 2 == 0, 2),
        ("net.onnx", 1, lambda n: n == 1, 1),
        ("net.pt2", 4, lambda n: n == 1, 1),
    ],
    ids=["threshold", "even", "own", "pt2"],
)
def test_a_file_that_differs_at_another_batch_size_is_not_written(tmp_path, name, size, special, wrong):
    net = returning(lambda y: y * 2 if special(y.shape[0]) else y)
    with pytest.raises(ValueError, match=f"on a batch of {wrong} differs .* with dynamic_batch=False"):
        bn.export(net, torch.randn(size, 3), tmp_path / name)
    assert not list(tmp_path.iterdir())
    assert bn.export(net, torch.randn(size, 3), tmp_path / name, dynamic_batch=False).batch_sizes == (size,)


def test_a_file_that_fails_at_another_batch_size_is_not_written(tmp_path):
    net = returning(lambda y: torch.stack([y[i] * (i + 1) for i in range(min(y.shape[0], 8))]))
    for size in (2, 1):
        with pytest.raises(ValueError, match=r"fails on a batch of 1, .* with dynamic_batch=False"):
            bn.export(net, torch.randn(size, 3), tmp_path / "net.onnx")
        assert not list(tmp_path.iterdir())


def test_a_small_output_in_a_small_batch_is_no_difference(tmp_path):
    net = nn.Sequential(nn.Linear(8, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Linear(64, 1)).eval()
    rows = torch.randn(4000, 8)
    order = net(rows).abs().flatten().argsort()
    # The first row's output is nearest to 0, so the check at batch size 1 compares values near 0.
    bn.export(net, rows[order[[0, -1, -2, -3]]], tmp_path / "net.pt2")


def test_batch_sizes_that_the_network_refuses_are_not_checked(tmp_path):
    done = bn.export(returning(lambda y: y.reshape(-1, 2, 4).sum(1)), torch.randn(4, 3), tmp_path / "net.onnx")
    assert done.batch_sizes == (2, 4, 16)


def test_folding_is_checked_at_other_batch_sizes(tmp_path):
    def code(n, x):
        y = n.linear(x)
        return n.norm(y) if x.shape[0] > 1 else y

    net = scramble_(Coded(code, linear=nn.Linear(3, 4), norm=nn.BatchNorm1d(4))).eval()
    with pytest.raises(ValueError, match="on a batch of 1 differs"):
        bn.export(net, torch.randn(2, 3), tmp_path / "net.onnx")


def test_large_inputs_are_not_repeated_many_times(tmp_path):
    net = scramble_(nn.Sequential(nn.Conv2d(1, 1, 1), nn.BatchNorm2d(1))).eval()
    assert bn.export(net, torch.randn(1, 1, 1024, 1024), tmp_path / "net.pt2").batch_sizes == (1, 2, 3, 4)
    assert bn.export(net, torch.randn(5, 1, 1024, 1024), tmp_path / "net.pt2").batch_sizes == (1, 2, 3, 5, 6)


def test_metadata_is_in_the_file(tmp_path):
    import onnxruntime

    metadata = {"classes": '["cat", "Wal\u00dfisch"]', "size": "8"}
    for name in FORMATS:
        bn.export(scramble_(Residual()).eval(), torch.randn(2, 3, 8, 8), tmp_path / name, metadata=metadata)
    session = onnxruntime.InferenceSession(str(tmp_path / "net.onnx"), providers=["CPUExecutionProvider"])
    assert session.get_modelmeta().custom_metadata_map == metadata
    found = dict.fromkeys(metadata, "")
    torch.export.load(tmp_path / "net.pt2", extra_files=found)
    assert found == metadata


def test_no_batch_normalization_is_in_the_file(tmp_path):
    import onnx

    bn.export(scramble_(Residual()).eval(), torch.randn(2, 3, 8, 8), tmp_path / "net.onnx")
    operators = {node.op_type for node in onnx.load(tmp_path / "net.onnx").graph.node}
    assert "Conv" in operators
    assert not any("Normalization" in op for op in operators)


@pytest.mark.parametrize("name", FORMATS)
def test_the_data_set_that_the_example_is_a_slice_of_is_not_in_the_file(tmp_path, name):
    net = scramble_(nn.Sequential(nn.Flatten(), nn.Linear(48, 4), bn.BatchNorm1d(4))).eval()
    images = torch.randn(20_000, 3, 4, 4)
    done = bn.export(net, images[:4], tmp_path / name)
    assert done.path.stat().st_size < images.nbytes / 20


def test_fixed_batch(tmp_path):
    done = bn.export(scramble_(Residual()).eval(), torch.randn(3, 3, 8, 8), tmp_path / "net.pt2", dynamic_batch=False)
    assert done.batch_sizes == (3,)


@pytest.mark.parametrize("name", FORMATS)
def test_inputs_by_name(tmp_path, name):
    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b, self.norm = nn.Linear(3, 4), nn.Linear(2, 4), nn.BatchNorm1d(4)

        def forward(self, left, right):
            return self.norm(self.a(left)) - self.b(right)

    example = {"right": torch.randn(2, 2), "left": torch.randn(2, 3)}
    done = bn.export(scramble_(Two()).eval(), example, tmp_path / name)
    assert done.relative_error < 1e-5


class Scaled(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear, self.norm = nn.Linear(3, 4), nn.BatchNorm1d(4)

    def forward(self, x, factors=None, negate=False, mode="sum"):
        scale, shift = factors or [1.0, 2]
        y = self.norm(self.linear(x)) * scale + shift
        return (-y if negate else y) if mode == "sum" else y.relu()


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("given", [{"factors": [3.0, 4]}, {"negate": True}, {"mode": "relu", "negate": False}])
def test_inputs_that_are_not_tensors(tmp_path, name, given):
    done = bn.export(scramble_(Scaled()).eval(), {"x": torch.randn(4, 3), **given}, tmp_path / name)
    assert done.batch_sizes == (1, 2, 3, 4, 16)


@pytest.mark.parametrize(
    ("code", "where"),
    [
        (lambda y: (y, y.shape[0]), r"output\[1\] is of type int"),
        (lambda y: {"y": y, "scale": 0.5}, r"output\['scale'\] is of type float"),
        (lambda y: [y.shape, y], r"output\[0\] is of type Size"),
    ],
)
def test_onnx_files_return_only_tensors(tmp_path, code, where):
    net, x = returning(code), torch.randn(4, 3)
    with pytest.raises(ValueError, match=f"the network's {where}.* or write a .pt2 file"):
        bn.export(net, x, tmp_path / "net.onnx")
    bn.export(net, x, tmp_path / "net.pt2")
    found, expected = torch.export.load(tmp_path / "net.pt2").module()(x[:2]), net(x[:2])
    torch.testing.assert_close(found, expected)


class Named:
    """An output whose name is not a leaf of torch's pytrees, so that exporters ignore it."""

    def __init__(self, y, name="logits"):
        self.y, self.name = y, name


register_pytree_node(Named, lambda o: ([o.y], o.name), lambda ys, name: Named(*ys, name), serialized_type_name="Named")


@pytest.mark.parametrize("name", FORMATS)
def test_an_output_may_have_constants(tmp_path, name):
    assert bn.export(returning(Named), torch.randn(4, 3), tmp_path / name).relative_error < 1e-5


@pytest.mark.parametrize("name", FORMATS)
def test_an_output_may_be_none(tmp_path, name):
    net = returning(lambda y: (y, None))
    assert bn.export(net, torch.randn(4, 3), tmp_path / name).relative_error < 1e-5


def test_a_file_that_cannot_be_read_is_not_written(tmp_path):
    net = returning(lambda y: (y, "text"))
    with pytest.raises(ValueError, match=r"torch cannot export this network to \.pt2"):
        bn.export(net, torch.randn(4, 3), tmp_path / "net.pt2")
    assert not list(tmp_path.iterdir())


def test_a_network_that_fixes_its_batch_is_told_so(tmp_path):
    net = returning(lambda y: y.reshape(2, 4))
    with pytest.raises(ValueError, match="try dynamic_batch=False"):
        bn.export(net, torch.randn(2, 3), tmp_path / "net.pt2")
    assert not list(tmp_path.iterdir())
    bn.export(net, torch.randn(2, 3), tmp_path / "net.pt2", dynamic_batch=False)


def test_other_endings_are_refused(tmp_path):
    with pytest.raises(ValueError, match=r"must end in \.onnx or \.pt2"):
        bn.export(Residual(), torch.randn(2, 3, 8, 8), tmp_path / "net.bin")


def test_a_missing_folder_is_named(tmp_path):
    with pytest.raises(FileNotFoundError, match="nowhere"):
        bn.export(Residual(), torch.randn(2, 3, 8, 8), tmp_path / "nowhere" / "net.pt2")


def test_a_file_that_differs_is_not_written(tmp_path):
    (tmp_path / "net.pt2").write_text("an older file")
    with pytest.raises(ValueError, match="more than the tolerance of 0e"):
        bn.export(scramble_(Residual()).eval(), torch.randn(2, 3, 8, 8), tmp_path / "net.pt2", tolerance=0.0)
    assert (tmp_path / "net.pt2").read_text() == "an older file"


def test_the_argument_is_left_alone(tmp_path):
    net = scramble_(Residual())
    before = copy.deepcopy(net.state_dict())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        bn.export(net, torch.randn(2, 3, 8, 8), tmp_path / "net.pt2")
    assert net.training
    torch.testing.assert_close(net.state_dict(), before, rtol=0, atol=0)


@pytest.mark.parametrize("name", ["net.onnx", "net.pt2"])
def test_code_that_branches_on_values_is_named_first(tmp_path, name):
    net = Coded(lambda n, x: n.bn(x) if x.sum() > 0 else x, bn=nn.BatchNorm1d(4)).eval()
    with pytest.raises(ValueError, match=r"Torch's error: .") as error:
        bn.export(net, torch.ones(2, 4), tmp_path / name)
    assert str(error.value).startswith(
        f"torch cannot export this network to .{name[4:]}. Python code reads the values of a tensor (__bool__ in the"
        " network), so the network may take other branches for other inputs; if so, use operations on tensors instead,"
        " such as torch.where. Torch's error: "
    )
    assert "\n" not in str(error.value)
    assert error.value.__cause__ is not None


def test_a_missing_extra_is_not_blamed_on_the_network(tmp_path, monkeypatch):
    for module in ("onnxscript", "onnxruntime"):
        monkeypatch.setitem(sys.modules, module, None)
    net = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3)).eval()
    with pytest.raises(MissingExtraError, match=r"^onnxscript and onnxruntime are not installed; run: pip install"):
        bn.export(net, torch.randn(2, 4), tmp_path / "net.onnx")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("name", FORMATS)
def test_a_full_disk_is_named_as_the_reason(tmp_path, name):
    path = tmp_path / name
    net = torch.nn.Linear(100, 100).eval()
    with no_room(1000), pytest.raises(OSError, match="too large") as error:
        bn.export(net, torch.randn(2, 100), path)
    assert error.value.filename == str(path)
    assert not [*tmp_path.iterdir()]


class Counting(nn.Module):
    """Multiply by the number of calls, which is kept in a buffer or in a Python number."""

    def __init__(self, kind):
        super().__init__()
        self.linear, self.norm = nn.Linear(3, 4), nn.BatchNorm1d(4)
        self.register_buffer("buffer", torch.zeros(()))
        self.kind, self.number = kind, 0

    def forward(self, x):
        if self.kind == "buffer":
            self.buffer += 1
        else:
            self.number += 1
        return self.norm(self.linear(x)) * (self.buffer + self.number)


@pytest.mark.parametrize("dynamic", [True, False])
@pytest.mark.parametrize(("name", "kind"), [("net.onnx", "buffer"), ("net.onnx", "number"), ("net.pt2", "number")])
def test_a_file_that_forgets_what_the_network_keeps_is_not_written(tmp_path, name, kind, dynamic):
    with pytest.raises(ValueError, match="forward keeps values for its next call"):
        bn.export(scramble_(Counting(kind)).eval(), torch.randn(4, 3), tmp_path / name, dynamic_batch=dynamic)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("name", FORMATS)
def test_networks_that_write_to_their_input_and_expanded_buffers(tmp_path, name):
    def code(n, x):
        x.sub_(0.5).div_(0.25)
        return n.norm(n.linear(x)) + n.expanded

    net = scramble_(Coded(code, linear=nn.Linear(3, 4), norm=nn.BatchNorm1d(4))).eval()
    net.register_buffer("expanded", torch.full((1,), 2.0).expand(4))
    assert bn.export(net, torch.randn(4, 3), tmp_path / name).batch_sizes == (1, 2, 3, 4, 16)


def test_buffers_that_the_forward_changes_are_in_a_pt2_file(tmp_path):
    net, x = scramble_(Counting("buffer")).eval(), torch.randn(4, 3)
    assert bn.export(net, x, tmp_path / "net.pt2").batch_sizes == (1, 2, 3, 4, 16)
    program = torch.export.load(tmp_path / "net.pt2").module()
    for _ in range(3):
        torch.testing.assert_close(program(x), net(x))


def test_one_output_that_amplifies_rounding_does_not_excuse_another(tmp_path):
    def code(n, x):
        y = n.norm(n.conv(x))
        return (y * 0.1 if x.shape[0] > 8 else y), y.argmax(1)  # in half precision, rounding changes some classes

    net = scramble_(Coded(code, conv=nn.Conv2d(3, 4, 3), norm=nn.BatchNorm2d(4))).eval().half()
    with pytest.raises(ValueError, match="on a batch of 16 differs"):
        bn.export(net, torch.randn(4, 3, 64, 64).half(), tmp_path / "net.onnx")


def test_onnx_too_refuses_a_fixed_batch(tmp_path):
    net = returning(lambda y: y.reshape(2, 4))
    with pytest.raises(ValueError, match="accepts no other batch size than 2"):
        bn.export(net, torch.randn(2, 3), tmp_path / "net.onnx")
    assert not list(tmp_path.iterdir())
    bn.export(net, torch.randn(2, 3), tmp_path / "net.onnx", dynamic_batch=False)


class Items(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear, self.norm = nn.Linear(3, 4), nn.BatchNorm1d(4)

    def forward(self, items):
        return self.norm(self.linear(items["x"])) * items["scale"]


class Starred(Items):
    def forward(self, *inputs):
        return self.norm(self.linear(inputs[0]))


@pytest.mark.parametrize("name", FORMATS)
def test_unusual_signatures(tmp_path, name):
    items = {"x": torch.randn(4, 3), "scale": torch.randn(1, 4)}
    for net, example in ((Items(), (items, "labels")), (Starred(), torch.randn(4, 3))):
        done = bn.export(scramble_(net).eval(), example, tmp_path / name)
        assert done.batch_sizes == (1, 2, 3, 4, 16)


@pytest.mark.parametrize("name", FORMATS)
def test_a_symbolic_link_is_kept(tmp_path, name):
    (tmp_path / name).symlink_to(f"version-1-{name}")
    bn.export(scramble_(Residual()).eval(), torch.randn(2, 3, 8, 8), tmp_path / name)
    assert (tmp_path / name).is_symlink()
    assert (tmp_path / f"version-1-{name}").stat().st_size > 0


def test_a_large_onnx_file_replaces_a_link(tmp_path, monkeypatch):
    monkeypatch.setattr(sys.modules["batchnorm.inference.export"], "LARGEST_FILE", 0)
    (tmp_path / "other").mkdir()
    (tmp_path / "net.onnx").symlink_to(tmp_path / "other" / "net.onnx")
    bn.export(scramble_(Residual()).eval(), torch.randn(2, 3, 8, 8), tmp_path / "net.onnx")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["net.onnx", "net.onnx.data", "other"]
    assert not list((tmp_path / "other").iterdir())


def test_a_link_to_itself(tmp_path):
    (tmp_path / "net.pt2").symlink_to(tmp_path / "net.pt2")
    with pytest.raises(OSError, match="symbolic link"):
        bn.export(Residual().eval(), torch.randn(2, 3, 8, 8), tmp_path / "net.pt2")


def test_metadata_that_are_not_strings_are_named(tmp_path):
    with pytest.raises(TypeError, match="'size' maps to 224"):
        bn.export(Residual().eval(), torch.randn(2, 3, 8, 8), tmp_path / "net.pt2", metadata={"size": 224})
