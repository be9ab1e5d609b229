"""What other programs call a setting or an option, for hints in error messages.

NequIP, MACE, DeePMD-kit, MALA and Lightning have other words for the same things; messages point from them to
Forgefield's.
"""

from __future__ import annotations

KEYS = {
    # learning
    "learning_rate": "training.lr",
    "start_lr": "training.lr",
    "optimiser": "training.optimizer",
    "lr_scheduler": "training.scheduler",
    "ema_decay": "training.ema",
    "gradient_clip_val": "training.clip_norm",
    "clip_grad": "training.clip_norm",
    "epochs": "trainer.max_epochs",
    "max_num_epochs": "trainer.max_epochs",
    "max_number_epochs": "trainer.max_epochs",
    "numb_steps": "trainer.max_steps",
    "patience": "training.early_stopping.patience",
    "early_stopping_patience": "training.early_stopping.patience",
    "loss": "task",
    "loss_coeffs": "task",
    "energy_weight": "task.energy.weight",
    "forces_weight": "task.forces.weight",
    "stress_weight": "task.stress.weight",
    "validation_metric": "training.monitor",
    "stop_lr": "training.scheduler",
    "decay_steps": "training.scheduler",
    "decay_rate": "training.scheduler",
    "weight_decay": "training.optimizer",
    "amsgrad": "training.optimizer",
    "opt_type": "training.optimizer",
    "start_swa": "training.swa.start",
    "start_pref_e": "task.energy.weight",
    "limit_pref_e": "task.energy.schedule",
    "start_pref_f": "task.forces.weight",
    "limit_pref_f": "task.forces.schedule",
    "start_pref_v": "task.stress.weight",
    "limit_pref_v": "task.stress.schedule",
    "save_freq": "training.checkpoint.every_steps",
    "eval_interval": "trainer.check_val_every_n_epoch",
    "num_epochs": "trainer.max_epochs",
    # how it is computed
    "model_dtype": "training.precision",
    "default_dtype": "training.precision",
    "allow_tf32": "training.precision",
    "use_mixed_precision": "training.precision",
    "compile_mode": "training.engine",
    "use_graphs": "training.engine",
    # data
    "batch_size": "data.batch.frames",
    "valid_batch_size": "data.eval_batch",
    "mini_batch_size": "data.batch.points",
    "systems": "data.train",
    "train_file": "data.train",
    "train_file_path": "data.train",
    "valid_file": "data.val",
    "val_file_path": "data.val",
    "valid_fraction": "data.val",
    "test_file": "data.test",
    "test_file_path": "data.test",
    "r_max": "data.cutoff",
    "cutoff_radius": "data.cutoff",
    "rcut": "data.cutoff",
    "rcutfac": "data.points.descriptors.cutoff",
    "chemical_species": "data.species",
    "chemical_symbols": "data.species",
    "type_names": "data.species",
    "type_map": "data.species",
    "E0s": "data.reference_energies",
    "energy_key": "data.labels.energy",
    "forces_key": "data.labels.forces",
    "stress_key": "data.labels.stress",
    "use_fast_tensor_data_set": "data.fast",
    # models
    "num_interactions": "model.num_layers",
    "max_ell": "model.l_max",
    "num_cutoff_basis": "model.polynomial_cutoff_p",
    "num_radial_basis": "model.num_bessels",
    "num_channels": "model.num_features",
    "layer_activations": "model.activation",
    # electronic structure
    "ldos_gridsize": "data.points.energies.levels",
    "ldos_gridspacing_ev": "data.points.energies.spacing",
    "ldos_gridoffset_ev": "data.points.energies.first",
    "input_rescaling_type": "data.points.scaling.inputs",
    "output_rescaling_type": "data.points.scaling.outputs",
    "logging_metrics": "task.observables.metrics",
}
"""Key of another program -> key of Forgefield."""

_RESUME = "To resume a run, run the same command again; nothing else is needed."
OPTIONS = {
    "--restart": _RESUME,
    "--restart-latest": _RESUME,
    "--resume": _RESUME,
    "--ckpt-path": _RESUME,
    "--log-path": "The log is written to log.txt in the run folder; -l FILE writes it to another file as well.",
    "--log-dir": "The log is written to log.txt in the run folder; -l FILE writes it to another file as well.",
    "--init-frz-model": "Import the model (forgefield import deepmd FILE), then use --init-model RUN.",
    "--foundation-model": "Import the model as a run (forgefield import), then use --finetune RUN.",
    "--skip-neighbor-stat": "There is no such step; leave it out.",
    "--output": "The name of the run is name=NAME, the folder of runs out=FOLDER.",
    "--output-dir": "The folder of runs is out=FOLDER.",
    "--work-dir": "The folder of runs is out=FOLDER.",
    "--seed": "Settings are key=value: seed=N.",
    "--lr": "Settings are key=value: training.lr=VALUE.",
    "--device": "Settings are key=value: trainer.accelerator=cpu, trainer.devices=2.",
    "--model": "Settings are key=value: model.name=NAME, model.preset=S.",
    "--config": "The config file is the first word: forgefield train my.yaml.",
}
"""Option of another program's command line -> what to do here."""


def option_hint(option: str) -> str:
    """What to do instead of using another program's option, with a leading space; empty for an unknown option."""
    word = "--" + option.lstrip("-").partition("=")[0].replace("_", "-")
    if word in OPTIONS:
        return f" {OPTIONS[word]}"
    keys = {name.lower().replace("_", "-"): key for name, key in KEYS.items()}
    key = keys.get(word[2:].lower())
    return f" Settings are key=value: {key}=VALUE." if key is not None and word != "--" else ""
