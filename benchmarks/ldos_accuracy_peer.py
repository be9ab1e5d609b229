"""Train MALA on LDOS snapshots and write what it predicts for another one; called by `ldos_accuracy.py`.

    python benchmarks/ldos_accuracy_peer.py '{"folder": ..., "train": [...], "held_out": ..., "seed": 0, "out": ..., ...}'

Needs a Python with materials-learning-algorithms. Writes to the folder `out`: `mala.npy`, the LDOS of the held-out snapshot in
1/(eV A^3), predicted with the weights after the last epoch (those that MALA keeps), and `mala.zip`, its archive of the model.
MALA requires a validation snapshot; it is the last training snapshot and only logged.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import mala
import numpy as np
import torch


def parameters(settings: dict[str, Any]) -> Any:
    p = mala.Parameters()
    p.verbosity, p.manual_seed = 0, settings["seed"]
    p.network.layer_sizes, p.network.layer_activations = settings["layers"], "ReLU"
    p.network.layer_activations_include_output_layer = settings["output_activation"]
    p.data.input_rescaling_type, p.data.output_rescaling_type = "feature-wise-standard", "minmax"
    p.running.mini_batch_size, p.running.learning_rate = settings["batch"], settings["lr"]
    p.running.max_number_epochs, p.running.optimizer = settings["epochs"], "Adam"
    p.targets.target_type = "LDOS"
    p.targets.ldos_gridsize, p.targets.ldos_gridspacing_ev, p.targets.ldos_gridoffset_ev = settings["energies"]
    return p


def main() -> None:
    settings: dict[str, Any] = json.loads(sys.argv[1])
    torch.set_num_threads(1)
    np.random.seed(settings["seed"])  # MALA's fast data set shuffles with numpy's global generator
    p, folder = parameters(settings), settings["folder"]
    data = mala.DataHandler(p)
    for name, use in [(name, "tr") for name in settings["train"]] + [(settings["train"][-1], "va")]:
        data.add_snapshot(f"{name}.in.npy", folder, f"{name}.out.npy", folder, use)
    data.prepare_data()
    network = mala.Network(p)
    trainer = mala.Trainer(p, network, data)
    trainer.train_network()
    trainer.save_run("mala", settings["out"], zip_run=True)
    inputs = np.load(Path(folder) / f"{settings['held_out']}.in.npy")[..., 3:]
    rows = torch.from_numpy(inputs.reshape(-1, inputs.shape[-1]).astype(np.float32))
    with torch.no_grad():
        predicted = network(data.input_data_scaler.transform(rows, copy=True))
        ldos = data.output_data_scaler.inverse_transform(predicted, as_numpy=True)
    np.save(Path(settings["out"]) / "mala.npy", ldos.reshape(*inputs.shape[:-1], -1))


main()
