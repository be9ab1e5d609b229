"""Training steps of Deep Potential models on DeePMD-kit's water example, beside DeePMD-kit where it is installed.

    python benchmarks/deeppot.py --data water_dp/data_0 [--models se_e2_a dpa1 dpa2 dpa3] [--precisions float64 float32]
                                 [--frames 1 8] [--engines eager compile graphs] [--peer-python other/bin/python]
                                 [--start input.json]

192 atoms a frame, cutoff 6 A, sel 46/92, embedding 25-50-100, 1600 features, fitting 240-240-240; DPA-1 with sel 120 and two
attention layers; DPA-3 as in its example (1.3 million parameters; any number of neighbours in `dpa3`, at most 30 with angles in
`dpa3_fixed`). A step is energy and forces, their loss, its gradient and Adam. On a CPU process CPU time on one thread, on a
GPU wall time with the GPU waited for; medians. The peer runs in a process of its own (`deeppot_peer.py`), before and after us.
--start: time from the command `forgefield train` to the end of its first step, report and all, with an empty cache.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from engines import whole_step

from forgefield.data.batch import Batch, batch_from_frames, to_device
from forgefield.data.options import LabelOptions, UnitOptions
from forgefield.data.padding import plan_sizes, sizes
from forgefield.data.readers import read_frames
from forgefield.data.species import SpeciesTable
from forgefield.errors import ForgefieldError
from forgefield.models.building import build_model
from forgefield.models.resolving import model_statistics, resolve_model
from forgefield.tasks.metrics import ErrorMetrics
from forgefield.tasks.options import TargetOptions, TaskOptions
from forgefield.tasks.task import Task
from forgefield.training.engines.compiled import CompileEngine
from forgefield.training.engines.engine import Engine
from forgefield.training.engines.graphs import GraphsEngine
from forgefield.training.engines.step import StepFunction
from forgefield.training.engines.verify import require_equal
from forgefield.training.precision import TOLERANCES

SPECIES, CUTOFF = ("O", "H"), 6.0
CUTOFFS = {"se_e3_tebd": 4.0}
"""Other cutoffs than that, A."""
FITTING = {"type": "ener", "neuron": [240, 240, 240], "resnet_dt": True, "seed": 1}
EMBEDDING = {"rcut_smth": 0.5, "neuron": [25, 50, 100], "axis_neuron": 16, "seed": 1}
MODELS: dict[str, dict[str, Any]] = {
    "se_e2_a": {"type": "se_e2_a", "sel": [46, 92], "type_one_side": True, **EMBEDDING},
    "dpa1": {"type": "se_atten", "sel": 120, "attn": 128, "attn_layer": 2, "attn_dotr": True, **EMBEDDING},
    "dpa2": {  # DeePMD-kit's example input_torch_small.json
        "type": "dpa2",
        "seed": 1,
        "repinit": {
            "rcut_smth": 0.5,
            "nsel": 120,
            "axis_neuron": 12,
            "use_three_body": True,
            "three_body_sel": 48,
            "three_body_rcut": 4.0,
            "three_body_rcut_smth": 3.5,
        },
        "repformer": {
            "rcut": 4.0,
            "rcut_smth": 3.5,
            "nsel": 48,
            "nlayers": 3,
            "g1_dim": 128,
            "g2_dim": 32,
            "axis_neuron": 4,
            "update_g1_has_attn": False,
            "update_g2_has_g1g1": False,
            "update_g2_has_attn": False,
            "update_style": "res_residual",
            "update_residual": 0.01,
            "update_residual_init": "norm",
        },
    },
    "se_e3_tebd": {"type": "se_e3_tebd", "sel": 40, "neuron": [2, 4, 8], "rcut_smth": 0.5, "seed": 1},
}
DPA3: dict[str, Any] = {
    "type": "dpa3",
    "n_dim": 128,
    "e_dim": 64,
    "a_dim": 32,
    "nlayers": 6,
    "e_rcut_smth": 5.3,
    "a_rcut": 4.0,
    "a_rcut_smth": 3.5,
    "axis_neuron": 4,
    "a_compress_rate": 1,
    "a_compress_e_rate": 2,
    "a_compress_use_split": True,
    "smooth_edge_update": True,
    "edge_init_use_dist": True,
    "use_exp_switch": True,
    "activation_function": "silut:10.0",
    "seed": 1,
}
MODELS["dpa3"] = {**DPA3, "use_dynamic_sel": True, "e_sel": 1200, "a_sel": 300}
MODELS["dpa3_fixed"] = {**DPA3, "e_sel": 120, "a_sel": 30}
OUTSIDE = ("type", "activation_function", "seed")
"""Options of `dpa3` that are not in DeePMD-kit's section `repflow`."""


def deepmd_descriptor(model: str, precision: str) -> dict[str, Any]:
    """The descriptor in an input of DeePMD-kit."""
    options = MODELS[model]
    cutoff = {"rcut": CUTOFFS.get(model, CUTOFF)}
    if options["type"] == "dpa2":
        return {**options, "repinit": {**options["repinit"], **cutoff}, "precision": precision}
    if options["type"] != "dpa3":
        return {**options, **cutoff, "precision": precision}
    outside = {key: options[key] for key in OUTSIDE}
    inside = {key: value for key, value in options.items() if key not in OUTSIDE}
    return {**outside, "precision": precision, "repflow": {**inside, "e_rcut": CUTOFF}}


def batch_of(data: Path, frames: int, cutoff: float = CUTOFF) -> Batch:
    found = read_frames(str(data), LabelOptions(), UnitOptions())[:frames]
    return batch_from_frames(found, SpeciesTable(SPECIES), cutoff)


def function_of(model: str, precision: str, batch: Batch, device: torch.device) -> StepFunction:
    section = {"name": "deeppot", "descriptor": MODELS[model], "fitting_net": FITTING}
    cutoff = CUTOFFS.get(model, CUTOFF)
    facts = model_statistics(section, lambda: [batch], species=SPECIES, cutoff=cutoff)
    resolved = resolve_model(section, species=SPECIES, cutoff=cutoff, statistics=facts)
    potential = build_model(resolved, precision=precision, seed=0).train().to(device)
    task = Task(TaskOptions(energy=TargetOptions(), forces=TargetOptions()), SPECIES)
    return StepFunction(potential, task, ErrorMetrics(task.names, SPECIES))


def milliseconds(step: Callable[[], None], device: torch.device, repeats: int) -> tuple[float, float]:
    """Of the first step (wall time) and of a later one."""
    on_gpu = device.type == "cuda"
    clock = time.perf_counter if on_gpu else time.process_time

    def timed(read: Callable[[], float]) -> float:
        if on_gpu:
            torch.cuda.synchronize()
        start = read()
        step()
        if on_gpu:
            torch.cuda.synchronize()
        return 1e3 * (read() - start)

    first = timed(time.perf_counter)
    timed(clock)
    return first, statistics.median(timed(clock) for _ in range(repeats))


def ours(model: str, precision: str, engine_name: str, batch: Batch, device: torch.device, repeats: int) -> list[float]:
    function = function_of(model, precision, batch, device)
    here = to_device(batch, device)
    engine = reference = Engine(function)
    if engine_name in ("compile", "graphs"):
        engine = CompileEngine(function)
    if engine_name.startswith("graphs"):
        engine = GraphsEngine(engine, plan=plan_sizes(np.array([sizes(here)])))
    first, later = milliseconds(whole_step(engine, here), device, repeats)
    if engine is not reference:
        require_equal(engine, reference, here, TOLERANCES[precision])
    return [first, later]


def theirs(args: argparse.Namespace, model: str, precision: str, frames: int) -> float | None:
    """Milliseconds of a step of DeePMD-kit; None where it cannot be had."""
    settings = {
        "model": {
            "type_map": list(SPECIES),
            "descriptor": deepmd_descriptor(model, precision),
            "fitting_net": {**FITTING, "precision": precision},
        },
        "data": str(args.data.resolve()),
        "frames": frames,
        "device": args.device,
        "repeats": args.repeats,
    }
    command = [args.peer_python, str(Path(__file__).with_name("deeppot_peer.py")), json.dumps(settings)]
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, env={**os.environ, "OMP_NUM_THREADS": "1"}
    )
    if done.returncode:
        print(f"  the peer failed: {(done.stderr.strip().splitlines() or [''])[-1][:160]}")
        return None
    return float(done.stdout.split()[-1])


def rows(args: argparse.Namespace, device: torch.device) -> None:
    print(f"{'model':10} {'precision':9} {'frames':>6} {'engine':14} {'first, s':>8} {'step, ms':>9}  of DeePMD-kit's")
    for model in args.models:
        for precision in args.precisions:
            for frames in args.frames:
                batch = batch_of(args.data, frames, CUTOFFS.get(model, CUTOFF))
                peer = [theirs(args, model, precision, frames)] if args.peer_python else []
                for engine in args.engines:
                    label = f"{model:10} {precision:9} {frames:6} {engine:14}"
                    try:
                        first, later = ours(model, precision, engine, batch, device, args.repeats)
                    except (ForgefieldError, RuntimeError) as error:
                        print(f"{label} {str(error).splitlines()[0][:150]}", flush=True)
                        continue
                    share = f"{later / peer[0]:.2f}" if peer and peer[0] else ""
                    print(f"{label} {first / 1e3:8.2f} {later:9.2f}  {share}", flush=True)
                if peer:
                    peer.append(theirs(args, model, precision, frames))
                    shown = " and ".join(f"{value:.1f}" for value in peer if value is not None)
                    print(f"{model:10} {precision:9} {frames:6} DeePMD-kit before and after: {shown} ms", flush=True)


def start(config: Path) -> None:
    """`forgefield train` with one step, from an empty cache to its end."""
    with tempfile.TemporaryDirectory() as folder:
        overrides = ["trainer.max_steps=1", f"out={folder}", "training.engine=eager"]
        command = [sys.executable, "-m", "forgefield", "train", str(config.resolve()), *overrides]
        environment = {**os.environ, "FORGEFIELD_CACHE": f"{folder}/cache", "OMP_NUM_THREADS": "1"}
        before, began = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
        subprocess.run(command, check=True, capture_output=True, env=environment, cwd=config.parent)
        after, wall = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter() - began
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    print(f"forgefield train {config.name}, one step, validation and report: {wall:.1f} s, {cpu:.1f} CPU-s")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--data", type=Path, required=True, help="a DeePMD system of the water example")
    parser.add_argument("--models", nargs="+", choices=sorted(MODELS), default=["dpa1", "se_e2_a"])
    parser.add_argument("--precisions", nargs="+", choices=("float64", "float32"), default=["float64", "float32"])
    parser.add_argument("--frames", nargs="+", type=int, default=[1, 8])
    parser.add_argument(
        "--engines", nargs="+", choices=("eager", "compile", "graphs", "graphs-eager"), default=["eager"]
    )
    parser.add_argument("--repeats", type=int, default=12)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--peer-python", help="a Python that has deepmd-kit")
    parser.add_argument("--start", type=Path, metavar="INPUT")
    args = parser.parse_args()
    device = torch.device(args.device)
    if device.type == "cpu":
        torch.set_num_threads(1)
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU, one thread, CPU time"
    print(f"{name}, torch {torch.__version__}")
    if args.start is not None:
        start(args.start)
    rows(args, device)


if __name__ == "__main__":
    main()
