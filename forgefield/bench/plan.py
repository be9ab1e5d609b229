"""`forgefield bench --plan`: what a batch needs of memory, what there is, and which batch would fill it."""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from forgefield.bench.children import Children, Refused
from forgefield.bench.machine import on_devices, places
from forgefield.bench.session import console, notify, threads
from forgefield.bench.tables import plain_table
from forgefield.errors import ForgefieldError

if TYPE_CHECKING:
    from rich.table import Table

    from forgefield.config.schema import Config


def plan(config: Config, args: argparse.Namespace) -> int:
    """`--plan`."""
    _, kind = places(config)
    out = console()
    with tempfile.TemporaryDirectory(prefix="forgefield-bench-") as folder:
        children = Children(Path(folder), threads(1), args.steps, args.warmup, args.trust_code)
        notify(out, f"Memory of single training steps of {config.name}, on batches of 1, 2 and 4 frames.")
        result = children.run(on_devices(config, 1, kind), "plan")
    if isinstance(result, Refused):
        raise ForgefieldError(result.reason)
    out.print(plan_table(result))
    notify(out, *plan_notes(result))
    if args.json is not None:
        from forgefield.files import write_atomically

        result.pop("folder")
        write_atomically(args.json.absolute(), json.dumps(result, indent=1) + "\n")
    return 0


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
        f"It needs {size(result['needed'])} of the {size(result['available'])} that are free, {100 * share:.3g} %: {advice}",
        "Tensors only: a GPU context (about 0.5 GiB), libraries and, with graphs, one such memory for all sizes come on top.",
    ]


def size(n: float) -> str:
    """Bytes for people."""
    for unit, scale in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if n >= 0.95 * scale:
            return f"{n / scale:.3g} {unit}"
    return f"{n:.0f} B"
