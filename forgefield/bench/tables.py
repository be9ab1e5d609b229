"""Tables and notes of `forgefield bench` about numbers of processes: how samples per second scale, where the time goes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from forgefield.bench.machine import cores, processes

if TYPE_CHECKING:
    from rich.table import Table

    from forgefield.bench.timer import Measurement

DISTURBED = 0.9
"""Share of a core below which a process that only computes must have been interrupted by others."""


def speed_up(one: Measurement, first: Measurement) -> float:
    return one.samples_per_second / first.samples_per_second


def efficiency(one: Measurement, first: Measurement) -> float:
    return speed_up(one, first) * first.ranks / one.ranks


def scaling_table(measured: Sequence[Measurement]) -> Table:
    from forgefield.training.run.summary import digits

    table = plain_table("ranks", "s per 100 samples", "samples/s", "atoms/s", "speed-up", "efficiency")
    first = measured[0]
    for one in measured:
        table.add_row(
            str(one.ranks),
            digits(100 / one.samples_per_second),
            digits(one.samples_per_second),
            digits(one.atoms_per_second),
            f"{speed_up(one, first):.2f}",
            f"{100 * efficiency(one, first):.0f} %",
        )
    return table


def scaling_notes(measured: Sequence[Measurement]) -> list[str]:
    one = measured[0]
    frames = f"{one.frames_per_rank} frame{'s' if one.frames_per_rank > 1 else ''}"
    batches = f" x {one.accumulate} batches a step" if one.accumulate > 1 else ""
    notes = [
        f"Every rank has {frames}{batches} whatever their number (weak scaling); speed-up and efficiency are relative to "
        f"the first row."
    ]
    for short in (m for m in measured if not m.full_batches):
        had = short.samples / (short.steps * short.ranks)
        notes.append(
            f"Warning: the data has fewer training frames than {processes(short.ranks)} take in a step, so that a rank had "
            f"{had:.1f} frames a step; this row cannot be compared with the others."
        )
    notes += [
        f"Warning: with ranks={one.ranks} a process had a core for only {100 * one.core_share:.0f} % of the time it computed. "
        "Something else was at work on this machine; measure again when it is idle."
        for one in measured
        if one.core_share is not None and one.core_share < DISTURBED
    ]
    return notes


def parts_table(measured: Sequence[Measurement]) -> Table:
    """ms per step: mean over ranks, and behind the slash the rank that needs longest."""
    table = plain_table("ranks", "step, ms", "data", "compute", "communication", "of it waiting", "update")
    for one in measured:
        cells = {part: f"{milliseconds(one.mean_ms[part])} / {milliseconds(one.max_ms[part])}" for part in one.mean_ms}
        waiting = milliseconds(one.waiting_ms)
        if one.communication_in_compute:
            cells["communication"], waiting = "in compute", "unknown"
        table.add_row(
            str(one.ranks),
            milliseconds(one.step_ms),
            cells["data"],
            cells["compute"],
            cells["communication"],
            waiting,
            cells["update"],
        )
    return table


def parts_notes(measured: Sequence[Measurement]) -> list[str]:
    last = measured[-1]
    strategies = ", ".join(dict.fromkeys(f"{m.strategy} ({m.backend})" for m in measured if m.ranks > 1))
    notes = ["Mean over ranks / slowest rank. Waiting is time spent in the exchange before the last rank has come."]
    if any(one.marks_synchronised for one in measured):
        notes.append(
            "Parts are timed in steps of their own, with the GPU halted at each mark: they do not add up to the step."
        )
    notes += [
        f"gradient message   {last.message_bytes / 1e6:.3g} MB a step, {last.parameters:,} parameters",
        f"exchange           {strategies or 'none, one process'}",
        f"threads            {', '.join(dict.fromkeys(str(m.threads) for m in measured))} per process",
        f"machine            {last.device}, {cores()} cores" + (f", {last.nodes} nodes" if last.nodes > 1 else ""),
    ]
    if last.memory_bytes:
        notes.append(f"GPU memory         {last.memory_bytes / 2**30:.2f} GiB at most on rank 0")
    return notes


def milliseconds(value: float) -> str:
    return f"{value:.1f}" if value >= 9.95 else f"{value:.2f}"


def plain_table(*columns: str) -> Table:
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    table = Table(box=SIMPLE_HEAD, pad_edge=False, header_style="dim")
    for column in columns:
        table.add_column(column, justify="right", no_wrap=True)
    return table
