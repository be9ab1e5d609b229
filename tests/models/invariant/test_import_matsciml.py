"""Checkpoints of Open MatSciML with PyTorch Geometric's SchNet give the same predictions, and nothing in them is executed."""

from __future__ import annotations

import sys
import types
from pathlib import Path
from typing import Any

import pytest
import torch

import forgefield
from forgefield.api.models import import_model
from forgefield.errors import ForgefieldError
from forgefield.models.importing import ImportRequest
from tests.support.structures import make_batch, make_frame

CUTOFF = 3.0


def all_pairs(positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Edges of a cluster and their lengths."""
    n = len(positions)
    distances = (positions[:, None] - positions[None] + torch.eye(n)[..., None]).norm(dim=-1)
    index = ((distances < CUTOFF) & ~torch.eye(n, dtype=torch.bool)).nonzero().T
    return index, (positions[index[0]] - positions[index[1]]).norm(dim=-1)


@pytest.fixture
def write(tmp_path, monkeypatch):
    """Writes a checkpoint as Lightning does, with the encoder's class and options among the hyperparameters."""
    module = types.ModuleType("matsciml_at_test")

    def save(name: str, state: dict[str, torch.Tensor], **settings: Any) -> Path:
        encoder = type(name, (), {"__module__": module.__name__})
        setattr(module, name, encoder)
        monkeypatch.setitem(sys.modules, module.__name__, module)
        content = {"state_dict": state, "hyper_parameters": {"encoder_class": encoder, **settings}}
        torch.save(content, tmp_path / "best.ckpt")
        monkeypatch.delitem(sys.modules, module.__name__)  # the class cannot be imported any more
        return tmp_path / "best.ckpt"

    return save


def test_energies_and_forces_are_those_of_the_checkpoint(write, tmp_path):
    geometric = pytest.importorskip("torch_geometric.nn.models")
    torch.manual_seed(0)
    theirs = geometric.SchNet(8, 6, 2, 5, cutoff=CUTOFF, interaction_graph=lambda pos, batch: all_pairs(pos)).double()
    with torch.no_grad():
        for parameter in theirs.parameters():  # biases are zero at first
            parameter += 0.2 * torch.randn_like(parameter)
    state = {f"encoder.{key}": value for key, value in theirs.state_dict().items()}
    file = write("SchNetWrap", state, normalize_kwargs={"energy_mean": 0.0, "energy_std": 0.5})
    run, _ = import_model("matsciml", ImportRequest(str(file), species=["H", "O"]), name="lips", out=tmp_path)
    frame = make_frame(6, periodic=False)
    found = forgefield.load(run)(make_batch(frame))
    positions = torch.from_numpy(frame.positions).requires_grad_(True)
    energy = 0.5 * theirs(torch.from_numpy(frame.numbers), positions).sum()
    (slope,) = torch.autograd.grad(energy, positions)
    # PyTorch Geometric rounds ln 2 and the centres of its Gaussians to float32.
    assert float(found["energy"]) == pytest.approx(float(energy.detach()), rel=1e-6)
    torch.testing.assert_close(found["forces"], -slope, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("EGNN", "a checkpoint of EGNN, which is not imported: it reads absolute coordinates"),
        ("Gala", "a checkpoint of Gala, which is not imported: it has no counterpart"),
    ],
)
def test_other_encoders_are_refused_with_the_reason(write, name, sentence):
    with pytest.raises(ForgefieldError, match=sentence):
        import_model("matsciml", write(name, {"encoder.weight": torch.zeros(2)}))
