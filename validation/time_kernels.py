"""Times real attention kernels on the GPU at hand, forward, with the SM clock of the same interval.

    python validation/time_kernels.py -o triton.csv --kernels triton fa2 cudnn
    python validation/time_kernels.py -o sweep.csv --kernels triton --sweep --seqlens 4096 --dtype fp8
    python validation/time_kernels.py --counters counters.csv --kernels triton --seqlens 4096

``triton`` is ``triton_attention.py`` (bf16 or fp8), ``fa2`` the FlashAttention-2 kernel inside PyTorch's SDPA,
``cudnn`` cuDNN's. ``eager`` and ``math`` are chains of kernels: standard attention in PyTorch as the benchmarks of the
FlashAttention papers write it, and SDPA's fallback, which computes in FP32.
The shapes are the papers' standard set: 16384 tokens in all, heads x head dim = 2048, with and without causal mask. A
burst is a captured CUDA graph of launches (about 30 ms, no L2 flush between them), after one burst of warm-up; ``ms``
is the median of three bursts back to back. ``sm_clock_mhz`` is the mean SM clock over the three: small kernels before
and after read every SM's cycle counter and the nanosecond timer. ``cycles`` = ``ms`` x clock. ``--counters`` instead
runs every case once under Nsight Compute (``ncu``) and writes its counters. FLOPs: 4 b h s^2 d, half for causal.

Needs PyTorch, Triton and an NVIDIA GPU. Exit code 0: all cases ran, or those that a kernel does not support
were named on stderr; 2: bad usage, or something is missing.
"""

from __future__ import annotations

import argparse
import csv
import itertools
import shutil
import statistics
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

KERNELS = ("triton", "fa2", "cudnn", "eager", "math")
TOKENS, WIDTH = 16384, 2048
KNOBS = ("tile_m", "tile_n", "stages", "warps")
SHAPE = (
    "arch",
    "kernel",
    "dtype",
    "direction",
    "causal",
    "batch",
    "seqlen_q",
    "seqlen_k",
    "heads_q",
    "heads_kv",
    "head_dim",
)
TIMING = ("ms", "ms_min", "ms_max", "sm_clock_mhz", "tflops", "cycles", "iters", "graph", "set", "build")
BURST_MS = 30.0
SWEEP = tuple(itertools.product((64, 128), (64, 128), (2, 3), (4, 8)))
COUNTERS = (
    "gpu__time_duration.sum",
    "sm__cycles_elapsed.max",
    "sm__cycles_active.avg",
    "sm__pipe_tensor_op_hmma_type_hmma_hgmma_qgmma_cycles_active.avg.pct_of_peak_sustained_active",
    "sm__inst_executed_pipe_xu.avg.pct_of_peak_sustained_active",
    "sm__pipe_fma_cycles_active.avg.pct_of_peak_sustained_active",
    "sm__pipe_alu_cycles_active.avg.pct_of_peak_sustained_active",
    "smsp__issue_active.avg.pct_of_peak_sustained_active",
    "smsp__inst_executed.sum",
    "l1tex__data_pipe_lsu_wavefronts.avg.pct_of_peak_sustained_elapsed",
    "lts__t_bytes.sum",
    "lts__t_sector_hit_rate.pct",
    "dram__bytes_read.sum",
    "dram__bytes_write.sum",
    "launch__registers_per_thread",
    "launch__shared_mem_per_block_dynamic",
    "launch__grid_size",
    "launch__block_size",
)


@dataclass(frozen=True)
class Case:
    """One kernel on one shape; ``knobs`` (tile_m, tile_n, stages, warps) for Triton only."""

    kernel: str
    causal: bool
    seqlen: int
    head_dim: int
    knobs: tuple[int, int, int, int] | None = None
    dtype: str = "bf16"

    @property
    def batch(self) -> int:
        """Sequences, so that the tokens are TOKENS."""
        return TOKENS // self.seqlen

    @property
    def heads(self) -> int:
        """Heads, so that the width of the model is WIDTH."""
        return WIDTH // self.head_dim

    def flops(self) -> float:
        """Floating-point operations by the papers' convention: half for causal."""
        return 4.0 * self.batch * self.heads * self.seqlen**2 * self.head_dim / (2 if self.causal else 1)

    def columns(self, arch: str) -> dict[str, Any]:
        """The columns that name the case."""
        lengths, heads = [self.seqlen] * 2, [self.heads] * 2
        values = [arch, self.kernel, self.dtype, "fwd", int(self.causal), self.batch, *lengths, *heads, self.head_dim]
        return dict(zip(SHAPE, values, strict=True)) | dict(zip(KNOBS, self.knobs or [""] * 4, strict=True))

    def arguments(self) -> list[str]:
        """Command line that runs this case alone."""
        text = ["--kernels", self.kernel, "--seqlens", str(self.seqlen), "--head-dims", str(self.head_dim)]
        knobs = ["--knobs", *map(str, self.knobs)] if self.knobs else []
        return [*text, "--dtype", self.dtype, "--masks", "causal" if self.causal else "full", *knobs]


def make_cases(options: argparse.Namespace) -> list[Case]:
    """Every case of the command line."""
    from triton_attention import DEFAULT_KNOBS

    cases = []
    for dim, mask, seqlen, kernel in itertools.product(
        options.head_dims, options.masks, options.seqlens, options.kernels
    ):
        choices: Sequence[Any] = [None]
        if kernel == "triton":
            choices = SWEEP if options.sweep else [tuple(options.knobs or vars(DEFAULT_KNOBS[dim]).values())]
        cases += [Case(kernel, mask == "causal", seqlen, dim, knobs, options.dtype) for knobs in choices]
    return cases


def launcher(case: Case) -> Callable[[], Any]:
    """A function without arguments that launches the case on random normal data."""
    import torch
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from triton_attention import DTYPES, Knobs, attention, inputs

    q, k, v = inputs(case.batch, [(case.heads, case.seqlen)] * 3, case.head_dim, DTYPES[case.dtype])
    if case.knobs is not None:
        knobs = Knobs(*case.knobs)
        return lambda: attention(q, k, v, causal=case.causal, knobs=knobs)
    if case.dtype == "fp8":
        raise ValueError("fp8 is for triton only")
    if case.kernel == "eager":
        packed = torch.stack([x.transpose(1, 2) for x in (q, k, v)], dim=2)
        return lambda: eager(packed, case.causal)
    backends = {"fa2": SDPBackend.FLASH_ATTENTION, "cudnn": SDPBackend.CUDNN_ATTENTION, "math": SDPBackend.MATH}
    backend = backends[case.kernel]

    def call() -> Any:
        with sdpa_kernel(backend):
            return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=case.causal)

    return call


def eager(packed: Any, causal: bool) -> Any:
    """Standard attention in separate PyTorch operations on packed (batch, seqlen, 3, heads, dim).

    The operations of ``attention_pytorch`` in FlashAttention's benchmark: copies of Q and K in another order, a GEMM
    that scales, an added mask, softmax, a GEMM.
    """
    import torch

    batch, seqlen, _, heads, dim = packed.shape
    q, k, v = packed.unbind(2)
    q = q.transpose(1, 2).reshape(batch * heads, seqlen, dim)
    k = k.permute(0, 2, 3, 1).reshape(batch * heads, dim, seqlen)
    scores = torch.empty(batch * heads, seqlen, seqlen, dtype=q.dtype, device=q.device)
    scores = torch.baddbmm(scores, q, k, beta=0, alpha=dim**-0.5).view(batch, heads, seqlen, seqlen)
    if causal:
        mask = torch.full((seqlen, seqlen), -10000.0, device=q.device).triu(1)
        scores = scores + mask.to(scores.dtype)
    return torch.einsum("bhts,bshd->bthd", scores.softmax(-1), v)


def make_probe() -> Callable[[], Any]:
    """A function that records, for every SM, its cycle counter and the nanosecond timer: tensor (programs, 3)."""
    import torch
    from sm_probe import probe_kernel

    programs = 4 * torch.cuda.get_device_properties(0).multi_processor_count

    def probe() -> Any:
        out = torch.empty((programs, 3), device="cuda", dtype=torch.int64)
        probe_kernel[(programs,)](out, num_warps=1)
        return out

    return probe


def mean_clock_mhz(before: Any, after: Any) -> float:
    """Median over the SMs of cycles per nanosecond between two probes, in MHz."""
    first = {sm: (cycles, ns) for sm, cycles, ns in before.tolist()}
    ratios = []
    for sm, cycles, ns in after.tolist():
        if sm in first:
            start_cycles, start_ns = first[sm]
            ratios.append(1e3 * (cycles - start_cycles) / (ns - start_ns))
    return statistics.median(ratios)


def time_case(case: Case) -> dict[str, Any]:
    """Columns TIMING of one case (``set`` excepted)."""
    return time_calls(case, launcher(case))


def time_calls(case: Case, call: Callable[[], Any]) -> dict[str, Any]:
    """The same of ``call``, which launches the case."""
    import torch

    probe = make_probe()
    call()
    probe()
    torch.cuda.synchronize()

    def events(body: Callable[[], Any]) -> Callable[[], float]:
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        body()
        end.record()
        return lambda: begin.elapsed_time(end)

    single = events(lambda: [call() for _ in range(3)])
    torch.cuda.synchronize()
    iters = max(1, round(BURST_MS / (single() / 3)))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(iters):
            call()
    graph.replay()
    before = probe()
    bursts = [events(graph.replay) for _ in range(3)]
    after = probe()
    torch.cuda.synchronize()
    times = [burst() / iters for burst in bursts]
    ms, clock = statistics.median(times), mean_clock_mhz(before, after)
    return {
        "ms": f"{ms:.5f}",
        "ms_min": f"{min(times):.5f}",
        "ms_max": f"{max(times):.5f}",
        "sm_clock_mhz": round(clock),
        "tflops": f"{case.flops() / ms / 1e9:.1f}",
        "cycles": round(ms * 1e3 * clock),
        "iters": iters,
        "graph": 1,
        "build": "pytorch" if case.kernel == "fa2" else "",
    }


def count_case(case: Case) -> dict[str, Any]:
    """Counters of the attention kernel of one case, from one launch under ``ncu``. RuntimeError when ``ncu`` fails."""
    tool = ["ncu", "--clock-control", "none", "--csv", "--page", "raw", "--print-units", "base", "--metrics"]
    run = [sys.executable, __file__, "--launch", *case.arguments()]
    done = subprocess.run([*tool, ",".join(COUNTERS), *run], capture_output=True, text=True)
    table = [line for line in done.stdout.splitlines() if line.startswith('"')]
    rows = list(csv.DictReader(table))[1:]  # the first row holds units
    if done.returncode != 0 or not rows:
        raise RuntimeError(f"ncu: {(done.stderr or done.stdout).strip()[-300:]}")
    longest = max(rows, key=lambda row: float(row["gpu__time_duration.sum"].replace(",", "")))
    values = {name: longest.get(name, "").replace(",", "") for name in COUNTERS}
    return {"set": "ncu", "kernel_name": longest["Kernel Name"][:120], **values}


def attempt(case: Case, measure: Callable[[Case], dict[str, Any]]) -> dict[str, Any] | None:
    """``measure(case)``; None, and a line on stderr, when the kernel does not support the shape or tile."""
    try:
        return measure(case)
    except Exception as error:  # whatever a kernel library raises must not end the run
        reason = str(error).strip().splitlines() or [type(error).__name__]
        print(f"skipped {case}: {reason[-1]}", file=sys.stderr, flush=True)
        return None


def launch_case(case: Case) -> dict[str, Any]:
    """Launch the case once."""
    import torch

    launcher(case)()
    torch.cuda.synchronize()
    return {}


def run_cases(options: argparse.Namespace) -> int:
    """Measure every case and write the CSV row by row."""
    import torch

    if not torch.cuda.is_available():
        raise OSError("no NVIDIA GPU found")
    cases = make_cases(options)
    if options.launch:
        for case in cases:
            attempt(case, launch_case)
        return 0
    path = options.counters or options.output
    fields = [*SHAPE, *(("set", "kernel_name", *COUNTERS) if options.counters else TIMING), *KNOBS]
    with path.open("w", newline="") as stream:
        writer = csv.DictWriter(stream, fields, lineterminator="\n")
        writer.writeheader()
        for case in cases:
            result = attempt(case, count_case if options.counters else time_case)
            if result is not None:
                writer.writerow(case.columns(options.arch) | {"set": "sweep" if options.sweep else "standard"} | result)
                stream.flush()
    return 0


def main(arguments: Sequence[str] | None = None) -> int:
    """Command line; returns the exit code."""
    parser = argparse.ArgumentParser(description="Time attention kernels on this GPU.")
    parser.add_argument("-o", "--output", type=Path, help="CSV of timings to write")
    parser.add_argument("--counters", type=Path, metavar="FILE", help="write hardware counters (needs ncu) instead")
    parser.add_argument("--kernels", nargs="+", choices=KERNELS, default=list(KERNELS))
    parser.add_argument("--seqlens", nargs="+", type=int, default=[512, 1024, 2048, 4096, 8192, 16384], metavar="N")
    parser.add_argument("--head-dims", nargs="+", type=int, choices=(64, 128, 256), default=[64, 128, 256])
    parser.add_argument("--dtype", choices=("bf16", "fp8"), default="bf16", help="fp8 (e5m2) for triton only")
    parser.add_argument("--masks", nargs="+", choices=("full", "causal"), default=["full", "causal"])
    parser.add_argument("--arch", default="h200", help="value of the column arch (default h200)")
    triton_knobs = parser.add_mutually_exclusive_group()
    triton_knobs.add_argument("--sweep", action="store_true", help="a grid of tiles, stages and warps for triton")
    triton_knobs.add_argument("--knobs", nargs=4, type=int, metavar=tuple(k.upper() for k in KNOBS), help="for triton")
    parser.add_argument("--launch", action="store_true", help="only launch each case once (what --counters profiles)")
    options = parser.parse_args(arguments)
    if not options.launch and (options.output is None) == (options.counters is None):
        parser.error("give either -o FILE or --counters FILE")
    bad = [n for n in options.seqlens if n < 1 or TOKENS % n]
    if bad:
        parser.error(f"--seqlens: {bad[0]} does not divide {TOKENS}")
    if options.counters and shutil.which("ncu") is None:
        parser.error("--counters: ncu (Nsight Compute) not found")
    try:
        return run_cases(options)
    except (ImportError, OSError) as error:
        print(f"time_kernels.py: {error}; PyTorch, Triton and an NVIDIA GPU are needed", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
