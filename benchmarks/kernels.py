"""Generated kernels of NequIP on water, one by one and in the whole training step: microseconds, bytes, launches.

    python benchmarks/kernels.py [--preset M] [--frames 32] [--knots 1024] [--storage bfloat16] [--in-turn] [--repeats 20]
                                 [--timeline FILE]
    python benchmarks/kernels.py --count [--preset M] [--atoms 6144] [--edges 332582]

Each pass of each layer is captured `--repeats` times in one CUDA graph, so that nothing waits for Python, and timed by CUDA
events. Inputs that fit the L2 cache are found there again. Bytes are counted from shapes: `HBM`, what has to come from or go to
device memory at least once; `L2`, what programs ask for, rows of other atoms and of the table for every edge. Before all that
comes the whole step (gradients and Adam, as a captured graph), with time by kernel from torch's profiler. What would begin
after `--budget` seconds are left out, which is said; Triton compiles before the first launch and keeps the result. `--count`
only counts, without a GPU. `--device cpu` with TRITON_INTERPRET=1 goes through every launch in Triton's interpreter, for which
`--preset tiny --frames 1 --molecules 1 --knots 16` is enough; its times mean nothing.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import numpy as np
import torch
from engines import MODELS, SPECIES, Trained, seconds_of, trained, water_batch, whole_step
from torch import Tensor

from forgefield.data.batch import Batch
from forgefield.data.padding import plan_sizes, sizes
from forgefield.kernels.convolution.form import Form, form_of
from forgefield.kernels.convolution.passes import Convolution, Motion, Radial, Rows
from forgefield.kernels.convolution.sums import sum_into_field
from forgefield.kernels.core import runtime
from forgefield.kernels.core.fields import TANGENT, Field
from forgefield.kernels.edges.geometry import EdgeGeometry, moved_geometry
from forgefield.kernels.edges.segments import forces_by_kernel
from forgefield.kernels.radial.packing import StoredTable
from forgefield.kernels.radial.table import CHUNK, Intervals, TableGradient
from forgefield.models.building import build_model
from forgefield.models.edges import edge_vectors
from forgefield.models.nequip.model import NequIP
from forgefield.models.nequip.passes import Layer, Network
from forgefield.models.nequip.tables import radial_tables
from forgefield.models.resolving import resolve_model
from forgefield.ops.execution import STORAGE, execution
from forgefield.ops.graph import EdgeGraph, edge_graph
from forgefield.training.engines.engine import Engine
from forgefield.training.engines.graphs import GraphsEngine
from forgefield.training.engines.step import StepFunction
from forgefield.training.precision import Precision

HBM, L2 = 4.2e12, 10e12
"""Bytes a second of an H200: a copy through device memory as measured, and reads that hit the L2 cache, about."""
FLOAT, INDEX, INTERVAL = 4, 8, 2
"""Bytes of a number, of an index and of the number of an interval."""


# ---- bytes


class Bytes(NamedTuple):
    hbm: float
    l2: float = 0.0

    @property
    def floor_us(self) -> float:
        return 1e6 * max(self.hbm / HBM, self.l2 / L2)


def convolution_bytes(form: Form, n_atoms: int, n_edges: int, knots: int, name: str, first: bool) -> Bytes:
    """Of one pass of a convolution with a table, sums over neighbours not included. first: of the first layer, whose features
    do not move and are not differentiated for forces."""
    dual, backward = name in ("tangents", "back"), name in ("forces", "back")
    n_out = sum(path.n_out * block.channels for block in form.blocks for path in block.paths)
    features = form.features.dim * (2 if dual and not first else 1)
    table = knots * 3 * form.n_weights
    outputs = n_out * (2 if name == "back" else 1)
    streamed = n_edges * ((form.n_harmonics + 1) * (2 if dual else 1) * FLOAT + INDEX + INTERVAL) + n_atoms * INDEX
    streamed += FLOAT * n_atoms * outputs
    if backward and not (name == "forces" and first):
        streamed += FLOAT * n_edges * form.features.dim
    if name == "forces":
        streamed += FLOAT * n_edges * form.n_chunks * 4
    if name == "back":
        streamed += FLOAT * n_edges * 2 * form.n_weights
    hbm = streamed + FLOAT * (n_atoms * features + table)
    return Bytes(hbm, streamed + FLOAT * n_edges * (features + 3 * form.n_weights))


def sum_bytes(form: Form, n_atoms: int, n_edges: int) -> Bytes:
    moved = (n_edges + n_atoms) * form.features.dim * FLOAT + n_edges * INDEX
    return Bytes(moved, moved)


def table_bytes(n_weights: int, n_edges: int, knots: int) -> Bytes:
    """Rows are read once; sums of chunks are written, and read again by the sum over each interval."""
    chunks = (knots + n_edges // CHUNK) * 4 * n_weights
    moved = n_edges * (2 * n_weights * FLOAT + 2 * FLOAT + INDEX) + FLOAT * (2 * chunks + knots * 4 * n_weights)
    return Bytes(moved, moved)


def gate_bytes(layer: Layer, name: str) -> Bytes:
    a, h, n = layer.a.shape.dim, layer.h.shape.dim, layer.a.n_atoms
    numbers = {"values": a + h, "tangents": 2 * a + h, "forces": 2 * a + h, "back": 3 * a + 2 * h}[name]
    return Bytes(FLOAT * n * numbers, FLOAT * n * numbers)


def plain(*tensors: Tensor) -> Bytes:
    """Of tensors that are read or written once."""
    total = sum(tensor.numel() * tensor.element_size() for tensor in tensors)
    return Bytes(total, total)


# ---- one launch after the other


class Timed(NamedTuple):
    """where: a layer, or what is not of a layer. what: the pass."""

    where: str
    what: str
    action: Callable[[], Any]
    moved: Bytes | None


class _Alone(Convolution):
    """A convolution without the sums over neighbours that follow it, which are timed apart."""

    def _sum(self, rows: Tensor, to_x: Field | None, place: int, first: int = 0) -> None:
        pass


class Scene:
    """A model on a batch with every field filled, so that each pass can be repeated."""

    def __init__(self, model: NequIP, batch: Batch, knots: int) -> None:
        self.model, self.batch, self.knots = model, batch, knots
        self.graph: EdgeGraph = edge_graph(batch)
        self.vectors = edge_vectors(batch)
        self.inverse = model.inverse_cutoffs(batch["species"], self.graph)
        self.tangents = torch.randn_like(self.vectors)
        l_max, dtype = model.options.l_max, model.dtype
        self.harmonics, _, self.place, at = EdgeGeometry.apply(self.vectors, self.inverse, l_max, knots, dtype)
        self.at = Intervals(at, knots).sort()
        d_harmonics, self.d_place = moved_geometry(self.vectors, self.tangents, self.inverse, l_max, knots, dtype)
        self.motion = Motion(d_harmonics, position=self.d_place)
        self.network = Network(model, batch["species"], self.graph)
        self.radials = [Radial(table.words, at, self.place, table.unit) for table in self.tables()]
        features = self.network.values(self.harmonics, self.radials)
        self.to_geometry, _ = self.network.forces(torch.randn_like(features))
        motions = [self.motion] * len(self.network.layers)
        self.network.tangents(motions)
        self.to_weights: dict[int, list[Rows]] = {}
        self.network.back(torch.randn_like(features), motions, self)

    def tables(self) -> list[StoredTable]:
        return [table.stored() for table in radial_tables(self.model, self.knots)]

    def begin(self, layer: int, motion: Motion) -> None:
        self.to_weights[layer] = []

    def add(self, layer: int, rows: Rows) -> None:
        """Keep the cotangents of a layer's radial weights."""
        self.to_weights[layer].append(rows)

    def end(self, layer: int) -> None:
        pass

    def geometry(self) -> Iterator[Timed]:
        graph, vectors, l_max, dtype = self.graph, self.vectors, self.model.options.l_max, self.model.dtype
        given = [self.batch[key] for key in ("positions", "cell", "frame", "edge_index", "edge_shift")]
        yield Timed("edges", "vectors", lambda: edge_vectors(self.batch), plain(*given, vectors))
        made = (self.harmonics, self.place, self.at.at)

        def values() -> Any:
            return EdgeGeometry.apply(vectors, self.inverse, l_max, self.knots, dtype)

        def back() -> Any:
            with torch.enable_grad():
                moving = vectors.detach().requires_grad_(True)
                _, direction, place, _ = EdgeGeometry.apply(moving, self.inverse, l_max, self.knots, dtype)
                given = (self.to_geometry[:, :3], self.to_geometry[:, 3])
                return torch.autograd.grad([direction, place], [moving], given)

        def tangents() -> Any:
            return moved_geometry(vectors, self.tangents, self.inverse, l_max, self.knots, dtype)

        yield Timed("edges", "harmonics", values, plain(vectors, *made))
        yield Timed("edges", "harmonics, and back", back, plain(vectors, *made, self.to_geometry, vectors, vectors))
        yield Timed("edges", "harmonics' tangents", tangents, plain(vectors, vectors, *made[:2]))
        yield Timed("edges", "by interval", lambda: Intervals(self.at.at, self.knots).sort().sorted(), None)
        slopes = plain(vectors, vectors, graph.by_source.order)
        yield Timed("edges", "forces", lambda: forces_by_kernel(vectors, graph), slopes)
        yield Timed("all layers", "tables", self.tables, None)

    def layers(self) -> Iterator[Timed]:
        for number, layer in enumerate(self.network.layers):
            yield from self._layer(f"layer {number + 1}", layer, self.radials[number], self.to_weights[number])

    def _layer(self, where: str, layer: Layer, radial: Radial, to_weights: list[Rows]) -> Iterator[Timed]:
        graph, form, motion = self.graph, layer.form, self.motion

        def table_gradient() -> None:
            found = TableGradient(self.at, self.place, self.d_place, form.n_weights)
            for of_w, of_dw, block in to_weights:
                found.add(of_w, of_dw, None if block is None else block.columns)
            found.result()

        alone = _Alone(form, graph, self.harmonics, radial, still=layer.first)
        to_x = None if layer.first else layer.to_x
        parts = self.place.new_empty((form.n_chunks, graph.n_edges, 4))
        passes = {
            "values": lambda: alone.values(layer.x, layer.z),
            "forces": lambda: alone.forces(layer.x, layer.to_z, to_x, parts),
            "tangents": lambda: alone.tangents(layer.x, layer.z, motion),
            "back": lambda: alone.back(layer.x, layer.to_z, layer.to_x, motion, lambda rows: None),
        }
        for name, action in passes.items():
            moved = convolution_bytes(form, graph.n_atoms, graph.n_edges, self.knots, name, layer.first)
            yield Timed(where, f"convolution, {name}", action, moved)
        rows = self.place.new_zeros((graph.n_edges, form.features.dim), dtype=alone.stored)
        moved = sum_bytes(form, graph.n_atoms, graph.n_edges)
        yield Timed(where, "sum", lambda: sum_into_field(rows, graph.by_source, layer.to_x, TANGENT), moved)
        moved = table_bytes(form.n_weights, graph.n_edges, self.knots)
        yield Timed(where, "table gradient", table_gradient, moved)
        gates = {
            "values": lambda: layer.nonlinearity.values(layer.a, layer.h),
            "forces": lambda: layer.nonlinearity.forces(layer.a, layer.to_h, layer.to_a),
            "tangents": lambda: layer.nonlinearity.tangents(layer.a, layer.h),
            "back": lambda: layer.nonlinearity.back(layer.a, layer.to_h, layer.to_a),
        }
        for name, action in gates.items():
            yield Timed(where, f"gate, {name}", action, gate_bytes(layer, name))


def microseconds(action: Callable[[], Any], device: torch.device, repeats: int) -> float:
    if device.type != "cuda":
        return 1e6 * seconds_of(action, device)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        action()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(repeats):
            action()
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    graph.replay()
    begin.record()
    graph.replay()
    end.record()
    torch.cuda.synchronize()
    return 1000 * begin.elapsed_time(end) / repeats


HEAD = f"{'':10} {'':22} {'us':>9} {'HBM, MB':>9} {'TB/s':>6} {'L2, MB':>9} {'TB/s':>6} {'floor, us':>10}"


def show(timed: Timed, taken: float) -> None:
    line = f"{timed.where:10} {timed.what:22} {taken:9.1f}"
    if timed.moved is not None:
        hbm, l2 = timed.moved
        rates = f"{hbm / 1e6:9.1f} {hbm / taken / 1e6:6.2f} {l2 / 1e6:9.1f} {l2 / taken / 1e6:6.2f}"
        line += f" {rates} {timed.moved.floor_us:10.1f}"
    print(line, flush=True)


# ---- the whole step


def show_step(model: Trained, batch: Batch, knots: int, storage: str, timeline: Path | None) -> None:
    """The step as `training.engine=graphs` and `training.derivative=kernels` make it. timeline: a file for one of them."""
    function = StepFunction(
        model.potential, model.task, model.errors, derivative="kernels", knots=knots, storage=storage
    )
    device = batch["positions"].device
    if device.type != "cuda":
        seconds = seconds_of(lambda: Engine(function).differentiate(batch), device)
        print(f"\nwhole step, eager: {seconds:.1f} s; graphs and their profile need an NVIDIA GPU")
        return
    engine = GraphsEngine(Engine(function), plan=plan_sizes(np.array([sizes(batch)])))
    step = whole_step(engine, batch)
    first = seconds_of(step, device)
    step()
    repeats = 20
    taken = min(seconds_of(step, device, repeats) for _ in range(3)) / repeats
    memory = torch.cuda.max_memory_allocated() / 2**30
    print(f"\nwhole step: {1000 * taken:.3f} ms, the first {first:.1f} s, {memory:.2f} GiB at most")
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        step()
        torch.cuda.synchronize()
    if timeline is not None:
        write_timeline(profile, timeline)
    found = [event for event in profile.key_averages() if event.self_device_time_total > 0]
    found.sort(key=lambda event: -event.self_device_time_total)
    total = sum(event.self_device_time_total for event in found)
    launches = sum(event.count for event in found)
    print(f"{launches} launches, {total / 1000:.3f} ms in kernels")
    print(f"{'ms':>8} {'launches':>9}  kernel")
    for event in found[:40]:
        print(f"{event.self_device_time_total / 1000:8.3f} {event.count:9}  {event.key[:110]}")
    rest = found[40:]
    if rest:
        spent = sum(event.self_device_time_total for event in rest) / 1000
        print(f"{spent:8.3f} {sum(event.count for event in rest):9}  {len(rest)} others")


def write_timeline(profile: torch.profiler.profile, file: Path) -> None:
    """Start and duration of every launch, microseconds, its stream, grid and registers, and the name of the kernel."""
    with tempfile.TemporaryDirectory() as folder:
        profile.export_chrome_trace(f"{folder}/trace.json")
        events = json.loads(Path(f"{folder}/trace.json").read_text())["traceEvents"]
    events = [event for event in events if event.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset")]
    events.sort(key=lambda event: event["ts"])
    with file.open("w") as out:
        for event in events:
            about = [event["args"].get(key) for key in ("stream", "grid", "registers per thread")]
            print(f"{event['ts'] - events[0]['ts']:9.1f} {event['dur']:8.1f} {about} {event['name'][:90]}", file=out)


# ---- counting alone


def show_count(preset: str, n_atoms: int, n_edges: int, knots: int) -> None:
    statistics = {"avg_num_neighbours": 54.0, "energy_scales": 1.0, "energy_shifts": 0.0}
    resolved = resolve_model({**MODELS[preset], **statistics}, species=SPECIES, cutoff=5.0)
    model = build_model(resolved, precision="float32", seed=1).model
    assert isinstance(model, NequIP)
    print(f"preset {preset}, {n_atoms} atoms, {n_edges} edges, {knots} intervals")
    print(f"{'':10} {'':22} {'HBM, MB':>9} {'L2, MB':>9} {'HBM, us':>9} {'L2, us':>9}")
    floor, total_hbm, total_l2 = 0.0, 0.0, 0.0
    for number, layer in enumerate(model.layers):
        form = form_of(layer.plan, tuple(tuple(paths) for _, paths in layer.targets), (0,) * len(layer.targets))
        about = f"layer {number + 1}"
        rows = {
            f"convolution, {name}": convolution_bytes(form, n_atoms, n_edges, knots, name, number == 0)
            for name in ("values", "forces", "tangents", "back")
        }
        rows |= {
            "sum": sum_bytes(form, n_atoms, n_edges),
            "table gradient": table_bytes(form.n_weights, n_edges, knots),
        }
        for name, (hbm, l2) in rows.items():
            microseconds_of = f"{1e6 * hbm / HBM:9.0f} {1e6 * l2 / L2:9.0f}"
            print(f"{about:10} {name:22} {hbm / 1e6:9.1f} {l2 / 1e6:9.1f} {microseconds_of}")
            times_a_step = 2 if name == "sum" and number > 0 else 1
            floor += times_a_step * Bytes(hbm, l2).floor_us
            total_hbm, total_l2 = total_hbm + times_a_step * hbm, total_l2 + times_a_step * l2
    print(
        f"in a step, sums twice but in the first layer: HBM {total_hbm / 1e9:.2f} GB, L2 {total_l2 / 1e9:.2f} GB, "
        f"{floor / 1000:.2f} ms at least: the longer of the two times of each"
    )


def arguments(words: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--preset", choices=[name for name in MODELS if name != "A"], default="M")
    parser.add_argument("--frames", type=int, default=32, help="of 192 atoms")
    parser.add_argument("--molecules", type=int, default=4, help="along an edge of a frame's box")
    parser.add_argument("--knots", type=int, default=1024, help="intervals of the tables")
    parser.add_argument("--storage", choices=list(STORAGE), default="float32", help="bytes are counted for float32")
    parser.add_argument("--repeats", type=int, default=20, help="of each pass, in one graph")
    parser.add_argument("--budget", type=float, default=40.0, help="seconds after which nothing new is started")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--timeline", type=Path, help="write one step here, launch by launch")
    parser.add_argument("--in-turn", action="store_true", help="no part of the step runs concurrently with the rest")
    parser.add_argument("--count", action="store_true", help="print bytes by count and stop")
    parser.add_argument("--atoms", type=int, default=6144, help="for --count")
    parser.add_argument("--edges", type=int, default=332_582, help="for --count")
    return parser.parse_args(words)


def main(words: list[str] | None = None) -> None:
    args = arguments(words)
    if args.count:
        show_count(args.preset, args.atoms, args.edges, args.knots)
        return
    device, began = torch.device(args.device), time.perf_counter()
    cutoff = 5.0 if args.molecules >= 4 else 3.0
    with Precision("float32").applied("float32"), execution(kernels=True, knots=args.knots, storage=args.storage):
        model = trained(args.preset, cutoff, "float32", device)
        batch = water_batch(args.frames, args.molecules, cutoff, device)
        frames, atoms, edges = sizes(batch)
        name = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
        print(f"{name}, torch {torch.__version__}, preset {args.preset}, {frames} frames, {atoms} atoms, {edges} edges")
        assert isinstance(model.potential.model, NequIP)
        # The step goes first: it compiles what is then timed alone.
        with mock.patch.object(runtime, "capturing", return_value=False) if args.in_turn else nullcontext():
            show_step(model, batch, args.knots, args.storage, args.timeline)
        with torch.no_grad():
            scene = Scene(model.potential.model, batch, args.knots)
            print(f"\n{HEAD}")
            for timed in (*scene.geometry(), *scene.layers()):
                if time.perf_counter() - began > args.budget:
                    print(f"the rest, from {timed.where}, {timed.what}: the {args.budget:g} s are up")
                    break
                show(timed, microseconds(timed.action, device, args.repeats))
    print(f"{time.perf_counter() - began:.0f} s in all")


if __name__ == "__main__":
    sys.exit(main())
