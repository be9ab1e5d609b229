"""Progress of an evaluation: a bar on a terminal, a line now and then in a log."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from typing import TypeVar

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from forgefield.training.run.journal import Journal

FIRST_LINE_S, NEXT_LINES_S = 10.0, 30.0
"""A log gets its first line after this time, then one every so often."""

Batch = TypeVar("Batch")


def with_progress(batches: Iterable[Batch], n_batches: int, journal: Journal, what: str) -> Iterator[Batch]:
    """The batches, as they are. what: what is being evaluated, for a person to read."""
    if journal.console.is_terminal and journal.ranks.is_rank_zero:
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
        with Progress(*columns, console=journal.console, transient=True) as bar:
            yield from bar.track(batches, total=n_batches, description=f"evaluating {what}")
        return
    next_line = time.monotonic() + FIRST_LINE_S
    for number, batch in enumerate(batches):
        if (now := time.monotonic()) > next_line:
            journal.notify(f"Evaluating {what}: {number} of {n_batches} batches.")
            next_line = now + NEXT_LINES_S
        yield batch
