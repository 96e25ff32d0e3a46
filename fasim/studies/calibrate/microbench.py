"""The result file of ``validation/microbench/run.py``: tables of measured numbers with their provenance."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from fasim.errors import ConfigError, did_you_mean

SCHEMA_VERSION = 1

FloatArray = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Microbench:
    """Results of one run on one GPU."""

    path: Path
    chip: str
    """Name of the GPU as its driver gives it."""
    driver: str
    date: str
    """ISO 8601, UTC."""
    benchmarks: dict[str, Any]

    @classmethod
    def read(cls, path: Path) -> Microbench:
        """Read a result file; programs that failed on the GPU are there without tables.

        Raises ConfigError when the file cannot be read or is no such result.
        """
        try:
            data = json.loads(path.read_text(encoding="utf-8"))
        except OSError as error:
            raise ConfigError(f"{path}: cannot read: {error.strerror}") from None
        except ValueError as error:
            raise ConfigError(f"{path}: not valid JSON: {error}") from None
        if not isinstance(data, dict) or not isinstance(data.get("benchmarks"), dict):
            raise ConfigError(f"{path}: no results of validation/microbench/run.py ('benchmarks' is missing)")
        if data.get("schema_version") != SCHEMA_VERSION:
            raise ConfigError(f"{path}: schema_version: expected {SCHEMA_VERSION}, got {data.get('schema_version')!r}")
        for key in ("chip", "driver", "date"):
            if not isinstance(data.get(key), str):
                raise ConfigError(f"{path}: {key}: expected a string, got {data.get(key)!r}")
        return cls(path, data["chip"], data["driver"], data["date"], data["benchmarks"])

    def has(self, program: str) -> bool:
        """Whether ``program`` was run and did not fail."""
        return bool(self.benchmarks.get(program, {}).get("status") == "ok")

    def provenance(self, program: str) -> str:
        """Date (of the program, if it was run apart), program, chip, driver and mean SM clock, for a comment."""
        clock, date = self.benchmarks[program]["sm_clock_mhz"], self.benchmarks[program].get("date", self.date)
        return f"{date[:10]}: {program}, {self.chip}, driver {self.driver}, {clock:.0f} MHz"

    def column(self, table: str, column: str, **where: object) -> FloatArray:
        """Values of a column in the rows that match; a tuple, list or range in ``where`` gives the values allowed.

        ``table`` is ``program.table``. Raises ConfigError when there is no such table, column or row.
        """
        program, _, name = table.partition(".")
        tables = self.benchmarks.get(program, {}).get("tables", {})
        if name not in tables:
            raise ConfigError(f"{self.path}: no table '{table}'{did_you_mean(name, tables)}")
        content = tables[name]
        names = content["columns"]
        for key in (column, *where):
            if key not in names:
                raise ConfigError(f"{self.path}: {table}: no column '{key}'{did_you_mean(key, names)}")
        index = names.index(column)
        allowed = {names.index(key): v if isinstance(v, (tuple, list, range)) else (v,) for key, v in where.items()}
        found = [row[index] for row in content["rows"] if all(row[i] in values for i, values in allowed.items())]
        if not found:
            wanted = ", ".join(f"{key} = {value}" for key, value in where.items())
            raise ConfigError(f"{self.path}: {table}: no row with {wanted}")
        return np.array(found, dtype=np.float64)
