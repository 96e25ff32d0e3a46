"""What all forward kernels of a family know of their problem: head dimensions, number formats, tiles, the build."""

from __future__ import annotations

from dataclasses import dataclass

from fasim.arch import Arch
from fasim.kernels.blocks import BlockInfo
from fasim.problem import Problem
from fasim.program.builds import Build
from fasim.program.tiles import operand_format


@dataclass(frozen=True)
class Attention:
    """A forward problem on a chip. ``cut``: its tiles and blocks; ``build``: what the compiler made of the kernel."""

    problem: Problem
    arch: Arch
    build: Build
    cut: BlockInfo

    @property
    def d(self) -> int:
        """Head dimension of Q and K."""
        return self.problem.head_dim

    @property
    def dv(self) -> int:
        """Head dimension of V and O."""
        return self.problem.head_dim_v

    @property
    def n(self) -> int:
        """Keys of a block."""
        return self.cut.tile_n

    @property
    def format(self) -> str:
        """Number format of Q, K, V and P."""
        return operand_format(self.problem.dtype)

    @property
    def output_format(self) -> str:
        """Number format of O."""
        return "bf16" if self.problem.bits < 16 else self.problem.dtype
