"""Compile the Triton kernels for a Hopper GPU; no GPU is needed.

test_kernels_compile.py runs this script with Triton's interpreter turned off.
"""

import itertools
import sys

from triton import compile as triton_compile
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from batchnorm.models.bn_inception.triton import average_pool, global_pool, max_pool, pixel_blocks, separable
from batchnorm.ops.activation import NAMES, TWO_SLOPES
from batchnorm.ops.cuda.triton import inference
from batchnorm.ops.cuda.triton.backward import backward
from batchnorm.ops.cuda.triton.forward import forward
from batchnorm.ops.cuda.triton.layers import backward_layers, forward_layers
from batchnorm.train.triton.loss import cross_entropy
from batchnorm.train.triton.update import update

NUMBERS = (
    *("C", "units", "slices", "parts", "share", "beside", "x_stride", "x_plane", "y_stride", "y_plane", "width"),
    *("dy_stride", "count", "H", "W", "out_H", "out_W", "inner", "room", "first"),
    *("classes", "pixels", "stride", "rows", "columns", "before", "each", "x_n", "x_c", "x_h", "x_w"),
)
POINTERS = {"bits": "u8", "where": "u8", "batches": "i64", "skipped": "i64", "words": "i32"}
# These arguments point to values of the dtype that `build` gets. Pointers that are neither here nor in POINTERS point
# to float32.
TYPED = ("x", "y", "residual", "dy", "dx", "dresidual", "other", "blocks")
ALONE = {"T": 2, "PHASE": 3, "ALONE": True, "LAST": False, "TREE": False, "TICKET": False}
MET = {"T": 4, "PHASE": 3, "ALONE": False, "LAST": False, "TREE": False, "TICKET": True}
MANY = {"T": 4, "PHASE": 3, "ALONE": False, "LAST": True, "TREE": True, "TICKET": True}
SUMS = {"T": 0, "PHASE": 1, "ALONE": False, "LAST": True, "TREE": False, "TICKET": False}
REST = {**SUMS, "PHASE": 2}
LAST, FIRST = (True, 64, 32, 16, False), (False, 256, 8, 8, True)


def build(kernel, form, way, dtype, act, absent, pointers=POINTERS):
    constants = {**way, "FORM": form, "ACT": act, "CUMULATIVE": act == 2, "STAGES": 3, "ON_DEVICE": True}
    signature, fixed, attributes = {}, {}, {}
    for i, numbered in enumerate(kernel.arg_names):
        name = numbered.rstrip("0123")  # kernels for several layers have arguments x0, x1, ...
        if name in constants or name in absent or numbered in absent:
            signature[numbered], fixed[(i,)] = "constexpr", constants.get(name)
        elif name in (*NUMBERS, "magic", "shift"):
            signature[numbered] = "i32"
        elif name in ("eps", "momentum", "slope"):
            signature[numbered] = "fp32"
        else:
            signature[numbered] = "*" + pointers.get(name, dtype if name in TYPED else "fp32")
            attributes[(i,)] = [["tt.divisibility", 16]]
    source = ASTSource(fn=kernel, signature=signature, constexprs=fixed, attrs=attributes)
    assert triton_compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 4}).asm["cubin"]


def main():
    count = 0
    plain, hidden = ("residual", "bits", "dresidual", "gamma"), ("residual",)
    for kernel, form, way in itertools.product((forward, backward), (LAST, FIRST), (ALONE, MET, MANY, SUMS, REST)):
        build(kernel, form, way, "bf16", 1, plain)
        count += 1
    for kernel, (act, name) in itertools.product((forward, backward), enumerate(NAMES)):
        smooth = name != "identity" and name not in TWO_SLOPES
        absent = ("bits",) if smooth else hidden if kernel is backward else ("running_mean", "running_var", "beta")
        build(kernel, LAST, MET, "fp32", act, absent)
        count += 1
    fourth = ("x3", "y3", "gamma3", "beta3", "running_mean3", "running_var3", "batches3", "skipped3", "dx3", "dy3")
    for kernel, way in itertools.product((forward_layers, backward_layers), (ALONE, MET, MANY, SUMS, REST)):
        build(kernel, LAST, way, "bf16", 1, fourth)
        count += 1
    build(average_pool.average, LAST, {"P": 16, "V": 64, "A": 16, "BACKWARD": True}, "bf16", 1, ())
    count += 1
    normalizing = ("stats", "dgamma", "dbeta")
    for kernel, absent in (
        (max_pool.max_forward, ()),
        (max_pool.max_forward, normalizing),
        (max_pool.max_sums, ()),
        (max_pool.max_backward_2, ()),
        (max_pool.max_backward_2, normalizing),
        (max_pool.max_backward_1, ("other",)),
    ):
        for align, stride, dtype in ((16, 2, "bf16"), (1, 1, "fp16")):
            way = {"P": 16, "V": 64, "A": align, "STRIDE": stride, "TREE": stride == 2, "UNROLL": stride}
            build(kernel, LAST, way, dtype, 1, absent)
            count += 1
    build(pixel_blocks.to_blocks, LAST, {"INPUTS": 3, "CHANNELS": 16, "P": 128, "V": 16}, "bf16", 1, (), {"x": "fp32"})
    count += 1
    for absent in ((), ("residual", "gamma", "beta")):
        build(inference.normalize, LAST, {"BLOCK": 2048}, "bf16", 1, absent)
        count += 1
    build(inference.normalize_rows, LAST, {"P": 32, "V": 64, "A": 16}, "bf16", 1, ())
    count += 1
    again = ("bits", "gamma", "beta", "running_mean", "running_var", "batches", "skipped")
    for form, absent in ((LAST, again), (FIRST, (*again, "residual"))):
        build(forward, form, REST, "bf16", 1, absent, pointers={})  # as in launch.recompute
        count += 1
    for aligned in (False, True):
        build(update, LAST, {"CHUNK": 2048, "ALIGNED": aligned}, "fp32", 1, (), {"table": "i64", "chunks": "i64"})
        count += 1
    stem = {"OUT": 64, "IN": 3, "M": 8, "A": 49, "B": 64}
    build(separable.compose, LAST, {**stem, "P": 8}, "fp32", 1, ())
    build(separable.compose_backward, LAST, {**stem, "P": 64}, "fp32", 1, ())
    for kernel in (global_pool.average, global_pool.spread):
        build(kernel, LAST, {"P": 64, "V": 128}, "bf16", 1, ())
    count += 4
    typed = {"labels": "i64", "scores": "bf16", "gradient": "bf16"}
    build(cross_entropy, LAST, {"C": 1024}, "bf16", 1, (), typed)
    count += 1
    sys.stdout.write(f"compiled {count}\n")


if __name__ == "__main__":
    main()
