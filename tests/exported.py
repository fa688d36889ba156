"""Find the batch normalizations in a network's exported graph that feed an activation, directly or through a sum."""

import warnings

import torch

ACTIVATIONS = frozenset(
    """relu relu_ hardtanh hardtanh_ relu6 hardswish hardswish_ silu silu_ sigmoid sigmoid_ tanh tanh_ leaky_relu
    leaky_relu_ gelu elu elu_ mish hardsigmoid prelu clamp""".split()  # noqa: SIM905
)
HANDED_ON = frozenset("dropout dropout_ alias clone contiguous".split())  # noqa: SIM905


def _name(node):
    return str(node.target).split(".")[1] if node.op == "call_function" and "." in str(node.target) else node.op


def _only_user(node):
    users = list(node.users)
    while len(users) == 1 and _name(users[0]) in HANDED_ON:
        users = list(users[0].users)
    return users[0] if len(users) == 1 else None


def _source(node):
    while isinstance(node, torch.fx.Node) and _name(node) in HANDED_ON:
        node = node.args[0]
    return node


def feeding(net, x):
    """For each activation that BN layers feed, return the layers' paths and the activation's name.

    If the activation's input is the sum of two layers' outputs, only one of the two layers can fuse the activation.
    """
    with warnings.catch_warnings(action="ignore"), torch.no_grad():
        exported = torch.export.export(net.eval(), (x,))
    buffers = exported.graph_signature.inputs_to_buffers
    paths = {}
    for node in exported.graph.nodes:
        if "batch_norm" in _name(node):
            (mean,) = [a for a in node.args if getattr(a, "name", None) in buffers and buffers[a.name].endswith("mean")]
            paths[node] = buffers[mean.name].rpartition(".")[0]
    groups = []
    for node in exported.graph.nodes:
        if _name(node) in ACTIVATIONS:
            source = _source(node.args[0])
            if source in paths:
                groups.append(({paths[source]}, _name(node)))
            elif _name(source) in ("add", "add_") and _only_user(source) is node:
                norms = {paths[s] for s in map(_source, source.args[:2]) if s in paths and _only_user(s) is source}
                if norms:
                    groups.append((norms, _name(node)))
    return groups
