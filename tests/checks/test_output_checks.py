"""Checks of models without an energy: a lawful one passes, and a law that is broken is named with the output that breaks it."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import yaml
from torch import nn

from forgefield.checks import CheckResult, run_checks
from forgefield.cli import main
from forgefield.errors import ForgefieldError
from forgefield.models import build_model, resolve_model
from forgefield.models.edges import edge_vectors
from forgefield.models.heads.options import HeadOptions
from forgefield.models.predictor import Predictor
from tests.support.check_structures import SPECIES, structures
from tests.support.helpers import PROPERTIES, tiny_config, write_properties

HEADS = {
    "charge": HeadOptions(per="atom", hidden=[4], scale=0.1),
    "gap": HeadOptions(reduce="mean", hidden=[4], shift=[[1.0], [2.0]], scale=0.5),
    "kind": HeadOptions(reduce="mean", hidden=[], classes=[1.0, 2.0]),
    "size": HeadOptions(reduce="sum", shape=[2], hidden=[4], scale=100.0),
}


class Lawful(nn.Module):
    """Sums of waves of the distance, twice passed on, and the species."""

    species, cutoff, feature_dim = ("Cu", "Au"), 4.0, 5

    def __init__(self) -> None:
        super().__init__()
        self.wave = nn.Parameter(torch.linspace(0.3, 1.5, 4, dtype=torch.float64))

    def envelope(self, r):
        return (1 - (r / self.cutoff).clamp(max=1.0) ** 2) ** 3

    def sum(self, batch, values):
        return values.new_zeros(len(batch["species"]), values.shape[1]).index_add(0, batch["edge_index"][1], values)

    def forward(self, batch):
        source, _ = batch["edge_index"]
        r = batch["edge_vectors"].norm(dim=1, keepdim=True)
        waves = torch.cos(self.wave * r) * self.envelope(r)
        once = self.sum(batch, waves * (1 + batch["species"][source, None]))
        twice = self.sum(batch, waves * torch.tanh(once[source]))
        return torch.cat([twice, batch["species"][:, None].double()], dim=1)


class PrefersAnAxis(Lawful):
    def forward(self, batch):
        vectors = batch["edge_vectors"]
        along = 1e-4 * vectors[:, :1] ** 2 * self.envelope(vectors.norm(dim=1, keepdim=True))
        return super().forward(batch) + self.sum(batch, along)


class Handed(Lawful):
    def forward(self, batch):
        vectors = batch["edge_vectors"]
        r = vectors.norm(dim=1, keepdim=True)
        kind = batch["species"][batch["edge_index"][0]][:, None]
        weights = (torch.ones_like(r), torch.exp(-r), torch.exp(-2 * r) * (1 + kind))
        a, b, c = (self.sum(batch, w * self.envelope(r) * vectors) for w in weights)
        return super().forward(batch) + (a * torch.linalg.cross(b, c)).sum(dim=1, keepdim=True)


class KnowsItsPlace(Lawful):
    def forward(self, batch):
        return super().forward(batch) + 1e-5 * batch["positions"][:, 1:2]


class KnowsAtomNumbers(Lawful):
    def forward(self, batch):
        start = torch.cumsum(batch["n_atoms"], 0) - batch["n_atoms"]
        order = torch.arange(len(batch["frame"])) - start[batch["frame"]]
        return super().forward(batch) * (1 + 1e-5 * order[:, None])


class SeesBatchMates(Lawful):
    """Like a batch normalisation left in training mode."""

    def forward(self, batch):
        features = super().forward(batch)
        return features - 1e-4 * features.mean(dim=0)


class HardCutoff(Lawful):
    def envelope(self, r):
        return torch.ones_like(r)


class IgnoresImages(Lawful):
    """As most encoders of Open MatSciML: distances between the atoms of the cell, wherever the neighbour's image is."""

    def forward(self, batch):
        source, centre = batch["edge_index"]
        wrong = batch["positions"][source] - batch["positions"][centre] + 1e-3
        return super().forward(batch | {"edge_vectors": wrong})


class CountsAtoms(Lawful):
    def forward(self, batch):
        return super().forward(batch) * (1 + 1e-5 * batch["n_atoms"][batch["frame"]][:, None])


class NoneWithoutNeighbours(Lawful):
    def forward(self, batch):
        neighbours = self.sum(batch, torch.ones_like(batch["edge_shift"][:, :1]))
        return super().forward(batch) * neighbours / neighbours


def results_of(model: nn.Module, heads: dict[str, HeadOptions] = HEADS) -> list[CheckResult]:
    predictor = Predictor(model, heads, has_energy=False, dtype=torch.float64, seed=1)
    return run_checks(predictor, structures(), SPECIES, 4.0, generator=np.random.default_rng(0))


def failing(model: nn.Module) -> set[str]:
    return {result.name for result in results_of(model) if not result.passed}


def test_lawful_encoder_passes_every_check():
    results = results_of(Lawful())
    assert [result for result in results if not result.passed] == []
    assert len(results) == 9


@pytest.mark.parametrize(
    ("model", "broken"),
    [
        (PrefersAnAxis, {"rotation", "reflection"}),
        (Handed, {"reflection"}),
        (KnowsAtomNumbers, {"permutation", "supercell"}),
        (SeesBatchMates, {"batch independence"}),
        (HardCutoff, {"cutoff smoothness"}),
        (CountsAtoms, {"supercell"}),
    ],
)
def test_broken_law_is_found_and_no_other_is_blamed(model, broken):
    assert failing(model()) == broken


@pytest.mark.parametrize(
    ("model", "broken"),
    [
        (IgnoresImages, {"supercell", "wrapping"}),
        (KnowsItsPlace, {"translation", "wrapping"}),
        (NoneWithoutNeighbours, {"no neighbours"}),
    ],
)
def test_law_whose_breach_breaks_others_too(model, broken):
    assert failing(model()) >= broken


def test_the_output_that_breaks_a_law_is_named():
    """An intensive head that adds up instead: the mean of logits is right, the sum is not."""

    class Sums(Predictor):
        def forward(self, batch, **asked):
            found = super().forward(batch, **asked)
            return {**found, "gap": found["gap"] * batch["n_atoms"]}

    model = Sums(Lawful(), HEADS, has_energy=False, dtype=torch.float64, seed=1)
    results = run_checks(model, structures(), SPECIES, 4.0, generator=np.random.default_rng(0))
    (found,) = [result for result in results if not result.passed]
    assert found.name == "supercell"
    assert found.note.endswith("(failed: gap)")


def test_equivariant_outputs_are_checked_for_equivariance():
    """Vectors of atoms that stay where they are, or the other way round, do not go through."""

    class Vectors(Predictor):
        turned = True

        def forward(self, batch, **asked):
            vectors = edge_vectors(batch)
            r = vectors.norm(dim=1, keepdim=True)
            sums = self.model.sum(batch, vectors * self.model.envelope(r))
            return {"dipole": sums if self.turned else sums.abs()}

    options = HeadOptions(per="atom", shape=[3])
    model = Vectors(Lawful(), {"dipole": options}, has_energy=False, dtype=torch.float64)
    options.kind = "vector"
    random = np.random.default_rng(0)
    assert all(result.passed for result in run_checks(model, structures(), SPECIES, 4.0, generator=random))
    model.turned = False
    failed = {r.name for r in run_checks(model, structures(), SPECIES, 4.0, generator=random) if not r.passed}
    assert failed == {"rotation", "reflection"}


def test_heads_next_to_an_energy_are_checked_too():
    given = {"name": "painn", "num_layers": 1, "num_features": 4, "energy_shifts": 0.0, "avg_num_neighbours": 9.0}
    facts = {"gap": {"reduce": "mean", "scale": 0.5}}
    resolved = resolve_model(given, species=SPECIES.symbols, cutoff=4.0, heads=facts)
    model = build_model(resolved, precision="float32", seed=0)
    results = run_checks(model, structures()[:1], SPECIES, 4.0, generator=np.random.default_rng(0))
    assert [result for result in results if not result.passed] == []
    assert len(results) == 22
    assert "supercell outputs" in {result.name for result in results}


def test_direct_forces_alone_are_checked():
    """Forces that do not turn with the structure fail. Moves of noise are nothing to check."""

    class Folded(Predictor):
        def forward(self, batch, **asked):
            return {"forces": super().forward(batch, **asked)["forces"].abs()}

    forces = HeadOptions(per="atom", shape=[3], kind="vector", hidden=[4])
    assert all(result.passed for result in results_of(Lawful(), {"forces": forces}))
    model = Folded(Lawful(), {"forces": forces}, has_energy=False, dtype=torch.float64, seed=1)
    results = run_checks(model, structures(), SPECIES, 4.0, generator=np.random.default_rng(0))
    assert {result.name for result in results if not result.passed} == {"rotation", "reflection"}
    with pytest.raises(ForgefieldError, match="neither an energy nor properties"):
        results_of(Lawful(), {"denoise": forces})


def test_heads_with_dropout_are_checked():
    results = results_of(Lawful(), {"gap": HeadOptions(reduce="mean", hidden=[4], dropout=0.5)})
    assert [result for result in results if not result.passed] == []


@pytest.mark.parametrize("model", ["nequip", "schnet"])
def test_command_checks_a_config_without_energies(tmp_path, model, capsys):
    """Frames with labels of atoms, missing here and there: labels do not disturb."""
    config = tiny_config(tmp_path, task={"gap": {}, "site_charge": {}, "cohesion": {"reduce": "sum"}})
    del config["task"]["energy"], config["task"]["forces"]
    config["data"] |= {"train": str(write_properties(tmp_path / "p.extxyz", 12)), "labels": {"fields": PROPERTIES}}
    config["model"] = {"name": model, "num_layers": 1, "num_features": 4}
    (tmp_path / "own.yaml").write_text(yaml.safe_dump(config))
    assert main(["check", str(tmp_path / "own.yaml"), "--frames", "2"]) == 0
    assert "All 9 checks passed" in capsys.readouterr().out
