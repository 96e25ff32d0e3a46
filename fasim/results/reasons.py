"""What roles wait for and which units there are: the words that engines, tables and traces share."""

from __future__ import annotations

#: What a role can be doing. Closed: the simulator, tables and traces share it. Order is the
#: order of columns in reports and the value of ``Trace.kind`` on role tracks.
REASONS: tuple[str, ...] = (
    "work",  # vector instructions of this role execute
    "issue",  # issuing MMA or copies; includes blocking at issue while the queue is full
    "pipe",  # wants a vector pipe that another role occupies
    "dependency",  # waits for a result of its own (MMA complete, latency of a dependent instruction)
    "barrier",  # waits at a named barrier for other roles
    "full",  # consumer: waits for a buffer to be filled
    "empty",  # producer: waits for a buffer to be released
    "memory",  # waits for its own copies or stores to complete
    "launch",  # before the CTA starts, CTA turnover
    "tail",  # finished; the rest of the grid still runs
)

#: Units in the order of reports.
UNITS: tuple[str, ...] = (
    "tensor",
    "mufu",
    "fma",
    "alu",
    "issue",
    "lsu",
    "smem",
    "tma",
    "tmem",
    "l2",
    "hbm",
)

#: ``Trace.kind`` of a slice on a unit track (tensor core, TMA), where no stall reason applies.
UNIT_SLICE = 100
