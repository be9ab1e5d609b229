"""Which accelerator is chosen, and what is said where it cannot be. MPS and XPU are not here: torch is made to say so."""

from __future__ import annotations

import pytest
import torch

from forgefield.errors import ForgefieldError
from forgefield.parallel import accelerators
from forgefield.parallel.accelerators import XPUAccelerator, device_count, evaluation_device, resolve_accelerator
from forgefield.training.trainer import requested_processes
from tests.support.helpers import tiny_config
from tests.support.train_many import train_only


@pytest.fixture
def machine(monkeypatch):
    """A machine as torch describes it: how many devices of each kind."""

    def describe(*, cuda: int = 0, xpu: int = 0, mps: bool = False) -> None:
        for module, number in ((torch.cuda, cuda), (torch.xpu, xpu)):
            monkeypatch.setattr(module, "is_available", lambda number=number: number > 0)
            monkeypatch.setattr(module, "device_count", lambda number=number: number)
            monkeypatch.setattr(module, "current_device", lambda: 0)
        monkeypatch.setattr(torch.xpu, "_is_compiled", lambda: xpu > 0)
        monkeypatch.setattr(torch.backends.mps, "is_available", lambda: mps)

    return describe


@pytest.mark.parametrize(
    ("kinds", "wanted", "chosen", "device", "number"),
    [
        ({}, None, None, "cpu", 0),
        ({}, "cpu", "cpu", "cpu", 0),
        ({"cuda": 4}, None, None, "cuda:0", 4),
        ({"cuda": 4}, "gpu", "gpu", "cuda:0", 4),
        ({"cuda": 4}, "cpu", "cpu", "cpu", 0),
        ({"cuda": 2, "xpu": 3}, "xpu", "xpu", "xpu:0", 3),
        ({"xpu": 3}, None, "xpu", "xpu:0", 3),
        ({"xpu": 3}, "gpu", "xpu", "xpu:0", 3),
        ({"mps": True}, None, "cpu", "cpu", 0),
    ],
)
def test_the_accelerator_that_is_chosen(kinds, wanted, chosen, device, number, machine):
    machine(**kinds)
    options = {} if wanted is None else {"accelerator": wanted}
    note = resolve_accelerator(options)
    assert options.get("accelerator") == chosen
    assert evaluation_device(wanted) == device
    assert device_count(wanted) == number
    assert (note is not None) == bool(kinds.get("mps"))


def test_one_process_takes_its_own_xpu(machine):
    """Lightning takes the CPU for a single device of a kind it does not know."""
    machine(xpu=3)
    options = {"accelerator": "xpu", "devices": [2]}
    resolve_accelerator(options)
    assert options["strategy"].root_device == torch.device("xpu", 2)
    several = {"accelerator": "xpu", "devices": 3}
    resolve_accelerator(several, world_size=3)
    assert "strategy" not in several
    assert XPUAccelerator.get_parallel_devices(XPUAccelerator.parse_devices(3))[2] == torch.device("xpu", 2)


@pytest.mark.parametrize(
    ("kinds", "wanted", "words"),
    [
        ({"mps": True}, "mps", r"mps: .*float64.*use trainer\.accelerator=cpu"),
        ({"mps": True}, "gpu", r"would be mps on this machine.*float64"),
        ({}, "gpu", "finds no GPU"),
        ({}, "cuda", "finds no CUDA device"),
        ({}, "xpu", "without XPU support"),
        ({}, "tpu", "choose one of auto, cpu, gpu, cuda, xpu"),
        ({}, "cudda", "Did you mean 'cuda'"),
    ],
)
def test_impossible_settings_are_refused_with_one_sentence(kinds, wanted, words, machine, tmp_path):
    machine(**kinds)
    config = tiny_config(tmp_path)
    config["trainer"]["accelerator"] = wanted
    with pytest.raises(ForgefieldError, match=words):
        train_only(config)


def test_as_many_processes_as_devices(machine, tmp_path):
    from forgefield.config.loading import load_config

    machine(xpu=3)
    config = tiny_config(tmp_path)
    config["trainer"]["accelerator"] = "xpu"
    assert requested_processes(load_config(config)) == 3
    config["trainer"]["accelerator"] = "cpu"
    assert requested_processes(load_config(config)) == 1


def test_random_numbers_of_the_accelerator_are_kept_by_its_name(machine, monkeypatch):
    machine(xpu=1)
    kept = {}
    monkeypatch.setattr(torch.xpu, "get_rng_state", lambda: torch.tensor([7]))
    monkeypatch.setattr(torch.xpu, "set_rng_state", lambda state: kept.update(state=state))
    accelerators.set_accelerator_random_state(accelerators.accelerator_random_state())
    assert kept["state"].tolist() == [7]
    accelerators.set_accelerator_random_state(
        {"cuda": torch.tensor([1])}
    )  # of a run that was on another kind of device
