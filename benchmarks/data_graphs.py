"""Neighbour lists of single frames beside the libraries that find them."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from ase import Atoms
from ase.neighborlist import neighbor_list
from data_measure import Settings, Table, best_of, copper, lips, water

from forgefield.data.frame import Frame
from forgefield.data.neighbours.graph import GraphOptions, build_edges
from forgefield.data.store.table import FrameTable

CASES: list[tuple[str, Callable[[Settings], FrameTable | None], float]] = [
    ("LiPS", lips, 5.0),
    ("Cu", copper, 4.0),
    ("Cu", copper, 6.0),
    ("water", water, 6.0),
]


def searches(cutoff: float) -> dict[str, Callable[[Frame], int]]:
    """Ways to the list of a frame; each returns the number of edges. Ours is sorted and knows the reverse of every edge."""
    options = GraphOptions(cutoff)
    found: dict[str, Callable[[Frame], int]] = {
        "forgefield": lambda f: len(build_edges(f.positions, f.cell, f.pbc, options)),
        "ase": lambda f: len(neighbor_list("ijS", Atoms(f.numbers, f.positions, cell=f.cell, pbc=f.pbc), cutoff)[0]),
    }
    try:
        import vesin

        def with_vesin(frame: Frame) -> int:
            search = vesin.NeighborList(cutoff=cutoff, full_list=True, n_threads=1)
            return len(search.compute(points=frame.positions, box=frame.cell, periodic=frame.pbc, quantities="ijS")[0])

        found["vesin"] = with_vesin
    except ImportError:
        print("left out: vesin is not installed")
    try:
        from matscipy.neighbours import neighbour_list

        found["matscipy"] = lambda f: len(
            neighbour_list("ijS", positions=f.positions, cell=f.cell, pbc=f.pbc, cutoff=cutoff)[0]
        )
    except ImportError:
        print("left out: matscipy is not installed")
    return found


def neighbours(settings: Settings) -> None:
    """Ours against vesin, matscipy and ASE, which neither sort nor find reverse edges."""
    peers = ("vesin", "matscipy", "ase")
    widths = dict.fromkeys(("forgefield", *peers), 10)
    over = {f"{name}/ours": 14 for name in peers}
    out = Table(
        "Neighbour list of one frame, CPU ms; then each library over ours",
        system=8,
        atoms=6,
        cutoff=7,
        edges=8,
        **widths,
        **over,
    )
    for name, read, cutoff in CASES:
        table = read(settings)
        if table is None:
            continue
        frames = list(table.frames(np.arange(0, len(table), max(1, len(table) // 16))))
        ways = searches(cutoff)
        counts = {way: [search(frame) for frame in frames] for way, search in ways.items()}
        assert all(count == counts["forgefield"] for count in counts.values()), "the lists differ"
        works = {way: lambda search=search: [search(frame) for frame in frames] for way, search in ways.items()}  # noqa: B023
        times = {way: timing.over(len(frames)).cpu for way, timing in best_of(works, settings.repeats).items()}
        ours = times["forgefield"]
        out.row(
            name,
            len(frames[0]),
            cutoff,
            float(np.mean(counts["forgefield"])),
            ours,
            *(times.get(peer) for peer in peers),
            *(times[peer] / ours if peer in times else None for peer in peers),
        )


PARTS = {"neighbours": neighbours}
