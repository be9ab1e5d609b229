"""Trainings of MALA, timed; run by `ldos.py` with a Python that has materials-learning-algorithms.

    python benchmarks/ldos_peer.py '{"folder": ..., "layers": [91, 100, 11], "batch": 40, "fast": false, "epochs": 3, ...}'

Prints the seconds of an epoch, the least of some: process CPU time on a CPU, wall time on a GPU. One epoch more than needed is
trained and the first is not counted, nor is the validation of a single batch counted apart.
"""

from __future__ import annotations

import json
import sys
import time
from typing import Any

import mala
import torch

settings: dict[str, Any] = json.loads(sys.argv[1])


def parameters() -> Any:
    p = mala.Parameters()
    p.verbosity, p.manual_seed = 0, 1
    p.use_gpu = settings["device"] != "cpu"
    p.network.layer_sizes, p.network.layer_activations = settings["layers"], "ReLU"
    p.descriptors.descriptors_contain_xyz = False
    p.data.input_rescaling_type, p.data.output_rescaling_type = "feature-wise-standard", "minmax"
    p.data.use_fast_tensor_data_set = settings["fast"]
    p.running.mini_batch_size, p.running.learning_rate, p.running.max_number_epochs = settings["batch"], 1e-5, 1
    if p.use_gpu and settings["tuned"]:
        p.use_graphs = True
        p.running.use_graphs, p.running.use_mixed_precision = True, True
    p.targets.target_type = "LDOS"
    p.targets.ldos_gridsize, p.targets.ldos_gridspacing_ev, p.targets.ldos_gridoffset_ev = (
        settings["layers"][-1],
        0.1,
        -10,
    )
    return p


def main() -> None:
    torch.set_num_threads(1)
    p, folder = parameters(), settings["folder"]
    data = mala.DataHandler(p)
    data.add_snapshot("train.in.npy", folder, "train.out.npy", folder, "tr")
    data.add_snapshot("val.in.npy", folder, "val.out.npy", folder, "va")
    data.prepare_data()
    trainer = mala.Trainer(p, mala.Network(p), data)
    clock = time.process_time if settings["device"] == "cpu" else time.perf_counter
    taken = []
    for _ in range(settings["epochs"] + 1):
        if settings["device"] != "cpu":
            torch.cuda.synchronize()
        began = clock()
        trainer.train_network()
        if settings["device"] != "cpu":
            torch.cuda.synchronize()
        taken.append(clock() - began)
    print(min(taken[1:]))


main()
