"""Learning-rate schedules by step: the curves against formulas written down slowly, exact ends, resume, scaling."""

from __future__ import annotations

import importlib.util
import json
import math
import os
import subprocess
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from forgefield.errors import ForgefieldError
from forgefield.training.optim.optimisers import build_scheduler, fit_length, rescale_learning_rates
from forgefield.training.optim.schedules import SCHEDULES
from tests.support.helpers import tiny_config
from tests.support.train_many import train_only


def make(spec: dict[str, Any] | str, *, lr: float = 1e-3, steps: int = 1000, lr_factor: float = 1.0) -> Any:
    """The scheduler that a config's `training.scheduler` gives, around a real optimiser."""
    optimiser = torch.optim.Adam([torch.nn.Parameter(torch.zeros(1))], lr=lr * lr_factor)
    return build_scheduler(
        spec, optimiser, monitor="val/loss", validate_every=1, epochs=1, steps=lambda: steps, lr_factor=lr_factor
    )["scheduler"]


def walk(scheduler: Any, steps: int) -> list[float]:
    """The optimiser's rate in each of so many steps, and the one after them."""
    rates = []
    for _ in range(steps + 1):
        rates.append(scheduler.optimizer.param_groups[0]["lr"])
        scheduler.optimizer.step()
        scheduler.step()
    return rates


def slow_rate(kind: str, t: int, *, start: float, stop: float, total: int, warmup: int = 0, **options: Any) -> float:
    """The rate of step t, as one would explain it."""
    if t < warmup:
        low = options.get("factor", 0.0) * start
        return low + (start - low) * t / warmup
    t, length = t - warmup, total - warmup
    if kind == "exp":
        every = options["every"]
        drops = t / every if options.get("smooth") else math.floor(t / every)
        return max(start * (stop / start) ** (drops * every / length), stop)
    if kind == "wsd":
        last = max(1, min(int(options["phase"] * total), length))
        if t < length - last:
            return start
        t, length = t - (length - last), last
    x = min(t / length, 1.0)
    shape = options.get("shape", "cosine")
    if shape == "cosine":
        return stop + 0.5 * (start - stop) * (1 + math.cos(math.pi * x))
    return start + (stop - start) * x if shape == "linear" else 1 / ((1 - x) / start + x / stop)


CURVES = {
    "exp": ({"name": "exp", "stop_lr": 1e-6, "decay_steps": 100}, {"every": 100}),
    "exp smooth": ({"name": "exp", "stop_lr": 1e-6, "decay_steps": 70, "smooth": True}, {"every": 70, "smooth": True}),
    "exp, uneven": ({"name": "exp", "stop_lr_ratio": 1e-3, "decay_steps": 300}, {"every": 300}),
    "exp, warm-up": (
        {"name": "exp", "stop_lr": 1e-6, "decay_steps": 90, "warmup_steps": 100, "warmup_start_factor": 0.1},
        {"every": 90, "warmup": 100, "factor": 0.1},
    ),
    "cosine_to": ({"name": "cosine_to", "stop_lr": 1e-5}, {}),
    "cosine_to, warm-up": ({"name": "cosine_to", "stop_lr_ratio": 0.01, "warmup_ratio": 0.05}, {"warmup": 50}),
    "wsd": ({"name": "wsd", "stop_lr": 1e-6}, {"phase": 0.1, "shape": "inverse_linear"}),
    "wsd linear": (
        {"name": "wsd", "stop_lr": 1e-6, "decay_phase_ratio": 0.3, "decay_type": "linear", "warmup_steps": 10},
        {"phase": 0.3, "shape": "linear", "warmup": 10},
    ),
    "wsd cosine": (
        {"name": "wsd", "stop_lr_ratio": 0.1, "decay_phase_ratio": 1.0, "decay_type": "cosine", "warmup_steps": 200},
        {"phase": 1.0, "shape": "cosine", "warmup": 200},
    ),
}


@pytest.mark.parametrize("name", CURVES)
def test_every_step_has_the_rate_of_the_formula(name: str) -> None:
    spec, options = CURVES[name]
    start, total = 1e-3, 1000
    stop = spec.get("stop_lr", start * spec.get("stop_lr_ratio", 0.0))
    expected = [slow_rate(spec["name"], t, start=start, stop=stop, total=total, **options) for t in range(total + 1)]
    assert walk(make(spec, lr=start, steps=total), total) == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("name", CURVES)
def test_the_ends_are_exact(name: str) -> None:
    spec, _ = CURVES[name]
    rates = walk(make(spec), 1000)
    warmup = spec.get("warmup_steps", int(1000 * spec.get("warmup_ratio", 0.0)))
    assert rates[0] == (spec.get("warmup_start_factor", 0.0) * 1e-3 if warmup else 1e-3)
    assert rates[warmup] == 1e-3
    if name != "exp, uneven":  # whose period does not divide the run: the last drop would come after it
        assert rates[1000] == spec.get("stop_lr", 1e-3 * spec.get("stop_lr_ratio", 0.0))
    assert rates[1000] >= spec.get("stop_lr", 0.0)


@pytest.mark.parametrize(("total", "period"), [(300, 4), (900, 10), (1009, 11), (1010, 100), (5000, 100), (5001, 5000)])
def test_a_period_longer_than_the_run_is_shortened(total: int, period: int) -> None:
    rates = walk(make({"name": "exp", "stop_lr": 1e-7}, steps=total), total - 1)
    changes = [t for t in range(1, total) if rates[t] != rates[t - 1]]
    assert changes == list(range(period, total, period))


def test_a_decay_rate_in_the_config_is_used_and_the_last_rate_is_its_floor() -> None:
    rates = walk(make({"name": "exp", "decay_rate": 0.5, "decay_steps": 10, "stop_lr": 1e-4}, steps=60), 60)
    assert rates[::10] == pytest.approx([1e-3, 5e-4, 2.5e-4, 1.25e-4, 1e-4, 1e-4, 1e-4])


@settings(max_examples=20, deadline=None)
@given(st.sampled_from(sorted(CURVES)), st.integers(1, 999))
def test_a_resumed_schedule_has_the_same_rates_to_the_last_bit(name: str, when: int) -> None:
    spec, _ = CURVES[name]
    whole = walk(make(spec), 1000)
    first = make(spec)
    walk(first, when - 1)
    second = make(spec)
    second.optimizer.load_state_dict(first.optimizer.state_dict())
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    assert walk(second, 1000 - when) == whole[when:]


@pytest.mark.parametrize("name", CURVES)
def test_a_factor_on_learning_rates_scales_the_whole_curve(name: str) -> None:
    spec, _ = CURVES[name]
    once, thrice = walk(make(spec), 1000), walk(make(spec, lr_factor=3.0), 1000)
    assert thrice == pytest.approx([3 * rate for rate in once], rel=1e-12)


@pytest.mark.parametrize("name", CURVES)
def test_a_checkpoint_of_another_number_of_ranks_resumes_with_scaled_rates(name: str) -> None:
    spec, _ = CURVES[name]
    first, second = make(spec, lr_factor=2.0), make(spec, lr_factor=6.0)
    walk(first, 400)
    checkpoint = {"optimizer_states": [first.optimizer.state_dict()], "lr_schedulers": [first.state_dict()]}
    rescale_learning_rates(checkpoint, 3.0)
    second.optimizer.load_state_dict(checkpoint["optimizer_states"][0])
    second.load_state_dict(checkpoint["lr_schedulers"][0])
    assert walk(second, 599) == pytest.approx(walk(make(spec, lr_factor=6.0), 1000)[401:], rel=1e-12)


def resumed(scheduler: Any, spec: dict[str, Any], steps: int) -> Any:
    """The schedule of a run that goes on from where `scheduler` is, with so many steps in all."""
    new = make(spec, steps=steps)
    new.optimizer.load_state_dict(scheduler.optimizer.state_dict())
    new.load_state_dict(scheduler.state_dict())
    return new


@pytest.mark.parametrize("name", CURVES)
def test_a_run_that_is_made_longer_follows_the_longer_curve(name: str) -> None:
    spec, _ = CURVES[name]
    first = make(spec)
    walk(first, 399)
    longer = resumed(first, spec, 3000)
    assert walk(longer, 100) == walk(make(spec, steps=3000), 500)[400:]


def test_a_schedule_of_the_run_keeps_its_place_when_other_ranks_need_another_number_of_steps() -> None:
    spec = {"name": "cosine_to", "stop_lr": 0.0}
    first = make(spec)
    walk(first, 499)
    scheduler = resumed(first, spec, 250)
    fit_length(scheduler, 250, in_proportion=True)
    assert (scheduler.T_max, scheduler.last_epoch) == (250, 125)
    assert scheduler.optimizer.param_groups[0]["lr"] == pytest.approx(5e-4)
    fit_length(scheduler, 250, in_proportion=True)
    assert scheduler.last_epoch == 125


def test_a_cosine_of_torch_follows_the_longer_curve_when_the_run_is_made_longer(tmp_path) -> None:
    """A run of 3 epochs is resumed with 6: torch's own state would hold the rate at zero or raise it again."""
    config = tiny_config(tmp_path, name="extended")
    config["training"] = {**config["training"], "lr": 0.01, "scheduler": "cosine"}
    rates: dict[int, float] = {}
    for epochs in (3, 6):
        config["trainer"] = {**config["trainer"], "max_epochs": epochs}
        run = train_only({**config, "callbacks": ["tests.training.optim.test_schedules.RatesOfEpochs"]})
        rates |= {int(k): v for k, v in json.loads((run.path / "rates.json").read_text()).items()}
    expected = [0.005 * (1 + math.cos(math.pi * epoch / 6)) for epoch in range(3, 6)]
    assert [rates[epoch] for epoch in range(3, 6)] == pytest.approx(expected, rel=1e-9)


class RatesOfEpochs(L.Callback):
    """Writes the learning rate of each epoch of this part of a training to rates.json."""

    def __init__(self) -> None:
        self.rates: dict[int, float] = {}

    def on_train_batch_start(self, trainer: Any, *_: Any) -> None:
        self.rates[trainer.current_epoch] = float(trainer.optimizers[0].param_groups[0]["lr"])

    def on_train_end(self, trainer: Any, *_: Any) -> None:
        (Path(trainer.default_root_dir) / "rates.json").write_text(json.dumps(self.rates))


@settings(max_examples=60, deadline=None)
@given(
    st.sampled_from(["exp", "cosine_to", "wsd"]),
    st.integers(1, 200),
    st.floats(1e-14, 1.0),
    st.floats(1e-6, 1.0),
    st.floats(0.0, 0.99),
)
def test_rates_stay_between_zero_and_the_first_one_and_never_rise_after_the_warm_up(name, steps, lr, ratio, warmup):
    spec = {"name": name, "stop_lr_ratio": ratio, "warmup_ratio": warmup}
    scheduler = make(spec, lr=lr, steps=steps)
    rates = [scheduler.rate(t, start=lr) for t in range(steps + 20)]
    assert all(0 <= rate <= lr * (1 + 1e-12) for rate in rates)
    decayed = rates[scheduler.warmup :]
    assert all(b <= a * (1 + 1e-12) for a, b in pairwise(decayed))


def test_a_first_rate_below_the_floor_of_an_exponential_does_not_rise() -> None:
    rates = walk(make({"name": "exp", "stop_lr": 0.0, "decay_steps": 10}, lr=1e-12, steps=50), 49)
    assert max(rates) == 1e-12


def test_cosine_still_names_the_scheduler_of_torch() -> None:
    assert isinstance(make({"name": "cosine", "T_max": 10}), torch.optim.lr_scheduler.CosineAnnealingLR)
    assert not any(name in SCHEDULES for name in ("cosine", "plateau", "cosineannealinglr", "exponentiallr"))


@pytest.mark.parametrize(
    ("spec", "said"),
    [
        ({"name": "exp"}, "either stop_lr or stop_lr_ratio"),
        ({"name": "exp", "stop_lr": 1e-6, "stop_lr_ratio": 0.1}, "either stop_lr or stop_lr_ratio"),
        ({"name": "exp", "stop_lr": 1.0}, "stop_lr must be between 0 and 0.001"),
        ({"name": "exp", "stop_lr_ratio": 1.5}, "stop_lr_ratio must be between 0 and 1"),
        ({"name": "exp", "stop_lr": 1e-6, "decay_steps": 0}, "decay_steps must be an integer of at least 1"),
        ({"name": "exp", "stop_lr": 1e-6, "decay_rate": 1.5}, "decay_rate"),
        ({"name": "exp", "stop_lr": 1e-6, "decay_step": 5}, "Did you mean 'decay_steps'"),
        ({"name": "exp", "stop_lr": 1e-6, "interval": "epoch"}, "interval must be step"),
        ({"name": "cosine_to", "stop_lr": 1e-6, "warmup_steps": 1000}, "leaves nothing"),
        ({"name": "cosine_to", "stop_lr": 1e-6, "warmup_steps": 5, "warmup_ratio": 0.1}, "cannot be combined"),
        ({"name": "wsd", "stop_lr": 0.0}, "positive"),
        ({"name": "wsd", "stop_lr": 1e-6, "decay_phase_ratio": 0}, "decay_phase_ratio"),
        ({"name": "wsd", "stop_lr": 1e-6, "decay_type": "sqrt"}, "inverse_linear, cosine or linear"),
        ("wsdd", "Did you mean 'wsd'"),
        ("SequentialLR", "needs a list of schedulers"),
        ({"name": "SequentialLR", "schedulers": ["plateau"]}, "ReduceLROnPlateau cannot be one of the schedulers"),
        ({"name": "SequentialLR", "schedulers": ["cosine"], "milestones": [3]}, "schedulers.0: set T_max"),
        ({"name": "ChainedScheduler", "schedulers": [{"name": "LinearLR", "interval": "step"}]}, "in common"),
    ],
)
def test_meaningless_settings_are_refused(spec: Any, said: str) -> None:
    with pytest.raises(ForgefieldError, match="training.scheduler") as error:
        make(spec)
    assert said in str(error.value)


SEQUENCE = {
    "name": "SequentialLR",
    "milestones": [4],
    "schedulers": [
        {"name": "LinearLR", "start_factor": 0.1, "total_iters": 4},
        {"name": "cosine", "T_max": 6, "eta_min": 1e-5},
    ],
}
CHAIN = {
    "name": "ChainedScheduler",
    "schedulers": [{"name": "ExponentialLR", "gamma": 0.9}, {"name": "ConstantLR", "factor": 0.5, "total_iters": 3}],
}


@pytest.mark.parametrize("spec", [SEQUENCE, CHAIN], ids=["sequence", "chain"])
def test_combined_schedulers_follow_their_parts_also_after_a_resume_with_scaled_rates(spec: dict[str, Any]) -> None:
    warm = [1e-3 * (0.1 + 0.9 * step / 4) for step in range(4)]
    cosine = [1e-5 + (1e-3 - 1e-5) * (1 + math.cos(math.pi * step / 6)) / 2 for step in range(7)]
    chain = [1e-3 * 0.9**step * (0.5 if step < 3 else 1) for step in range(11)]
    expected = warm + cosine if spec is SEQUENCE else chain
    assert walk(make(spec), 10) == pytest.approx(expected, rel=1e-9)
    first, second = make(spec, lr_factor=2.0), make(spec)
    walk(first, 5)
    checkpoint = {"optimizer_states": [first.optimizer.state_dict()], "lr_schedulers": [first.state_dict()]}
    rescale_learning_rates(checkpoint, 0.5)
    second.optimizer.load_state_dict(checkpoint["optimizer_states"][0])
    second.load_state_dict(checkpoint["lr_schedulers"][0])
    assert walk(second, 4) == pytest.approx(expected[6:], rel=1e-9)


def test_a_run_without_an_end_needs_a_length() -> None:
    with pytest.raises(ForgefieldError, match="T_max"):
        make({"name": "exp", "stop_lr": 1e-6}, steps=-1)
    assert make({"name": "exp", "stop_lr": 1e-6, "T_max": 50}, steps=-1).T_max == 50


# --- against DeePMD-kit, where it is installed

DEEPMD_SCRIPT = """
import json, sys
import numpy as np
from deepmd.dpmodel.utils.learning_rate import BaseLR
curves = []
for options, total in json.load(sys.stdin):
    schedule = BaseLR(start_lr=1e-3, num_steps=total, **options)
    curves.append(schedule.value(np.arange(total + 1)).tolist())
print(json.dumps(curves))
"""


def deepmd_python() -> str:
    named = os.environ.get("FORGEFIELD_DEEPMD_PYTHON")
    if named is None and importlib.util.find_spec("deepmd") is None:
        pytest.skip("deepmd-kit is not installed; FORGEFIELD_DEEPMD_PYTHON may name an interpreter that has it")
    return named or sys.executable


def test_the_curves_are_those_of_deepmd_kit() -> None:
    python = deepmd_python()
    cases: list[tuple[dict[str, Any], int]] = []
    for total in (1, 7, 300, 1009, 4321, 20000):
        for warmup in ({}, {"warmup_ratio": 0.13, "warmup_start_factor": 0.2}, {"warmup_steps": total // 3}):
            for stop in ({"stop_lr": 3.51e-8}, {"stop_lr_ratio": 0.05}):
                common = {**warmup, **stop}
                cases.append(({"type": "exp", **common}, total))
                cases.append(({"type": "exp", "decay_steps": 37, "smooth": True, **common}, total))
                cases.append(({"type": "exp", "decay_steps": 400, "decay_rate": 0.9, **common}, total))
                cases.append(({"type": "cosine", **common}, total))
                wsd = {"type": "wsd", "decay_phase_ratio": 0.27, **common}
                cases += [({**wsd, "decay_type": shape}, total) for shape in ("inverse_linear", "cosine", "linear")]
    answer = subprocess.run(
        [python, "-c", DEEPMD_SCRIPT], input=json.dumps(cases), capture_output=True, text=True, check=False
    )
    assert answer.returncode == 0, answer.stderr[-2000:]
    names = {"exp": "exp", "cosine": "cosine_to", "wsd": "wsd"}
    for (options, total), theirs in zip(cases, json.loads(answer.stdout), strict=True):
        spec = {"name": names[options["type"]], **{key: value for key, value in options.items() if key != "type"}}
        scheduler = make(spec, steps=total)
        ours = [scheduler.rate(t, start=1e-3) for t in range(total + 1)]
        assert ours == pytest.approx(theirs, rel=1e-11), (spec, total)
