"""One training step of DeePMD-kit's PyTorch model, timed; run by `deeppot.py` with a Python that has deepmd-kit.

    python benchmarks/deeppot_peer.py '{"model": {...}, "data": ..., "frames": 1, "device": "cpu", "repeats": 12}'

Prints the milliseconds of a step, median: process CPU time of one thread on a CPU, wall time on a GPU.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import time
from pathlib import Path
from typing import Any

settings: dict[str, Any] = json.loads(sys.argv[1])
os.environ.setdefault("DEVICE", "cpu" if settings["device"] == "cpu" else "")

import numpy as np  # noqa: E402
import torch  # noqa: E402
from deepmd.pt.model.model import get_model  # noqa: E402


def main() -> None:
    torch.set_num_threads(1)
    device, data, n = torch.device(settings["device"]), Path(settings["data"]), settings["frames"]
    model = get_model(settings["model"]).to(device).train()
    optimiser = torch.optim.Adam(model.parameters(), lr=1e-3)
    names = ("coord", "box", "energy", "force")
    arrays = {name: np.load(data / "set.000" / f"{name}.npy")[:n].astype(np.float64) for name in names}
    tensors = {name: torch.tensor(array, device=device) for name, array in arrays.items()}
    types = torch.tensor(np.loadtxt(data / "type.raw", dtype=int), device=device).repeat(n, 1)
    forces = tensors["force"].view(n, -1, 3)

    def step() -> None:
        optimiser.zero_grad(set_to_none=True)
        coordinates = tensors["coord"].clone().requires_grad_(True)
        out = model(coordinates, types, tensors["box"])
        energy = (out["energy"].view(-1) - tensors["energy"].view(-1)).square().mean() / types.shape[1]
        (energy + (out["force"] - forces).square().mean()).backward()
        optimiser.step()

    clock = time.process_time if device.type == "cpu" else time.perf_counter
    taken = []
    for _ in range(2 + settings["repeats"]):
        if device.type == "cuda":
            torch.cuda.synchronize()
        start = clock()
        step()
        if device.type == "cuda":
            torch.cuda.synchronize()
        taken.append(1e3 * (clock() - start))
    print(statistics.median(taken[2:]))


main()
