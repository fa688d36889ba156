"""How the programs that share a slice of channels meet, inside one launch and with nothing to reset between launches.

One word per slice counts arrivals in its low bits and turns its highest bit when all have come; the low bits are zero
again by then. Words start at zero and may be shared by launches that follow each other on a stream.
"""

from __future__ import annotations

import triton
import triton.language as tl

TURN = tl.constexpr(-(2**31))


@triton.jit
def take_ticket(counter, programs):
    """Number the programs in the order in which they start.

    Parts of a slice get neighbouring numbers, so whoever waits waits for programs that run already, or start as soon
    as earlier slices are done: no launch is too large, and no order of the hardware is relied on.
    """
    ticket = tl.atomic_add(counter, 1, sem="relaxed")
    if ticket == programs - 1:
        tl.store(counter, 0)
    return ticket


@triton.jit
def arrive(word, step):
    """Count this program's arrival, with everything it has written, and return the count before it."""
    tl.debug_barrier()
    before = tl.atomic_add(word, step, sem="acq_rel") & 0x7FFFFFFF
    tl.debug_barrier()
    return before


@triton.jit
def release(word, parts):
    """Let the waiting programs go on, once all ``parts`` have arrived."""
    tl.debug_barrier()
    tl.atomic_add(word, TURN - parts, sem="release")


@triton.jit
def arrive_to_turn(word, part, parts):
    """Count this program's arrival so that the last one turns the word."""
    tl.debug_barrier()
    step = tl.where(part == 0, TURN - (parts - 1), 1)
    tl.atomic_add(word, step, sem="release")


@triton.jit
def side_of(word):
    """Return which way the word lies before this program arrives."""
    return tl.load(word, volatile=True) & TURN


@triton.jit
def wait(word, side):
    """Wait until the word has turned; what the others wrote before is visible then."""
    # Triton has no acquiring load, and one thread must poll alone: all of them together keep arrivals from the word.
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
    """Return the slice and the part of a program.

    ``beside`` slices are worked on at a time, and neighbouring programs have the same rows of them: together they
    read long runs of memory.
    """
    group = program // (beside * parts)
    rest = program - group * (beside * parts)
    width = tl.minimum(beside, slices - group * beside)
    part = rest // width
    return group * beside + rest - part * width, part
