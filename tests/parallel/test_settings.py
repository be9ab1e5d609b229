"""Settings of parallel training: learning-rate scaling, strategies and what is refused, batch per rank, logs."""

from __future__ import annotations

import logging
import math
from dataclasses import replace
from pathlib import Path

import lightning as L
import pytest
import torch

from forgefield.api import train
from forgefield.config.loading import load_config
from forgefield.data.sampling.plan import Budget
from forgefield.errors import ForgefieldError
from forgefield.parallel.ranks import Ranks, single_process
from forgefield.parallel.rendezvous import interface_towards, usable_threads
from forgefield.parallel.strategies import MPIDDPStrategy, check_strategy, register_strategies
from forgefield.training.optim.optimisers import build_optimiser, build_scheduler, fit_length, rescale_learning_rates
from forgefield.training.optim.schedules import describe_learning_rate, learning_rate_factor
from forgefield.training.problem.preflight import check_settings
from forgefield.training.run.journal import Journal
from forgefield.training.run.start_summary import effective_batch, schedule_rows
from forgefield.training.trainer import _launch_environment, _require_gradient_averaging, requested_processes
from tests.support.helpers import tiny_config

# ---- learning rate


@pytest.mark.parametrize(("rule", "factor"), [("none", 1.0), ("sqrt", math.sqrt(6)), ("linear", 6.0)])
def test_learning_rate_is_scaled_by_the_number_of_ranks(rule, factor):
    assert learning_rate_factor(rule, 6) == factor
    assert learning_rate_factor(rule, 1) == 1.0


@pytest.mark.parametrize("wrong", ["lineer", "Linear", "2", "yes", ""])
def test_any_other_rule_is_an_error(wrong):
    with pytest.raises(ForgefieldError, match=r"'training\.scale_lr' must be none, sqrt or linear"):
        load_config({"training": {"scale_lr": wrong}})


def rates(spec: dict, factor: float, steps: int = 12) -> list[float]:
    """The learning rate of each step of a schedule."""
    optimiser = build_optimiser("sgd", [torch.nn.Parameter(torch.zeros(1))], lr=0.1 * factor)
    made = build_scheduler(
        {**spec, "interval": "step"},
        optimiser,
        monitor="x",
        validate_every=1,
        epochs=-1,
        steps=lambda: steps,
        lr_factor=factor,
    )
    found = []
    for _ in range(steps):
        found.append(optimiser.param_groups[0]["lr"])
        optimiser.step()
        made["scheduler"].step()
    return found


@pytest.mark.parametrize(
    "spec",
    [
        {"name": "cosine", "eta_min": 0.01},
        {"name": "ExponentialLR", "gamma": 0.9},
        {"name": "OneCycleLR", "max_lr": 0.3, "total_steps": 20},
        {"name": "CyclicLR", "base_lr": 0.01, "max_lr": 0.2, "step_size_up": 3},
        {"name": "StepLR", "step_size": 4},
    ],
)
def test_the_whole_curve_is_scaled_and_keeps_its_length(spec):
    assert rates(spec, 3.0) == pytest.approx([3.0 * rate for rate in rates(spec, 1.0)], rel=1e-12)


@pytest.mark.parametrize("spec", [{"name": "cosine", "eta_min": 0.01}, {"name": "StepLR", "step_size": 4}])
def test_a_resume_with_another_factor_follows_the_scaled_curve(spec):
    def stepped(factor, n, state=None):
        optimiser = build_optimiser("sgd", [torch.nn.Parameter(torch.zeros(1))], lr=0.1 * factor)
        made = build_scheduler(
            {**spec, "interval": "step"},
            optimiser,
            monitor="x",
            validate_every=1,
            epochs=-1,
            steps=lambda: 12,
            lr_factor=factor,
        )["scheduler"]
        if state is not None:
            optimiser.load_state_dict(state["optimizer_states"][0])
            made.load_state_dict(state["lr_schedulers"][0])
        for _ in range(n):
            optimiser.step()
            made.step()
        return optimiser, made

    optimiser, scheduler = stepped(2.0, 5)
    state = {"optimizer_states": [optimiser.state_dict()], "lr_schedulers": [scheduler.state_dict()]}
    rescale_learning_rates(state, 4.0 / 2.0)
    resumed, _ = stepped(4.0, 3, state)
    straight, _ = stepped(4.0, 8)
    assert resumed.param_groups[0]["lr"] == pytest.approx(straight.param_groups[0]["lr"], rel=1e-12)


def test_applied_settings_are_reported():
    assert describe_learning_rate(0.01, "sqrt", 4, 2.0) == "lr 0.01 x 2 (scale_lr=sqrt, 4 ranks) = 0.02"
    assert effective_batch(Budget("frames", 8), 4, 2) == "8 frames x 4 ranks x 2 batches per step = 64 frames per step"
    assert effective_batch(Budget("frames", 1), 1, 1) == "1 frame"
    assert "counted in steps, of which" in schedule_rows({"name": "StepLR", "interval": "step"}, 4)[0][1]


def test_batch_per_rank_from_an_effective_batch(monkeypatch, tmp_path):
    monkeypatch.setenv("SLURM_NTASKS", "4")
    path = tmp_path / "my.yaml"
    path.write_text(
        "effective_batch: 32\ndata: {batch: {frames: '${int_div:${effective_batch},${oc.env:SLURM_NTASKS}}'}}\n"
    )
    assert load_config(path, []).data.batch.frames == 8


# ---- strategies


@pytest.mark.parametrize(
    ("strategy", "reason"),
    [
        ("fsdp", "shards the parameters"),
        ("deepspeed_stage_2", "an optimiser step"),
        ("ddp_spawn", "cannot be resumed or watched"),
        ("ddp_notebook", "cannot be resumed or watched"),
        ("dpp", "Did you mean 'ddp'"),
        ("single_device", "is for one process, but 4 were started"),
    ],
)
def test_a_strategy_that_cannot_work_is_refused_with_the_reason(strategy, reason):
    with pytest.raises(ForgefieldError, match=reason):
        check_strategy(strategy, world_size=4)


@pytest.mark.parametrize("strategy", ["simple_ddp", "ddp", "ddp_find_unused_parameters_true", None, "auto"])
def test_supported_strategies_are_accepted(strategy):
    check_strategy(strategy, world_size=4)
    with pytest.raises(ForgefieldError, match="shards the parameters"):
        check_strategy("fsdp", world_size=4)


@pytest.mark.parametrize(
    ("strategy", "missing"),
    [
        ("single_xpu", "single_xpu: this torch .* is built without XPU support|finds no Intel GPU"),
        ("ddp_with_xpu", "ddp_with_xpu: this torch .* is built without XPU support|finds no Intel GPU"),
        ("ddp_with_ccl", "oneccl_bindings_for_pytorch is not installed"),
    ],
)
@pytest.mark.skipif(hasattr(torch, "xpu") and torch.xpu.is_available(), reason="there is an Intel GPU")
def test_missing_hardware_or_library_is_one_clear_error(strategy, missing, tmp_path):
    config = tiny_config(tmp_path)
    config["trainer"] = {**config["trainer"], "strategy": strategy}
    config["trainer"].pop("accelerator")
    with pytest.raises(ForgefieldError, match=missing):
        train(config)
    assert not (tmp_path / "runs" / "tiny").exists()


@pytest.mark.skipif(torch.distributed.is_mpi_available(), reason="this torch has MPI")
def test_a_backend_that_torch_lacks_is_one_clear_error():
    with pytest.raises(ForgefieldError, match="this torch is built without MPI"):
        MPIDDPStrategy(process_group_backend="mpi")


def test_names_are_registered_with_lightning_once():
    from lightning.pytorch.strategies import StrategyRegistry

    register_strategies()
    register_strategies()
    for name in ("simple_ddp", "ddp_with_mpi", "ddp_with_ccl", "ddp_with_xpu", "single_xpu"):
        assert name in StrategyRegistry


def test_an_optimiser_that_follows_the_loss_is_refused_on_several_ranks(tmp_path):
    config = load_config(tiny_config(tmp_path), ["training.optimizer=lbfgs"])
    two = Ranks(
        replace(single_process().launch, world_size=2, local_size=2, launcher="torchrun"), hosts=["a", "a"], backend="x"
    )
    with pytest.raises(ForgefieldError, match="evaluations in a step of LBFGS depends on the loss"):
        check_settings(config, {}, two)
    check_settings(config, {}, single_process())


def test_edge_kernels_cannot_be_turned_off_for_a_model_without_them(tmp_path):
    config = load_config(tiny_config(tmp_path), ["training.kernels.edges=false"])
    check_settings(config, {}, single_process())  # NequIP's convolutions on a CPU
    config.model = {"name": "allegro", "preset": "S"}
    check_settings(config, {}, single_process())
    config.model = {"name": "schnet"}
    with pytest.raises(ForgefieldError, match="has no sums over edges that use kernels"):
        check_settings(config, {}, single_process())


@pytest.mark.parametrize(
    ("devices", "accelerator", "n"),
    [(2, "cpu", 2), ("3", "cpu", 3), ([0, 1], "gpu", 2), ("0,1,2", "gpu", 3), (None, "cpu", 1), ("auto", "cpu", 1)],
)
def test_how_many_processes_the_devices_ask_for(devices, accelerator, n, tmp_path):
    config = tiny_config(tmp_path)
    config["trainer"] = {**config["trainer"], "accelerator": accelerator}
    if devices is not None:
        config["trainer"]["devices"] = devices
    assert requested_processes(load_config(config, [])) == n


# ---- the rest


def test_threads_are_shared_among_the_ranks_of_a_node(monkeypatch):
    monkeypatch.setattr("os.cpu_count", lambda: 16)
    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(16)))
    assert usable_threads(replace(single_process().launch, local_size=4)) == 4
    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(2)))  # the launcher has given us cores of our own
    assert usable_threads(replace(single_process().launch, local_size=8)) == 2


def test_the_interface_towards_this_machine_is_its_loopback():
    assert interface_towards("127.0.0.1") == "lo"
    assert interface_towards("no such machine anywhere") is None


def test_a_journal_writes_the_requested_file(tmp_path):
    journal = Journal(file=tmp_path / "train.log")
    journal.notify("before the folder")
    (tmp_path / "run").mkdir()
    journal.keep_in(tmp_path / "run")
    journal.notify("after it")
    logging.getLogger("lightning.pytorch").info("a remark")
    logging.getLogger("lightning.pytorch").warning("a warning")
    journal.close()
    for path in (tmp_path / "train.log", tmp_path / "run" / "log.txt"):
        text = path.read_text()
        assert text.count("before the folder") == text.count("after it") == 1
        assert "a warning" not in text
    assert (tmp_path / "run" / "warnings.txt").read_text().count("a warning") == 1


def test_a_log_that_cannot_be_written_is_a_clear_error(tmp_path):
    with pytest.raises(ForgefieldError, match=r"Could not write the log .*train\.log"):
        Journal(file=Path(tmp_path / "nowhere" / "train.log"))


def test_a_schedule_as_long_as_the_run_continues_at_the_same_step_when_the_run_has_fewer_steps():
    """12 steps on two ranks become 24 on one: after a quarter of the run the learning rate is where it was."""

    def at(n: int, length: int):
        optimiser = build_optimiser("sgd", [torch.nn.Parameter(torch.zeros(1))], lr=0.1)
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimiser, T_max=length)
        for _ in range(n):
            optimiser.step()
            scheduler.step()
        return optimiser, scheduler

    optimiser, scheduler = at(3, 12)
    fit_length(scheduler, 24, in_proportion=True)
    rates_left = []
    for _ in range(18):
        optimiser.step()
        scheduler.step()
        rates_left.append(optimiser.param_groups[0]["lr"])
    assert rates_left[5] == pytest.approx(at(12, 24)[0].param_groups[0]["lr"], rel=1e-9)
    assert rates_left == sorted(rates_left, reverse=True)
    assert rates_left[-1] == pytest.approx(0.0, abs=1e-12)


def test_devices_written_as_text_are_the_devices_that_are_used():
    launch = replace(single_process().launch, launcher="torchrun", world_size=2, local_size=2, master_port=1)
    options = {"devices": "2,3", "accelerator": "gpu"}
    _launch_environment(options, launch)
    assert options["devices"] == [2, 3]
    assert options["strategy"] == "simple_ddp"


def test_one_process_of_a_launcher_uses_one_device():
    options: dict = {}
    _launch_environment(options, replace(single_process().launch, launcher="srun", master_port=1))
    assert options["devices"] == 1


def test_a_strategy_that_does_not_average_is_refused_also_as_an_object():
    trainer = L.Trainer(accelerator="cpu", devices=1, logger=False, enable_checkpointing=False)
    two = Ranks(replace(single_process().launch, world_size=2, local_size=2), hosts=["a", "a"], backend="gloo")
    with pytest.raises(ForgefieldError, match="SingleDeviceStrategy does not average gradients over the 2 processes"):
        _require_gradient_averaging(trainer, two)
