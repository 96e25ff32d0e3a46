"""The operands of an effect at the moment it takes place: the bridge from arithmetic to storage."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from fasim.checker.arrays import Arrays
from fasim.checker.state import Execution, Located
from fasim.checker.storage import Piece, Value, concatenate
from fasim.errors import ConfigError, ModelError, did_you_mean
from fasim.numerics.exp2 import Exp2
from fasim.numerics.formats import OPERAND_FORMATS
from fasim.problem import Problem
from fasim.program.effects import Effect
from fasim.program.language import Kernel
from fasim.program.ops import Copy
from fasim.results.findings import Kind


@dataclass(frozen=True)
class Numerics:
    """Numeric choices in the place of the schedule's own; None leaves them as they are.

    ``exp2``: method of the exponentials; ``threshold`` of the conditional rescale in powers of two; ``p_format``:
    what probabilities are rounded to before they are divided by their sum. Raises ConfigError for an unknown format.
    """

    exp2: Exp2 | None = None
    threshold: float | None = None
    p_format: str | None = None

    def __post_init__(self) -> None:
        if self.p_format is not None and self.p_format not in OPERAND_FORMATS:
            raise ConfigError(
                f"p_format: unknown format '{self.p_format}'{did_you_mean(self.p_format, OPERAND_FORMATS)}"
            )


#: Everything as the schedule has it.
UNCHANGED = Numerics()


class Nothing(Exception):
    """A place does not hold what is read from it."""

    def __init__(self, place: str, why: str) -> None:
        super().__init__(why)
        self.place = place


class Operands:
    """The operands of one effect, by the names of its fields.

    ``pair``: the operands of the same effect in each CTA that executes it, several for a 2-CTA MMA.
    """

    def __init__(
        self,
        kernel: Kernel,
        arrays: Arrays,
        step: Execution,
        places: dict[str, Located],
        report: Callable[[Kind, Execution, str, str], None],
        numerics: Numerics,
    ) -> None:
        self.numerics = numerics
        self.kernel, self.arrays, self.step, self.places = kernel, arrays, step, places
        self._report = report
        self.pair: Sequence[Operands] = (self,)

    @property
    def problem(self) -> Problem:
        """What is computed."""
        return self.kernel.problem

    def read(self, field: str) -> Value:
        """What the operand holds. Raises Nothing."""
        at = self.places[field]
        value = at.storage.read(at.name, at.stage, at.share)
        if value is None:
            by = at.storage.overwritten.get((at.name, at.stage))
            raise Nothing(at.text, f"what {by} overwrote" if by else "what nobody has written")
        return value.part(1, at.columns)

    def write(self, field: str, value: Value) -> None:
        """Put ``value`` there."""
        at, step = self.places[field], self.step
        if not at.storage.write(at.key, at.lo, at.hi, Piece(value, self._tile, isinstance(step.op, Copy), step.name)):
            self.report("data", field, "overwrites what was loaded before and nobody has read")

    def begun(self, field: str) -> bool:
        """Whether the operand was written in this work tile."""
        at = self.places[field]
        return at.storage.written_in(at.key, self._tile)

    @property
    def _tile(self) -> int:
        return self.step.tile // self.kernel.cluster

    def turn(self, effect: Effect) -> int:
        """How many effects of this kind the role has executed in this work tile."""
        return self.step.actor.turns.get(type(effect), 0)

    def clear(self, field: str) -> None:
        """Let the operand hold nothing."""
        at = self.places[field]
        at.storage.pieces.pop(at.key, None)

    def load(self, array: str | None) -> Value:
        """What the copy's memory line holds."""
        op = self.step.op
        assert isinstance(op, Copy)
        return self._global(op.tensor, array, self.step.line)

    def fetch(self, tensor: str, array: str | None, lines: int) -> Value:
        """Columns from the first ``lines`` lines that the work tile has of ``tensor``."""
        return concatenate([self._global(tensor, array, self._line(tensor, i)) for i in range(lines)], 1)

    def _line(self, tensor: str, number: int = 0) -> int:
        found = self.kernel.find_tensor(tensor)
        return int(self.kernel.tiles[found.start][self.step.tile]) + found.step * number

    def _global(self, tensor: str, array: str | None, line: int) -> Value:
        layout = self.kernel.find_tensor(tensor).layout
        if layout is None:
            raise ModelError(f"{self.kernel.name}: tensor '{tensor}' has no layout: what do its lines hold?")
        region = layout.region(line, self.step.tile)
        name = array or layout.array or tensor
        if not (region.rows >= 0).any():
            columns = len(range(*region.columns.indices(layout.columns)))
            return Value(np.zeros((len(region.rows), columns), np.float32), region.rows, region.keys)
        if name not in self.arrays.data:
            raise Nothing(f"{name} in global memory", "what nobody has written")
        return Value(self.arrays.read(name, region), region.rows, region.keys)

    def store(self, value: Value, tensor: str | None, array: str | None, number: int) -> None:
        """To the rows of the copy's line, or of the work tile's ``number``-th of ``tensor``; see ``effects.Store``."""
        step, kernel = self.step, self.kernel
        name = tensor or (step.op.tensor if isinstance(step.op, Copy) else "")
        layout = kernel.find_tensor(name).layout
        if layout is None:
            raise ModelError(f"{kernel.name}: operation '{step.op.label}' stores to '{name}', which has no layout")
        line = self._line(name, number) if tensor else step.line
        region = layout.region(line, step.tile)
        size, actor = len(region.rows), step.actor
        if len(value.data) != size:  # an instance's own rows
            rows = size // actor.role.count
            region = region._replace(rows=region.rows[actor.instance * rows : (actor.instance + 1) * rows])
        columns = value.data.shape[1] if array else layout.columns
        width, first = len(range(*region.columns.indices(columns))), 0
        if layout.share and value.data.shape[1] > width:
            first = round(layout.share(line)[0] * value.data.shape[1])
        value = replace(value, data=value.data[:, first : first + width])
        if not self.arrays.write(array or layout.array or name, layout, columns, region, value.data):
            self.report("output", "source", f"writes rows of {array or name} a second time")

    def report(self, kind: Kind, field: str, message: str) -> None:
        """Something is wrong with an operand."""
        step = self.step
        self._report(kind, step, self.places[field].text, message)
