"""The one table of instruction classes: where an instruction executes, how fast, and what it does to a running MMA.

Rates and interference are fields of an architecture (:mod:`fasim.arch.sm`); this table says which field holds for which
class, so that a class is added in one place.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

InstructionClass = Literal[
    "ffma", "fmul", "fadd", "ffma2", "imad", "fmnmx", "f2fp", "f2fp8", "alu", "fsel", "ex2", "mufu",
    "shfl", "lds", "ldsm", "sts", "ldg", "stg", "misc",
]  # fmt: skip

#: Pipes of a sub-core. "issue" is the issue port alone: the uniform datapath, moves, branches.
InstructionPipe = Literal["fma", "alu", "mufu", "lsu", "issue"]


@dataclass(frozen=True)
class Instruction:
    """One class of warp instructions.

    ``lanes``: field of ``Sm`` with the lanes per SM and cycle; None for the issue port. The others name fields of
    ``Interference``: ``port``, what it takes of the operand port that vector instructions share with a running wgmma;
    ``mma_delay``, by how much it delays that wgmma; ``ex2_wait``, how long it keeps EX2 of other warps waiting.
    """

    pipe: InstructionPipe
    lanes: str | None
    port: str | None = None
    mma_delay: str | None = None
    ex2_wait: str | None = None


def _fma(name: str, lanes: str = "ops_per_cycle", ex2_wait: str = "ex2_wait_cycles") -> Instruction:
    return Instruction("fma", f"fma.{lanes}", f"{name}_port_cycles", f"{name}_delay_cycles", ex2_wait)


def _alu(lanes: str = "ops_per_cycle", port: str = "alu_port_cycles") -> Instruction:
    return Instruction("alu", f"alu.{lanes}", port, "alu_delay_cycles", "ex2_wait_cycles")


_LSU = Instruction("lsu", "lsu.shuffle_ops_per_cycle")

INSTRUCTIONS: dict[InstructionClass, Instruction] = {
    "ffma": _fma("ffma", ex2_wait="ex2_wait_ffma_cycles"),
    "fmul": _fma("fmul"),
    "fadd": _fma("fadd"),
    "ffma2": Instruction("fma", "fma.packed_ops_per_cycle", "ffma_port_cycles"),  # packed f32x2, Blackwell
    "imad": _fma("ffma", "imad_ops_per_cycle", "ex2_wait_ffma_cycles"),
    "fmnmx": _alu(),
    "f2fp": _alu("convert_ops_per_cycle"),  # convert and pack two fp32 to 16 or 4 bit
    "f2fp8": _alu("convert_fp8_ops_per_cycle"),  # convert and pack two fp32 to 8 bit
    "alu": _alu(),  # LOP3, ISETP, FSEL, IADD3, PRMT ...
    "fsel": _alu(port="fsel_port_cycles"),  # FSEL and others with one register operand: as alu, but less of the port
    "ex2": Instruction("mufu", "mufu.ops_per_cycle", "mufu_port_cycles"),
    "mufu": Instruction("mufu", "mufu.other_ops_per_cycle", "mufu_port_cycles"),  # rcp, lg2, rsq
    "shfl": _LSU,
    "lds": _LSU,  # ld.shared; its bytes are given apart
    "ldsm": _LSU,  # ldmatrix of four registers; its bytes are given apart
    "sts": _LSU,  # st.shared, stmatrix
    "ldg": _LSU,  # global load, cp.async
    "stg": _LSU,
    "misc": Instruction("issue", None),
}
