"""Trace files for the Perfetto UI (ui.perfetto.dev) and chrome://tracing.

Opened in the UI, a run looks like this: a process per SM, a track per role and unit::

    fasim            run        [ fa3 · B3 S1408 H8 d128 bf16 forward · h200                 ]
    SM 0 (1 us =     producer   [empty: K                 ][load K][empty: K                ]
    1 cycle)         consumer0  [QK: issue    ][row_max][exp2       ][rescale][QK: issue    ]
                     consumer1  [exp2    ][rescale][QK: issue    ][row_max][exp2       ]
                     tensor     [QK      ][PV     ][QK      ][PV      ]       [QK      ][PV
                     tma           [load K][load V]                      [load K][load V]

How to read it: **one cycle is shown as one microsecond**, so "3 ms 43 us" reads 3043 cycles, whatever the clock of the
run, and fractions of a cycle stay visible. A slice with work has the name of its op, a wait the name of its
reason first. Click a slice for its tile, iteration, reason and what released it or (on unit tracks) the role that
issued it; click the slice of "fasim" for what was run, the clock and the scale.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, cast

import numpy as np

from fasim.errors import ConfigError
from fasim.results.reasons import REASONS, UNIT_SLICE
from fasim.results.run import Run, Trace
from fasim.views.common import atomic_output, check_suffix, owners_of, provenance, require_trace, rows_of

if TYPE_CHECKING:
    from perfetto.trace_builder.proto_builder import StreamingTraceProtoBuilder

SUFFIXES = (".pftrace", ".json", ".json.gz")

_NS_PER_CYCLE = 1000  # of trace time: a cycle is shown as a microsecond
_SCALE = "1 us = 1 cycle"
_SEQUENCE = 1  # id of the one writer of packets

Args = dict[str, str | int | float]


@dataclass(frozen=True)
class _Slice:
    name: str
    category: str
    start_cycles: float
    end_cycles: float
    args: Args


@dataclass(frozen=True)
class _Track:
    """A line of the UI. ``process`` 1 is the (first) run, SM n is process n + 2 (0 is the kernel's in both formats)."""

    process: int
    process_name: str
    rank: int
    name: str
    slices: Iterator[_Slice] = field(repr=False)


@dataclass(frozen=True)
class Recording:
    """A trace, the name of its processes in the UI, a headline over it, and what a click on that shows."""

    name: str
    headline: str
    properties: Args
    trace: Trace


def write_trace(run: Run, path: str | Path) -> None:
    """Write the trace of ``run`` to ``path``; the suffix picks the format.

    ``.pftrace`` is Perfetto's own format (needs the ``perfetto`` package), ``.json`` and ``.json.gz`` Chrome's trace
    event format, whose ``ts`` and ``dur`` are then cycles. The same run gives the same bytes.
    Raises ConfigError for another suffix, a run without trace, a missing package or a path that cannot be written.
    """
    check_suffix(Path(path), SUFFIXES, "trace")
    trace = require_trace(run)
    write_recordings([Recording("", " · ".join(provenance(run)), _run_args(run, trace), trace)], run.meta, path)


def write_recordings(recordings: Sequence[Recording], meta: Mapping[str, Any], path: str | Path) -> None:
    """Write several traces into one file, one below the other; ``meta`` goes into the header of JSON.

    Formats and errors as for :func:`write_trace`.
    """
    path = Path(path)
    check_suffix(path, SUFFIXES, "trace")
    tracks = _tracks(recordings)
    if pftrace := path.name.lower().endswith(".pftrace"):
        _require_perfetto()
    with atomic_output(path) as file:
        if pftrace:
            _write_pftrace(tracks, file)
        elif path.name.lower().endswith(".gz"):
            with gzip.GzipFile(filename="", mode="wb", fileobj=file, mtime=0) as packed:
                _write_json(tracks, meta, cast(IO[bytes], packed))
        else:
            _write_json(tracks, meta, file)


def _tracks(recordings: Sequence[Recording]) -> Iterator[_Track]:
    first = 1  # process of the headline
    for recording in recordings:
        trace, name = recording.trace, recording.name
        length = float(trace.end.max(initial=0)) / trace.ticks_per_cycle
        whole = _Slice(recording.headline, "run", 0.0, length, recording.properties)
        yield _Track(first, name or "fasim", 0, "run", iter([whole]))
        for sm in np.unique(trace.sm).tolist():
            label = f"{name} SM {sm} ({_SCALE})".lstrip()
            for rank, row in enumerate(rows_of(trace, sm)):
                yield _Track(first + 1 + sm, label, rank, row.label, _slices(trace, row.index.tolist()))
        first += 2 + int(trace.sm.max(initial=0))


def _run_args(run: Run, trace: Trace) -> Args:
    args: Args = {"scale": _SCALE, "clock_mhz": run.clock_mhz, "cycles": run.cycles, "time_us": run.time_us}
    args |= {"tflops": run.tflops, "bottleneck": run.bottleneck, "truncated": str(trace.truncated)}
    plain = {
        key: value if isinstance(value, str | int | float) else json.dumps(value) for key, value in run.meta.items()
    }
    return args | plain


def _slices(trace: Trace, index: list[int]) -> Iterator[_Slice]:
    owner, labels = owners_of(trace, np.asarray(index))
    for i, issuer in zip(index, owner.tolist(), strict=True):
        op = trace.names[trace.name[i]]
        kind = int(trace.kind[i])
        reason = "busy" if kind == UNIT_SLICE else REASONS[kind]
        args: Args = {"reason": reason}
        for key, value in (("tile", int(trace.tile[i])), ("iteration", int(trace.iteration[i]))):
            if value >= 0:
                args[key] = value
        if issuer >= 0:
            args["owner"] = labels[issuer]
        elif (cause := int(trace.cause[i])) >= 0:
            args["released_by"] = f"{trace.tracks[trace.track[cause]]}: {trace.names[trace.name[cause]]}"
        name = (op or reason) if reason in ("work", "busy") else f"{reason}: {op}" if op else reason
        start, end = int(trace.start[i]), int(trace.end[i])
        yield _Slice(name, reason, start / trace.ticks_per_cycle, end / trace.ticks_per_cycle, args)


def _write_json(tracks: Iterable[_Track], meta: Mapping[str, Any], file: IO[bytes]) -> None:
    header = {"scale": _SCALE, **meta}
    file.write(b'{"displayTimeUnit":"ns","otherData":' + _json(header) + b',"traceEvents":[')
    separator = b"\n"
    for event in _json_events(tracks):
        file.write(separator + _json(event))
        separator = b",\n"
    file.write(b"\n]}\n")


def _json(value: object) -> bytes:
    return json.dumps(value, separators=(",", ":")).encode()


def _json_events(tracks: Iterable[_Track]) -> Iterator[dict[str, Any]]:
    for track in tracks:
        where = {"pid": track.process, "tid": track.rank + 1}
        names = {"process_name": track.process_name, "thread_name": track.name}
        for event, name in names.items():
            yield {"ph": "M", "name": event, **where, "args": {"name": name}}
        yield {"ph": "M", "name": "thread_sort_index", **where, "args": {"sort_index": track.rank}}
        for s in track.slices:
            times = {"ts": s.start_cycles, "dur": s.end_cycles - s.start_cycles}
            yield {"ph": "X", "name": s.name, "cat": s.category, **times, **where, "args": s.args}


def _require_perfetto() -> None:
    try:
        import perfetto.trace_builder.proto_builder  # noqa: F401
    except ImportError:
        raise ConfigError(".pftrace needs the 'perfetto' package: pip install 'fasim[trace]', or write .json") from None


def _write_pftrace(tracks: Iterable[_Track], file: IO[bytes]) -> None:
    from perfetto.protos.perfetto.trace.perfetto_trace_pb2 import TrackDescriptor, TrackEvent
    from perfetto.trace_builder.proto_builder import StreamingTraceProtoBuilder

    builder = StreamingTraceProtoBuilder(file)
    processes: set[int] = set()
    for uuid, track in enumerate(tracks, start=1_000_000):
        if track.process not in processes:
            processes.add(track.process)
            packet = builder.create_packet()
            packet.track_descriptor.uuid = track.process
            packet.track_descriptor.process.pid = track.process
            packet.track_descriptor.process.process_name = track.process_name
            packet.track_descriptor.child_ordering = TrackDescriptor.EXPLICIT
            builder.write_packet(packet)
        packet = builder.create_packet()
        packet.track_descriptor.uuid = uuid
        packet.track_descriptor.parent_uuid = track.process
        packet.track_descriptor.name = track.name
        packet.track_descriptor.sibling_order_rank = track.rank
        builder.write_packet(packet)
        for s in track.slices:
            begin = _event(builder, s.start_cycles, uuid, TrackEvent.TYPE_SLICE_BEGIN)
            begin.track_event.name = s.name
            begin.track_event.categories.append(s.category)
            for key, value in s.args.items():
                note = begin.track_event.debug_annotations.add(name=key)
                kind = (
                    "int_value"
                    if isinstance(value, int)
                    else "double_value"
                    if isinstance(value, float)
                    else "string_value"
                )
                setattr(note, kind, value)
            builder.write_packet(begin)
            builder.write_packet(_event(builder, s.end_cycles, uuid, TrackEvent.TYPE_SLICE_END))


def _event(builder: StreamingTraceProtoBuilder, cycles: float, track: int, kind: int) -> Any:
    packet = builder.create_packet()
    packet.timestamp = round(cycles * _NS_PER_CYCLE)
    packet.trusted_packet_sequence_id = _SEQUENCE
    packet.track_event.type = kind
    packet.track_event.track_uuid = track
    return packet
