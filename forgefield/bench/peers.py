"""Times training steps of other programs: `python peers.py JOB.json RESULT.json`.

This is a separate script that does not import Forgefield, so that it also runs in an environment with the other program only. A
step consists of energies and forces, mean squared errors, backward pass and Adam, as in Forgefield. Neighbour lists are passed
to programs that accept them; for the others (DeePMD-kit) they are part of the step.

If a job has a list of structures, the model is built and compiled once for all of them, and a batch is timed when its number is
read from standard input. Several programs can then compile at the same time and be timed one after the other.
"""

from __future__ import annotations

import gc
import importlib
import json
import resource
import sys
import time
import traceback
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

PEERS = {
    "nequip eager": ("nequip", "nequip"),
    "nequip compile": ("nequip", "nequip"),
    "nequip oeq": ("openequivariance", "openequivariance"),
    "nequip oeq-compile": ("openequivariance", "openequivariance"),
    "allegro eager": ("allegro", "nequip-allegro"),
    "allegro compile": ("allegro", "nequip-allegro"),
    "mace": ("mace", "mace-torch"),
    "deepmd": ("deepmd", "deepmd-kit"),
}
"""Module that must be importable and the package that contains it, by the name of the row."""
Batch = dict[str, Tensor]
Predict = Callable[[], tuple[Tensor, Tensor]]
"""Returns energies (n_frames,) and forces (n_atoms, 3) that can be differentiated."""
MODIFIER = "enable_OpenEquivariance"
"""NequIP's name for convolutions with OpenEquivariance's kernels."""
MEMORY_ATTEMPTS, MEMORY_PAUSE = 6, 20.0
"""Attempts to run the first step when memory is short, and seconds between them."""


class Peer(NamedTuple):
    """bind: returns the function that predicts a batch. description: of the model."""

    model: torch.nn.Module
    bind: Callable[[Batch], Predict]
    description: str


def main(job_file: str, result_file: str) -> None:
    job, result = json.loads(Path(job_file).read_text()), Path(result_file)
    warnings.filterwarnings("ignore")
    if isinstance(job["structures"], list):
        failure = or_refusal(partial(serve, job, result))
        if failure:
            write(result, failure)
    else:
        write(result, or_refusal(partial(measure, job)))


def write(file: Path, content: dict[str, Any]) -> None:
    """Write JSON atomically, since another process waits for the file."""
    partial_file = file.with_suffix(".part")
    partial_file.write_text(json.dumps(content))
    partial_file.replace(file)


def one_line(error: Exception) -> str:
    lines = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {lines[0][:300]}"


def build_peer(job: dict[str, Any], batch: Batch) -> Peer:
    """The model of a job. batch: determines species and mean number of neighbours."""
    importlib.import_module(PEERS[job["name"]][0])
    precision = job["precision"]
    if precision not in ("float32", "float64", "tf32"):
        raise ValueError(f"peers are measured in float32, tf32 and float64, not {precision}")
    dtype = torch.float64 if precision == "float64" else torch.float32
    torch.set_float32_matmul_precision("high" if precision == "tf32" else "highest")
    program, _, mode = job["name"].partition(" ")
    return {"nequip": nequip, "allegro": allegro, "mace": mace, "deepmd": deepmd}[program](batch, job, dtype, mode)


def measure(job: dict[str, Any]) -> dict[str, Any]:
    """Time the steps of a job.

    job: name (a key of `PEERS`), structures (file), model (all options of Forgefield's model), device, precision, lr, warmup,
    steps.
    """
    device = torch.device(job["device"])
    batch = load_structures(job["structures"], device)
    peer = build_peer(job, batch)
    step = training_step(peer.model, peer.bind(batch), batch, job["lr"])
    first = seconds_of(step, device)
    times = timed(step, device, job["warmup"], job["steps"])
    return {"first_step_seconds": first, **times, **facts(peer, job, batch)}


def serve(job: dict[str, Any], result: Path) -> dict[str, Any]:
    """Run a first step on every batch, write `result`, and then time batch n for every line with a number n on standard input.

    The times of batch n are written to a file whose name ends in n. `structures` of the job are files, the largest first.
    """
    device = torch.device(job["device"])
    batches = [load_structures(file, device) for file in job["structures"]]
    peer = build_peer(job, batches[0])
    steps = [training_step(peer.model, peer.bind(batch), batch, job["lr"]) for batch in batches]
    firsts = [or_refusal(partial(first_step, step, device)) for step in steps]
    write(result, {"prepared": firsts})
    for line in sys.stdin:
        n = int(line)
        times = firsts[n]
        if "refusal" not in times:
            times = {**times, **or_refusal(partial(timed, steps[n], device, job["warmup"], job["steps"], repeats=2))}
        free_memory(device)
        write(result.with_name(f"{result.stem}-{n}{result.suffix}"), {**times, **facts(peer, job, batches[n])})
    return {}


def or_refusal(action: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """The result of an action, or its error as `refusal`."""
    try:
        return action()
    except Exception as error:
        traceback.print_exc()
        return {"refusal": one_line(error)}


def first_step(step: Callable[[], None], device: torch.device) -> dict[str, Any]:
    """Time of the first step. If memory is short, wait until other processes on the device have released theirs."""
    start = time.perf_counter()
    for remaining in reversed(range(MEMORY_ATTEMPTS)):
        try:
            seconds_of(step, device)
            break
        except torch.OutOfMemoryError:
            if not remaining:
                raise
        free_memory(device)
        time.sleep(MEMORY_PAUSE)
    free_memory(device)
    return {"first_step_seconds": time.perf_counter() - start}


def free_memory(device: torch.device) -> None:
    """Release cached memory."""
    if device.type == "cuda":
        gc.collect()
        torch.cuda.empty_cache()


def facts(peer: Peer, job: dict[str, Any], batch: Batch) -> dict[str, Any]:
    """What a step computed: model, parameters, gradients and size of the batch."""
    weights = [p for p in peer.model.parameters() if p.requires_grad]
    with_gradient = [p for p in weights if p.grad is not None]
    description = peer.description
    if job["name"].endswith("compile") and len(batch["n_atoms"]) < 2:
        description += ", run eagerly: it compiles for two frames or more"
    return {
        "package": PEERS[job["name"]][1],
        "description": description,
        "parameters": sum(p.numel() for p in weights),
        "with_gradient": sum(p.numel() for p in with_gradient),
        "all_finite": all(bool(p.grad.isfinite().all()) for p in with_gradient if p.grad is not None),
        "frames": len(batch["n_atoms"]),
        "atoms": len(batch["species"]),
        "edges": batch["edge_index"].shape[1],
    }


def load_structures(file: str, device: torch.device) -> Batch:
    """A batch with Forgefield's keys, and `numbers`, the atomic number of each species index."""
    with np.load(file) as arrays:
        return {key: torch.from_numpy(arrays[key]).to(device) for key in arrays.files}


def training_step(model: torch.nn.Module, predict: Predict, batch: Batch, lr: float) -> Callable[[], None]:
    """A function that runs one training step with Adam."""
    optimiser = torch.optim.Adam([p for p in model.parameters() if p.requires_grad], lr=lr)
    n_atoms = batch["n_atoms"].double()
    labelled = [~torch.isnan(batch[name]) for name in ("energy", "forces")]  # missing labels are not part of the loss

    def step() -> None:
        optimiser.zero_grad()
        energy, forces = predict()
        energy_loss = torch.where(labelled[0], (energy.double() - batch["energy"]) / n_atoms, 0.0).square().mean()
        force_loss = torch.where(labelled[1], forces.double() - batch["forces"], 0.0).square().mean()
        (energy_loss + force_loss).backward()
        optimiser.step()

    return step


def seconds_of(step: Callable[[], None], device: torch.device, n: int = 1) -> float:
    """Wall-clock time of n steps."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    start = time.perf_counter()
    for _ in range(n):
        step()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - start


def timed(step: Callable[[], None], device: torch.device, warmup: int, steps: int, repeats: int = 1) -> dict[str, Any]:
    """Time per step, the shortest of `repeats` measurements, and peak memory. The first step must have been run before."""
    seconds_of(step, device, max(warmup - 1, 1))
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    seconds = min(seconds_of(step, device, steps) for _ in range(repeats))
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return {
        "step_ms": 1000 * seconds / steps,
        "memory_bytes": torch.cuda.max_memory_allocated(device) if device.type == "cuda" else None,
        "resident_bytes": peak if sys.platform == "darwin" else 1024 * peak,
    }


def symbols(batch: Batch) -> list[str]:
    from ase.data import chemical_symbols

    return [chemical_symbols[number] for number in batch["numbers"].tolist()]


# ---- NequIP and Allegro


def nequip_data(batch: Batch) -> dict[str, Tensor]:
    from nequip.data import AtomicDataDict as Keys

    return {
        Keys.POSITIONS_KEY: batch["positions"],
        Keys.CELL_KEY: batch["cell"],
        Keys.PBC_KEY: torch.ones(len(batch["cell"]), 3, dtype=torch.bool, device=batch["cell"].device),
        Keys.ATOM_TYPE_KEY: batch["species"],
        Keys.BATCH_KEY: batch["frame"],
        Keys.NUM_NODES_KEY: batch["n_atoms"],
        Keys.EDGE_INDEX_KEY: batch["edge_index"].flip(0).contiguous(),  # centre first
        Keys.EDGE_CELL_SHIFT_KEY: batch["edge_shift"],
    }


def graph_model(
    build: Callable[..., Any], batch: Batch, settings: dict[str, Any], job: dict[str, Any], description: str
) -> Peer:
    """A model of NequIP or Allegro; with OpenEquivariance's convolutions if the name of the job contains `oeq`."""
    from nequip.data import AtomicDataDict as Keys
    from nequip.model import modify
    from nequip.utils.global_state import set_global_state

    set_global_state(allow_tf32=job["precision"] == "tf32")
    model = build(**settings)
    if " oeq" in job["name"]:
        model = modify(model, [{"modifier": MODIFIER}])
        require_kernels(model, settings["num_layers"])
    model = model.train().to(batch["positions"].device)

    def bind(batch: Batch) -> Predict:
        data = nequip_data(batch)

        def predict() -> tuple[Tensor, Tensor]:
            out = model(dict(data))
            return out[Keys.TOTAL_ENERGY_KEY].reshape(-1), out[Keys.FORCE_KEY]

        return predict

    return Peer(model, bind, description)


def require_kernels(model: torch.nn.Module, n: int) -> None:
    """Raise an error unless all n convolutions are OpenEquivariance's."""
    from nequip.nn._tp_scatter_oeq import OpenEquivarianceTensorProductScatter

    replaced = sum(isinstance(module, OpenEquivarianceTensorProductScatter) for module in model.modules())
    if replaced != n:
        raise ValueError(f"{replaced} of {n} convolutions are OpenEquivariance's; nothing is measured")


def shared_settings(batch: Batch, job: dict[str, Any], dtype: torch.dtype, mode: str) -> dict[str, Any]:
    options, names = job["model"], symbols(batch)
    compiles = mode.endswith("compile")
    if compiles and len(batch["n_atoms"]) < 2:
        raise ValueError("NequIP compiles for batches of two frames or more, and this batch has one")
    return {
        "seed": 1,
        "model_dtype": str(dtype).removeprefix("torch."),
        "compile_mode": "compile" if compiles else "eager",
        "r_max": float(options["cutoff"]),
        "type_names": names,
        "avg_num_neighbors": batch["edge_index"].shape[1] / len(batch["species"]),
        "per_type_energy_scales": dict.fromkeys(names, 1.0),
        "per_type_energy_shifts": dict.fromkeys(names, 0.0),
    }


def nequip(batch: Batch, job: dict[str, Any], dtype: torch.dtype, mode: str) -> Peer:
    from nequip.model import NequIPGNNModel

    names = ["num_layers", "l_max", "parity", "num_features", "type_embed_num_features", "radial_mlp_depth"]
    names += ["radial_mlp_width", "num_bessels", "polynomial_cutoff_p"]
    if job["model"].get("name") == "nequip":
        options, description = {name: job["model"][name] for name in names}, "Forgefield's hyperparameters"
    else:
        options = {"num_layers": 2, "l_max": 1, "parity": False, "num_features": [128, 64]}
        options["type_embed_num_features"] = 32
        description = "preset S"
    if mode.startswith("oeq"):
        description += ", kernels of OpenEquivariance"
    settings = {**shared_settings(batch, job, dtype, mode), **options}
    return graph_model(NequIPGNNModel, batch, settings, job, description)


def allegro(batch: Batch, job: dict[str, Any], dtype: torch.dtype, mode: str) -> Peer:
    from allegro.model import AllegroModel

    model, networks = job["model"], ("scalar_embed", "allegro", "readout")
    if model.get("name") == "allegro":
        description, names = "Forgefield's hyperparameters", ("l_max", "parity", "num_layers", "num_scalar_features")
        options = {name: model[name] for name in (*names, "num_tensor_features", "tp_path_channel_coupling")}
        for network in networks:
            options[f"{network}_mlp_hidden_layers_depth"] = model[f"{network}_mlp_depth"]
            options[f"{network}_mlp_hidden_layers_width"] = model[f"{network}_mlp_width"]
    else:
        description = "l_max 2, 2 layers, 64 scalar and 64 tensor features"
        options = {"l_max": 2, "num_layers": 2, "num_scalar_features": 64, "num_tensor_features": 64}
        options |= {f"{network}_mlp_hidden_layers_width": 64 for network in networks}
    options["radial_chemical_embed"] = {
        "_target_": "allegro.nn.TwoBodyBesselScalarEmbed",
        "num_bessels": model.get("num_bessels") or 8,
    }
    settings = {**shared_settings(batch, job, dtype, mode), **options}
    return graph_model(AllegroModel, batch, settings, job, description)


# ---- MACE


def mace(batch: Batch, job: dict[str, Any], dtype: torch.dtype, mode: str) -> Peer:
    torch.set_default_dtype(dtype)
    from e3nn import o3
    from mace import modules

    device, numbers = batch["positions"].device, batch["numbers"].tolist()
    block = modules.interaction_classes["RealAgnosticResidualInteractionBlock"]
    model = modules.ScaleShiftMACE(
        r_max=float(job["model"]["cutoff"]),
        num_bessel=8,
        num_polynomial_cutoff=5,
        max_ell=3,
        interaction_cls=block,
        interaction_cls_first=block,
        num_interactions=2,
        num_elements=len(numbers),
        hidden_irreps=o3.Irreps("64x0e + 64x1o"),
        MLP_irreps=o3.Irreps("16x0e"),
        atomic_energies=np.zeros(len(numbers)),
        avg_num_neighbors=batch["edge_index"].shape[1] / len(batch["species"]),
        atomic_numbers=numbers,
        correlation=3,
        gate=torch.nn.functional.silu,
        atomic_inter_scale=1.0,
        atomic_inter_shift=0.0,
    ).to(device)

    def bind(batch: Batch) -> Predict:
        frame_of_edge = batch["frame"][batch["edge_index"][1]]
        data = {
            "positions": batch["positions"].to(dtype),
            "node_attrs": torch.nn.functional.one_hot(batch["species"], len(numbers)).to(dtype),
            "edge_index": batch["edge_index"],
            "shifts": torch.einsum("ei,eij->ej", batch["edge_shift"], batch["cell"][frame_of_edge]).to(dtype),
            "unit_shifts": batch["edge_shift"].to(dtype),
            "cell": batch["cell"].reshape(-1, 3).to(dtype),
            "batch": batch["frame"],
            "ptr": torch.nn.functional.pad(batch["n_atoms"].cumsum(0), (1, 0)),
        }

        def predict() -> tuple[Tensor, Tensor]:
            out = model({**data, "positions": data["positions"].clone()}, training=True)
            return out["energy"], out["forces"]

        return predict

    return Peer(model, bind, "64x0e + 64x1o, max_ell 3, correlation 3, 2 layers")


# ---- DeePMD-kit


def deepmd(batch: Batch, job: dict[str, Any], dtype: torch.dtype, mode: str) -> Peer:
    from deepmd.pt.model.model import get_model

    precision = str(dtype).removeprefix("torch.")
    species, centres = batch["species"], batch["edge_index"][1]
    neighbours = torch.zeros(len(species), len(batch["numbers"]), dtype=torch.int64, device=species.device)
    neighbours.index_put_((centres, species[batch["edge_index"][0]]), torch.ones_like(centres), accumulate=True)
    cutoff = float(job["model"]["cutoff"])
    model = get_model(
        {
            "type_map": symbols(batch),
            "descriptor": {
                "type": "se_e2_a",
                "rcut": cutoff,
                "rcut_smth": 0.1 * cutoff,
                "sel": [4 * (1 + int(largest) // 4) for largest in neighbours.max(0).values],
                "neuron": [25, 50, 100],
                "axis_neuron": 16,
                "precision": precision,
            },
            "fitting_net": {"neuron": [240, 240, 240], "precision": precision},
        }
    ).to(species.device)

    def bind(batch: Batch) -> Predict:
        n_atoms = batch["n_atoms"]
        if not bool((n_atoms == n_atoms[0]).all()):
            raise ValueError("DeePMD-kit needs frames of equal size in a batch, and these differ")
        frames = len(n_atoms)
        coordinates, types = batch["positions"].reshape(frames, -1, 3), batch["species"].reshape(frames, -1)

        def predict() -> tuple[Tensor, Tensor]:
            out = model(coordinates.clone().requires_grad_(True), types, box=batch["cell"].reshape(frames, 9))
            return out["energy"].reshape(-1), out["force"].reshape(-1, 3)

        return predict

    return Peer(model, bind, "se_e2_a 25-50-100, fitting 240-240-240")


if __name__ == "__main__":
    main(*sys.argv[1:])
