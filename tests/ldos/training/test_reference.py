"""Own kernels before their first step: compared with autograd alike at any stage of a training, timed, and refused."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import pytest
import torch

from forgefield.errors import ForgefieldError
from forgefield.ldos.model import LDOSNetwork
from forgefield.ldos.training import engines
from forgefield.ldos.training.blocks import Block
from forgefield.ldos.training.engine_choice import EngineBuilder, schedule_capture_obstacle
from forgefield.ldos.training.engines import EagerEngine, GraphsEngine
from forgefield.ldos.training.executor import PointsExecutor
from forgefield.ldos.training.fused import FusedGradient, FusedStep, fused_obstacle
from forgefield.ldos.training.gradient import AutogradGradient, ManualGradient
from forgefield.ldos.training.reference import (
    TOLERANCES,
    RoundedReference,
    kernel_difference,
    largest_difference,
    pack_rows,
    synthetic_targets,
)
from forgefield.ops.execution import products_in
from forgefield.training.engines.captured import CapturedSteps
from forgefield.training.optim.update import Update
from tests.support.fused_points import DEVICE, LOW, RUNS, SMALL, Rows, network
from tests.support.point_networks import task
from tests.support.snapshots import point_config
from tests.support.train_many import train_only

by_kernels = pytest.mark.skipif(not RUNS, reason="needs Triton, and a GPU or its interpreter (TRITON_INTERPRET=1)")
NEAREST = replace(SMALL, rounds=True)


def trained(activation: str, output: str | None) -> tuple[LDOSNetwork, torch.Tensor, torch.Tensor]:
    """A network that has learnt nearly all of what another one gives, the points and the targets."""
    model = network(activation, output)
    inputs = Rows(90).layout.split(Rows(90).rows)[0].contiguous()
    targets = model.network(inputs).detach()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.01)
    optimiser = torch.optim.Adam(model.parameters(), lr=1e-3)
    for step in range(200):
        optimiser.param_groups[0]["lr"] = 1e-3 * 0.97**step
        optimiser.zero_grad()
        (model.network(inputs) - targets).square().mean().backward()
        optimiser.step()
    assert float((model.network(inputs).detach() - targets).square().mean() / targets.var()) < 1e-4
    return model, inputs, targets


@by_kernels
@pytest.mark.parametrize(("activation", "output"), [("relu", None), ("relu", "leakyrelu"), ("silu", None)])
def test_kernels_pass_with_weights_of_any_stage_of_a_training(activation, output):
    """With the true targets they would not: residuals are then below what rounding the factors changes."""
    model, inputs, targets = trained(activation, output)
    how = task("mse")
    for dtype in (torch.float32, LOW):
        assert kernel_difference(model, how, (inputs, targets), dtype, NEAREST) < 0.5 * TOLERANCES[dtype]
    batch, factor = pack_rows(inputs, targets), how.slope_factor(90).to(DEVICE, torch.float32)
    kernels = FusedGradient(FusedStep(model, how.loss, Rows(1).layout, 90, None, torch.float32, NEAREST))
    plain = AutogradGradient(model, how.loss)
    pairs = [(kernels(*batch, factor, None), plain(*batch, factor, None)), *zip(kernels.gradients, plain.gradients)]
    assert largest_difference(pairs) > 2 * TOLERANCES[torch.float32]


@by_kernels
def test_a_kernel_that_leaves_something_out_is_found(monkeypatch):
    model, resident = network("relu"), Rows(90)
    rows = resident.layout.split(resident.rows)
    taken = FusedStep.refresh

    def without_a_row(step: FusedStep) -> None:
        taken(step)
        step._copies[1][3] = 0  # one of 70 units stays silent

    monkeypatch.setattr(FusedStep, "refresh", without_a_row)
    assert kernel_difference(model, task("mse"), rows, torch.float32, NEAREST) > 10 * TOLERANCES[torch.float32]


def test_the_reference_rounds_as_products_in_bfloat16_do_and_another_order_of_sums_is_within_the_tolerance():
    model, how, resident = network("silu"), task("huber", [1.0, 2, 0, 1, 1, 0.5, 1]), Rows(90)
    inputs, targets = resident.layout.split(resident.rows)
    factor = how.slope_factor(90).to(DEVICE, torch.float32)
    reference = RoundedReference(model, how.loss, torch.bfloat16)
    targets = synthetic_targets(reference.outputs(inputs).detach(), targets)
    expected = reference(inputs, targets, factor, None)
    written, around = ManualGradient(model, how.loss), torch.arange(89, -1, -1, device=DEVICE)
    with products_in(torch.bfloat16):
        errors = written(inputs[around], targets[around], factor, None)
    pairs = [(errors, expected), *zip(written.gradients, reference.gradients)]
    assert largest_difference(pairs) < 0.1 * TOLERANCES[torch.bfloat16]
    plain = AutogradGradient(model, how.loss)
    plain(inputs, targets, factor, None)
    assert largest_difference(zip(reference.gradients, plain.gradients)) > 1e-4  # factors are rounded at all


def test_targets_are_made_up_with_residuals_as_large_as_targets_vary():
    outputs, targets = torch.randn(50, 7), 3 * torch.randn(50, 7)
    made = synthetic_targets(outputs, targets)
    sizes = (outputs - made).abs() / targets.std(correction=0)
    assert 0.49 < float(sizes.min()) < float(sizes.max()) < 1.51
    assert torch.equal(made, synthetic_targets(outputs, targets))
    assert float((outputs - synthetic_targets(outputs, torch.ones(50, 7))).abs().min()) > 0.4
    assert largest_difference([(torch.ones(2), torch.ones(2)), (torch.tensor([torch.nan]), torch.ones(1))]) != 0


def test_batches_whose_places_need_more_than_32_bits_are_left_to_torch(monkeypatch):
    model = network(hidden=(37, 250))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    options = model.options
    weights = [_on_a_gpu(weight) for weight in model.weights]
    model = SimpleNamespace(dtype=torch.float32, weights=weights, options=options)
    most = 2**31 // 256
    assert "32 bits" not in (fused_obstacle(model, "tf32", most - 128) or "")  # type: ignore[arg-type]
    assert "32 bits" in fused_obstacle(model, "tf32", most - 127)  # type: ignore[arg-type, operator]


def _on_a_gpu(weight: torch.Tensor) -> SimpleNamespace:
    return SimpleNamespace(device=torch.device("cuda"), shape=weight.shape)


def graphs_engine(optimiser: Callable[..., torch.optim.Optimizer] = torch.optim.Adam, **options) -> GraphsEngine:
    model, how, resident = network(hidden=(20,)), task("mse"), Rows(50)
    update = Update(optimiser(model.parameters(), lr=0.1), None, clip=(None, "norm"), reduce=None)
    inner = EagerEngine(model, how, ManualGradient(model, how.loss), update, resident=resident)  # type: ignore[arg-type]
    return GraphsEngine(inner, 4, 10, **options)


def block(steps: int) -> Block:
    return Block([10] * steps, [10] * steps, torch.arange(10 * steps, device=DEVICE).view(steps, 10), None)


def test_kernels_that_cannot_be_timed_leave_everything_as_it_was_to_torch(monkeypatch):
    said: list[str] = []
    engine = graphs_engine(fuses=True, notify=said.append)
    engine.run(block(1), 0, lambda: [0.1])
    before = [p.detach().clone() for p in engine.inner.model.parameters()]

    def breaks(steps: CapturedSteps, key: int, n: int) -> None:
        with steps.state_restored():
            for parameter in engine.inner.model.parameters():
                parameter.data.zero_()
            raise RuntimeError("out of resources")

    monkeypatch.setattr(CapturedSteps, "capture", breaks)
    monkeypatch.setattr(CapturedSteps, "captures", True)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch.random, "fork_rng", lambda devices: nullcontext())
    monkeypatch.setattr(engines, "current_factor_dtype", lambda: torch.float32)
    engine._choose(4)
    assert engine._fused is None
    assert engine.choices == {"float32": False}
    assert said == ["Fused kernels do not run here (RuntimeError: out of resources); PyTorch's steps are used."]
    assert all(torch.equal(p, old) for p, old in zip(engine.inner.model.parameters(), before))


@by_kernels
def test_gradients_are_found_where_a_replay_left_them(monkeypatch):
    """A replay binds nothing; the step before it, of a term on snapshots, may have bound other tensors."""
    monkeypatch.setattr(engines, "current_factor_dtype", lambda: torch.float32)
    engine = graphs_engine(fuses=True, optimiser=partial(torch.optim.SGD, momentum=0.5))
    engine.run(block(1), 0, lambda: [0.1])
    steps, parameters = CapturedSteps.run, list(engine.inner.model.parameters())

    def replayed(captured: CapturedSteps, key: int, n: int) -> None:
        steps(captured, key, n)
        engine.inner.update.use(engine.inner.gradient.gradients)

    monkeypatch.setattr(CapturedSteps, "run", replayed)
    engine.run(block(2), 1, lambda: [0.1])
    assert engine._fused is not None
    assert engine._fused.adam is None
    assert all(p.grad is found for p, found in zip(parameters, engine._fused.gradients))


def scheduler(name: str, **options) -> torch.optim.lr_scheduler.LRScheduler:
    optimiser = torch.optim.Adam([torch.nn.Parameter(torch.zeros(1))], lr=0.1)
    return getattr(torch.optim.lr_scheduler, name)(optimiser, **options)


CYCLES = [("OneCycleLR", {"max_lr": 0.3, "total_steps": 20}), ("CyclicLR", {"base_lr": 0.01, "max_lr": 0.2})]


@pytest.mark.parametrize(("name", "options"), CYCLES)
def test_schedulers_that_change_betas_are_refused_for_captured_steps(name, options):
    config = SimpleNamespace(
        training=SimpleNamespace(engine="graphs", graphs=SimpleNamespace(compiled=False)),
        data=SimpleNamespace(fast=None),
    )
    session = SimpleNamespace(ranks=SimpleNamespace(world_size=1))
    maker = EngineBuilder(config, session, None, 4, None)  # type: ignore[arg-type]
    made = scheduler(name, **options)
    module = SimpleNamespace(
        trainer=SimpleNamespace(optimizers=[made.optimizer]), device=torch.device("cuda"), schedule={"scheduler": made}
    )
    with pytest.raises(ForgefieldError, match=f"{name} changes the momentum .*cycle_momentum=false"):
        maker._choice(module)
    config.training.engine = "auto"
    assert maker._choice(module) == ("eager", False)
    module.schedule = {"scheduler": scheduler(name, **options, cycle_momentum=False)}
    assert maker._choice(module) == ("graphs", False)
    assert schedule_capture_obstacle(None) is schedule_capture_obstacle(scheduler("ExponentialLR", gamma=0.5)) is None


def test_a_setting_that_captured_steps_hold_must_not_change():
    engine = graphs_engine()
    group = engine.inner.update.optimiser.param_groups[0]
    engine.run(block(3), 0, lambda: [0.1])
    group["lr"] = 0.01
    engine.run(block(3), 3, lambda: [0.1])
    group["betas"] = (0.8, 0.99)
    with pytest.raises(ForgefieldError, match="has changed another setting of the optimiser"):
        engine.run(block(3), 6, lambda: [0.1])


def test_a_resumed_training_reports_that_it_continues_without_its_kernels(tmp_path, monkeypatch, capsys):
    def resumed(module: PointsExecutor) -> None:
        module.choices = {"bfloat16": True}
        begins(module)

    begins = PointsExecutor.on_train_start
    for name, start in (("from the start", begins), ("resumed", resumed)):
        monkeypatch.setattr(PointsExecutor, "on_train_start", start)
        config = point_config(tmp_path, name=name, task={"ldos": {}})
        config["trainer"]["max_epochs"] = 1
        train_only(config)
        said = " ".join(capsys.readouterr().out.split())
        assert ("used Forgefield's kernels, which are not available here" in said) == (name == "resumed")
