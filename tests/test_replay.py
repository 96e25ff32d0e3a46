"""What schedules record, and the cycles they take, is what ``tests/replay.jsonl`` says: no prediction moves unseen."""

from pathlib import Path

import pytest
import replay

FILE = Path(__file__).with_name("replay.jsonl")
ROWS = replay.read(FILE)
AGAIN = "meant? then it is a [MODEL] commit, with `python -m tests.replay record tests/replay.jsonl --cases 4`"


@pytest.mark.parametrize("schedule", sorted({row["schedule"] for row in ROWS}))
def test_recorded_programs_and_cycles_are_unchanged(schedule):
    differing = []
    for row in ROWS:
        if row["schedule"] == schedule and (found := replay.difference(row["result"], replay.result(row))):
            differing.append(f"{row['arch']}, {row['problem']}, {row['knobs']}: {found}")
    assert not differing, "\n".join([f"{len(differing)} cases differ; {AGAIN}", *differing[:5]])


def test_every_schedule_runs_in_the_recorded_cases():
    """A file of refusals would compare nothing."""
    ran = {row["schedule"] for row in ROWS if isinstance(row["result"].get("cycles"), list)}
    assert ran == set(replay.list_schedules())


def test_a_moved_prediction_is_seen():
    row = next(row for row in ROWS if isinstance(row["result"].get("cycles"), list))
    moved = row["result"] | {"cycles": [cycles + 1 / 64 for cycles in row["result"]["cycles"]]}
    assert replay.difference(moved, replay.result(row)).startswith("cycles: ")
