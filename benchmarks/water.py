"""DeePMD-kit's water example, its input unchanged, trained here: errors after so many steps beside its public curve.

    python benchmarks/water.py --data water_dp [--steps 500 10000 100000] [--set key=value ...]

Trains on data_0, data_1, data_2 with one frame a step and validates on all 80 frames of data_3. Every number of steps is a
training of its own, on the learning-rate curve of the public 1,000,000-step example, left after so many steps. key=value:
overrides of the config, such as training.engine=graphs.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

import forgefield

LENGTH = 1_000_000
"""Steps of the public example, which its learning rate is spread over."""
PUBLIC = {500: 0.338, 10_000: 0.093, 100_000: 0.040}
"""Root mean square of force errors, eV/A, that DeePMD-kit's documentation and issue 529 give."""


def example(data: Path, steps: int) -> dict[str, Any]:
    descriptor = {"type": "se_e2_a", "sel": [46, 92], "rcut_smth": 0.5, "rcut": 6.0, "neuron": [25, 50, 100]}
    descriptor |= {"resnet_dt": False, "axis_neuron": 16, "type_one_side": True, "seed": 1}
    prefactors = {"e": (0.02, 1), "f": (1000, 1), "v": (0, 0)}
    loss = {
        f"{end}_pref_{name}": pair[i] for name, pair in prefactors.items() for i, end in enumerate(("start", "limit"))
    }
    systems = [str(data / f"data_{number}") for number in range(4)]
    return {
        "model": {
            "type_map": ["O", "H"],
            "descriptor": descriptor,
            "fitting_net": {"neuron": [240, 240, 240], "resnet_dt": True, "seed": 1},
        },
        "learning_rate": {"type": "exp", "decay_steps": 5000, "start_lr": 0.001, "stop_lr": 3.51e-8},
        "loss": {"type": "ener", **loss},
        "training": {
            "training_data": {"systems": systems[:3], "batch_size": 1},
            "validation_data": {"systems": systems[3:], "batch_size": 8},
            "numb_steps": steps,
            "seed": 10,
            "disp_freq": steps,
            "save_freq": steps,
        },
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--data", type=Path, required=True, help="the folder with data_0 to data_3")
    parser.add_argument("--steps", nargs="+", type=int, default=sorted(PUBLIC))
    parser.add_argument("--set", nargs="+", default=[], dest="overrides", metavar="key=value")
    args = parser.parse_args()
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
    lines = [f"{device}, torch {torch.__version__}", "steps, force RMSE eV/A, public, energy RMSE meV/atom, minutes"]
    for steps in args.steps:
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder) / "input.json"
            file.write_text(json.dumps(example(args.data.resolve(), steps)))
            began = time.perf_counter()
            overrides = [f"out={folder}", f"training.scheduler.T_max={LENGTH}", *args.overrides]
            row = forgefield.train(file, *overrides).metrics()[-1]
            minutes = (time.perf_counter() - began) / 60
        forces, energy = row["val/forces_rmse"] / 1000, row["val/energy_rmse"]
        lines.append(f"{steps:7}  {forces:.4f}  {PUBLIC.get(steps, float('nan')):.3f}  {energy:.2f}  {minutes:.1f}")
        print("\n".join([lines[0], lines[1], *lines[2:]]), flush=True)


if __name__ == "__main__":
    main()
