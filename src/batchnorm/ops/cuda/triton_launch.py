"""Launch Triton kernels through the CUDA driver, which takes less time than Triton's own launcher."""

from __future__ import annotations

import ctypes
import re
from collections.abc import Callable
from functools import reduce
from operator import itemgetter, or_
from typing import Any

import torch
from torch import Tensor

from . import driver

Tensors = tuple[Tensor | None, ...]
# A function that launches a kernel, given a list of tensor addresses and a tuple of scalars.
Launched = Callable[[list[int], tuple[float, ...]], driver.Launch | None]


class TritonLaunch:
    """Launch a Triton kernel on tensors of one geometry.

    Before each launch, Triton's own launcher inspects every argument in Python to find the matching compiled kernel.
    This takes longer than the launch itself. The compiled kernel depends only on this object's attributes and on the
    key in ``__call__``, so this object caches the kernel under that key.
    """

    def __init__(
        self,
        kernel: Any,
        programs: int,
        numbers: tuple[int, ...],
        constants: tuple[Any, ...],
        options: dict[str, Any],
        device: torch.device,
    ) -> None:
        self.kernel, self.programs, self.options = kernel, programs, options
        self.numbers, self.constants, self.device = numbers, constants, device.index
        self.compiled: dict[tuple[Any, ...], Launched] = {}

    def __call__(self, tensors: Tensors, scalars: tuple[float, ...], choices: tuple[int, ...]) -> driver.Launch | None:
        """Launch the kernel; ``choices`` are the compile-time constants that do not depend on the geometry.

        Returns the launch if this function called the CUDA driver directly, or None if Triton ran the kernel.
        """
        addresses = [0 if t is None else t.data_ptr() for t in tensors]
        key: tuple[Any, ...] = (choices, *[None if t is None else t.dtype for t in tensors])
        if reduce(or_, addresses) & 15:  # Triton compiles different code for pointers that are not aligned to 16 bytes
            key = (*key, *[a % 16 for a in addresses])
        run = self.compiled.get(key)
        if run is not None:
            return run(addresses, scalars)
        if self.device is not None and self.device != torch.cuda.current_device():
            with torch.cuda.device(self.device):  # Triton launches on the current device
                return self(tensors, scalars, choices)
        rest = (*choices, *self.constants)
        compiled = self.kernel[(self.programs,)](*tensors, *self.numbers, *scalars, *rest, **self.options)
        if compiled is not None:  # `compiled` is None if Triton's interpreter runs the kernel
            absent = [t is None for t in tensors]
            self.compiled[key] = self._past_triton(compiled, absent, scalars) or self._by_triton(compiled, absent, rest)
        return None

    def _by_triton(self, compiled: Any, absent: list[bool], rest: tuple[Any, ...]) -> Launched:
        launch = compiled[(self.programs, 1, 1)]

        def run(addresses: list[int], scalars: tuple[float, ...]) -> None:
            given = [None if no else a for a, no in zip(addresses, absent, strict=True)]
            if self.device is not None and self.device != torch.cuda.current_device():
                with torch.cuda.device(self.device):
                    launch(*given, *self.numbers, *scalars, *rest)
            else:
                launch(*given, *self.numbers, *scalars, *rest)

        return run

    def _past_triton(self, compiled: Any, absent: list[bool], scalars: tuple[float, ...]) -> Launched | None:
        """Return a function that launches ``compiled`` through the driver, or None if only Triton can launch it."""
        try:
            meta, index = compiled.metadata, self.device
            types = [compiled.src.signature[name] for name in compiled.src.fn.arg_names]
            declared = re.search(r"\.entry[^(]*\(([^)]*)\)", compiled.asm["ptx"])
            required = re.search(r"\.reqntid (\d+)", compiled.asm["ptx"])
            special = meta.num_ctas != 1 or meta.launch_cooperative_grid or meta.launch_pdl
            scratch = meta.global_scratch_size or meta.profile_scratch_size
            function, threads, shared = compiled.function, 32 * meta.num_warps, meta.shared
        except (AttributeError, KeyError):
            return None
        if declared is None or special or scratch or index is None or not function:
            return None
        if required is not None and int(required[1]) != threads:
            return None
        values = (*absent, *self.numbers, *scalars)
        fields: list[Any] = []
        for i, (kind, value) in enumerate(zip(types, values, strict=False)):
            if i < len(absent):
                known = kind == "constexpr" if value else kind[:1] == "*"
                fields += [] if value else ["P"]
            elif i < len(absent) + len(self.numbers):
                known = kind in INTEGERS or kind == "constexpr"
                fields += [INTEGERS[kind](value)] if kind in INTEGERS else []
            else:
                known = kind == ("fp32" if isinstance(value, float) else "i32")
                fields.append("f" if isinstance(value, float) else "i")
            if not known:
                return None
        # Triton appends up to two parameters to a kernel: pointers to scratch memory. Kernels that use scratch memory
        # were rejected above, so the pointers can be null.
        extra = declared[1].count(".param") - len(fields)
        if extra not in (0, 1, 2) or any(kind != "constexpr" for kind in _flat(types[len(values) :])):
            return None
        arguments = driver.Arguments(*fields, *[ctypes.c_void_p(None)] * extra)
        kernel = driver.Kernel(function, threads, shared, index, cooperative=False)
        present = tuple(i for i, no in enumerate(absent) if not no)
        pick = itemgetter(*present)

        def run(addresses: list[int], scalars: tuple[float, ...]) -> driver.Launch:
            stream = torch._C._cuda_getCurrentRawStream(index)
            values = (*pick(addresses), *scalars)
            arguments.launch(kernel, self.programs, values, stream)
            return driver.Launch(kernel, self.programs, arguments, values, present)

        return run


INTEGERS: dict[str, Any] = {"i32": ctypes.c_int32, "i64": ctypes.c_int64}


def _flat(types: list[Any]) -> list[Any]:
    return [kind for t in types for kind in (_flat(list(t)) if isinstance(t, tuple) else [t])]
