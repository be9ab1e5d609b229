"""`forgefield bench` with real processes: what it counts, what it leaves alone, what it refuses; and the model of scaling."""

from __future__ import annotations

import copy
import importlib.util
import io
import json
import math
import sys
import tempfile
from contextlib import redirect_stdout
from dataclasses import replace
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest

from forgefield.bench import options as bench_options
from forgefield.bench import tables
from forgefield.bench.options import BenchOptions
from forgefield.bench.session import measure_group
from forgefield.bench.timer import PARTS, Measurement, _waiting
from forgefield.bench.training import measure, measured_config, not_measured
from forgefield.cli import main
from forgefield.config.loading import load_config
from forgefield.errors import ForgefieldError
from forgefield.parallel.launch import detect_launch
from forgefield.parallel.ranks import single_process
from tests.support.helpers import tiny_config
from tests.support.launching import ROOT, ranks, write_config

BATCH, TRAIN = 3, 10
"""Frames of a rank's batch, and all there are to train on: one rank has three full steps an epoch, two ranks have one."""


def small_config(folder: Path, **trainer: Any) -> dict[str, Any]:
    """A config with much in it that has no part in a step, and less data than the steps to be timed would use up."""
    return tiny_config(
        folder,
        data={"batch": {"frames": BATCH}},
        training={"tensorboard": 1, "monitor": "val/forces_mae", "early_stopping": {"patience": 1}},
        trainer={"max_steps": 1, "num_nodes": 2, **trainer},
        callbacks=[{"name": "lightning.pytorch.callbacks.EarlyStopping", "monitor": "nothing of that name"}],
    )


def tree(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> SimpleNamespace:
    """One real measurement with one and two processes. out: what it said. rows: its JSON. before, after: the user's runs."""
    folder = tmp_path_factory.mktemp("bench")
    config = write_config(folder / "mine.yaml", small_config(folder))
    (folder / "runs" / "tiny" / "checkpoints").mkdir(parents=True)
    (folder / "runs" / "tiny" / "run.json").write_text('{"status": "running"}')
    (folder / "runs" / "tiny" / "checkpoints" / "step-00000007.ckpt").write_text("precious")
    scratch = folder / "scratch"
    scratch.mkdir()
    before = tree(folder / "runs")
    words = ["--ranks", "1,2", "--steps", "4", "--warmup", "1", "--json", str(folder / "out.json")]
    out = io.StringIO()
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(out):
        patch.chdir(folder)
        patch.setenv("OMP_NUM_THREADS", "1")
        patch.setattr(tempfile, "tempdir", str(scratch))
        assert main(["bench", config.name, *words]) == 0
    content = json.loads((folder / "out.json").read_text())
    return SimpleNamespace(
        out=out.getvalue(),
        content=content,
        rows=content["measurements"],
        before=before,
        after=tree(folder / "runs"),
        left=sorted(path.name for path in scratch.iterdir()),
        files=sorted(path.name for path in folder.iterdir()),
        json=folder / "out.json",
    )


def test_steps_are_counted_over_all_ranks_and_full_ones_only(measured: SimpleNamespace) -> None:
    assert [row["ranks"] for row in measured.rows] == [1, 2]
    for row in measured.rows:
        assert row["steps"] == 4
        assert row["samples"] == 4 * row["ranks"] * BATCH
        assert row["full_batches"]
        assert 4 * row["samples"] <= row["atoms"] <= 8 * row["samples"]
        assert row["edges"] > row["atoms"]


def test_rates_follow_from_counts_and_seconds(measured: SimpleNamespace) -> None:
    first = measured.rows[0]
    for row in measured.rows:
        assert row["samples_per_second"] == pytest.approx(row["samples"] / row["seconds"])
        assert row["atoms_per_second"] == pytest.approx(row["atoms"] / row["seconds"])
        assert row["seconds_per_100_samples"] == pytest.approx(100 * row["seconds"] / row["samples"])
        assert row["step_ms"] == pytest.approx(1000 * row["seconds"] / row["steps"])
        assert row["speed_up"] == pytest.approx(row["samples_per_second"] / first["samples_per_second"])
        assert row["efficiency"] == pytest.approx(row["speed_up"] / row["ranks"])


def test_parts_make_up_the_step(measured: SimpleNamespace) -> None:
    for row in measured.rows:
        assert set(row["mean_ms"]) == set(PARTS)
        assert sum(row["mean_ms"].values()) == pytest.approx(row["step_ms"], rel=0.1)
        assert all(0 <= row["mean_ms"][part] <= row["max_ms"][part] for part in PARTS)
        assert row["mean_ms"]["compute"] > row["mean_ms"]["data"]
    one, two = measured.rows
    assert one["mean_ms"]["communication"] == one["waiting_ms"] == 0
    assert 0 <= two["waiting_ms"] < two["mean_ms"]["communication"]


def test_transfers_and_devices_are_reported(measured: SimpleNamespace) -> None:
    for row in measured.rows:
        assert row["message_bytes"] == 4 * row["parameters"]
        assert row["threads"] == 1
    assert [row["backend"] for row in measured.rows] == ["none", "gloo"]
    assert measured.rows[1]["strategy"] == "SimpleDDPStrategy"
    assert measured.content["model"]["name"] == "nequip"


def test_runs_of_the_user_are_not_touched_and_nothing_is_left(measured: SimpleNamespace) -> None:
    assert measured.after == measured.before
    assert measured.left == []
    assert measured.files == ["frames.extxyz", "mine.yaml", "out.json", "runs", "scratch"]


def test_table_for_people(measured: SimpleNamespace) -> None:
    lines = measured.out.splitlines()
    assert any("Measuring 2 processes, 1 + 4 steps" in line and "samples/s" in line for line in lines)
    header = next(i for i, line in enumerate(lines) if "s per 100 samples" in line)
    rows = [line.split() for line in lines[header + 2 : header + 4]]
    for cells, row in zip(rows, measured.rows):
        assert cells[0] == str(row["ranks"])
        assert float(cells[1]) == pytest.approx(row["seconds_per_100_samples"], rel=5e-3)
        assert float(cells[4]) == pytest.approx(row["speed_up"], abs=0.01)
    assert "weak scaling" in measured.out
    assert "Not measured: callbacks" in measured.out
    assert "gradient message" in measured.out


def test_processes_of_a_launcher_are_what_is_measured(tmp_path: Path) -> None:
    config = write_config(tmp_path / "mine.yaml", tiny_config(tmp_path))
    words = ("bench", config.name, "--steps", "2", "--warmup", "0", "--json", "out.json")
    done = ranks(2, "forgefield", *words, folder=tmp_path, launcher="torchrun")
    assert done.returncode == 0, done.stderr
    (row,) = json.loads((tmp_path / "out.json").read_text())["measurements"]
    assert (row["ranks"], row["steps"], row["samples"]) == (2, 2, 8)
    assert done.stdout.count("s per 100 samples") == 1
    assert not (tmp_path / "runs").exists()


def test_ranks_cannot_be_chosen_where_a_launcher_has(tmp_path: Path) -> None:
    started = single_process(detect_launch({"TORCHELASTIC_RUN_ID": "1", "RANK": "0", "WORLD_SIZE": "1"}))
    with pytest.raises(
        ForgefieldError, match="torchrun has started 1 process, and those are measured; leave --ranks out"
    ):
        measure_group(load_config(tiny_config(tmp_path)), started, BenchOptions(ranks=[1, 2]))


def test_error_of_a_measurement_is_reported_once(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    config = write_config(tmp_path / "mine.yaml", tiny_config(tmp_path))
    assert main(["bench", str(config), "--ranks", "1", "data.max_force=1e-6"]) == 2
    out, err = capfd.readouterr()
    assert err.count("error:") == 1
    assert "max_force" in err
    assert "s per 100 samples" not in out


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--ranks", "0"], "positive whole numbers"),
        (["--ranks", "1,two"], "positive whole numbers"),
        (["--ranks", "-1"], "positive whole numbers"),
        (["--ranks", "1.5"], "positive whole numbers"),
        (["--steps", "0"], "at least 1"),
        (["--warmup", "-3"], "at least 0"),
        (["--json", "no/such/folder/out.json"], "does not exist"),
        (["data.batch.frame=3"], "did you mean"),
        (["--engines", "eager,compiled"], "did you mean 'compile'"),
        (["--derivatives", "triple"], "'triple' is not one of auto, double, tangent"),
        (["--figure", "out.jpeg"], "should end in .png"),
        (["--figure", "out.png", "--ranks", "1,2"], "add --engines"),
        (["--quick", "--engines", "eager"], "use one of them"),
        (["--plan", "--ranks", "1"], "leave out --ranks"),
        (["--peer-python", sys.executable], "needs --peers"),
        (["--peers", "--peer-python", "no/such/python"], "no such program"),
        (["--peers", "--peer-names", "nequipp"], "did you mean 'nequip'"),
    ],
)
def test_wrong_arguments_are_one_clear_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], words: list[str], sentence: str
) -> None:
    config = write_config(tmp_path / "mine.yaml", tiny_config(tmp_path))
    assert main(["bench", str(config), *words]) == 2
    assert sentence.lower() in capsys.readouterr().err.lower()


def test_more_processes_than_cores_is_warned_of() -> None:
    (warning,) = bench_options.sharing_warnings(4, 2, "core")
    assert "4 processes" in warning
    assert "2 cores" in warning
    assert "no speed-up can be expected" in warning
    assert bench_options.sharing_warnings(2, 2, "core") == []


def test_disturbed_measurement_is_warned_of(measured: SimpleNamespace) -> None:
    row = Measurement.from_dict(measured.rows[1])
    assert row.core_share is not None
    assert row.core_share > 0
    (_, warning) = tables.scaling_notes([replace(row, core_share=0.42)])
    assert "42 % of its compute time" in warning
    assert len(tables.scaling_notes([replace(row, core_share=0.97)])) == 1


def test_default_is_doubling_up_to_what_there_is() -> None:
    assert [bench_options.powers_of_two(n) for n in (1, 2, 6, 8)] == [[1], [1, 2], [1, 2, 4], [1, 2, 4, 8]]


def test_devices_are_those_of_the_measurement_whatever_the_config(tmp_path: Path) -> None:
    config = load_config(small_config(tmp_path, devices="1,3"))
    assert bench_options.on_devices(config, 1, "GPU").trainer["devices"] == [1]
    assert bench_options.on_devices(config, 2, "core").trainer["devices"] == 2
    assert "num_nodes" not in bench_options.on_devices(config, 2, "core").trainer
    assert config.trainer["devices"] == "1,3"


def test_measured_training_is_the_same_but_for_what_is_not_a_step(tmp_path: Path) -> None:
    files = {"val": str(tmp_path / "other.extxyz"), "test": 2}
    given = small_config(tmp_path, gradient_clip_val=1.0, fast_dev_run=True, limit_train_batches=1)
    config = load_config({**given, "data": {**given["data"], **files}})
    before = copy.deepcopy(config)
    changed = measured_config(config, steps=7, warmup=2, folder=tmp_path / "there")
    assert config == before
    assert changed.out == str(tmp_path / "there" / "runs")
    assert (changed.data.val, changed.data.test) == (0, 2)
    assert changed.data.batch == config.data.batch
    assert changed.model == config.model
    assert (changed.training.lr, changed.training.ema) == (config.training.lr, config.training.ema)
    assert changed.training.early_stopping is None
    assert changed.trainer["gradient_clip_val"] == 1.0
    assert "fast_dev_run" not in changed.trainer
    assert "limit_train_batches" not in changed.trainer
    assert not_measured(config) == ["callbacks"]


@pytest.mark.parametrize(
    ("frames", "accumulate", "samples_of_a_step", "full"),
    [(BATCH, 2, 2 * BATCH, True), (4, 1, 4, True), (40, 1, TRAIN, False)],
    ids=["accumulated", "single", "less-data-than-a-batch"],
)
def test_step_is_an_optimiser_step_on_full_batches(
    tmp_path: Path, frames: int, accumulate: int, samples_of_a_step: int, full: bool
) -> None:
    config = load_config(tiny_config(tmp_path, data={"batch": {"frames": frames}}, training={"accumulate": accumulate}))
    measurement, code = measure(config, single_process(), steps=3, warmup=1, folder=tmp_path)
    assert code == 0
    assert measurement is not None
    assert (measurement.steps, measurement.samples) == (3, 3 * samples_of_a_step)
    assert measurement.full_batches is full
    assert any("fewer training frames" in note for note in tables.scaling_notes([measurement])) is not full
    assert Measurement.from_dict(json.loads(json.dumps(measurement.as_dict()))) == measurement


def test_waiting_is_what_the_last_to_come_does_not_have() -> None:
    first, second = [1.0, 5.0], [3.0, 2.0]
    assert _waiting([first, second]) == pytest.approx(((2.0 - 1.0) + (3.5 - 2.0)) / 2)
    assert _waiting([first]) == 0


# ---- benchmarks/scaling_model.py


@pytest.fixture(scope="module")
def model() -> ModuleType:
    spec = importlib.util.spec_from_file_location("scaling_model", ROOT / "benchmarks" / "scaling_model.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["scaling_model"] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


def network(model: ModuleType, **changes: float) -> Any:
    figures = {"latency_inside": 3e-6, "latency_between": 1e-5, "bandwidth_inside": 3e11, "bandwidth_between": 4e10}
    return model.Network(**{"per_node": 8, **figures, **changes})


def test_one_rank_sends_nothing(model: ModuleType) -> None:
    for algorithm in (model.ring_seconds, model.tree_seconds):
        assert algorithm(1, 1e9, 1e-5, 1e10) == 0
    assert model.all_reduce_seconds(1, 1e9, network(model, start=1e-5)) == 0


def test_every_byte_leaves_a_rank_twice_in_the_limit(model: ModuleType) -> None:
    n_bytes, bandwidth = 1e9, 1e10
    assert model.ring_seconds(2, n_bytes, 0, bandwidth) == pytest.approx(n_bytes / bandwidth)
    assert model.ring_seconds(10**6, n_bytes, 0, bandwidth) == pytest.approx(2 * n_bytes / bandwidth, rel=1e-5)
    assert model.tree_seconds(1024, n_bytes, 0, bandwidth) == pytest.approx(2 * n_bytes / bandwidth)
    flat = network(model, per_node=1, latency_between=0, bandwidth_between=bandwidth)
    assert model.all_reduce_seconds(10**6, n_bytes, flat) == pytest.approx(2 * n_bytes / bandwidth, rel=1e-5)


def test_latency_counts_hops(model: ModuleType) -> None:
    assert model.ring_seconds(64, 0, 1e-5, 1e10) == pytest.approx(2 * 63 * 1e-5)
    assert model.tree_seconds(64, 0, 1e-5, 1e10) == pytest.approx(2 * 6 * 1e-5)
    times = [model.all_reduce_seconds(512, 2e6, network(model, latency_between=t)) for t in (0, 1e-6, 1e-5, 1e-4)]
    assert times == sorted(times)
    assert times[0] < times[-1]


@pytest.mark.parametrize("world", [2, 8, 16, 128, 4096])
def test_all_reduce_grows_with_bytes_and_takes_the_better_way(model: ModuleType, world: int) -> None:
    one = network(model)
    times = [model.all_reduce_seconds(world, n_bytes, one) for n_bytes in (1e2, 1e4, 1e6, 1e8)]
    assert times == sorted(times)
    inside = model.ring_seconds(min(world, 8), 1e6, one.latency_inside, one.bandwidth_inside)
    share, nodes = 1e6 / min(world, 8), max(1, world // 8)
    ways = [
        algorithm(nodes, share, one.latency_between, one.bandwidth_between)
        for algorithm in (model.ring_seconds, model.tree_seconds)
    ]
    assert times[2] == pytest.approx(inside + min(ways))


def test_slowest_of_many_ranks_is_the_expected_maximum(model: ModuleType) -> None:
    random = np.random.default_rng(1)
    two_kinds = np.array([1.0, 3.0])
    for world in (1, 3, 6):
        exact = (3.0 - 2.0 * 0.5**world) / 2.0 - 1.0
        assert model.imbalance(two_kinds, 1, world, random, 20_000) == pytest.approx(exact, abs=0.01)
    assert model.imbalance(np.full(5, 7.0), 4, 64, random, 10) == 0
    spread = np.arange(1.0, 50.0)
    many_small, few = (model.imbalance(spread, frames, 64, random, 300) for frames in (64, 2))
    assert many_small < few


def test_presets_are_the_real_models(model: ModuleType) -> None:
    steps = {step.name: step for step in model.preset_steps()}
    assert list(steps) == ["S", "M", "L"]
    assert steps["S"].parameters < steps["M"].parameters < steps["L"].parameters
    assert all(step.message_bytes == 4 * step.parameters for step in steps.values())
    assert [sum(model.buckets(step.message_bytes)) for step in steps.values()] == [
        step.message_bytes for step in steps.values()
    ]


def test_measurement_goes_into_the_model(
    model: ModuleType, measured: SimpleNamespace, capsys: pytest.CaptureFixture[str]
) -> None:
    step, row = model.bench_step(measured.json), measured.rows[0]
    assert 1000 * step.alone == pytest.approx(row["step_ms"])
    assert (step.message_bytes, step.frames, step.name) == (row["message_bytes"], BATCH, "tiny")
    frames = measured.json.parent / "frames.extxyz"
    model.main(["--bench", str(measured.json), "--frames", str(frames), "--cutoff", "3.5", "--trials", "20"])
    out = capsys.readouterr().out
    table = out[out.index("Efficiency") : out.index("What it adds")].splitlines()[2:]
    efficiencies = [float(line.split()[2]) for line in table if line]
    assert len(efficiencies) == 13
    assert efficiencies[0] == 100
    assert efficiencies[0] > efficiencies[1] > efficiencies[-1] > 0
    for word in ("measured", "counted", "assumed", "Where this model would break"):
        assert word in out


def test_step_on_the_command_line(model: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--step-ms", "10", "--message-mb", "100", "--per-node", "1", "--ranks", "1,1024", "--disk", "1e9"]
    free = [
        "--latency-between",
        "0",
        "--start",
        "0",
        "--latency-host",
        "0",
        "--bandwidth-host",
        "1e9",
        "--memory",
        "1e9",
    ]
    model.main([*words, *free])
    out = capsys.readouterr().out
    seconds = 2 * 1023 / 1024 * 100e6 / 40e9
    expected = 100 * 0.010 / (0.010 + seconds)
    assert math.isclose(float(out[out.index("Efficiency") :].splitlines()[3].split()[2]), expected, abs_tol=0.01)


def test_model_refuses_no_ranks(model: ModuleType) -> None:
    with pytest.raises(ForgefieldError, match="from 1 up"):
        model.main(["--step-ms", "1", "--ranks", "0"])
