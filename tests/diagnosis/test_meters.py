"""Counters of energy that wrap around, memory, and where figures and numbers go."""

from __future__ import annotations

import importlib.util

import pytest
import torch
from lightning.pytorch.loggers import TensorBoardLogger

from forgefield.diagnosis.autocorrelation import ModelAutocorrelation
from forgefield.diagnosis.energy import EnergyMeter, read_counters, spent
from forgefield.diagnosis.gradient_check import GradientCheck
from forgefield.diagnosis.throughput_meter import ThroughputMeter, peak_memory_mb
from forgefield.errors import ForgefieldError
from tests.support.plain_modules import Net, fit, samples


def test_counters_of_packages_are_read_once_and_may_start_over(tmp_path):
    for name, energy in (("intel-rapl:0", 5_000_000), ("intel-rapl:1", 7_000_000), ("intel-rapl:0:0", 1_000_000)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "energy_uj").write_text(f"{energy}\n")
        (tmp_path / name / "max_energy_range_uj").write_text("10000000\n")
    begin = {key: value for key, value in read_counters(tmp_path).items() if key.startswith("intel")}
    assert begin == {"intel-rapl:0": 5.0, "intel-rapl:1": 7.0}  # the part of package 0 is in it
    (tmp_path / "intel-rapl:0" / "energy_uj").write_text("9000000")
    (tmp_path / "intel-rapl:1" / "energy_uj").write_text("2000000")
    used = spent(begin, read_counters(tmp_path), tmp_path)
    assert used == pytest.approx({"intel-rapl:0": 4.0, "intel-rapl:1": 5.0})


@pytest.mark.skipif(importlib.util.find_spec("codecarbon") is not None, reason="CodeCarbon is installed")
def test_what_is_not_installed_is_reported():
    with pytest.raises(ForgefieldError, match="needs the package codecarbon"):
        EnergyMeter(source="codecarbon", country="DEU")


def test_batches_that_are_accumulated_are_one_step(tmp_path):
    """24 batches, three to a step: eight steps, with a row every four of them and none at step 0."""
    meter = ThroughputMeter(every=4)
    fit(Net(), meter, folder=tmp_path, data=samples(192), max_epochs=1, accumulate_grad_batches=3)
    assert meter.numbers["rows"]["step"] == [4, 8]


def test_a_plain_script_has_throughput_memory_figures_and_numbers_in_its_logger(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    meter = ThroughputMeter(every=8)
    logger = TensorBoardLogger(str(tmp_path), name="events", version="0")
    callbacks = (meter, GradientCheck(norms_every=2), ModelAutocorrelation(window=8, every=4))
    fit(Net(), *callbacks, folder=tmp_path, data=samples(64), logger=logger)
    rows = meter.numbers["rows"]
    assert rows["step"] == [8, 16, 24]
    assert all(value > 0 for value in rows["frames_per_second"])
    assert all(0 <= value <= 1 for value in rows["data_share"])
    assert rows["memory_mb"][-1] == pytest.approx(peak_memory_mb(torch.device("cpu")), rel=0.2)
    events = EventAccumulator(logger.log_dir)
    events.Reload()
    assert set(events.Tags()["images"]) == {
        f"diagnosis/{name}" for name in ("throughput", "gradient_check", "autocorrelation")
    }
    assert "diagnosis/autocorrelation_gradients" in events.Tags()["scalars"]
