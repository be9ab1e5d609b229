"""The kernel's step in the place of an optimiser's own: the same weights, average and state, or torch's own code."""

import pytest
import torch

from forgefield.kernels.step.update import AdamStep
from forgefield.training.optim import update
from forgefield.training.optim.averages import WeightAverage
from forgefield.training.optim.captured_optimiser import CapturedOptimiser
from forgefield.training.optim.captured_update import adam_step
from forgefield.training.optim.update import portable_optimiser_states
from tests.support.kernels import DEVICE, draw, needs_kernels

pytestmark = needs_kernels


class Net(torch.nn.Module):
    """The last weight gets a gradient in no step, and `late` not in the first."""

    def __init__(self) -> None:
        super().__init__()
        shapes = {"a": (5, 7), "late": (3,), "b": (1100,), "unused": (4,)}
        for number, (name, shape) in enumerate(shapes.items()):
            self.register_parameter(name, torch.nn.Parameter(draw(number, *shape).float()))

    def optimiser(self, kind: type[torch.optim.Adam] = torch.optim.AdamW, **settings) -> torch.optim.Optimizer:
        groups = [
            {"params": [self.a, self.late], "lr": 0.02},
            {"params": [self.b, self.unused], "lr": 0.01, "betas": (0.7, 0.9)},
        ]
        return kind(groups, **settings)

    def bring(self, step: int) -> None:
        for number, weight in enumerate((self.a, self.late, self.b)):
            if weight is not self.late or step > 0:
                weight.grad = draw(10 * step + number, *weight.shape).float()


@pytest.fixture
def _counts_as_on_a_gpu(monkeypatch):
    monkeypatch.setattr(update, "_has_fused_kernel", lambda optimiser, group: True)


@pytest.mark.usefixtures("_counts_as_on_a_gpu")
@pytest.mark.parametrize("clip", [(None, None), (2.0, "norm"), (0.3, "value")])
@pytest.mark.parametrize("kind", [torch.optim.Adam, torch.optim.AdamW])
def test_an_update_by_the_kernel_leaves_what_the_optimiser_would_leave(kind, clip, monkeypatch):
    plain, graphed = Net().to(DEVICE), Net().to(DEVICE)
    given, replaced = (net.optimiser(kind, weight_decay=0.05, foreach=False) for net in (plain, graphed))
    averages = [WeightAverage(net, 0.9) for net in (plain, graphed)]
    update = CapturedOptimiser(replaced, averages[1])
    launches, launch = [], AdamStep.launch

    def counted(step: AdamStep) -> None:
        launches.append(step)
        launch(step)

    monkeypatch.setattr(AdamStep, "launch", counted)
    update.clip = clip
    found = torch.zeros((), device=DEVICE)
    for step in range(8):
        for net, optimiser in ((plain, given), (graphed, replaced)):
            net.bring(step)
            for group in optimiser.param_groups:
                group["lr"] *= 0.9
        if step >= 4:
            replaced.found_inf = found.fill_(step == 5)
        if step == 5:  # left out, but counted by the average
            averages[0].next_share()
        else:
            if clip[0]:
                value = clip[1] == "value"
                clipped = torch.nn.utils.clip_grad_value_ if value else torch.nn.utils.clip_grad_norm_
                clipped(plain.parameters(), clip[0])
            given.step()
            averages[0].update()
        replaced.step()
    if DEVICE == "cpu":  # with Triton's interpreter updates are launched instead of replayed
        assert len(launches) == 6  # all but those in which a weight had no state yet
    del replaced.found_inf
    states = [optimiser.state_dict() for optimiser in (given, replaced)]
    portable_optimiser_states(states, [given, replaced])
    assert states[0]["state"].keys() == states[1]["state"].keys()
    for number, expected in states[0]["state"].items():
        for name, tensor in expected.items():
            torch.testing.assert_close(states[1]["state"][number][name], tensor, rtol=1e-5, atol=1e-7)
    for (name, expected), (_, of_it) in zip(averages[0].average.items(), averages[1].average.items()):
        torch.testing.assert_close(of_it, expected, rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(graphed.get_parameter(name), plain.get_parameter(name), rtol=1e-5, atol=1e-6)


def made(optimiser: torch.optim.Optimizer) -> bool:
    """Whether the kernel does the step of this optimiser, after one of its own."""
    optimiser.step()
    for state in optimiser.state.values():
        state["step"] = state["step"].to(DEVICE)
    rates = [torch.zeros((), device=DEVICE) for _ in optimiser.param_groups]
    return adam_step(optimiser, rates, None, rates[0], None) is not None


@pytest.mark.parametrize(
    ("settings", "known"),
    [({}, True), ({"weight_decay": 0.1}, True), ({"amsgrad": True}, False), ({"maximize": True}, False)],
)
def test_what_the_kernel_does_not_do_is_left_to_torch(settings, known):
    net = Net().to(DEVICE)
    net.bring(0)
    assert made(net.optimiser(**settings)) is known


def test_other_types_layouts_and_optimisers_are_left_to_torch():
    net = Net().to(DEVICE)
    net.bring(0)
    assert not made(net.optimiser(torch.optim.NAdam))
    hooked = net.optimiser()
    hooked.register_step_post_hook(lambda *given: None)
    assert not made(hooked)
    net.a.grad = net.a.grad.t().contiguous().t()
    assert not made(net.optimiser())
    double = Net().to(DEVICE).double()
    double.a.grad = torch.ones_like(double.a)
    assert not made(double.optimiser())
