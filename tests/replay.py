"""Replay: digests of what schedules record and of the cycles they take, to hold two states of the code together.

A refactoring must leave both as they are; a change of the model is seen here first::

    python -m tests.replay record before.jsonl                  # several hundred cases for every schedule and chip
    python -m tests.replay compare before.jsonl                 # the cases of that file on the code as it is now
    python -m tests.replay record tests/replay.jsonl --cases 4  # the part that CI compares, made anew

A case is a schedule, a chip, a problem and knobs, drawn at random with a fixed seed and kept in the file, so that
``compare`` runs the same ones even where the choice of cases has changed since. Per case the file has a digest each of
the program (instructions, demands, barriers), of its grid (tile table), of the machine and of its names, and the
cycles of every launch; or ``refused`` where the schedule does not exist for the case. ``compare`` prints the first
cases that differ and what differs first in them, and exits with 1.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import multiprocessing
import os
import random
import sys
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from fasim.arch import list_archs, load_arch
from fasim.engine import image as im
from fasim.errors import FasimError
from fasim.lowering.lower import lower_all
from fasim.problem import Problem
from fasim.program.library import Knob, list_schedules, load_schedule
from fasim.studies.simulate import execute

CLOCK_MHZ = 1500.0

#: Values that are tried for whole-number and other knobs, by name; every other knob says its choices itself.
VALUES: dict[str, tuple[object, ...]] = {
    "tile_m": (64, 128, 192),
    "tile_n": (32, 64, 80, 96, 128, 176, 224),
    "stages": (1, 2, 3, 4),
    "cluster": (1, 2),
    "splits": (0, 2, 3),
    "num_splits": (1, 2, 3),
    "warps": (4, 8),
    "emulation_frequency": (4, 10, 16),
    "emulation_residue": (2, 4),
    "emulation_start": (0, 1, 2),
    "rescale_threshold": (0.0, 4.0, 8.0),
    "rescale_rate": (0.0, 0.1, 1.0),
    "query_tiles": (1, 2),
    "early_p": (0.5, 0.75, 1.0),
    "softmax_instructions": (20.0, 60.0),
    "launch_us": (0.0, 5.0),
}
DIMS = ((64, 64), (128, 128), (128, 128), (96, 96), (192, 128), (192, 192), (256, 256), (32, 32), (80, 80))
HEADS = ((2, 2), (2, 2), (4, 2), (8, 1), (6, 2))
LENGTHS = ((512, 512), (1024, 1024), (2048, 2048), (333, 777), (777, 333), (1, 1500), (70, 640), (300, 300))

#: What is compared, in the order in which a difference is looked for.
PARTS = ("refused", "machine", "grid", "program", "names", "cycles")


def cases(count: int) -> Iterator[dict[str, Any]]:
    """``count`` cases for every schedule and every chip that it runs on."""
    for name in list_schedules():
        schedule = load_schedule(name)
        for arch in list_archs():
            if load_arch(arch).architecture not in schedule.architectures:
                continue
            for number in range(count):
                rng = random.Random(f"{name} {arch} {number}")
                yield {"schedule": name, "arch": arch, **_draw(rng, schedule.dtypes, schedule.knobs.values())}


def _draw(rng: random.Random, dtypes: Iterable[str], knobs: Iterable[Knob]) -> dict[str, Any]:
    """A problem, and knobs that mostly stay as they are."""
    (d, dv), (heads_q, heads_kv), (seqlen_q, seqlen_k) = (rng.choice(axis) for axis in (DIMS, HEADS, LENGTHS))
    problem = {
        "batch": rng.choice((1, 2)),
        "seqlen_q": seqlen_q,
        "seqlen_k": seqlen_k,
        "heads_q": heads_q,
        "heads_kv": heads_kv,
        "head_dim": d,
        "head_dim_v": dv,
        "causal": rng.random() < 0.5,
        "dtype": rng.choice(tuple(dtypes)),
    }
    few = rng.choice((0.0, 0.1, 0.3))
    chosen = {}
    for knob in knobs:
        values = ("on", "off") if knob.type is bool else knob.choices or VALUES[knob.name]
        if rng.random() < few:
            chosen[knob.name] = rng.choice(values)
    return {"problem": problem, "knobs": chosen}


def result(case: dict[str, Any]) -> dict[str, Any]:
    """What the code makes of a case."""
    try:
        arch = load_arch(case["arch"])
        kernels = load_schedule(case["schedule"]).build(Problem(**case["problem"]), arch, case["knobs"])
        images = lower_all(kernels, CLOCK_MHZ)
    except FasimError as error:
        return {"refused": type(error).__name__}
    return {
        "machine": _digest(*(image.machine for image in images), *(image.slowest_line for image in images)),
        "grid": _digest(*(part for i in images for part in (i.tiles, i.line_base, i.line_end))),
        "program": _digest(*(part for image in images for part in _program(image))),
        "names": _digest(*(part for i in images for part in (i.names, i.agents, i.agent_role, i.barriers, i.columns))),
        "cycles": _cycles(images),
    }


def _cycles(images: list[im.Image]) -> list[float] | str:
    """Cycles of every launch, or what stopped it: a program that is recorded may deadlock."""
    try:
        return [raw.ticks / im.TICKS for raw in execute(images, "compiled")]
    except FasimError as error:
        return type(error).__name__


def _program(image: im.Image) -> Iterator[object]:
    yield image.code
    yield from (image.demand, image.mma_delay, image.mma_stop, image.stall, image.activity, image.entry, image.need)


def _digest(*parts: object) -> str:
    digest = hashlib.blake2b(digest_size=8)
    for part in parts:
        if isinstance(part, np.ndarray):
            digest.update(repr(part.shape).encode() + np.ascontiguousarray(part).tobytes())
        else:
            digest.update(repr(tuple(part) if isinstance(part, tuple) else part).encode())
    return digest.hexdigest()


def results(todo: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """The results of all cases in their order, over the machine's cores."""
    workers = os.cpu_count() or 1
    context = multiprocessing.get_context("spawn")
    with context.Pool(workers) as pool:
        for number, found in enumerate(pool.imap(result, todo, chunksize=32), start=1):
            if sys.stderr.isatty() and number % 100 == 0:
                print(f"\r{number} of {len(todo)}", end="", file=sys.stderr, flush=True)
            yield found


def difference(before: dict[str, Any], after: dict[str, Any]) -> str | None:
    """The first part in which two results differ, and how."""
    for part in PARTS:
        if before.get(part) != after.get(part):
            return f"{part}: {before.get(part)} -> {after.get(part)}"
    return None


def record(path: Path, count: int) -> None:
    """Write ``count`` cases of every schedule and chip with their results to ``path``."""
    todo = list(cases(count))
    with path.open("w") as file:
        for case, found in zip(todo, results(todo), strict=True):
            file.write(json.dumps({**case, "result": found}) + "\n")


def read(path: Path) -> list[dict[str, Any]]:
    """Cases and their recorded results."""
    return [json.loads(line) for line in path.read_text().splitlines()]


def compare(path: Path, show: int, only: str) -> int:
    """Run the cases of ``path``, print up to ``show`` that differ; the number of those."""
    recorded = [row for row in read(path) if only in row["schedule"]]
    differing: Counter[str] = Counter()
    for row, found in zip(recorded, results(recorded), strict=True):
        text = difference(row["result"], found)
        if text is None:
            continue
        differing[text.partition(":")[0]] += 1
        if differing.total() <= show:
            print(f"{row['schedule']} on {row['arch']}, {row['problem']}, {row['knobs']}\n    {text}")
    parts = ", ".join(f"{part} {count}" for part, count in differing.items())
    print(f"{differing.total()} of {len(recorded)} cases differ{f' ({parts})' if parts else ''}")
    return differing.total()


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m tests.replay", description=__doc__.split("\n")[0])
    commands = parser.add_subparsers(dest="command", required=True)
    recorder = commands.add_parser("record", help="write cases and their results")
    recorder.add_argument("file", type=Path)
    recorder.add_argument("--cases", type=int, default=300, help="of every schedule and chip (default 300)")
    comparer = commands.add_parser("compare", help="run the cases of a file and print what differs first")
    comparer.add_argument("file", type=Path)
    comparer.add_argument("--show", type=int, default=10, help="cases printed (default 10)")
    comparer.add_argument("--only", default="", help="schedules whose name has this in it")
    options = parser.parse_args()
    if options.command == "record":
        record(options.file, options.cases)
        return 0
    return 1 if compare(options.file, options.show, options.only) else 0


if __name__ == "__main__":
    sys.exit(main())
