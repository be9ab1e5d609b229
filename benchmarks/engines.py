"""Whole training steps (energies and forces, gradients, Adam) of every engine on water, on this machine.

    python benchmarks/engines.py [--cases S-32 M-1 L-32 A-32 ...] [--engines eager compile graphs-eager graphs-compiled script]
                                 [--derivatives double kernels tangent] [--precision tf32] [--plain-edges] [--budget 600]
                                 [--fresh-cache] [--json out.json]
                                 [--peers [--peer-modes eager compile oeq oeq-compile] [--peer-python other/bin/python]]

A case is a model and a batch: presets S, M and L of NequIP and an Allegro (A: l_max 2, 2 layers, 64 scalar and 64 tensor
features) on 32, 8 or 1 frames of 192 atoms, or `small`, 5 frames of 24; cutoff 5 A, about 54 neighbours. Before an engine is
timed, its loss and all its gradients must equal those of the eager engine with double backward. The first step is timed from
the call to its end, compiling included; an engine is compiled once for all batches of a model. Engine `best` is graphs with
kernels where the model has them, else of the compiled step. `--plain-edges`: Allegro without its kernels. Peers run in
processes of their own, which compile side by side before anything is timed; `oeq` is NequIP with kernels of OpenEquivariance. A
table at the end says what both computed.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from ase.data import atomic_numbers
from engines_peers import MODES, Peers

from forgefield.bench.training import water
from forgefield.data.batch import Batch, batch_from_frames, to_device
from forgefield.data.padding import plan_sizes, sizes
from forgefield.data.readers import frames_from_atoms
from forgefield.data.species import SpeciesTable
from forgefield.errors import ForgefieldError
from forgefield.models.building import build_model
from forgefield.models.potential import Potential
from forgefield.models.resolving import resolve_model
from forgefield.tasks.metrics import ErrorMetrics
from forgefield.tasks.options import TargetOptions, TaskOptions
from forgefield.tasks.task import Task
from forgefield.training.engines.choose import Choice, kernels_refusal
from forgefield.training.engines.compiled import CompileEngine
from forgefield.training.engines.engine import Engine
from forgefield.training.engines.graphs import GraphsEngine
from forgefield.training.engines.script import ScriptEngine
from forgefield.training.engines.step import DERIVATIVES, StepFunction
from forgefield.training.engines.verify import require_equal
from forgefield.training.optim.captured_optimiser import CapturedOptimiser
from forgefield.training.precision import TOLERANCES, Precision

SPECIES = ("H", "O")
MODELS: dict[str, dict[str, Any]] = {
    "tiny": {"name": "nequip", "num_layers": 1, "l_max": 1, "num_features": 4, "radial_mlp_width": 8},
    "S": {"name": "nequip", "preset": "S"},
    "M": {"name": "nequip", "preset": "M"},
    "L": {"name": "nequip", "preset": "L"},
    "A": {"name": "allegro", "l_max": 2, "num_layers": 2, "num_scalar_features": 64, "num_tensor_features": 64},
}
BATCHES = {"tiny": (2, 2, 3.0), "32": (32, 4, 5.0), "8": (8, 4, 5.0), "1": (1, 4, 5.0), "small": (5, 2, 5.0)}
"""Frames, molecules along an edge of the box, cutoff in A."""
CASES = ["S-1", "S-small", "S-8", "S-32", "M-1", "M-small", "M-8", "M-32", "L-32", "A-32"]
ENGINES = ("eager", "compile", "graphs-eager", "graphs-compiled", "script", "best")
LEARNING_RATE = 1e-4


@dataclass
class Trained:
    """One model on the device with what its engines have in common. compiled: by derivative, made when first asked for."""

    potential: Potential
    resolved: dict[str, Any]
    task: Task
    errors: ErrorMetrics
    compiled: dict[str, CompileEngine]
    edge_kernels: bool = True

    def function(self, derivative: str) -> StepFunction:
        return StepFunction(
            self.potential, self.task, self.errors, derivative=derivative, edge_kernels=self.edge_kernels
        )

    def engine(self, name: str, derivative: str, batch: Batch) -> Engine:
        if name == "script":
            return ScriptEngine(self.function(derivative))
        inner = Engine(self.function(derivative))
        if name in ("compile", "graphs-compiled"):
            inner = self.compiled.setdefault(derivative, CompileEngine(self.function(derivative)))
        if not name.startswith("graphs"):
            return inner
        return GraphsEngine(inner, plan=plan_sizes(np.array([sizes(batch)])))


def resolve(model: str, cutoff: float) -> dict[str, Any]:
    """All options of a model."""
    statistics = {"avg_num_neighbours": 54.0, "energy_scales": 1.0, "energy_shifts": 0.0}
    return resolve_model({**MODELS[model], **statistics}, species=SPECIES, cutoff=cutoff)


def trained(model: str, cutoff: float, precision: str, device: torch.device) -> Trained:
    resolved = resolve(model, cutoff)
    potential = build_model(resolved, precision=Precision(precision).weights, seed=1).train().to(device)
    task = Task(TaskOptions(energy=TargetOptions(), forces=TargetOptions()), SPECIES)
    return Trained(potential, resolved, task, ErrorMetrics(task.names, SPECIES), {})


def batch_of(name: str, device: torch.device) -> Batch:
    return water_batch(*BATCHES[name], device)


def water_batch(frames: int, along_edge: int, cutoff: float, device: torch.device) -> Batch:
    rng = np.random.default_rng(7)
    atoms = [water(rng, along_edge) for _ in range(frames)]
    return to_device(batch_from_frames(frames_from_atoms(atoms), SpeciesTable(SPECIES), cutoff), device)


# ---- one engine


def whole_step(engine: Engine, batch: Batch) -> Callable[[], None]:
    """Gradients and Adam, as the training does them with this engine."""
    weights = engine.function.trained_weights()
    optimiser = torch.optim.Adam(weights, lr=LEARNING_RATE)
    if isinstance(engine, GraphsEngine):
        update = CapturedOptimiser(optimiser, None)

        def replay() -> None:
            engine.differentiate(batch)
            engine.assign_gradients()
            update.step()

        return replay

    def step() -> None:
        loss = engine.step(batch).loss
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()

    return step


def seconds_of(action: Callable[[], None], device: torch.device, repeats: int = 1) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(repeats):
        action()
    if device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - start


def measure(engine: Engine, reference: Engine, batch: Batch, tolerance: float, seconds: float) -> dict[str, Any]:
    """seconds: to spend on timing, about."""
    device = batch["positions"].device
    step = whole_step(engine, batch)
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    first = seconds_of(step, device)
    step()  # by now it has all it needs: optimiser state, captured graphs
    memory = torch.cuda.max_memory_allocated() / 2**30 if device.type == "cuda" else None
    difference = require_equal(engine, reference, batch, tolerance).difference
    warm = seconds_of(step, device, 3) / 3
    repeats = int(np.clip(seconds / max(warm, 1e-5), 3, 50))
    taken = min(seconds_of(step, device, repeats) for _ in range(2))
    weights = engine.function.trained_weights()
    return {
        "first_step_s": first,
        "step_ms": 1000 * taken / repeats,
        "difference": difference,
        "memory_gib": memory,
        "parameters": sum(weight.numel() for weight in weights),
        "with_gradient": sum(weight.numel() for weight in weights if weight.grad is not None),
    }


# ---- all of them


def parts(case: str) -> tuple[tuple[str, float], str]:
    """Model and cutoff, and the name of the batch."""
    model, _, size = case.partition("-")
    size = size or "tiny"
    return (model, BATCHES[size][2]), size


def rows(
    args: argparse.Namespace, device: torch.device, peers: Peers | None, out_of_time: Callable[[], bool]
) -> Iterator[dict[str, Any]]:
    models: dict[tuple[str, float], Trained] = {}
    for case in args.cases:
        key, size = parts(case)
        if out_of_time():
            yield {"case": case, "engine": "all", "refusal": "the time is up"}
            continue
        for other in [other for other in models if other != key]:
            del models[other]
        if key not in models:
            models[key] = replace(trained(*key, args.precision, device), edge_kernels=not args.plain_edges)
        batch = batch_of(size, device)
        frames, atoms, edges = sizes(batch)
        about = {"case": case, "frames": frames, "atoms": atoms, "edges": edges}
        for name, derivative in ways(models[key], args, device):
            row = {**about, "engine": name, "derivative": derivative}
            yield {**row, **one(models[key], name, derivative, batch, args, out_of_time)}
        if peers is not None:
            yield from peer_rows(about, models[key].resolved["name"], peers, args.peer_modes, out_of_time)


def ways(model: Trained, args: argparse.Namespace, device: torch.device) -> Iterator[tuple[str, str]]:
    """Engines and derivatives. `best` is graphs with kernels where the model has them, else of the compiled step."""
    named = [name for name in args.engines if name != "best"]
    yield from ((name, derivative) for derivative in args.derivatives for name in named)
    if "best" in args.engines:
        choice = Choice("graphs", "kernels", "eager")
        has_kernels = kernels_refusal(choice, model.function("kernels"), device) is None
        yield ("graphs-eager", "kernels") if has_kernels else ("graphs-compiled", "double")


def one(
    model: Trained, name: str, derivative: str, batch: Batch, args: argparse.Namespace, out_of_time: Callable[[], bool]
) -> dict[str, Any]:
    if out_of_time():
        return {"refusal": "the time is up"}
    if name.startswith("graphs") and batch["positions"].device.type != "cuda":
        return {"refusal": "needs an NVIDIA GPU"}
    if derivative == "kernels":
        word, _, captured = name.partition("-")
        choice = Choice(word, derivative, captured or None)
        refusal = kernels_refusal(choice, model.function(derivative), batch["positions"].device)
        if refusal is not None:
            return {"refusal": refusal}
    engine: Engine | None = None
    try:
        engine = model.engine(name, derivative, batch)
        reference = Engine(model.function("double"))
        return measure(engine, reference, batch, TOLERANCES[args.precision], args.seconds)
    except (ForgefieldError, RuntimeError) as error:
        return {"refusal": f"{type(error).__name__}: {(str(error).splitlines() or [''])[0][:200]}"}
    finally:
        for parameter in model.potential.parameters():
            parameter.grad = None
        if isinstance(engine, GraphsEngine):
            engine._captured.clear()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()


def start_peers(peers: Peers, args: argparse.Namespace, device: torch.device) -> None:
    """Let every peer compile for all cases of a model, side by side."""
    job = {"device": str(device), "precision": args.precision, "lr": LEARNING_RATE}
    numbers = [atomic_numbers[species] for species in SPECIES]
    models: dict[tuple[str, float], list[str]] = {}
    for case in args.cases:
        models.setdefault(parts(case)[0], []).append(case)
    for key, cases in models.items():
        resolved = resolve(*key)
        batches = {case: batch_of(parts(case)[1], torch.device("cpu")) for case in cases}
        for mode in args.peer_modes:
            peers.add(f"{resolved['name']} {mode}", resolved, numbers, batches, job)
    peers.prepare()


def peer_rows(
    about: dict[str, Any], program: str, peers: Peers, modes: list[str], out_of_time: Callable[[], bool]
) -> Iterator[dict[str, Any]]:
    for mode in modes:
        name = f"{program} {mode}"
        row = {**about, "engine": name, "derivative": "-"}
        found = {"refusal": "the time is up"} if out_of_time() else peers.time(name, about["case"])
        if "refusal" in found:
            yield {**row, "refusal": found["refusal"]}
            continue
        if any(found[size] != about[size] for size in ("frames", "atoms", "edges")):
            raise SystemExit(f"{name} was given another batch than ours: {found}, {about}")
        memory = found["memory_bytes"]
        row |= {
            "first_step_s": found["first_step_seconds"],
            "step_ms": found["step_ms"],
            "description": found["description"],
        }
        row["memory_gib"] = None if memory is None else memory / 2**30
        yield {**row, **{name: found[name] for name in ("parameters", "with_gradient", "all_finite")}}


def show(row: dict[str, Any]) -> None:
    size = f"{row.get('atoms', ''):>6} {row.get('edges', ''):>7}"
    name = f"{row['case']:8} {size} {row['engine']:16} {row.get('derivative', ''):8}"
    if "refusal" in row:
        print(f"{name} {row['refusal']}", flush=True)
        return
    memory = "" if row["memory_gib"] is None else f"{row['memory_gib']:8.2f}"
    difference = "" if row.get("difference") is None else f"{row['difference']:9.1e}"
    rate = 1000 * row["atoms"] / row["step_ms"]
    print(
        f"{name} {row['first_step_s']:8.2f} {row['step_ms']:9.2f} {rate:10.0f} {memory:>8} {difference:>9}", flush=True
    )


def compare(rows: list[dict[str, Any]]) -> None:
    """Our fastest row of each case with every peer's, and what each of them computed."""
    print(
        "\nEach computes energies and forces, mean squared errors per atom and per component, gradients of all weights, Adam."
    )
    for case in dict.fromkeys(row["case"] for row in rows):
        of_case = [row for row in rows if row["case"] == case and "refusal" not in row]
        ours = min((row for row in of_case if row["derivative"] != "-"), key=lambda row: row["step_ms"], default=None)
        for row in of_case:
            if row is not ours and row["derivative"] != "-":
                continue
            parameters = f"{row['parameters']:,} weights, {row['with_gradient']:,} with a gradient"
            sizes_of = f"{row['frames']} frames, {row['atoms']} atoms, {row['edges']} edges"
            times = f"{row['step_ms']:8.2f} ms"
            if ours is not None and row is not ours:
                times += f" = {row['step_ms'] / ours['step_ms']:.2f} x ours"
                if row["memory_gib"] and ours["memory_gib"]:
                    times += f", memory {row['memory_gib'] / ours['memory_gib']:.1f} x"
            print(
                f"{case:8} {row['engine']:18} {times}; {sizes_of}; {parameters}; {row.get('description', 'Forgefield')}"
            )


def arguments(words: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    known = ["tiny", *(f"{model}-{batch}" for model in ("S", "M", "L", "A") for batch in ("32", "8", "1", "small"))]
    parser.add_argument("--cases", nargs="+", choices=known, default=CASES, metavar="CASE", help=" ".join(known))
    parser.add_argument("--engines", nargs="+", choices=ENGINES, default=list(ENGINES[:4]))
    parser.add_argument("--derivatives", nargs="+", choices=DERIVATIVES, default=["double", "kernels"])
    parser.add_argument("--plain-edges", action="store_true", help="no kernels for Allegro")
    parser.add_argument("--precision", choices=sorted(TOLERANCES), default="float32")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--seconds", type=float, default=0.5, help="spent on timing each engine, about")
    parser.add_argument("--budget", type=float, help="seconds after which nothing new is started")
    parser.add_argument("--fresh-cache", action="store_true", help="compile everything anew, in a temporary cache")
    parser.add_argument("--json", type=Path, help="write all rows here, again after every row")
    parser.add_argument("--peers", action="store_true", help="also NequIP or Allegro themselves")
    parser.add_argument("--peer-modes", nargs="+", choices=MODES, default=["eager", "compile"])
    parser.add_argument("--peer-steps", type=int, default=10)
    parser.add_argument("--peer-patience", type=float, default=900.0, help="seconds for all of them to compile")
    parser.add_argument("--peer-limit", type=float, default=120.0, help="seconds for timing one of them on one batch")
    parser.add_argument("--peer-logs", type=Path, help="a folder for what they print")
    parser.add_argument("--peer-python", default=sys.executable, help="the Python that has them")
    return parser.parse_args(words)


def main(words: list[str] | None = None) -> None:
    args = arguments(words)
    device, began = torch.device(args.device), time.perf_counter()
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else f"CPU, {torch.get_num_threads()} threads"
    print(f"{name}, torch {torch.__version__}, {args.precision}")
    columns = f"{'first, s':>8} {'step, ms':>9} {'atoms/s':>10} {'GiB':>8} {'differs':>9}"
    print(f"{'case':8} {'atoms':>6} {'edges':>7} {'engine':16} {'form':8} {columns}")

    def out_of_time() -> bool:
        return args.budget is not None and time.perf_counter() - began > args.budget

    collected = []
    with (
        tempfile.TemporaryDirectory(prefix="engines-cache-") as folder,
        Precision(args.precision).applied(args.precision),
        ExitStack() as running,
    ):
        if args.fresh_cache:
            os.environ["TORCHINDUCTOR_CACHE_DIR"] = folder
            os.environ["TRITON_CACHE_DIR"] = str(Path(folder) / "triton")
        peers = None
        if args.peers:
            chosen = args.peer_steps, args.peer_patience, args.peer_limit, args.peer_logs
            peers = running.enter_context(Peers(args.peer_python, *chosen))
            start_peers(peers, args, device)
        for row in rows(args, device, peers, out_of_time):
            show(row)
            collected.append(row)
            if args.json is not None:
                machine = {"device": name, "torch": torch.__version__, "precision": args.precision}
                args.json.write_text(json.dumps({**machine, "rows": collected}, indent=1) + "\n")
    if args.peers:
        compare(collected)
    print(f"{time.perf_counter() - began:.0f} s in all")


if __name__ == "__main__":
    main()
