"""The order in which the compiler puts a softmax: a warp issues in order, so what stands together contends together.

The score of a block becomes P in stretches of the main loop. Within one, FFMA, FMNMX, FADD, FMUL and F2FP go out
between the exponentials and the busiest pipe sets the pace; from one to the next the busiest pipe changes. Counted in
the SASS of the loops over full blocks (FA3 as in fa3.py, FA4 as in _fa4_hopper.py); a stretch ends where the pipe that
takes longest beside an MMA changes for more than 60 cycles. Shares are of all instructions of a class in the softmax
of a block; what no stretch names comes last.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Stretch:
    """Shares of each class that stand together; ``fmnmx`` of the second row's maximum, ``fmul`` of the rescale of O."""

    label: str
    fmnmx: float = 0.0
    ffma: float = 0.0
    ex2: float = 0.0
    fadd: float = 0.0
    f2fp: float = 0.0
    fmul: float = 0.0


@dataclass(frozen=True)
class Order:
    """Stretches of a softmax between its first maximum and its end, before and after the wait for PV.

    ``rows``: of a thread's two rows, those whose maximum comes first; the other is in the stretches.
    """

    rows: int
    early: tuple[Stretch, ...]
    late: tuple[Stretch, ...]


_MAX, _SCALE, _EXP = "row max 2, exp", "scale S and O, exp", "exp, sum"

#: Head dim, 16-bit, overlapped; P in registers unless it says so.
OVERLAPPED = {
    64: Order(
        1,
        (),
        (
            Stretch(_MAX, fmnmx=0.9, ffma=0.45, ex2=0.15, fadd=0.03, f2fp=0.03, fmul=0.5),
            Stretch(_EXP, fmnmx=0.1, ffma=0.03, ex2=0.12),
            Stretch(_SCALE, ffma=0.52, ex2=0.24, fadd=0.42, f2fp=0.41, fmul=0.5),
        ),
    ),
    128: Order(
        1,
        (Stretch(_MAX, fmnmx=1.0, ffma=0.5, ex2=0.26, fadd=0.02),),
        (Stretch(_SCALE, ffma=0.5, ex2=0.29, fadd=0.39, f2fp=0.45, fmul=1.0),),
    ),
    192: Order(
        1,
        (
            Stretch(_MAX, fmnmx=0.4, ffma=0.48, ex2=0.02, fadd=0.02),
            Stretch(_MAX, fmnmx=0.6, ex2=0.28, fadd=0.02),
            Stretch(_SCALE, ffma=0.34, ex2=0.03),
        ),
        (Stretch(_SCALE, ffma=0.18, ex2=0.29, fadd=0.5, f2fp=0.54),),
    ),
    256: Order(
        1,
        (
            Stretch(_MAX, fmnmx=0.85, ffma=0.48, ex2=0.17, fadd=0.03),
            Stretch(_EXP, fmnmx=0.15, ex2=0.17),
            Stretch(_SCALE, ffma=0.38, ex2=0.1, fadd=0.03),
        ),
        (Stretch(_SCALE, ffma=0.14, ex2=0.31, fadd=0.6, f2fp=0.65),),
    ),
}

#: The same with P in shared memory.
P_IN_SMEM = {
    64: Order(2, (), (Stretch(_SCALE, ffma=1.0, ex2=0.23, fadd=0.19, f2fp=0.15, fmul=1.0),)),
    96: Order(
        1,
        (Stretch(_MAX, fmnmx=1.0, ffma=0.74, ex2=0.38, fadd=0.11, f2fp=0.03),),
        (Stretch(_SCALE, ffma=0.26, ex2=0.3, fadd=0.49, f2fp=0.53, fmul=1.0),),
    ),
}

#: FP8, overlapped.
FP8 = {
    64: Order(
        1,
        (),
        (
            Stretch(_MAX, fmnmx=0.95, ffma=0.5, ex2=0.26, f2fp=0.1, fmul=0.5),
            Stretch(_EXP, fmnmx=0.05, ex2=0.07, f2fp=0.05),
            Stretch(_SCALE, ffma=0.5, ex2=0.33, fadd=0.55, f2fp=0.35, fmul=0.5),
        ),
    ),
    96: Order(
        1,
        (),
        (
            Stretch(_MAX, fmnmx=0.97, ffma=0.49, ex2=0.23, fadd=0.02, fmul=0.5),
            Stretch(_EXP, fmnmx=0.03, ex2=0.09, f2fp=0.06),
            Stretch(_SCALE, ffma=0.51, ex2=0.36, fadd=0.59, f2fp=0.5, fmul=0.5),
        ),
    ),
    128: Order(
        1,
        (
            Stretch(_MAX, fmnmx=0.97, ffma=0.49, ex2=0.22, fadd=0.03),
            Stretch(_EXP, fmnmx=0.03, ex2=0.06, fadd=0.01),
            Stretch(_SCALE, ffma=0.33, ex2=0.03, fadd=0.02),
        ),
        (Stretch(_SCALE, ffma=0.18, ex2=0.23, fadd=0.34, f2fp=0.36, fmul=1.0),),
    ),
    192: Order(
        1,
        (Stretch(_MAX, fmnmx=1.0, ffma=0.82, ex2=0.37, fadd=0.05),),
        (Stretch(_SCALE, ffma=0.18, ex2=0.38, fadd=0.65, f2fp=0.7, fmul=1.0),),
    ),
    256: Order(
        1,
        (Stretch(_MAX, fmnmx=0.55, ffma=0.29, ex2=0.12, fadd=0.02),),
        (Stretch(_SCALE, fmnmx=0.45, ffma=0.71, ex2=0.53, fadd=0.52, f2fp=0.5, fmul=1.0),),
    ),
}

#: 16-bit, QK, softmax and PV one after the other; counted at 64, with P in shared memory, and 128.
SERIAL = {
    64: Order(
        1,
        (),
        (
            Stretch(_MAX, fmnmx=1.0, ffma=0.49, ex2=0.29, fadd=0.02),
            Stretch(_SCALE, ffma=0.51, ex2=0.2, fadd=0.31, f2fp=0.23),
            Stretch(_EXP, ex2=0.51, fadd=0.54, f2fp=0.04),
        ),
    ),
    128: Order(
        1,
        (),
        (
            Stretch(_MAX, fmnmx=0.96, ffma=0.5, ex2=0.22, fadd=0.01, fmul=0.5),
            Stretch(_EXP, fmnmx=0.04, ex2=0.08),
            Stretch(_SCALE, ffma=0.5, ex2=0.19, fadd=0.43, f2fp=0.07, fmul=0.5),
        ),
    ),
}

#: FlashAttention-4 on Hopper, by (head dim, head dim of V): loops over full blocks, and over the masked blocks that are
#: all blocks of a causal tile. P in shared memory at 96.
FA4 = {
    (64, 64): Order(
        2,
        (Stretch(_SCALE, ffma=1.0, ex2=0.14, fadd=0.11),),
        (Stretch(_SCALE, ex2=0.12, fadd=0.11, f2fp=0.19, fmul=1.0),),
    ),
    (96, 96): Order(
        2,
        (Stretch(_SCALE, ffma=0.62, ex2=0.08, fadd=0.06),),
        (Stretch(_SCALE, ffma=0.38, ex2=0.24, fadd=0.22, f2fp=0.28, fmul=1.0),),
    ),
    (128, 128): Order(
        2,
        (Stretch(_SCALE, ffma=1.0, ex2=0.13, fadd=0.09),),
        (Stretch(_SCALE, ex2=0.23, fadd=0.22, f2fp=0.28, fmul=1.0),),
    ),
    (192, 128): Order(
        2,
        (Stretch(_SCALE, ffma=1.0, ex2=0.13, fadd=0.09),),
        (Stretch(_SCALE, ex2=0.22, fadd=0.2, f2fp=0.28, fmul=1.0),),
    ),
    (192, 192): Order(
        2,
        (Stretch(_SCALE, ffma=0.64, ex2=0.07, fadd=0.04),),
        (Stretch(_SCALE, ffma=0.36, ex2=0.09, fadd=0.07, f2fp=0.07),),
    ),
    (256, 256): Order(2, (Stretch(_SCALE, ffma=1.0, ex2=0.15, fadd=0.07), Stretch(_EXP, ex2=0.15, fadd=0.07)), ()),
}
FA4_CAUSAL = {
    (64, 64): Order(
        1,
        (
            Stretch(_MAX, fmnmx=0.9, ffma=0.5, ex2=0.22),
            Stretch(_EXP, fmnmx=0.1, ex2=0.14),
            Stretch(_SCALE, ffma=0.5, ex2=0.22, fadd=0.5),
            Stretch(_EXP, ex2=0.27, fadd=0.28),
        ),
        (),
    ),
    (96, 96): Order(
        1,
        (
            Stretch(_MAX, fmnmx=0.62, ffma=0.5, ex2=0.23),
            Stretch(_EXP, fmnmx=0.38, ex2=0.19),
            Stretch(_SCALE, ffma=0.5, ex2=0.08, f2fp=0.06),
        ),
        (Stretch(_SCALE, ex2=0.27, fadd=0.66, f2fp=0.53, fmul=1.0),),
    ),
    (128, 128): Order(
        1,
        (
            Stretch(_MAX, fmnmx=0.47, ffma=0.48, ex2=0.12),
            Stretch(_EXP, fmnmx=0.53, ex2=0.23),
            Stretch(_SCALE, ffma=0.46, ex2=0.08, fadd=0.11),
        ),
        (Stretch(_SCALE, ffma=0.06, ex2=0.3, fadd=0.53, f2fp=0.66, fmul=1.0),),
    ),
    (192, 128): Order(
        1,
        (
            Stretch(_MAX, fmnmx=0.62, ffma=0.5, ex2=0.2),
            Stretch(_EXP, fmnmx=0.38, ex2=0.2),
            Stretch(_SCALE, ffma=0.5, ex2=0.09, fadd=0.17),
        ),
        (Stretch(_SCALE, ex2=0.28, fadd=0.52, f2fp=0.72, fmul=1.0),),
    ),
    (192, 192): Order(
        1,
        (
            Stretch(_MAX, fmnmx=0.57, ffma=0.5, ex2=0.2),
            Stretch(_EXP, fmnmx=0.43, ex2=0.21),
            Stretch(_SCALE, ffma=0.5, ex2=0.16, fadd=0.29),
        ),
        (Stretch(_SCALE, ex2=0.13, fadd=0.3, f2fp=0.61),),
    ),
    (256, 256): Order(
        1,
        (
            Stretch(_MAX, fmnmx=0.8, ffma=0.48, ex2=0.18),
            Stretch(_EXP, fmnmx=0.2, ex2=0.24),
            Stretch(_SCALE, ffma=0.52, ex2=0.2, fadd=0.42),
        ),
        (Stretch(_SCALE, ex2=0.14, fadd=0.17, f2fp=0.65),),
    ),
}
