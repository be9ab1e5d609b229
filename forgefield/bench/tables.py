"""Tables, notes and figures of `forgefield bench`: engines and other programs, numbers of processes, memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from forgefield.bench.options import count_processes
from forgefield.processes import usable_cores

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from rich.table import Table

    from forgefield.bench.step import Limits, Work
    from forgefield.bench.timer import Measurement

DISTURBED = 0.9
"""Fraction of a core below which a process has been interrupted by other programs."""


# ---- engines and peers


@dataclass(frozen=True)
class Row:
    """One row of the table of engines and peers.

    engine: `eager`, ..., or the name of a peer. captured: the engine whose step CUDA graphs replay. refusal: why there are no
    numbers. memory_bytes: peak memory of tensors on a GPU, else of the process. bandwidth, arithmetic: fractions of the
    measured limits. note: about the peer's model.
    """

    engine: str
    precision: str
    derivative: str | None = None
    captured: str | None = None
    first_step_seconds: float | None = None
    step_ms: float | None = None
    atoms_per_second: float | None = None
    edges_per_second: float | None = None
    memory_bytes: int | None = None
    bandwidth: float | None = None
    arithmetic: float | None = None
    refusal: str | None = None
    is_peer: bool = False
    note: str = ""

    @property
    def label(self) -> str:
        return f"{self.engine} ({self.captured})" if self.captured else self.engine

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def measured_row(one: Measurement, work: Work | None, limits: Limits | None) -> Row:
    bandwidth, arithmetic = None, None
    if work is not None and limits is not None:
        bandwidth, arithmetic = work.fractions(limits, edges_per_second=one.edges_per_second, precision=one.precision)
    return Row(
        engine=one.engine,
        precision=one.precision,
        derivative=one.derivative,
        captured=one.captured,
        first_step_seconds=one.first_step_seconds,
        step_ms=one.step_ms,
        atoms_per_second=one.atoms_per_second,
        edges_per_second=one.edges_per_second,
        memory_bytes=one.memory_bytes if one.memory_bytes is not None else one.resident_bytes,
        bandwidth=bandwidth,
        arithmetic=arithmetic,
    )


def peer_row(name: str, result: dict[str, Any], *, precision: str, atoms: int, edges: int) -> Row:
    """result: written by `peers.py`. atoms, edges: of the structures that were measured."""
    if "refusal" in result:
        return Row(name, precision, refusal=result["refusal"], is_peer=True)
    per_second = 1000 / result["step_ms"]
    memory = result["memory_bytes"] if result["memory_bytes"] is not None else result["resident_bytes"]
    return Row(
        engine=name,
        precision=precision,
        first_step_seconds=result["first_step_seconds"],
        step_ms=result["step_ms"],
        atoms_per_second=atoms * per_second,
        edges_per_second=edges * per_second,
        memory_bytes=memory,
        is_peer=True,
        note=f"{result['description']}, {result['parameters']:,} parameters",
    )


def engines_table(rows: Sequence[Row]) -> Table:
    from forgefield.training.run.summary import digits

    table = plain_table(
        *("engine", "derivative", "precision", "first\nstep, s", "ms per\nstep", "atoms/s", "edges/s", "memory,\nGiB"),
        *("band-\nwidth", "arith-\nmetic"),
    )
    for row in (row for row in rows if row.refusal is None):
        table.add_row(
            row.label,
            row.derivative or "-",
            row.precision,
            digits(row.first_step_seconds),
            milliseconds(row.step_ms or 0.0),
            digits(row.atoms_per_second),
            digits(row.edges_per_second),
            digits(row.memory_bytes / 2**30 if row.memory_bytes else None),
            percent(row.bandwidth),
            percent(row.arithmetic),
        )
    return table


def percent(fraction: float | None) -> str:
    if fraction is None:
        return "-"
    return f"{100 * fraction:.0f} %" if fraction >= 0.0995 else f"{100 * fraction:.2g} %"


def engines_notes(rows: Sequence[Row], limits: Limits | None, device: str) -> list[str]:
    """Reasons for missing rows first, then the meaning of the columns."""
    notes = [f"{row.label}, {row.precision}: {row.refusal}" for row in rows if row.refusal is not None]
    notes += [f"{row.label}: {row.note}." for row in rows if row.note]
    notes.append(
        "First step: including compilation and the comparison with the eager engine. Memory: "
        + ("peak of all tensors on the GPU." if device != "cpu" else "peak of the process, including libraries.")
    )
    if limits is not None:
        from forgefield.bench.step import COUNTED_BYTES

        products = ", ".join(f"{rate / 1e12:.3g} Tflop/s {name}" for name, rate in limits.matmul.items())
        notes.append(
            f"Measured limits: copy {limits.copy / 1e9:.3g} GB/s; matrix products {products}. "
            f"Bandwidth: {COUNTED_BYTES}. Arithmetic: matrix products of one eager step."
        )
    return notes


def best_row(rows: Sequence[Row], precision: str) -> Row | None:
    """The fastest of Forgefield's engines in this precision."""
    measured = [row for row in rows if row.refusal is None and not row.is_peer and row.precision == precision]
    return min(measured, key=lambda row: row.step_ms or 0.0, default=None)


def draw(rows: Sequence[Row], path: Path, title: str) -> None:
    """Draw bars of the time per step and of the first step for each engine, with other programs in another colour.

    path: ends in one of `FIGURE_SUFFIXES`.
    """
    from forgefield.report.canvas import house_style, new_figure

    shown = [row for row in rows if row.refusal is None]
    precisions = {row.precision for row in shown}
    labels = [f"{row.label}, {row.precision}" if len(precisions) > 1 else row.label for row in shown]
    forms = {row.derivative for row in shown if row.derivative}
    if len(forms) > 1:
        labels = [f"{label}, {row.derivative}" if row.derivative else label for label, row in zip(labels, shown)]
    with house_style():
        figure = new_figure(7.4, 1.1 + 0.32 * max(len(shown), 1))
        figure.set_facecolor("white")
        left, right = figure.subplots(1, 2, sharey=True)
        _bars(left, [row.step_ms or 0.0 for row in shown], shown, "ms per step")
        _bars(right, [row.first_step_seconds or 0.0 for row in shown], shown, "first step, s")
        left.set_yticks(range(len(shown)), labels)
        left.invert_yaxis()
        figure.suptitle(title, x=0.01, ha="left", fontsize="medium")
        figure.savefig(path, dpi=200)


def _bars(axes: Axes, values: list[float], rows: Sequence[Row], label: str) -> None:
    from forgefield.report.canvas import COLOURS
    from forgefield.training.run.summary import digits

    colours = [COLOURS["line"] if row.is_peer else COLOURS["blue"] for row in rows]
    axes.barh(range(len(values)), values, height=0.62, color=colours)
    for position, value in enumerate(values):
        axes.annotate(
            digits(value), (value, position), xytext=(3, 0), textcoords="offset points", va="center", fontsize="small"
        )
    axes.set_xlabel(label)
    axes.set_xlim(0, 1.18 * max(values, default=1.0))
    axes.tick_params(axis="y", length=0)


# ---- numbers of processes


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
    batches = f" x {one.accumulate} batches per step" if one.accumulate > 1 else ""
    notes = [
        f"Every rank has {frames}{batches}, independent of the number of ranks (weak scaling). Speed-up and efficiency are "
        "relative to the first row."
    ]
    for short in (m for m in measured if not m.full_batches):
        had = short.samples / (short.steps * short.ranks)
        notes.append(
            f"Warning: the data has fewer training frames than {count_processes(short.ranks)} need for a step, so a rank had "
            f"{had:.1f} frames per step; this row is not comparable with the others."
        )
    notes += [
        f"Warning: with ranks={one.ranks} a process had a core for only {100 * one.core_share:.0f} % of its compute time. "
        "Other programs were running on this machine; measure again when it is idle."
        for one in measured
        if one.core_share is not None and one.core_share < DISTURBED
    ]
    return notes


def parts_table(measured: Sequence[Measurement]) -> Table:
    """ms per step: mean over ranks, and after the slash the slowest rank."""
    table = plain_table("ranks", "step, ms", "data", "compute", "communication", "of which waiting", "update")
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
    notes = ["Mean over ranks / slowest rank. Waiting: time spent in communication before the last rank has arrived."]
    if any(one.marks_synchronised for one in measured):
        notes.append(
            "The parts were timed in separate steps, with the GPU synchronised after each part; they do not add up to the step."
        )
    notes += [
        f"gradient message   {last.message_bytes / 1e6:.3g} MB per step, {last.parameters:,} parameters",
        f"exchange           {strategies or 'none, one process'}",
        f"threads            {', '.join(dict.fromkeys(str(m.threads) for m in measured))} per process",
        f"machine            {last.device}, {usable_cores()} cores"
        + (f", {last.nodes} nodes" if last.nodes > 1 else ""),
    ]
    if last.memory_bytes:
        notes.append(f"GPU memory         {last.memory_bytes / 2**30:.2f} GiB peak on rank 0")
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


# ---- memory


def plan_table(result: dict[str, Any]) -> Table:
    """result: a `MemoryPlan` as a dict."""
    table = plain_table("batch", "frames", "atoms", "edges", "peak memory")
    for peak in result["measured"]:
        table.add_row("measured", *(f"{peak[key]:,}" for key in ("frames", "atoms", "edges")), size(peak["bytes"]))
    table.add_row("configured", *(f"{n:,}" for n in result["largest"]), size(result["needed"]))
    fits = result["fits"]
    room = 0.9 * result["available"]
    table.add_row("fills 90 %", *(f"{fits[key]:,}" for key in ("frames", "atoms", "edges")), size(room))
    return table


def plan_notes(result: dict[str, Any]) -> list[str]:
    model, kind = result["model"], result["setting"]
    share = result["needed"] / result["available"]
    advice = (
        "it fits."
        if share <= 0.9
        else f"it does not fit safely; data.batch={{{kind}: {result['fits'][kind]}}} would, or training.memory.recompute=true."
    )
    return [
        f"memory = {size(model['fixed'])} + {size(model['per_atom'])} per atom + {size(model['per_edge'])} per edge, fitted to "
        f"the measured steps ({result['engine']}, {result['device']}). Configured: the largest batch of the first epochs.",
        f"It needs {size(result['needed'])} of {size(result['available'])} available, {100 * share:.3g} %: {advice}",
        "Not included: the GPU context (about 0.5 GiB), libraries and, with engine graphs, its memory pool for all sizes.",
    ]


def size(n: float) -> str:
    """A number of bytes with its unit."""
    for unit, scale in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if n >= 0.95 * scale:
            return f"{n / scale:.3g} {unit}"
    return f"{n:.0f} B"
