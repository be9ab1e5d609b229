"""Statistics of the training data are those of NequIP.

The numbers were logged by NequIP 0.19.1 (`nequip-train` with the config and the frames of this file, in float64).
"""

import numpy as np
import pytest
from ase.build import bulk
from ase.calculators.emt import EMT
from ase.calculators.singlepoint import SinglePointCalculator
from ase.io import write

import forgefield

CONFIG = """
run: [train]
names: [Ni, Cu]
data:
  _target_: nequip.data.datamodule.ASEDataModule
  seed: 3
  train_file_path: train.xyz
  val_file_path: val.xyz
  transforms:
    - {_target_: nequip.data.transforms.ChemicalSpeciesToAtomTypeMapper, model_type_names: "${names}"}
    - {_target_: nequip.data.transforms.NeighborListTransform, r_max: 3.3}
  train_dataloader: {_target_: torch.utils.data.DataLoader, batch_size: 3}
  val_dataloader: {_target_: torch.utils.data.DataLoader, batch_size: 2}
  stats_manager: {_target_: nequip.data.CommonDataStatisticsManager, type_names: "${names}"}
trainer: {_target_: lightning.Trainer, accelerator: cpu, max_epochs: 1}
training_module:
  _target_: nequip.train.EMALightningModule
  loss: {_target_: nequip.train.EnergyForceLoss}
  val_metrics: {_target_: nequip.train.EnergyForceMetrics}
  optimizer: {_target_: torch.optim.Adam, lr: 0.01}
  model:
    _target_: nequip.model.NequIPGNNModel
    seed: 5
    model_dtype: float64
    type_names: ${names}
    r_max: 3.3
    num_layers: 1
    l_max: 1
    num_features: 4
    radial_mlp_width: 8
    avg_num_neighbors: ${training_data_stats:per_type_num_neighbors_mean}
    per_type_energy_shifts: ${training_data_stats:per_atom_energy_mean}
    per_type_energy_scales: ${training_data_stats:per_type_forces_rms}
"""
EXPECTED = {
    "avg_num_neighbours": {"Ni": 12.166666666666666, "Cu": 12.3},
    "energy_shifts": {"Ni": 0.8322716265626324, "Cu": 0.8322716265626324},
    "energy_scales": {"Ni": 3.3616817353363935, "Cu": 4.286682346020347},
}


def frames():
    rng = np.random.default_rng(0)
    for index in range(8):
        atoms = bulk("Cu", cubic=True).repeat((1 + index % 2, 1, 1))
        atoms.symbols[[0]] = "Ni"
        atoms.rattle(0.25, rng=rng)
        atoms.calc = EMT()
        results = {"energy": atoms.get_potential_energy(), "forces": atoms.get_forces()}
        atoms.calc = SinglePointCalculator(atoms, **results)
        yield atoms


def test_statistics_equal_those_of_nequip(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    structures = list(frames())
    write("train.xyz", structures[:6], format="extxyz")
    write("val.xyz", structures[6:], format="extxyz")
    (tmp_path / "alloy.yaml").write_text(CONFIG)
    run = forgefield.train(
        tmp_path / "alloy.yaml", "training.uncertainty=false", "training.engine=eager", "training.tensorboard=0"
    )
    # Forces are written with eight decimals.
    for name, values in EXPECTED.items():
        assert run.info["model"][name] == pytest.approx(values, rel=1e-9), name
