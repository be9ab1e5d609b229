"""The data module end to end, on small files and on the real sets; and what `forgefield data info` prints."""

from __future__ import annotations

import lightning
import numpy as np
import pytest
import torch

from forgefield.cli import Parser
from forgefield.cli import data as data_command
from forgefield.data.batch import BatchSpec
from forgefield.data.inspection.inspect import inspect_table
from forgefield.data.module import read_data
from forgefield.data.options import BatchOptions, DataOptions, UnitOptions
from forgefield.data.store.table import FrameTable
from forgefield.errors import ForgefieldError


@pytest.fixture
def file(tmp_path):
    text = "".join(
        f"2\nProperties=species:S:1:pos:R:3:forces:R:3 energy={-30 - i / 100}\n"
        f"H 0 0 0 0 0 1\nO 0 0 {1 + i / 50} 0 0 -1\n"
        for i in range(12)
    )
    (tmp_path / "a.xyz").write_text(text)
    return tmp_path / "a.xyz"


def test_data_is_split_batched_and_described_according_to_the_options(file):
    options = DataOptions(train=str(file), val=0.25, batch=BatchOptions(frames=4), eval_batch=2)
    calls = []
    module = read_data(options, seed=1, progress=lambda done, total: calls.append((done, total)))
    assert calls[-1] == (12, 12)
    assert calls == sorted(calls)
    assert module.species.symbols == ("H", "O")
    assert (len(module.train), len(module.val), module.test) == (9, 3, None)
    served = module.serve(BatchSpec())
    assert [len(b["energy"]) for b in served.train_dataloader()] == [4, 4, 1]
    assert [len(b["energy"]) for b in served.val_dataloader()] == [2, 1]
    assert served.test_dataloader() == []
    rows = dict(module.describe())
    assert rows["frames"] == "9 to train, 3 to val (random)"
    assert rows["species"] == "H 9, O 9"


def test_shuffling_is_an_option_and_follows_the_epoch(file):
    def order(shuffle, epoch):
        loader = read_data(DataOptions(train=str(file), shuffle=shuffle), 3).serve(BatchSpec()).train_dataloader()
        loader.set_epoch(epoch)
        return [i for batch in loader for i in batch["frame_id"].tolist()]

    assert order(False, 1) == list(range(11))
    assert order(True, 0) != order(True, 1)
    assert order(True, 1) == order(True, 1)


def test_lightning_takes_the_loaders_as_they_are(file):
    class Count(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.scale = torch.nn.Parameter(torch.zeros((), dtype=torch.float64))
            self.seen = []

        def training_step(self, batch, _):
            self.seen += batch["frame_id"].tolist()
            return (self.scale - batch["energy"]).square().mean()

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=0.1)

    model = Count()
    trainer = lightning.Trainer(
        max_epochs=2, logger=False, enable_checkpointing=False, enable_progress_bar=False, accelerator="cpu",
        enable_model_summary=False, barebones=False,
    )  # fmt: skip
    data = read_data(DataOptions(train=str(file), val=2, batch=BatchOptions(frames=3)), 0)
    trainer.fit(model, datamodule=data.serve(BatchSpec()))
    assert sorted(model.seen) == sorted(list(range(10)) * 2)


def test_an_element_only_in_the_test_file_is_an_error_that_names_it(file, tmp_path):
    (tmp_path / "test.xyz").write_text("2\nenergy=1\nH 0 0 0\nAu 0 0 1\n")
    with pytest.raises(ForgefieldError, match=r"test\.xyz, frame 0: it contains Au"):
        read_data(DataOptions(train=str(file), test=str(tmp_path / "test.xyz")), 0)


def test_species_in_the_config_set_the_order_and_may_be_more(file):
    module = read_data(DataOptions(train=str(file), species=["O", "H", "N"]), 0)
    assert module.train[0]["species"].tolist() == [1, 0]
    assert module.statistics.species_counts == {"O": 11, "H": 11, "N": 0}
    assert module.statistics.mean_neighbours_by_species["N"] == 0.0


def test_rmd17_with_the_frames_of_the_benchmark(shared):
    folder = shared / "rmd17"
    options = DataOptions(
        train=str(folder / "rmd17_ethanol_train_01.npz"), indices="0:50", val={"indices": "950:1000"},
        units=UnitOptions(energy="kcal/mol"),
    )  # fmt: skip
    module = read_data(options, 0)
    assert [f.index for f in module.train.frames] == list(range(50))
    assert [f.index for f in module.val.frames] == list(range(950, 1000))
    assert module.statistics.species_counts == {"H": 300, "C": 100, "O": 50}
    assert 0.8 < module.statistics.min_distance < 1.0
    assert module.statistics.mean_neighbours == pytest.approx(8.0, abs=0.05)  # all 9 atoms see each other


def test_3bpa_takes_its_isolated_atoms_as_reference(shared):
    files = [str(shared / "3bpa" / name) for name in ("train_300K.xyz", "iso_atoms.xyz")]
    module = read_data(DataOptions(train=files, val=50), 0)
    found = module.statistics
    assert found.reference_kind == "isolated"
    assert found.reference_energies["C"] == -1029.4889999855063
    assert found.labels == {"energy": 454, "forces": 450, "stress": 0}
    assert -8 < found.energy_residual_mean < -4  # cohesive energy of an organic molecule


def test_3bpa_in_the_wrong_unit_is_noticed(shared):
    files = [str(shared / "3bpa" / name) for name in ("train_300K.xyz",)]
    options = DataOptions(train=files, val=50, units=UnitOptions(forces="Ha/Bohr"), max_force=100)
    with pytest.raises(ForgefieldError, match=r"train_300K\.xyz, frame \d+: force component"):
        read_data(options, 0)


def inspect_command(*argv):
    parser = Parser(prog="data")
    data_command.add_arguments(parser)
    return data_command.run(data_command.parse(parser, ["info", *map(str, argv)]))


def test_info_shows_what_is_there(file, capsys):
    assert inspect_command(file, "--energy-unit", "Ha", "--forces-unit", "eV/A", "--cutoff", "3") == 0
    printed = capsys.readouterr().out
    for piece in ("12 in 1 file", "2, 24 in all", "H: 12 atoms in 12 frames", "none: 12 frames", "-1 to 1 eV/A"):
        assert piece in printed
    assert f"{-30 * 27.211386 / 2:.2f}"[:6] in printed
    assert "1.000 A (H-O" in printed
    assert "nothing suspicious" in printed


def test_info_points_at_what_is_suspicious(make_frame):
    rng = np.random.default_rng(0)
    frames = [
        make_frame([8, 1, 1], energy=-500.0 + rng.normal(), forces=rng.normal(size=(3, 3)), source="w.xyz", index=i)
        for i in range(20)
    ]
    frames[3] = make_frame([8, 1, 1], energy=-500.0 / 27.2, forces=rng.normal(size=(3, 3)), source="w.xyz", index=3)
    frames[5] = make_frame([8, 1, 1], energy=-500.0, forces=np.full((3, 3), 90.0), source="w.xyz", index=5)
    frames[7] = make_frame([8, 1, 1], energy=-500.0, forces=None, source="w.xyz", index=7,
                           positions=[[0, 0, 0], [0, 0, 0.2], [0, 1, 0]])  # fmt: skip
    frames.append(frames[0])
    remarks = "\n".join(inspect_table(FrameTable.from_frames(frames)).remarks)
    assert "1 frame with atoms closer than half the sum of their covalent radii: w.xyz, frame 7" in remarks
    assert "1 frame identical to an earlier one: w.xyz, frame 0" in remarks
    assert "eV/A: w.xyz, frame 5" in remarks
    assert "eV/atom: w.xyz, frame 3; the ratio 27" in remarks
    assert "1 frame without forces: w.xyz, frame 7" in remarks
