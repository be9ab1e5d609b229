"""`forgefield bench` by engine: what its numbers mean, what it counts as work, the water it measures on, and its peers."""

from __future__ import annotations

import importlib.util
import io
import json
import sys
import tempfile
from contextlib import redirect_stdout
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import ase.io
import numpy as np
import pytest
import torch
from ase.calculators.tip3p import TIP3P
from ase.neighborlist import neighbor_list

from forgefield.bench import peers as bench_peers
from forgefield.bench import step as bench_step
from forgefield.bench.children import Children, run_job
from forgefield.bench.options import BenchOptions, Job
from forgefield.bench.step import Limits, Work, _MatrixProducts, _SavedByAutograd, bare_step, count_work, measure_limits
from forgefield.bench.tables import Row, best_row, engines_notes, peer_row, percent
from forgefield.bench.training import BOX, frames_for, water, water_training, write_water
from forgefield.cli import main
from forgefield.config.loading import load_config
from forgefield.data.options import BatchOptions
from forgefield.parallel.ranks import single_process
from tests.support.helpers import tiny_config
from tests.support.launching import write_config

MODEL = "model={name: nequip, num_layers: 1, l_max: 1, num_features: 4, radial_mlp_width: 8}"
SMALL = [MODEL, "data.cutoff=3.0", "data.batch.frames=1", "trainer.accelerator=cpu", "--steps", "2", "--warmup", "1"]


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> SimpleNamespace:
    """One real measurement on water, without a config, of an engine that runs here and one that does not."""
    folder = tmp_path_factory.mktemp("bench")
    scratch = folder / "scratch"
    scratch.mkdir()
    files = ["--json", str(folder / "out.json"), "--figure", str(folder / "out.png")]
    out = io.StringIO()
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(out):
        patch.chdir(folder)
        patch.setenv("OMP_NUM_THREADS", "1")
        patch.setattr(tempfile, "tempdir", str(scratch))
        assert main(["bench", "--engines", "eager,graphs", *SMALL, *files]) == 0
    return SimpleNamespace(
        out=out.getvalue(),
        content=json.loads((folder / "out.json").read_text()),
        figure=(folder / "out.png").read_bytes(),
        left=sorted(path.name for path in folder.iterdir()),
        scratch=list(scratch.iterdir()),
    )


def test_rates_are_those_of_one_frame_of_water(measured: SimpleNamespace) -> None:
    eager, _ = measured.content["engines"]
    assert (eager["engine"], eager["derivative"], eager["precision"]) == ("eager", "double", "float32")
    steps_per_second = 1000 / eager["step_ms"]
    assert eager["atoms_per_second"] == pytest.approx(192 * steps_per_second)
    work = measured.content["work"]["float32"]
    assert work["atoms"] == 192
    assert eager["edges_per_second"] == pytest.approx(work["edges"] * steps_per_second, rel=0.1)
    assert eager["first_step_seconds"] > 0
    assert 1e8 < eager["memory_bytes"] < 1e10


def test_fractions_are_work_over_limits(measured: SimpleNamespace) -> None:
    eager, work = measured.content["engines"][0], measured.content["work"]["float32"]
    limits, steps_per_second = measured.content["limits"], eager["edges_per_second"] / work["edges"]
    assert eager["bandwidth"] == pytest.approx(work["bytes"] * steps_per_second / limits["copy"])
    assert eager["arithmetic"] == pytest.approx(work["flops"] * steps_per_second / limits["matmul"]["float32"])
    assert 0 < eager["arithmetic"] < 1
    assert 0 < eager["bandwidth"] < 1


def test_an_engine_that_cannot_run_is_a_row_with_the_reason(measured: SimpleNamespace) -> None:
    _, graphs = measured.content["engines"]
    assert graphs["engine"] == "graphs"
    assert graphs["step_ms"] is None
    assert "NVIDIA GPU" in graphs["refusal"]
    assert "graphs, float32: training.engine=graphs: CUDA graphs need an NVIDIA GPU" in measured.out


def test_only_what_was_requested_is_measured_and_nothing_is_left(measured: SimpleNamespace) -> None:
    assert measured.content["measurements"] == []
    assert measured.left == ["out.json", "out.png", "scratch"]
    assert measured.scratch == []


def test_the_printed_table_and_the_figure_show_the_numbers(measured: SimpleNamespace) -> None:
    line = next(line.split() for line in measured.out.splitlines() if line.strip().startswith("eager"))
    eager = measured.content["engines"][0]
    assert line[:3] == ["eager", "double", "float32"]
    assert float(line[4]) == pytest.approx(eager["step_ms"], rel=0.01)
    assert "Data: liquid water" in measured.out
    assert "bytes that every execution moves" in measured.out
    assert measured.figure.startswith(b"\x89PNG")


# ---- work and limits


def test_matrix_products_are_counted_through_both_derivatives() -> None:
    x = torch.randn(5, 7, requires_grad=True)
    w = torch.randn(7, 3, requires_grad=True)
    with _MatrixProducts() as counted:
        (slope,) = torch.autograd.grad((x @ w).tanh().sum(), x, create_graph=True)
        slope.square().sum().backward()
    one = 2 * 5 * 7 * 3
    # x @ w; for the slope dy @ w^T; back through that for dy and w; back through x @ w for x and w.
    assert counted.flops == 6 * one


def test_memory_that_autograd_keeps_is_counted_once() -> None:
    x, weight = torch.randn(1000, requires_grad=True), torch.randn(1000, requires_grad=True)
    kept = _SavedByAutograd([x, weight])
    with kept:
        y = x.exp()  # keeps y
        z = y * weight  # keeps y, again, and a weight, which is not counted
        (z * z).sum()  # keeps z, twice
    assert kept.bytes == 4 * 2000


def test_work_grows_with_the_batch(tmp_path: Path) -> None:
    step = bare_step(load_config(tiny_config(tmp_path)))
    one, two, three = (count_work(step, step.batch([0] * n)) for n in (1, 2, 3))
    assert (three.flops - two.flops) == (two.flops - one.flops) > 0
    assert three.bytes - two.bytes == pytest.approx(two.bytes - one.bytes, rel=0.02)
    weights = sum(p.numel() * p.element_size() for p in step.potential.parameters())
    assert (
        one.bytes - (two.bytes - one.bytes) >= 2 * 4 * weights
    )  # weights, gradients and Adam's two moments, in and out


def test_fractions_of_limits() -> None:
    work = Work(atoms=10, edges=100, flops=2_000, bytes=3_000)
    bandwidth, arithmetic = work.fractions(Limits(1e6, {"tf32": 4e6}), edges_per_second=5_000, precision="tf32")
    assert (bandwidth, arithmetic) == (pytest.approx(50 * 3_000 / 1e6), pytest.approx(50 * 2_000 / 4e6))
    assert work.fractions(Limits(1e6, {}), edges_per_second=5_000, precision="tf32")[1] is None
    assert Work.from_dict(json.loads(json.dumps(work.as_dict()))) == work


def test_limits_are_rates_that_are_reached(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever else the machine does meanwhile, they are numbers that a processor can have."""
    monkeypatch.setattr(bench_step, "LOOP_SECONDS", 0.05)
    limits = measure_limits(torch.device("cpu"), ["float32", "float64"])
    assert 1e7 < limits.copy < 1e14
    assert all(1e7 < rate < 1e15 for rate in limits.matmul.values())


def test_limits_are_work_by_the_time_it_took(monkeypatch: pytest.MonkeyPatch) -> None:
    """By a clock on which every action takes 50 ms: bytes read and written, and multiplications and additions."""
    monkeypatch.setattr(bench_step, "_seconds", lambda action, device, repeats=1: 0.05 * repeats)
    limits = measure_limits(torch.device("cpu"), ["float32", "float64", "unknown"])
    assert limits.copy == pytest.approx(20 * 2 * bench_step.COPY_BYTES["cpu"])
    assert limits.matmul == pytest.approx({"float32": 20 * 2 * 256**3, "float64": 20 * 2 * 256**3})


# ---- rows


def test_the_fastest_engine_is_recommended() -> None:
    rows = [
        Row("eager", "float32", step_ms=30.0),
        Row("compile", "float32", step_ms=10.0),
        Row("graphs", "float32", refusal="no GPU"),
        Row("nequip compile", "float32", step_ms=1.0, is_peer=True),
        Row("compile", "tf32", step_ms=5.0),
    ]
    best = best_row(rows, "float32")
    assert best is not None
    assert best.label == "compile"
    assert best_row(rows[2:4], "float32") is None
    assert replace(rows[0], captured="compile").label == "eager (compile)"
    assert [percent(x) for x in (None, 0.5, 0.034, 0.00012)] == ["-", "50 %", "3.4 %", "0.012 %"]


def test_peer_numbers_are_turned_into_rates() -> None:
    result = {
        "first_step_seconds": 2.0,
        "step_ms": 20.0,
        "memory_bytes": None,
        "resident_bytes": 7,
        "description": "small",
    }
    row = peer_row("mace", {**result, "parameters": 1234}, precision="float32", atoms=192, edges=10_000)
    assert (row.atoms_per_second, row.edges_per_second, row.memory_bytes) == (9600, 500_000, 7)
    assert "mace: small, 1,234 parameters." in engines_notes([row], None, "cpu")


# ---- water


def test_water_is_liquid_water() -> None:
    atoms = water(np.random.default_rng(1))
    assert len(atoms) == 192
    grams_per_cm3 = atoms.get_masses().sum() * 1.66053907 / BOX**3
    assert grams_per_cm3 == pytest.approx(0.997, abs=0.005)
    assert 50 < len(neighbor_list("i", atoms, 5.0)) / 192 < 58
    assert abs(atoms.get_forces()).max() < 20


def test_labels_of_water_are_an_energy_and_its_slope() -> None:
    atoms = water(np.random.default_rng(2), along_edge=3)
    settings = {"rc": 0.45 * atoms.cell[0, 0], "width": 0.5}
    energies = []
    for step in (1e-4, -1e-4):
        moved = atoms.copy()
        moved.positions[4, 1] += step
        moved.calc = TIP3P(**settings)
        energies.append(moved.get_potential_energy())
    assert atoms.get_forces()[4, 1] == pytest.approx((energies[1] - energies[0]) / 2e-4, rel=1e-4)


def test_water_is_the_same_every_time_and_enough_for_full_batches(tmp_path: Path) -> None:
    for name in ("a", "b"):
        write_water(tmp_path / name, 2)
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()
    for batch, frames in (({"frames": 16}, 32), ({"atoms": 1920}, 20), ({"edges": 100_000}, 18)):
        options: Any = SimpleNamespace(batch=BatchOptions(**batch))
        assert frames_for(options, ranks=2) >= frames


def test_water_takes_the_place_of_the_data_of_a_config(tmp_path: Path) -> None:
    content = tiny_config(tmp_path, task={"energy": {}, "stress": {}}, data={"test": 2, "batch": {"frames": 3}})
    file = write_config(tmp_path / "mine.yaml", content)
    with water_training(str(file), ["training.lr=0.5"], single_process(), most=2) as config:
        frames = ase.io.read(config.data.train, ":")
        assert len(frames) >= 6
        assert all(len(frame) == 192 for frame in frames)
        assert (config.training.lr, config.data.cutoff, config.data.batch.frames) == (0.5, 3.5, 3)
        assert (config.data.test, config.task.stress) == (None, None)
        assert config.model["num_features"] == content["model"]["num_features"]
    assert not Path(config.data.train).parent.exists()


def test_a_job_that_fails_leaves_its_reason(tmp_path: Path) -> None:
    config = load_config(tiny_config(tmp_path, data={"max_force": 1e-6}))
    assert run_job(config, single_process(), Job("plan", tmp_path / "result.json")) == 2
    result = json.loads((tmp_path / "result.json").read_text())
    assert "max_force" in result["refusal"]
    assert result["of_memory"] is False


# ---- peers


def test_a_peer_that_is_not_installed_is_a_line(tmp_path: Path) -> None:
    if importlib.util.find_spec("mace") is not None:
        pytest.skip("MACE is installed here")
    children = Children(tmp_path, "1", BenchOptions(steps=1, warmup=0))
    assert children.run_peer({"name": "mace"}, [sys.executable]) == {"refusal": "mace-torch is not installed"}


def test_batches_of_a_peer_are_prepared_together_and_timed_on_request(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a model of one weight in the place of another program's; the second batch is one that it cannot predict."""
    for n, energy in enumerate((1.0, float("inf"))):
        arrays = {"n_atoms": np.array([1]), "species": np.zeros(1, int), "edge_index": np.zeros((2, 0), int)}
        np.savez(tmp_path / f"{n}.npz", energy=np.array([energy]), forces=np.zeros((1, 3)), **arrays)
    model = torch.nn.Linear(1, 1, bias=False)
    taken = []

    def bind(batch: dict[str, torch.Tensor]) -> Any:
        def predict() -> tuple[torch.Tensor, torch.Tensor]:
            taken.append(float(batch["energy"]))
            if not bool(batch["energy"].isfinite()):
                raise ValueError("no such energy")
            return model(torch.ones(1, 1)).reshape(-1), model(torch.ones(3, 1)).reshape(1, 3)

        return predict

    monkeypatch.setattr(bench_peers, "build_peer", lambda job, batch: bench_peers.Peer(model, bind, "one weight"))
    monkeypatch.setattr(sys, "stdin", io.StringIO("1\n0\n"))
    job: dict[str, Any] = {"name": "nequip eager", "device": "cpu", "lr": 0.1, "warmup": 2, "steps": 3}
    job["structures"] = [str(tmp_path / f"{n}.npz") for n in range(2)]
    bench_peers.serve(job, tmp_path / "result.json")
    prepared = json.loads((tmp_path / "result.json").read_text())["prepared"]
    assert prepared[0]["first_step_seconds"] > 0
    assert prepared[1] == {"refusal": "ValueError: no such energy"}
    assert json.loads((tmp_path / "result-1.json").read_text())["refusal"] == "ValueError: no such energy"
    found = json.loads((tmp_path / "result-0.json").read_text())
    assert found["step_ms"] > 0
    assert (found["parameters"], found["with_gradient"], found["frames"], found["atoms"]) == (1, 1, 1, 1)
    assert taken == [1.0, float("inf"), *[1.0] * 7]  # both prepared; then a step to warm up and twice three that count


def test_a_step_of_a_peer_is_a_step_of_adam_on_energies_and_forces() -> None:
    model = torch.nn.Linear(1, 1, bias=False)
    torch.nn.init.constant_(model.weight, 2.0)
    batch = {
        "n_atoms": torch.tensor([2, 2]),
        "energy": torch.tensor([1.0, float("nan")], dtype=torch.float64),
        "forces": torch.full((4, 3), float("nan"), dtype=torch.float64),
    }

    def predict() -> tuple[torch.Tensor, torch.Tensor]:
        return model(torch.ones(2, 1)).reshape(-1), model(torch.ones(12, 1)).reshape(4, 3)

    bench_peers.training_step(model, predict, batch, lr=0.125)()
    assert model.weight.item() == pytest.approx(1.875)  # Adam's first step is the learning rate, against the gradient
    assert model.weight.grad is not None
    assert model.weight.grad.item() == pytest.approx(
        (2 - 1) / 4
    )  # d/dw of ((w - 1) / 2)^2 / 2; missing labels add nothing


@pytest.mark.skipif(importlib.util.find_spec("nequip") is None, reason="nequip is not installed")
def test_nequip_is_measured_where_it_is_installed(tmp_path: Path) -> None:
    step = bare_step(load_config(tiny_config(tmp_path)))
    arrays = {key: tensor.numpy() for key, tensor in step.batch([0, 1]).items()}
    np.savez(tmp_path / "structures.npz", numbers=np.array([29, 79]), **arrays)
    job = {"name": "nequip eager", "structures": str(tmp_path / "structures.npz"), "model": step.resolved}
    job |= {"device": "cpu", "precision": "float32", "lr": 0.01, "warmup": 1, "steps": 2}
    result = Children(tmp_path, "1", BenchOptions(steps=2, warmup=1)).run_peer(job, [sys.executable])
    assert result["step_ms"] > 0
    assert result["description"] == "Forgefield's hyperparameters"
