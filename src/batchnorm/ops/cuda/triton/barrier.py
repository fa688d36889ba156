"""Barriers between the programs of one launch that share a slice of channels; they need no reset between launches.

Each slice has one word, an int32 in global memory. The lower 31 bits of a word count the programs that have arrived at
the barrier. When all programs have arrived, the highest bit flips and the other bits are zero again. Words start at
zero, and consecutive launches on a stream may use the same words.
"""

from __future__ import annotations

import triton
import triton.language as tl

TURN = tl.constexpr(-(2**31))  # the highest bit of a word


@triton.jit
def take_ticket(counter, programs):
    """Return this program's number, counted in the order in which programs start.

    The programs of slices that are processed at the same time have consecutive numbers (see :func:`place`). So a
    program waits only for programs that are already running or that start when earlier slices are done. Thus launches
    may have any size, and the hardware may start programs in any order.
    """
    ticket = tl.atomic_add(counter, 1, sem="relaxed")
    if ticket == programs - 1:
        tl.store(counter, 0)
    return ticket


@triton.jit
def arrive(word, step):
    """Count this program's arrival, make its writes visible to other programs, and return the previous count."""
    tl.debug_barrier()
    before = tl.atomic_add(word, step, sem="acq_rel") & 0x7FFFFFFF
    tl.debug_barrier()
    return before


@triton.jit
def release(word, parts):
    """Flip the highest bit, which releases the waiting programs; call this after exactly ``parts`` arrivals."""
    tl.debug_barrier()
    tl.atomic_add(word, TURN - parts, sem="release")


@triton.jit
def arrive_to_turn(word, part, parts):
    """Count this program's arrival; the highest bit flips when all ``parts`` programs have arrived."""
    tl.debug_barrier()
    step = tl.where(part == 0, TURN - (parts - 1), 1)
    tl.atomic_add(word, step, sem="release")


@triton.jit
def side_of(word):
    """Return the word's highest bit; call this before the program arrives."""
    return tl.load(word, volatile=True) & TURN


@triton.jit
def wait(word, side):
    """Wait until the highest bit differs from ``side``; the other programs' writes are then visible."""
    # Use assembly, because Triton has no load-acquire. Only one thread polls, because polling delays the arrivals of
    # other programs.
    tl.inline_asm_elementwise(
        """
        {
            .reg .pred same, other;
            .reg .b32 now;
            mov.u32 now, %tid.x;
            setp.ne.u32 other, now, 0;
            @other bra done;
        again:
            ld.acquire.gpu.global.b32 now, [$1];
            and.b32 now, now, 0x80000000;
            setp.eq.b32 same, now, $2;
            @!same bra done;
            nanosleep.u32 32;
            bra again;
        done:
            mov.b32 $0, 0;
        }
        """,
        "=r,l,r",
        [word, side],
        tl.int32,
        is_pure=False,
        pack=1,
    )
    tl.debug_barrier()


@triton.jit
def place(program, slices, parts, beside):
    """Return the slice and the part that a program processes.

    ``beside`` slices are processed at the same time. Neighboring programs process the same part of neighboring slices.
    In a channels-last tensor, they therefore read long contiguous pieces of memory together.
    """
    group = program // (beside * parts)
    rest = program - group * (beside * parts)
    width = tl.minimum(beside, slices - group * beside)
    part = rest // width
    return group * beside + rest - part * width, part
