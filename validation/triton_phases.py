"""Cycle stamps inside the companion Triton kernel, for ``fasim phases``.

    python validation/triton_phases.py -o phases.csv --kernels kernels.csv
    fasim phases phases.csv --kernels kernels.csv

Runs ``triton_attention.py`` with 4 sequences of 4096 tokens, and a variant of it that writes down SM 0's cycle counter
twice per block of keys. ``phases.csv`` has the columns of ``data/h200_fa3_phases.csv``: ``issue_start``, QK is about
to be issued; ``s_ready``, QK is complete. ``issue_end`` is empty, since the compiled kernel waits where it has issued.
Tiles are the programs of SM 0 in the order in which they began, cycles count from the first stamp. ``kernels.csv`` is
the timing of each variant without stamps, with its knobs; ``stamped_pct`` is what writing the stamps adds to it.

Needs PyTorch, Triton and an NVIDIA GPU. Exit code 0: done; 2: bad usage, or something is missing; 3: the variant
with stamps computes something else.
"""

from __future__ import annotations

import argparse
import csv
import itertools
import sys
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from time_kernels import KNOBS, SHAPE, TIMING, Case

SEQLEN = 4096
COLUMNS = ("variant", "warpgroup", "tile", "iteration", "issue_start", "issue_end", "s_ready")
#: Programs of SM 0 that are written down: enough for medians, and a small file.
TILES = 8


class Differs(Exception):
    """The variant with stamps computes something else."""


def stamp_rows(variant: str, stamps: list[list[list[list[int]]]]) -> Iterator[list[Any]]:
    """Rows of the CSV from stamps by program, warpgroup, block and kind, 0 where there is none."""

    def start(program: list[list[list[int]]]) -> int:
        return min((block[0] for blocks in program for block in blocks if block[0]), default=0)

    used = sorted(filter(start, stamps), key=start)
    first = start(used[0])
    for tile, program in enumerate(used[:TILES]):
        for warpgroup, blocks in enumerate(program):
            for iteration, (issue, ready) in enumerate((block for block in blocks if block[0]), start=1):
                yield [variant, warpgroup, tile, iteration, issue - first, "", ready - first]


def measure(case: Case) -> tuple[dict[str, Any], Any]:
    """Timing of the kernel without stamps, with ``stamped_pct``, and the stamps of one launch."""
    import torch
    from time_kernels import time_calls
    from triton_attention import DTYPES, STAMPS, Knobs, inputs, launch

    assert case.knobs is not None
    knobs = Knobs(*case.knobs)
    q, k, v = inputs(case.batch, [(case.heads, case.seqlen)] * 3, case.head_dim, DTYPES[case.dtype])
    out = torch.empty_like(q)
    plain = partial(launch, q, k, v, out, causal=case.causal, knobs=knobs)
    programs = case.seqlen // knobs.tile_m * case.batch * case.heads
    shape = (programs, knobs.warps // 4, case.seqlen // knobs.tile_n, STAMPS)
    stamps = torch.zeros(shape, device="cuda", dtype=torch.int64)
    # No more registers than the kernel itself has, so that as many programs fit on an SM.
    stamped = partial(plain, stamps=stamps, maxnreg=-(-plain().n_regs // 8) * 8)
    expected = out.clone()
    timing, longer = time_calls(case, plain), time_calls(case, stamped)
    timing["stamped_pct"] = f"{100 * (longer['cycles'] / timing['cycles'] - 1):.1f}"
    stamps.zero_()
    stamped()
    if not torch.equal(out, expected):
        raise Differs(f"{case}: the variant with stamps computes something else")
    return timing, stamps


def run(options: argparse.Namespace) -> None:
    """Time and stamp every case, and write both files."""
    import torch
    from triton_attention import DEFAULT_KNOBS

    if not torch.cuda.is_available():
        raise OSError("no NVIDIA GPU found")
    with options.output.open("w", newline="") as stream, options.kernels.open("w", newline="") as table:
        stamps_csv = csv.writer(stream, lineterminator="\n")
        stamps_csv.writerow(COLUMNS)
        fields = [*SHAPE[:2], "variant", *SHAPE[2:], *TIMING, *KNOBS, "stamped_pct"]
        kernels_csv = csv.DictWriter(table, fields, lineterminator="\n")
        kernels_csv.writeheader()
        for dim, mask in itertools.product(options.head_dims, options.masks):
            knobs = options.knobs or vars(DEFAULT_KNOBS[dim]).values()
            case = Case("triton", mask == "causal", SEQLEN, dim, tuple(knobs))
            variant = f"triton_d{dim}{'c' if case.causal else ''}"
            timing, stamps = measure(case)
            kernels_csv.writerow(case.columns(options.arch) | {"variant": variant, "set": "phases"} | timing)
            stamps_csv.writerows(stamp_rows(variant, stamps.tolist()))


def main(arguments: Sequence[str] | None = None) -> int:
    """Command line; returns the exit code."""
    parser = argparse.ArgumentParser(description="Record cycle stamps inside the Triton attention kernel.")
    parser.add_argument("-o", "--output", type=Path, required=True, help="CSV of stamps to write")
    parser.add_argument("--kernels", type=Path, required=True, help="CSV of the variants and their timing to write")
    parser.add_argument("--head-dims", nargs="+", type=int, choices=(64, 128, 256), default=[64, 128, 256])
    parser.add_argument("--masks", nargs="+", choices=("full", "causal"), default=["full", "causal"])
    parser.add_argument(
        "--knobs", nargs=4, type=int, metavar=tuple(k.upper() for k in KNOBS), help="other than default"
    )
    parser.add_argument("--arch", default="h200", help="value of the column arch (default h200)")
    options = parser.parse_args(arguments)
    if options.knobs and options.knobs[3] not in (4, 8):
        parser.error(f"--knobs: {options.knobs[3]} warps: 4 or 8")
    try:
        run(options)
    except (ImportError, OSError) as error:
        print(f"triton_phases.py: {error}; PyTorch, Triton and an NVIDIA GPU are needed", file=sys.stderr)
        return 2
    except Differs as error:
        print(f"triton_phases.py: {error}", file=sys.stderr)
        return 3
    return 0


if __name__ == "__main__":
    sys.exit(main())
