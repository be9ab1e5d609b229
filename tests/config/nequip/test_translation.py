"""Configs of NequIP and Allegro: what they become, and what is refused by name."""

import numpy as np
import pytest
import yaml
from ase.build import bulk
from ase.calculators.emt import EMT
from ase.calculators.singlepoint import SinglePointCalculator
from ase.io import write

import forgefield
from forgefield.config.converting import convert_input
from forgefield.config.loading import load_config
from forgefield.config.nequip import is_nequip_config, nequip_translation
from forgefield.config.sources import read_yaml
from forgefield.errors import ForgefieldError

CONFIG = """
run: [train, test]
cutoff_radius: 4.0
width: 8
model_type_names: [Cu]
monitored_metric: val0_epoch/weighted_sum
data:
  _target_: nequip.data.datamodule.ASEDataModule
  seed: 3
  split_dataset: {file_path: cu.xyz, train: 6, val: 2, test: 2}
  transforms:
    - _target_: nequip.data.transforms.ChemicalSpeciesToAtomTypeMapper
      model_type_names: ${model_type_names}
      chemical_species_to_atom_type_map: ${list_to_identity_dict:${model_type_names}}
    - _target_: nequip.data.transforms.NeighborListTransform
      r_max: ${cutoff_radius}
  train_dataloader: {_target_: torch.utils.data.DataLoader, batch_size: 3, shuffle: true}
  val_dataloader: {_target_: torch.utils.data.DataLoader, batch_size: 2}
  test_dataloader: ${data.val_dataloader}
  stats_manager:
    _target_: nequip.data.CommonDataStatisticsManager
    type_names: ${model_type_names}
trainer:
  _target_: lightning.Trainer
  accelerator: cpu
  max_epochs: 2
  callbacks:
    - _target_: lightning.pytorch.callbacks.ModelCheckpoint
      monitor: ${monitored_metric}
      dirpath: ${hydra:runtime.output_dir}
    - _target_: nequip.train.callbacks.LossCoefficientScheduler
      schedule: {1: {per_atom_energy_mse: 3.0, forces_mse: 1.0}}
training_module:
  _target_: nequip.train.EMALightningModule
  ema_decay: 0.9
  loss:
    _target_: nequip.train.EnergyForceLoss
    coeffs: {total_energy: 1.0, forces: 3.0}
  val_metrics:
    _target_: nequip.train.EnergyForceMetrics
    coeffs: {total_energy_mae: 1.0, forces_rmse: 3.0}
  optimizer: {_target_: torch.optim.Adam, lr: 0.01}
  model:
    _target_: nequip.model.NequIPGNNModel
    seed: 5
    model_dtype: float64
    type_names: ${model_type_names}
    r_max: ${cutoff_radius}
    num_layers: 1
    l_max: 1
    num_features: ${int_div:${width},2}
    radial_mlp_width: ${width}
    avg_num_neighbors: ${training_data_stats:per_type_num_neighbors_mean}
    per_type_energy_shifts: ${training_data_stats:per_atom_energy_mean}
    per_type_energy_scales: ${training_data_stats:per_type_forces_rms}
"""


@pytest.fixture
def file(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "cu.yaml"
    path.write_text(CONFIG)
    return path


def frames(n_frames):
    rng = np.random.default_rng(0)
    for _ in range(n_frames):
        atoms = bulk("Cu", cubic=True)
        atoms.rattle(0.1, rng=rng)
        atoms.calc = EMT()
        results = {"energy": atoms.get_potential_energy(), "forces": atoms.get_forces()}
        atoms.calc = SinglePointCalculator(atoms, **results)
        yield atoms


def test_a_config_trains_as_it_is_with_the_statistics_and_the_monitor_of_nequip(file):
    structures = list(frames(10))
    write("cu.xyz", structures, format="extxyz")
    run = forgefield.train(file, "training.uncertainty=false", "training.engine=eager", "training.tensorboard=0")
    model = run.info["model"]
    energies = [atoms.get_potential_energy() / 4 for atoms in structures]
    shift = model["energy_shifts"]["Cu"]
    assert min(energies) < shift < max(energies)
    assert set(model["energy_scales"]) == set(model["avg_num_neighbours"]) == {"Cu"}
    row = run.metrics()[-1]
    expected = 0.25 * row["val/energy_total_mae"] / 1000 + 0.75 * row["val/forces_rmse"] / 1000
    assert row["val/weighted_sum"] == pytest.approx(expected, rel=1e-12)


def test_every_part_becomes_the_setting_with_its_meaning(file):
    config = nequip_translation(read_yaml(file), file).config
    assert config["data"]["reference_energies"] == "mean"
    assert (config["data"]["train"], config["data"]["val"], config["data"]["test"]) == ("cu.xyz", 2, 2)
    assert config["data"]["batch"] == {"frames": 3}
    assert (config["seed"], config["data"]["split_seed"]) == (5, 3)
    assert config["model"]["num_features"] == 4
    assert config["model"]["avg_num_neighbours_by_species"]
    assert config["model"]["energy_scales_by_species"]
    assert config["task"]["energy"]["weight"] == 0.25
    assert config["task"]["forces"]["schedule"] == {"kind": "step", "unit": "epoch", "at": [1], "to": [0.25]}
    assert config["training"]["ema"] == 0.9
    assert config["training"]["monitor_weights"] == {"energy_total_mae": 0.25e-3, "forces_rmse": 0.75e-3}


def test_validation_sets_keep_apart_and_the_first_is_monitored(file):
    content = yaml.safe_load(CONFIG)
    content["data"]["split_dataset"] = {"file_path": "cu.xyz", "train": 8, "test": 2}
    content["data"]["val_file_path"] = ["a.xyz", "b.xyz"]
    with pytest.raises(ForgefieldError, match="in addition to other data"):
        nequip_translation(content, file)
    del content["data"]["split_dataset"]
    content["data"]["train_file_path"] = "cu.xyz"
    config = nequip_translation(content, file).config
    assert config["data"]["val"] == {"0": "a.xyz", "1": "b.xyz"}
    assert config["training"]["monitor"] == "val-0/weighted_sum"


def test_a_stratified_huber_loss_keeps_its_strata(file):
    content = yaml.safe_load(CONFIG)
    del content["trainer"]["callbacks"]
    energy = {"field": "total_energy", "coeff": 1.0, "metric": {"_target_": "nequip.train.MeanSquaredError"}}
    metric = {"_target_": "nequip.train.StratifiedHuberForceLoss", "delta_dict": {0: 0.1, 5: 0.2}}
    forces = {"field": "forces", "coeff": 3.0, "metric": metric}
    content["training_module"]["loss"] = {"_target_": "nequip.train.MetricsManager", "metrics": [energy, forces]}
    task = nequip_translation(content, file).config["task"]
    assert task["forces"] == {"weight": 0.75, "loss": "huber", "huber_deltas": [[0.0, 0.1], [5.0, 0.2]]}
    forces["field"] = "stress"
    with pytest.raises(ForgefieldError, match="which is for forces"):
        nequip_translation(content, file)


def test_a_flipped_stress_has_a_negative_unit(file):
    content = yaml.safe_load(CONFIG)
    flip = {"_target_": "nequip.data.transforms.StressSignFlipTransform"}
    content["data"]["transforms"].append(flip)
    assert nequip_translation(content, file).config["data"]["units"] == {"stress": "-eV/A^3"}
    content["data"]["transforms"].append(flip)
    assert "units" not in nequip_translation(content, file).config["data"]
    content["data"]["transforms"].append({"_target_": "nequip.data.transforms.VirialToStressTransform"})
    with pytest.raises(ForgefieldError, match="computes from virials"):
        nequip_translation(content, file)


def test_maximum_errors_are_part_of_the_monitored_sum(file):
    content = yaml.safe_load(CONFIG)
    content["training_module"]["val_metrics"]["coeffs"] = {"forces_mae": 1.0, "forces_maxabserr": 3.0}
    weights = nequip_translation(content, file).config["training"]["monitor_weights"]
    assert weights == {"forces_mae": 0.25e-3, "forces_max": 0.75e-3}
    largest = {"_target_": "nequip.train.MaximumAbsoluteError"}
    content["training_module"]["val_metrics"] = {
        "_target_": "nequip.train.MetricsManager",
        "metrics": [{"field": "forces", "metric": largest, "coeff": 2.0, "per_type": True}],
        "type_names": ["Cu"],
    }
    assert nequip_translation(content, file).config["training"]["monitor_weights"] == {"forces_max/Cu": 1e-3}


def test_the_converted_config_is_the_same_training(file, tmp_path):
    write("cu.xyz", list(frames(2)), format="extxyz")
    out = tmp_path / "converted.yaml"
    convert_input(file, out)
    one, other = load_config(file), load_config(out)
    other.name = one.name
    assert one == other


def test_allegro_and_custom_type_names(file):
    content = yaml.safe_load(CONFIG)
    content["model_type_names"] = ["copper"]
    content["data"]["transforms"][0]["chemical_species_to_atom_type_map"] = {"Cu": "copper"}
    content["training_module"]["model"] = {
        "_target_": "allegro.model.AllegroModel", "type_names": "${model_type_names}", "r_max": 4.0, "l_max": 2,
        "num_scalar_features": 8, "allegro_mlp_hidden_layers_depth": 2, "per_type_energy_shifts": {"copper": -3.5},
        "radial_chemical_embed": {"_target_": "allegro.nn.TwoBodyBesselScalarEmbed", "num_bessels": 4},
    }  # fmt: skip
    config = nequip_translation(content, file).config
    assert config["data"]["species"] == ["Cu"]
    assert config["data"]["reference_energies"] == {"Cu": -3.5}
    assert config["model"]["name"] == "allegro"
    assert (config["model"]["allegro_mlp_depth"], config["model"]["num_bessels"]) == (2, 4)


def test_schedule_free_training_with_a_sequence_of_schedulers(file):
    content = yaml.safe_load(CONFIG)
    module = content["training_module"]
    module["_target_"] = "nequip.train.ScheduleFreeLightningModule"
    module["optimizer"] = {
        "_target_": "schedulefree.AdamWScheduleFree",
        "lr": 0.02,
        "warmup_steps": 10,
        "foreach": True,
    }
    del module["ema_decay"]
    module["lr_scheduler"] = {
        "scheduler": {
            "_target_": "torch.optim.lr_scheduler.SequentialLR",
            "schedulers": [
                {"_target_": "torch.optim.lr_scheduler.LinearLR", "total_iters": 3},
                {"_target_": "torch.optim.lr_scheduler.ExponentialLR", "gamma": 0.9},
            ],
            "milestones": [3],
        }
    }
    training = nequip_translation(content, file).config["training"]
    assert training["optimizer"] == {"name": "AdamWScheduleFree", "warmup_steps": 10}
    assert (training["lr"], training["ema"]) == (0.02, None)
    members = [{"name": "LinearLR", "total_iters": 3}, {"name": "ExponentialLR", "gamma": 0.9}]
    assert training["scheduler"] == {"name": "SequentialLR", "schedulers": members, "milestones": [3]}
    file.write_text(yaml.safe_dump(content))
    write("cu.xyz", list(frames(10)), format="extxyz")
    forgefield.train(file, "training.uncertainty=false", "training.engine=eager", "training.tensorboard=0")


def test_muon_with_the_groups_of_nequip(file):
    content = yaml.safe_load(CONFIG)
    groups = {"muon": {"lr": 0.01, "weight_decay": 1e-5}, "adam": {"lr": 0.002, "betas": [0.9, 0.99]}}
    content["training_module"]["optimizer"] = {
        "_target_": "nequip.train.MuonWithAuxAdam",
        "param_groups": {"_target_": "nequip.model.MuonParamGroups", **groups},
    }
    training = nequip_translation(content, file).config["training"]
    of_muon = {"momentum": 0.95, "weight_decay": 1e-5, "scale_by": "inputs", "adamw_factor": 0.2}
    of_adamw = {"adamw_betas": [0.9, 0.99], "adamw_eps": 1e-10, "adamw_weight_decay": 0.0}
    assert training["optimizer"] == {"name": "Muon", **of_muon, **of_adamw}
    assert training["lr"] == 0.01


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("nequip.train.EMALightningModule", "os.system", "'training_module._target_' is os.system, which is not translated"),
        ("num_layers: 1", "num_layer: 1", "unknown key 'training_module.model.num_layer'"),
        ("${int_div:${width},2}", "${int_div:${width},3}", "int_div refuses a remainder"),
        ("${training_data_stats:per_atom_energy_mean}", "${training_data_stats:forces_rms}", "not an energy per atom"),
        ("run: [train, test]", "run: [test]", "forgefield test RUN"),
        ("nequip.model.NequIPGNNModel", "nequip.model.ModelFromPackage", "forgefield import nequip"),
        ("ema_decay: 0.9", "ema_decay: 1.5", "'training_module.ema_decay' must be above 0 and below 1, not 1.5"),
        ("torch.optim.Adam,", "torch.optim.Adan,", "Did you mean 'Adam'"),
        ("r_max: ${cutoff_radius}\n    num", "r_max: '${cutoff_radius_from_package:a.zip}'\n    num", "not opened"),
        ("max_epochs: 2", "overfit_batches: 2", "unknown key 'trainer.overfit_batches'"),
    ],
)  # fmt: skip
def test_what_has_no_counterpart_is_refused_by_name(file, old, new, message):
    assert old in CONFIG
    file.write_text(CONFIG.replace(old, new))
    with pytest.raises(ForgefieldError) as caught:
        load_config(file)
    assert message in str(caught.value)


def test_other_configs_are_not_taken_for_those_of_nequip():
    assert not is_nequip_config({"data": {}, "training": {}, "trainer": {}})
    assert not is_nequip_config({"data": {}, "trainer": {}, "training_module": {}})
