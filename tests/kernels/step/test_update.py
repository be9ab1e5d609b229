"""Steps of Adam and AdamW by a kernel, against torch's own in float32 and in float64."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from forgefield.kernels.step import update
from forgefield.kernels.step.update import AdamStep, Group, Weight
from tests.support.kernels import DEVICE, draw, needs_kernels

pytestmark = needs_kernels
SHAPES = ((1,), (1023,), (41, 25), (), (0,), (3, 1024), (2, 7))
WITHOUT_GRADIENT = 6
"""The last of the shapes."""
KINDS = {"adam": torch.optim.Adam, "adamw": torch.optim.AdamW}
SETTINGS = (
    {"lr": 0.02, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.0},
    {"lr": 0.01, "betas": (0.8, 0.95), "eps": 1e-6, "weight_decay": 0.1},
)
CLIPS = {"not clipped": None, "norm": ("norm", 3.0), "wide": ("norm", 1e4), "value": ("value", 0.7)}
ROUNDING = 2e-6


class Trained:
    """Weights in two groups with gradients of many sizes, trained by torch's optimiser or by the kernel."""

    def __init__(self, kind: str, dtype: torch.dtype = torch.float32, device: str = DEVICE) -> None:
        self.weights = [
            torch.nn.Parameter(draw(i, *shape).to(device, torch.float32).to(dtype)) for i, shape in enumerate(SHAPES)
        ]
        self.averages = [w.detach().clone() for w in self.weights]
        for number, weight in enumerate(self.weights):
            if number != WITHOUT_GRADIENT:
                weight.grad = torch.zeros_like(weight)
        groups = [{"params": self.weights[i::2], **SETTINGS[i]} for i in range(2)]
        self.optimiser = KINDS[kind](groups, foreach=False, fused=False)
        self.kernel: AdamStep | None = None

    def bring(self, step: int) -> None:
        for number, weight in enumerate(self.weights):
            if weight.grad is not None:
                values = draw(100 * step + number, *weight.shape).float() * 10.0 ** (number % 3 - 1)
                weight.grad.copy_(values)

    def by_torch(self, clip: tuple[str, float] | None, share: float | None) -> None:
        if clip is not None:
            clipped = torch.nn.utils.clip_grad_norm_ if clip[0] == "norm" else torch.nn.utils.clip_grad_value_
            clipped(self.weights, clip[1])
        self.optimiser.step()
        if share is not None:
            with torch.no_grad():
                torch._foreach_lerp_(self.averages, self.weights, share)

    def make_kernel(self, clip: tuple[str, float] | None, averaged: bool, found_inf: Tensor | None = None) -> None:
        self.share = torch.zeros((), device=DEVICE)
        self.rates = [torch.tensor(group["lr"], device=DEVICE) for group in self.optimiser.param_groups]
        groups = [
            Group(rate, group["betas"], group["eps"], group["weight_decay"], group["decoupled_weight_decay"])
            for rate, group in zip(self.rates, self.optimiser.param_groups)
        ]
        weights = []
        for number, weight in enumerate(self.weights):
            row = Weight(weight.detach(), self.averages[number] if averaged else None)
            if weight.grad is not None:
                mean, square = torch.zeros_like(weight), torch.zeros_like(weight)
                count = torch.zeros((), device=DEVICE)
                row = replace(
                    row, gradient=weight.grad, mean=mean, square=square, count=count, group=int(number % 2 == 1)
                )
            weights.append(row)
        share = self.share if averaged else None
        self.rows = weights
        self.kernel = AdamStep(weights, groups, share=share, found_inf=found_inf, clip=clip)

    def by_kernel(self, share: float | None) -> None:
        assert self.kernel is not None
        for rate, group in zip(self.rates, self.optimiser.param_groups):
            rate.fill_(group["lr"])
        self.share.fill_(share or 0.0)
        self.kernel.launch()

    def everything(self) -> list[Tensor]:
        states = [t for row in self.rows for t in (row.mean, row.square, row.count) if t is not None]
        return [*(w.detach() for w in self.weights), *self.averages, *states]


def largest_difference(found: list[Tensor], expected: list[Tensor]) -> float:
    """In units of the largest number of each tensor."""
    differences = [0.0]
    for a, b in zip(found, expected, strict=True):
        if a.numel():
            differences.append(float((a.double() - b.double().to(a.device)).abs().max() / b.double().abs().max()))
    return max(differences)


@pytest.mark.parametrize("clip", CLIPS)
@pytest.mark.parametrize("averaged", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_steps_are_those_of_torch(kind, averaged, clip):
    """Twelve steps, with learning rates and shares of the average that change. The kernel is as near to float64 as torch is."""
    ours, theirs, exact = Trained(kind), Trained(kind), Trained(kind, torch.float64)
    ours.make_kernel(CLIPS[clip], averaged)
    for step in range(12):
        share = (0.3, 0.002, 1.0)[step % 3] if averaged else None
        for trained in (ours, theirs, exact):
            trained.bring(step)
            for group, settings in zip(trained.optimiser.param_groups, SETTINGS):
                group["lr"] = settings["lr"] / (1 + step)
        ours.by_kernel(share)
        for trained in (theirs, exact):
            trained.by_torch(CLIPS[clip], share)
    for found, expected in ((ours, exact), (ours, theirs)):
        assert (
            largest_difference([w.detach() for w in found.weights], [w.detach() for w in expected.weights]) < ROUNDING
        )
        assert largest_difference(found.averages, expected.averages) < ROUNDING
    for row, weight in zip(ours.rows, exact.weights):
        state = exact.optimiser.state.get(weight, {})
        assert (row.count is None) == (not state)
        if row.count is not None:
            assert float(row.count) == float(state["step"]) == 12
            assert largest_difference([row.mean, row.square], [state["exp_avg"], state["exp_avg_sq"]]) < ROUNDING


def test_corrections_for_bias_are_exact_at_any_count():
    """A weight that starts at zero shows them: its first move is the learning rate, and one with counts of long trainings
    moves as float64 says."""
    for before in (0, 1, 9, 1000, 5_000_000):
        weight = torch.zeros(3, device=DEVICE)
        mean, square, gradient = (torch.full((3,), x, device=DEVICE) for x in (0.5, 0.25, 0.5))
        if before == 0:
            mean.zero_()
            square.zero_()
        count = torch.tensor(float(before), device=DEVICE)
        row = Weight(weight, None, gradient, mean, square, count)
        group = Group(torch.tensor(1.0, device=DEVICE), (0.9, 0.999), 0.0, 0.0, False)
        m, v = (0.05, 0.00025) if before == 0 else (0.5, 0.25)
        n = before + 1
        expected = -(m / (1 - 0.9**n)) / (v / (1 - 0.999**n)) ** 0.5
        AdamStep([row], [group]).launch()
        torch.testing.assert_close(weight, torch.full_like(weight, expected), rtol=3e-7, atol=0)
        assert float(count) == n


@pytest.mark.parametrize("clip", ["not clipped", "norm"])
def test_a_step_that_is_to_be_left_out_changes_nothing(clip):
    found = torch.ones((), device=DEVICE)
    trained = Trained("adamw")
    trained.make_kernel(CLIPS[clip], True, found)
    trained.bring(0)
    trained.weights[1].grad[5] = torch.nan
    before = [t.clone() for t in trained.everything()]
    trained.by_kernel(0.5)
    assert all(torch.equal(a, b) for a, b in zip(before, trained.everything()))
    found.zero_()
    trained.bring(1)
    trained.by_kernel(0.5)
    plain = Trained("adamw")
    plain.bring(1)
    plain.by_torch(CLIPS[clip], 0.5)
    assert largest_difference(trained.averages, plain.averages) < ROUNDING
    assert {float(row.count) for row in trained.rows if row.count is not None} == {1.0}


def test_the_norm_is_that_of_all_gradients_in_any_number_of_parts(monkeypatch):
    results = []
    for parts in (512, 1):
        monkeypatch.setattr(update, "PARTS", parts)
        trained = Trained("adam")
        trained.make_kernel(("norm", 3.0), False)
        trained.bring(2)
        trained.by_kernel(None)
        norm = torch.cat([w.grad.flatten() for w in trained.weights if w.grad is not None]).double().norm()
        assert float(trained.kernel._parts.sum().sqrt()) == pytest.approx(float(norm), rel=1e-14)
        results.append([w.detach() for w in trained.weights])
    assert largest_difference(*results) < 1e-7


def test_gradients_that_are_not_finite_do_what_they_do_in_torch():
    for bad in (torch.nan, torch.inf):
        ours, theirs = Trained("adam"), Trained("adam")
        ours.make_kernel(("norm", 3.0), False)
        for trained in (ours, theirs):
            trained.bring(0)
            trained.weights[1].grad[5] = bad
        ours.by_kernel(None)
        theirs.by_torch(("norm", 3.0), None)
        for a, b in zip(ours.weights, theirs.weights):
            assert torch.equal(a.isnan(), b.isnan())


def test_gradients_stay_as_they_were_and_the_same_steps_give_the_same_bits():
    results = []
    for _ in range(2):
        trained = Trained("adamw")
        trained.make_kernel(("norm", 0.1), True)
        for step in range(3):
            trained.bring(step)
            given = [w.grad.clone() for w in trained.weights if w.grad is not None]
            trained.by_kernel(0.01)
            kept = [w.grad for w in trained.weights if w.grad is not None]
            assert all(torch.equal(a, b) for a, b in zip(given, kept))
        results.append(trained.everything())
    assert all(torch.equal(a, b) for a, b in zip(*results))


def test_compiling_beforehand_changes_nothing_and_nothing_beyond_a_tensor_is_written():
    room = torch.full((4, 3 * 1025), torch.nan, device=DEVICE)
    parts = [row[1025:2050] for row in room]
    for part, value in zip(parts, (1.0, 0.5, 0.0, 0.0)):
        part.fill_(value)
    count = torch.zeros((), device=DEVICE)
    weight, gradient, mean, square = parts
    group = Group(torch.tensor(0.1, device=DEVICE), (0.9, 0.999), 1e-8, 0.0, False)
    step = AdamStep([Weight(weight, None, gradient, mean, square, count)], [group], clip=("norm", 1.0))
    before = room.clone()
    step.compile()
    assert torch.equal(room.nan_to_num(7.0), before.nan_to_num(7.0))
    assert float(count) == 0
    step.launch()
    assert not room[:, 1025:2050].isnan().any()
    assert room[:, :1025].isnan().all()
    assert room[:, 2050:].isnan().all()
    torch.testing.assert_close(weight, torch.full_like(weight, 0.9))
