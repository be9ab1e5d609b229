"""Rows of the table of engines and peers: what was measured of each, or why nothing was."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from forgefield.bench.tables import milliseconds as ms
from forgefield.bench.tables import plain_table

if TYPE_CHECKING:
    from rich.table import Table

    from forgefield.bench.roofline import Limits, Work
    from forgefield.bench.timer import Measurement


@dataclass(frozen=True)
class Row:
    """engine: `eager`, ..., or the name of a peer. captured: the engine whose step graphs replay. refusal: why there are no
    numbers. memory_bytes: most memory of tensors on a GPU, else of the process. bandwidth, arithmetic: fractions of the
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
    """result: what `bench_peers.py` wrote. atoms, edges: of the structures that it was given."""
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
        note=f"{result['words']}, {result['parameters']:,} parameters",
    )


def engines_table(rows: Sequence[Row]) -> Table:
    from forgefield.training.run.summary import digits

    table = plain_table(
        *("engine", "derivative", "precision", "first\nstep, s", "ms per\nstep", "atoms/s", "edges/s", "memory,\nGiB"),
        *("of band-\nwidth", "of arith-\nmetic"),
    )
    for row in (row for row in rows if row.refusal is None):
        table.add_row(
            row.label,
            row.derivative or "-",
            row.precision,
            digits(row.first_step_seconds),
            ms(row.step_ms or 0.0),
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
    """Refusals first, then what the columns mean."""
    notes = [f"{row.label}, {row.precision}: {row.refusal}" for row in rows if row.refusal is not None]
    notes += [f"{row.label}: {row.note}." for row in rows if row.note]
    notes.append(
        "First step: from when its batch is there to its end, with compiling and the comparison with the eager engine. Memory: "
        + ("most of all tensors on the GPU." if device != "cpu" else "most of the process, libraries included.")
    )
    if limits is not None:
        from forgefield.bench.roofline import BYTES_IN_WORDS

        products = ", ".join(f"{rate / 1e12:.3g} Tflop/s {name}" for name, rate in limits.matmul.items())
        notes.append(
            f"Limits, measured: copying {limits.copy / 1e9:.3g} GB/s; matrix products {products}. "
            f"Of bandwidth: {BYTES_IN_WORDS}. Of arithmetic: matrix products of one eager step."
        )
    return notes


def best_row(rows: Sequence[Row], precision: str) -> Row | None:
    """The fastest of our own engines in this precision."""
    own = [row for row in rows if row.refusal is None and not row.is_peer and row.precision == precision]
    return min(own, key=lambda row: row.step_ms or 0.0, default=None)
