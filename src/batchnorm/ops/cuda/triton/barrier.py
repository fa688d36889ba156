"""Barriers for programs that process the same slice of channels in one launch.

Each slice has one word, an int32 in global memory. Programs arrive by adding to the word, and wait until the word's
highest bit flips. The bit flips in one of two ways. With :func:`arrive_to_turn`, the last arrival itself flips the bit.
With :func:`arrive`, the last program to arrive can do some work first, and then calls :func:`release`. Either way, the
lower 31 bits are zero after the flip. So if the words start at zero, consecutive launches on a stream can use the same
words without a reset.
"""

from __future__ import annotations

import triton
import triton.language as tl

TURN = tl.constexpr(-(2**31))  # the highest bit of a word


@triton.jit
def take_ticket(counter, programs):
    """Return this program's number, counted in the order in which programs start.

    Slices are processed in groups, and the programs of a group have consecutive numbers (see :func:`place`). A program
    waits only for programs of its own group. Each of them is already running, or starts as soon as programs of earlier
    groups have finished. If all programs of a group can run at the same time, there is no deadlock, even if the launch
    has many more programs and the hardware starts them in any order.
    """
    ticket = tl.atomic_add(counter, 1, sem="relaxed")
    if ticket == programs - 1:
        tl.store(counter, 0)
    return ticket


@triton.jit
def arrive(word, step):
    """Add ``step`` to the word, and return the word's previous lower 31 bits.

    Programs that arrive later can see the writes that this program made before it arrived.
    """
    tl.debug_barrier()
    before = tl.atomic_add(word, step, sem="acq_rel") & 0x7FFFFFFF
    tl.debug_barrier()
    return before


@triton.jit
def release(word, parts):
    """Flip the word's highest bit, which releases the waiting programs, and set the other bits to zero.

    Call this after exactly ``parts`` arrivals, each with step 1.
    """
    tl.debug_barrier()
    tl.atomic_add(word, TURN - parts, sem="release")


@triton.jit
def arrive_to_turn(word, part, parts):
    """Record this program's arrival; the word's highest bit flips when all ``parts`` programs have arrived."""
    tl.debug_barrier()
    # The steps of all programs add up to TURN. Whatever the order of the steps, the highest bit flips only at the last
    # one.
    step = tl.where(part == 0, TURN - (parts - 1), 1)
    tl.atomic_add(word, step, sem="release")


@triton.jit
def side_of(word):
    """Return the word's highest bit, which :func:`wait` needs; call this before the program arrives."""
    return tl.load(word, volatile=True) & TURN


@triton.jit
def wait(word, side):
    """Wait until the word's highest bit differs from ``side``.

    After that, this program can see what other programs wrote before they arrived or called :func:`release`.
    """
    # Use assembly, because Triton has no load with acquire semantics. Only one thread of the program polls, because
    # polling delays the arrivals of other programs.
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

    ``program`` is the program's number. Slices are processed in groups of ``beside`` neighboring slices; the last group
    may be smaller. The first programs of a group process part 0 of each of its slices, the next programs part 1, and so
    on. In a channels-last tensor, programs with consecutive numbers together read long contiguous pieces of memory.
    """
    group = program // (beside * parts)
    rest = program - group * (beside * parts)
    width = tl.minimum(beside, slices - group * beside)
    part = rest // width
    return group * beside + rest - part * width, part
