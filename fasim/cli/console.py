"""What the commands share: parsing of option texts, and printing."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from fasim.errors import ConfigError

if TYPE_CHECKING:
    from rich.console import Console

_FILE_WIDTH = 120


def parse_window(text: str | None) -> tuple[int, int] | None:
    """``A:B`` in cycles; None stays None. Raises ConfigError."""
    if text is None:
        return None
    try:
        first, last = (int(part) for part in text.split(":"))
    except ValueError:
        raise ConfigError(f"--cycles: '{text}' is not A:B with whole cycles") from None
    if not 0 <= first < last:
        raise ConfigError(f"--cycles: '{text}': A must be at least 0 and below B")
    return first, last


def parse_integers(option: str, text: str) -> tuple[int, ...]:
    """``0,1`` given to ``option``. Raises ConfigError."""
    try:
        numbers = tuple(int(part) for part in text.split(","))
    except ValueError:
        raise ConfigError(f"{option}: '{text}' is not a list of numbers such as 0,1") from None
    return numbers


def parse_assignments(option: str, pairs: Sequence[str] | None) -> dict[str, object]:
    """``NAME=VALUE`` pairs given to ``option``, values as text. Raises ConfigError."""
    found: dict[str, object] = {}
    for pair in pairs or ():
        name, equals, value = pair.partition("=")
        if not equals or not name:
            raise ConfigError(f"{option}: '{pair}' is not NAME=VALUE")
        found[name] = value
    return found


def console_for(stderr: bool = False) -> Console:
    """A console on stdout or stderr; a file or pipe gets lines long enough for whole table rows."""
    from rich.console import Console

    console = Console(stderr=stderr, highlight=False)
    if not console.is_terminal:
        console.width = _FILE_WIDTH
    return console


@contextmanager
def progress_bar(task: str) -> Iterator[Callable[[int, int], None]]:
    """A bar on stderr that leaves no trace, moved by calls with what is done and all there is to do.

    It is silent where stderr is no terminal.
    """
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    console = console_for(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        bar = progress.add_task(task, total=None)
        yield lambda done, total: progress.update(bar, completed=done, total=total)


def write_json(path: str | None, data: object, sort_keys: bool = False) -> None:
    """What the option --json asks for: ``data`` to a file, or to stdout. Raises ConfigError as :func:`write_text`."""
    if path is not None:
        write_text(path, json.dumps(data, indent=2, sort_keys=sort_keys) + "\n")


def write_text(path: str, text: str) -> None:
    """Write to a file, or to stdout when ``path`` is ``-``. Raises ConfigError."""
    if path == "-":
        sys.stdout.write(text)
        return
    try:
        Path(path).write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{path}: cannot write: {error.strerror}") from None


def note(message: str) -> None:
    """One message on stderr."""
    print(f"fasim: {message}", file=sys.stderr)
