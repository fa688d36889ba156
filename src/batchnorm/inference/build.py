"""Make the modules of the inference network from a plan."""

from __future__ import annotations

import copy
from collections.abc import Callable

from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm as TorchBatchNorm
from torch.nn.utils import parametrize

from ..graph import Graph
from ..graph.kinds import Affine, base_type, has_hooks
from ..layers import BatchNorm
from ..layers.fusion import Fused
from ..layers.normalized import Normalized
from ..network_copy import Memo
from ..ops import Activation
from ..ops.activation import from_module, to_module
from .affine import fold_after, fold_before, weights_of
from .fixed import FixedAffine
from .fold_plan import Plan, has_extras

SETTINGS = (bool, int, float, str, type(None))
Makers = dict[nn.Module, Callable[[Memo], nn.Module]]


def activation_of(layer: nn.Module) -> Activation:
    """Return the nonlinearity that a layer applies itself."""
    return layer.activation if isinstance(layer, BatchNorm) else Activation()


def makers_for(net: nn.Module, graph: Graph, plan: Plan, fused: dict[nn.Module, nn.Module]) -> Makers:
    """Say how each module that changes is made: folded weights, what is left of a layer, nothing.

    Paper: Alg. 2, l. 11
    """
    makers: Makers = {module: _folded_affine(module, plan) for module in {**plan.before, **plan.after}}
    for layer in plan.gone:
        makers[layer] = _in_place_of(layer, _rest_of(layer, graph))
    for layer, left in plan.remaining.items():
        activation = (from_module(fused[layer]) if layer in fused else None) or activation_of(layer)
        fixed = FixedAffine(_narrow(left.scale, layer), _narrow(left.shift, layer), activation)
        makers[layer] = _in_place_of(layer, fixed)
    for module in set(fused.values()):
        makers[module] = _in_place_of(module, nn.Identity())
    for module in net.modules():
        # What insert() added goes where nothing is left of it.
        if isinstance(module, Normalized) and module.norm in plan.gone and _is_dispensable(module, makers):
            makers[module] = _same_as(module.affine)
        if isinstance(module, Fused):
            makers[module] = _in_place_of(module, nn.Identity())
    return makers


def _is_dispensable(container: Normalized, makers: Makers) -> bool:
    identity = activation_of(container.norm).name == "identity"
    return identity and container.affine in makers and not has_hooks(container)


def _folded_affine(module: nn.Module, plan: Plan) -> Callable[[Memo], nn.Module]:
    def make(memo: Memo) -> nn.Module:
        affine = copy.deepcopy(module, memo)
        assert isinstance(affine, Affine)
        weights = weights_of(affine)
        if module in plan.before:
            weights = fold_before(affine, weights, plan.before[module])
        if module in plan.after:
            weights = fold_after(affine, weights, plan.after[module])
        trained, like = affine.weight.requires_grad, affine.weight.detach()
        if parametrize.is_parametrized(affine):
            # remove_parametrizations would take the property from a class that the user's module shares.
            affine.__class__ = base_type(affine)  # type: ignore[assignment]
            del affine._modules["parametrizations"]
        affine.weight = nn.Parameter(weights.weight.to(like), requires_grad=trained)
        affine.bias = nn.Parameter(weights.bias.to(like), requires_grad=trained)
        return affine

    return make


def _rest_of(layer: TorchBatchNorm, graph: Graph) -> nn.Module:
    activation = activation_of(layer)
    if has_extras(graph, layer):
        return FixedAffine(None, None, activation)
    return to_module(activation)


def _in_place_of(old: nn.Module, new: nn.Module) -> Callable[[Memo], nn.Module]:
    """Let a new module replace an old one, with its plain settings: the user's code may read bn.num_features."""
    for name, value in vars(old).items():
        if not name.startswith("_") and isinstance(value, SETTINGS) and not hasattr(new, name):
            vars(new)[name] = value
    return lambda memo: new


def _same_as(module: nn.Module) -> Callable[[Memo], nn.Module]:
    return lambda memo: memo[id(module)]


def _narrow(v: Tensor, layer: TorchBatchNorm) -> Tensor:
    assert layer.running_mean is not None
    return v.to(layer.running_mean)
