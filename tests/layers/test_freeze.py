import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict
from torch.nn.utils.parametrize import register_parametrization

import batchnorm as bn

LAYERS = [(bn.BatchNorm1d, (4, 3)), (bn.BatchNorm2d, (4, 3, 5, 5)), (bn.BatchNorm3d, (4, 3, 2, 2, 2))]


@pytest.mark.parametrize(("kind", "shape"), LAYERS)
def test_frozen_statistics_survive_train(kind, shape):
    layer = kind(3)
    layer(torch.randn(shape) + 2)
    before = {k: v.clone() for k, v in layer.state_dict().items()}
    bn.freeze_(layer, affine=False)
    layer.train()
    x = torch.randn(shape)
    y = layer(x)
    assert layer.weight.requires_grad
    torch.testing.assert_close(y, layer.eval()(x))
    state = layer.state_dict()
    for key, value in before.items():
        torch.testing.assert_close(state[key], value, rtol=0, atol=0)


def test_affine_alone():
    layer = bn.BatchNorm1d(3)
    bn.freeze_(layer, statistics=False)
    assert not layer.weight.requires_grad
    assert not layer.bias.requires_grad
    layer(torch.randn(4, 3))
    assert layer.num_batches_tracked == 1


def test_unfreeze_restores_what_was():
    layer = bn.BatchNorm1d(3)
    layer.bias.requires_grad_(False)  # frozen by the user before freeze_
    assert bn.freeze_(layer) is layer
    assert bn.unfreeze_(layer) is layer
    assert layer.weight.requires_grad
    assert not layer.bias.requires_grad
    layer(torch.randn(4, 3))
    assert layer.num_batches_tracked == 1
    assert set(layer.state_dict()) == set(nn.BatchNorm1d(3).state_dict())


@pytest.mark.parametrize("statistics", [True, False])
@pytest.mark.parametrize("affine", [True, False])
def test_state_dict_carries_it(statistics, affine):
    net = nn.Sequential(nn.Linear(2, 3), bn.BatchNorm1d(3))
    bn.freeze_(net, statistics=statistics, affine=affine)
    twin = nn.Sequential(nn.Linear(2, 3), bn.BatchNorm1d(3))
    twin.load_state_dict(net.state_dict())
    assert twin[1].frozen_statistics is statistics
    assert twin[1].weight.requires_grad is not affine
    bn.unfreeze_(twin)
    assert twin[1].weight.requires_grad
    assert not twin[1].frozen_statistics


def test_distributed_checkpoints_carry_it():
    net, twin = (nn.Sequential(nn.Linear(2, 3), bn.BatchNorm1d(3)) for _ in range(2))
    bn.freeze_(net, affine=False)
    state = get_model_state_dict(net)
    assert state["1.frozen"] == net[1].frozen == 1
    set_model_state_dict(twin, state)
    assert twin[1].frozen == 1
    torch.testing.assert_close(dict(twin.state_dict()), dict(net.state_dict()))


def test_a_checkpoint_without_the_entry_leaves_a_frozen_layer_frozen():
    layer = bn.BatchNorm1d(3)
    bn.freeze_(layer)
    layer.load_state_dict(nn.BatchNorm1d(3).state_dict())
    assert layer.frozen_statistics


def test_torch_does_not_take_a_frozen_layer_for_an_ordinary_one():
    layer = bn.BatchNorm1d(3)
    bn.freeze_(layer)
    with pytest.raises(RuntimeError, match="frozen"):
        nn.BatchNorm1d(3).load_state_dict(layer.state_dict())


def test_scripted_layers_are_refused():
    net = nn.ModuleDict({"a": bn.BatchNorm1d(3), "b": torch.jit.script(nn.Sequential(nn.BatchNorm1d(3)))})
    with pytest.raises(ValueError, match=r"cannot freeze b\.0: it is scripted"):
        bn.freeze_(net)
    assert net["a"].frozen == 0
    bn.freeze_(net, statistics=False)
    assert not net["a"].weight.requires_grad
    with pytest.raises(ValueError, match=r"cannot freeze b\.0: it is scripted"):
        bn.freeze_(nn.ModuleDict({"b": net["b"]}))


def test_refusals_change_nothing():
    net = nn.ModuleDict({"a": bn.BatchNorm1d(3), "b": nn.BatchNorm1d(3)})
    with pytest.raises(ValueError, match=r"cannot freeze b: only this library.*convert"):
        bn.freeze_(net)
    assert net["a"].weight.requires_grad
    net = nn.ModuleDict({"a": bn.BatchNorm1d(3), "b": bn.BatchNorm1d(3, track_running_stats=False)})
    with pytest.raises(ValueError, match="b has no running statistics"):
        bn.freeze_(net)
    assert not net["a"].frozen_statistics
    net = nn.ModuleDict({"a": bn.BatchNorm1d(3), "b": bn.BatchNorm1d(3)})
    register_parametrization(net["b"], "weight", nn.Softplus())
    with pytest.raises(ValueError, match=r"the weight of b is not a parameter.*affine=False"):
        bn.freeze_(net)
    assert net["a"].frozen == net["b"].frozen == 0
    assert net["a"].weight.requires_grad
    bn.freeze_(net, affine=False)
    bn.unfreeze_(net)
    assert net["b"].frozen == 0
    with pytest.raises(ValueError, match="nothing to freeze"):
        bn.freeze_(nn.Linear(2, 2))


def test_a_parameter_that_is_parametrized_while_frozen():
    net = nn.ModuleDict({"a": bn.BatchNorm1d(3), "b": bn.BatchNorm1d(3)})
    bn.freeze_(net)
    register_parametrization(net["b"], "bias", nn.Softplus())
    with pytest.raises(ValueError, match=r"the bias of b is not a parameter.*affine=False"):
        bn.unfreeze_(net)
    assert net["a"].frozen == net["b"].frozen == 7


def test_repr_says_so():
    layer = bn.BatchNorm1d(3)
    bn.freeze_(layer)
    assert repr(layer).endswith("frozen=statistics+weight+bias)")


def test_a_state_dict_replaces_how_much_is_frozen():
    here, there, taught = (bn.BatchNorm1d(3) for _ in range(3))
    bn.freeze_(here)
    bn.freeze_(there, affine=False)
    here.load_state_dict(there.state_dict())
    assert here.frozen_statistics
    assert here.weight.requires_grad
    assert here.bias.requires_grad
    # Loading a state dict does not unfreeze a parameter that the user has frozen.
    taught.weight.requires_grad_(False)
    taught.load_state_dict(there.state_dict())
    assert not taught.weight.requires_grad
    bn.freeze_(there)
    here.load_state_dict(there.state_dict())
    assert not here.weight.requires_grad
    bn.unfreeze_(here)
    assert here.weight.requires_grad
