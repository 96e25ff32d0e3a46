"""Broken copies of a recorded kernel: an operation dropped, moved or changed, or a declaration that is wrong.

A check that finds nothing proves something only if it finds what is there. A :data:`Change` takes the kernels that a
schedule recorded and returns copies with one thing wrong. It names an operation by role and label (:class:`At`), as
reports and traces do, so it does not depend on how the schedule's source is written. A name that fits nothing or fits
more than one operation, and a value that is there already, raise ConfigError with the choices.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import TYPE_CHECKING, Literal, TypeVar

import numpy as np

from fasim.errors import ConfigError, did_you_mean
from fasim.program.effects import Effect, IntArray
from fasim.program.language import Barrier, Buffer, Kernel, Role, Tensor, TmemRegion
from fasim.program.ops import Arrive, Copy, Loop, Mma, Only, Op, TileLoop, Wait

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

T = TypeVar("T", bound="DataclassInstance")
D = TypeVar("D", Barrier, Buffer, Kernel, TmemRegion, Tensor)
S = TypeVar("S", Barrier, Buffer, TmemRegion)

#: From the kernels of a schedule to copies of them, of which something is wrong.
Change = Callable[[Sequence[Kernel]], list[Kernel]]

#: Changes the list of operations that an operation stands in, given its index there.
_Edit = Callable[[list[Op], int], None]


@dataclass(frozen=True)
class At:
    """An operation of a recorded program, named by its role and its label.

    A label may occur more than once. ``kernel`` picks the kernel, ``inside`` the loop around the operation (by its
    label, at any depth), ``behind`` the operation that stands directly before it, ``barrier`` the one that it waits
    for or arrives at, and ``which`` one of those that are left: their number in program order (0 is the first, -1 the
    last), or ``all`` of them.
    """

    role: str
    label: str
    kernel: str = ""
    inside: str = ""
    behind: str = ""
    barrier: str = ""
    which: int | Literal["only", "all"] = "only"


# --- operations -------------------------------------------------------------------------------------------------------
def drop(at: At) -> Change:
    """The operation is left out; of a loop, its body as well."""

    def edit(body: list[Op], index: int) -> None:
        del body[index]

    return lambda kernels: _edit(kernels, at, edit)


def move(at: At, *, before: str = "", after: str = "") -> Change:
    """The operation comes earlier, ``before`` the last operation of that label that precedes it in the same body.

    Or it comes later, ``after`` the next one of that label.
    """
    if bool(before) == bool(after):
        raise ConfigError(f"{_name(at)}: move it either before or after another operation")
    label, step = before or after, -1 if before else 1

    def edit(body: list[Op], index: int) -> None:
        others = range(index + step, -1 if before else len(body), step)
        target = next((other for other in others if body[other].label == label), None)
        if target is None:
            where, choices = "before" if before else "after", [body[other].label for other in others]
            raise ConfigError(f"{_name(at)}: no '{label}' {where} it in its body{did_you_mean(label, choices)}")
        body.insert(target, body.pop(index))

    # In this order, no move changes the index of an operation whose turn is still to come.
    return lambda kernels: _edit(kernels, at, edit, last_first=not before)


def retarget(at: At, **changed: object) -> Change:
    """Fields of the operation have other values: ``pending=2``, ``scope="cta"``, ``trips="full"``.

    A dict changes fields within one, such as those of a barrier use: ``use={"barrier": "turn@own"}``.
    """

    def edit(body: list[Op], index: int) -> None:
        body[index] = _changed(body[index], changed, _name(at))

    return lambda kernels: _edit(kernels, at, edit)


# --- effects ----------------------------------------------------------------------------------------------------------
def retarget_effect(at: At, kind: type[Effect], **changed: object) -> Change:
    """As :func:`retarget`, for the operation's effects of one kind; ``b={"back": 0}`` changes a field of a place."""

    def edit(effect: Effect) -> tuple[Effect, ...]:
        assert is_dataclass(effect)
        return (_changed(effect, changed, f"{_name(at)}: {kind.__name__}"),)

    return _edit_effects(at, kind, edit)


def replace_effect(at: At, kind: type[Effect], *instead: Effect) -> Change:
    """The operation has other effects ``instead`` of those of one kind; without any, these are left out."""
    return _edit_effects(at, kind, lambda effect: instead)


def add_effect(at: At, effect: Effect) -> Change:
    """The operation has one more effect, before its own."""

    def edit(body: list[Op], index: int) -> None:
        body[index] = replace(body[index], effects=(effect, *body[index].effects))

    return lambda kernels: _edit(kernels, at, edit)


def _edit_effects(at: At, kind: type[Effect], edit_one: Callable[[Effect], tuple[Effect, ...]]) -> Change:
    def edit(body: list[Op], index: int) -> None:
        old = body[index].effects
        if not any(isinstance(effect, kind) for effect in old):
            has = ", ".join(type(effect).__name__ for effect in old) or "none"
            raise ConfigError(f"{_name(at)}: no effect {kind.__name__} (has {has})")
        new = [part for effect in old for part in (edit_one(effect) if isinstance(effect, kind) else (effect,))]
        body[index] = replace(body[index], effects=tuple(new))

    return lambda kernels: _edit(kernels, at, edit)


# --- declarations -----------------------------------------------------------------------------------------------------
def redeclare(kind: type[Barrier | Buffer | Kernel | TmemRegion | Tensor], name: str, **changed: object) -> Change:
    """A kernel, or what kernels declare under ``name``, is declared otherwise.

    For example ``redeclare(Barrier, "O.free", arrivals=1)``.
    """
    what = f"{kind.__name__.lower()} '{name}'"

    def change(kernels: Sequence[Kernel]) -> list[Kernel]:
        declared = [item for k in kernels for item in (k, *k.barriers, *k.buffers, *k.regions, *k.tensors)]
        names = [item.name for item in declared if isinstance(item, kind)]
        if name not in names:
            raise ConfigError(f"no {what}{did_you_mean(name, names)}")

        def redo(items: Sequence[D]) -> list[D]:
            wanted = [isinstance(item, kind) and item.name == name for item in items]
            return [_changed(item, changed, what) if yes else item for item, yes in zip(items, wanted, strict=True)]

        return [
            replace(
                k,
                barriers=redo(k.barriers),
                buffers=redo(k.buffers),
                regions=redo(k.regions),
                tensors=redo(k.tensors),
            )
            for k in redo(kernels)
        ]

    return change


def restage(count: int, *names: str) -> Change:
    """The barriers, buffers and regions of these names have ``count`` stages, where they are declared and used."""

    def redo(items: Sequence[S]) -> list[S]:
        return [replace(item, stages=count) if item.name in names else item for item in items]

    def redo_use(op: Op) -> Op:
        if isinstance(op, Loop | Only | TileLoop):
            return replace(op, body=tuple(redo_use(inner) for inner in op.body))
        if isinstance(op, Arrive | Wait) and op.use.barrier in names:
            return replace(op, use=replace(op.use, stages=count))
        if isinstance(op, Copy | Mma) and op.bar is not None and op.bar.barrier in names:
            return replace(op, bar=replace(op.bar, stages=count))
        return op

    def change(kernels: Sequence[Kernel]) -> list[Kernel]:
        declared: list[Barrier | Buffer | TmemRegion] = []
        for kernel in kernels:
            declared += [*kernel.barriers, *kernel.buffers, *kernel.regions]
        known = {item.name: item.stages for item in declared}
        for name in names:
            if known.get(name, count) == count:
                state = f"has {count} stages already" if name in known else f"is not there{did_you_mean(name, known)}"
                raise ConfigError(f"barrier, buffer or region '{name}' {state}")
        return [
            replace(
                k,
                barriers=redo(k.barriers),
                buffers=redo(k.buffers),
                regions=redo(k.regions),
                roles=[replace(role, body=[redo_use(op) for op in role.body]) for role in k.roles],
            )
            for k in kernels
        ]

    return change


def retile(column: str, values: Callable[[Mapping[str, IntArray]], IntArray]) -> Change:
    """A column of the tile table, perhaps a new one, holds ``values`` of the table as it was."""

    def change(kernels: Sequence[Kernel]) -> list[Kernel]:
        tables = [{**kernel.tiles, column: values(kernel.tiles)} for kernel in kernels]
        pairs = list(zip(kernels, tables, strict=True))
        if all(column in kernel.tiles and np.array_equal(kernel.tiles[column], new[column]) for kernel, new in pairs):
            raise ConfigError(f"tile-table column '{column}' holds these values already")
        return [replace(kernel, tiles=new) for kernel, new in pairs]

    return change


def together(*changes: Change) -> Change:
    """All of the changes, one after the other."""

    def change(kernels: Sequence[Kernel]) -> list[Kernel]:
        for one in changes:
            kernels = one(kernels)
        return list(kernels)

    return change


# --- finding and editing ----------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class _Spot:
    """Where an operation stands: its index in every body from the role's inwards, and what surrounds it."""

    path: tuple[int, ...]
    inside: tuple[str, ...]
    behind: str
    op: Op

    def fits(self, at: At) -> bool:
        """Whether ``at``, of which role and kernel are right, names this operation."""
        return (
            self.op.label == at.label
            and (not at.inside or at.inside in self.inside)
            and at.behind in ("", self.behind)
            and at.barrier in ("", _barrier(self.op))
        )

    def __str__(self) -> str:
        at = f", barrier {name}" if (name := _barrier(self.op)) else ""
        return f"inside {' > '.join(self.inside) or 'no loop'}, behind {self.behind or 'nothing'}{at}"


def _spots(body: Sequence[Op], path: tuple[int, ...] = (), inside: tuple[str, ...] = ()) -> Iterator[_Spot]:
    behind = ""
    for index, op in enumerate(body):
        yield _Spot((*path, index), inside, behind, op)
        if isinstance(op, Loop | Only | TileLoop):
            yield from _spots(op.body, (*path, index), (*inside, op.label))
        behind = op.label


def _select(kernels: Sequence[Kernel], at: At) -> list[tuple[int, int, tuple[int, ...]]]:
    """Kernel, role and path of the operations that ``at`` names, in program order."""
    of_kernels = [(k, kernel) for k, kernel in enumerate(kernels) if at.kernel in ("", kernel.name)]
    if not of_kernels:
        raise ConfigError(f"{_name(at)}: no kernel '{at.kernel}'{did_you_mean(at.kernel, [k.name for k in kernels])}")
    roles = [(k, r, role) for k, kernel in of_kernels for r, role in enumerate(kernel.roles) if role.name == at.role]
    if not roles:
        names = [role.name for _, kernel in of_kernels for role in kernel.roles]
        raise ConfigError(f"{_name(at)}: no role '{at.role}'{did_you_mean(at.role, names)}")
    spots = [(k, r, spot) for k, r, role in roles for spot in _spots(role.body)]
    named = [(k, spot) for k, _, spot in spots if spot.op.label == at.label]
    if not named:
        raise ConfigError(f"{_name(at)}: no such operation{did_you_mean(at.label, {s.op.label for _, _, s in spots})}")
    fits = [(k, r, spot.path) for k, r, spot in spots if spot.fits(at)]
    choices = "; ".join(f"{kernels[k].name}: {spot}" for k, spot in named)
    if not fits or (at.which == "only" and len(fits) > 1):
        how = "say kernel, inside, behind, barrier or which"
        raise ConfigError(f"{_name(at)}: {len(fits)} of {len(named)} fit, {how}: {choices}")
    if isinstance(at.which, str):
        return fits
    if not -len(fits) <= at.which < len(fits):
        raise ConfigError(f"{_name(at)}: which={at.which}, but {len(fits)} fit: {choices}")
    return [fits[at.which]]


def _barrier(op: Op) -> str:
    use = op.use if isinstance(op, Arrive | Wait) else op.bar if isinstance(op, Copy | Mma) else None
    return use.barrier if use else ""


def _edit(kernels: Sequence[Kernel], at: At, edit: _Edit, last_first: bool = True) -> list[Kernel]:
    new, selected = list(kernels), _select(kernels, at)
    for k, r, path in reversed(selected) if last_first else selected:
        roles: list[Role] = list(new[k].roles)
        roles[r] = replace(roles[r], body=_edit_body(roles[r].body, path, edit))
        new[k] = replace(new[k], roles=roles)
    return new


def _edit_body(body: Sequence[Op], path: tuple[int, ...], edit: _Edit) -> list[Op]:
    new, (index, *inner) = list(body), path
    if not inner:
        edit(new, index)
        return new
    around = new[index]
    assert isinstance(around, Loop | Only | TileLoop)
    new[index] = replace(around, body=tuple(_edit_body(around.body, tuple(inner), edit)))
    return new


def _changed(item: T, changed: Mapping[str, object], what: str) -> T:
    """A copy of ``item`` with other fields. Raises ConfigError for an unknown field and where nothing changes."""
    known, new = [field.name for field in fields(item)], dict(changed)
    for name, value in changed.items():
        if name not in known:
            raise ConfigError(f"{what}: no field '{name}'{did_you_mean(name, known)}")
        old = getattr(item, name)
        if isinstance(value, dict) and is_dataclass(old) and not isinstance(old, type):
            new[name] = _changed(old, value, f"{what}: {name}")
        if new[name] == old:
            raise ConfigError(f"{what}: {name} is {old!r} already")
    return replace(item, **new)


def _name(at: At) -> str:
    return f"role '{at.role}', operation '{at.label}'"
