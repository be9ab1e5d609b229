"""Engines on a GPU: every engine and derivative form against eager in float64, captured training as a whole, resume."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from forgefield.api import train
from forgefield.data.padding import Size, SizePlan
from forgefield.training.engines.compiled import CompileEngine
from forgefield.training.engines.engine import Engine
from forgefield.training.engines.graphs import GraphsEngine
from forgefield.training.engines.verify import largest_difference
from forgefield.training.optim import captured_update
from forgefield.training.optim.averages import WeightAverage
from forgefield.training.optim.captured_optimiser import CapturedOptimiser
from forgefield.training.optim.optimisers import build_optimiser
from forgefield.training.precision import Precision
from tests.support.engine_cases import labelled, potential_of, step_function
from tests.support.gpu_batches import SIZES, on_gpu
from tests.support.helpers import tiny_config
from tests.support.structures import make_potential

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


@pytest.mark.parametrize("form", ["double", "tangent"])
@pytest.mark.parametrize("name", ["nequip", "allegro"])
def test_captured_steps_equal_eager_ones_on_the_cpu(name, form):
    """The CPU is the oracle: it adds in another order, by other code."""
    host, potential = potential_of(name), potential_of(name).cuda()
    oracle = Engine(step_function(host))
    inner = Engine(step_function(potential, derivative=form))
    engine = GraphsEngine(inner, plan=SizePlan((Size(edges=3000, atoms=160, frames=5),)))
    for number, atoms in enumerate(SIZES):
        expected = oracle.differentiate(labelled(*atoms, seed=number, box=6.0))
        for given in (inner, engine):
            found = given.differentiate(on_gpu(*atoms, seed=number))
            moved = found._replace(
                gradients=[None if g is None else g.cpu() for g in found.gradients],
                measured=found.measured._make(t.cpu() for t in found.measured),
            )
            assert largest_difference(moved, expected, oracle.function.trained)[0] < 1e-9
    assert engine.captures == 1


def test_the_same_step_twice_gives_the_same_bits():
    potential = make_potential("float32", l_max=2).cuda()
    engine = GraphsEngine(Engine(step_function(potential)), plan=SizePlan(()))
    batch = on_gpu(20, 30)
    first = [g.clone() for g in engine.differentiate(batch).gradients]
    engine.differentiate(on_gpu(30, 20, seed=9))
    again = engine.differentiate(batch).gradients
    assert all(torch.equal(a, b) for a, b in zip(first, again))


def test_compiled_and_captured_code_is_exact_for_every_size_with_one_compilation():
    potential = make_potential("float32").cuda()
    compiled, eager = CompileEngine(step_function(potential)), Engine(step_function(potential))
    captured = GraphsEngine(compiled, plan=SizePlan(()))
    for number, atoms in enumerate(SIZES):
        batch = on_gpu(*atoms, seed=number)
        for engine in (compiled, captured):
            assert (
                largest_difference(engine.differentiate(batch), eager.differentiate(batch), eager.function.trained)[0]
                < 1e-5
            )
    assert compiled.training.compilations == 1


@pytest.mark.parametrize("name", ["bf16-mixed", "fp16-mixed"])
def test_lower_precisions_change_the_step_a_little_and_not_more(name):
    potential = make_potential("float32", num_features=16).cuda()
    engine, batch = Engine(step_function(potential)), on_gpu(20, 30)
    expected = engine.differentiate(batch)
    with Precision(name).applied(name):
        found = engine.differentiate(batch)
    size = largest_difference(found, expected, engine.function.trained)[0]
    assert 1e-6 < size < 0.1


def test_tf32_rounds_large_products_inside_and_only_there():
    a, b = (torch.randn(512, 512, device="cuda", generator=torch.Generator("cuda").manual_seed(i)) for i in (1, 2))
    exact = a.double() @ b.double()

    def error() -> float:
        return float((a @ b - exact).norm() / exact.norm())

    assert error() < 1e-6
    with Precision("tf32").applied("tf32"):
        assert 1e-5 < error() < 1e-2
    assert error() < 1e-6


@pytest.mark.parametrize("name", ["adam", "adamw", "nadam"])
def test_captured_updates_are_those_of_the_optimiser(name):
    weights = [torch.nn.Parameter(torch.linspace(-1, 1, 6, device="cuda").view(2, 3).clone()) for _ in range(2)]
    kinds = {"adam": torch.optim.Adam, "adamw": torch.optim.AdamW, "nadam": torch.optim.NAdam}
    plain, graphed = (kinds[name]([weight], lr=0.1) for weight in weights)
    update = CapturedOptimiser(graphed, None)
    update.clip = (0.5, "norm")
    grads = [torch.zeros(2, 3, device="cuda") for _ in range(2)]
    for step in range(6):
        for weight, grad in zip(weights, grads):
            grad.copy_(torch.sin(torch.arange(6.0, device="cuda").view(2, 3) * (step + 1)))
            weight.grad = grad
        torch.nn.utils.clip_grad_norm_([weights[0]], 0.5)
        for optimiser in (plain, graphed):
            optimiser.param_groups[0]["lr"] = 0.1 / (1 + step)
            optimiser.step()
        torch.testing.assert_close(weights[0], weights[1], rtol=1e-6, atol=1e-7)


def test_captured_updates_of_muon_are_those_of_its_steps():
    """A matrix takes Muon's steps, a vector AdamW's."""
    modules = [torch.nn.Linear(3, 4).double().cuda() for _ in range(2)]
    modules[1].load_state_dict(modules[0].state_dict())
    spec = {"name": "Muon", "weight_decay": 0.01, "adamw_factor": 0.5}
    plain, graphed = (build_optimiser(spec, list(m.parameters()), lr=0.1, module=m) for m in modules)
    CapturedOptimiser(graphed, None)
    places = [torch.zeros_like(parameter) for parameter in modules[0].parameters()]
    for step in range(6):
        for number, place in enumerate(places):
            numbers = torch.arange(place.numel(), dtype=torch.float64, device="cuda").view(place.shape)
            place.copy_(torch.sin(numbers * (step + 1) + number))
        for module in modules:
            for parameter, place in zip(module.parameters(), places):
                parameter.grad = place
        for optimiser in (plain, graphed):
            for group in optimiser.param_groups:
                group["lr"] = group["factor"] * 0.1 / (1 + step) if "factor" in group else 0.1 / (1 + step)
            optimiser.step()
        for one, other in zip(modules[0].parameters(), modules[1].parameters()):
            torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-12)


class Trained:
    """A few weights with gradients that follow from them, in float32 or float64; two sets of places for the gradients, as steps
    of two sizes have."""

    def __init__(self, kind: type[torch.optim.Adam], dtype: torch.dtype) -> None:
        shapes = [(300, 700), (1023,), (1,), (), (5, 5, 41)]
        self.net = torch.nn.Module()
        for number, shape in enumerate(shapes):
            drawn = torch.randn(shape, generator=torch.Generator().manual_seed(number))
            self.net.register_parameter(f"w{number}", torch.nn.Parameter(drawn.cuda().to(dtype)))
        self.weights = list(self.net.parameters())
        groups = [{"params": self.weights[:2]}, {"params": self.weights[2:], "lr": 0.003, "betas": (0.8, 0.99)}]
        self.optimiser = kind(groups, lr=0.01, weight_decay=0.01)
        self.average = WeightAverage(self.net, 0.95)
        self.places = [[torch.zeros_like(w) for w in self.weights] for _ in range(2)]

    @torch.no_grad()
    def bring(self, step: int) -> None:
        for number, (weight, place) in enumerate(zip(self.weights, self.places[step % 2])):
            towards = torch.arange(weight.numel(), device="cuda", dtype=torch.float64).view(weight.shape)
            place.copy_(weight.double() - torch.cos(towards + step) * (1 + number))
            weight.grad = place


@pytest.mark.parametrize("clip", [None, 5.0])
@pytest.mark.parametrize("kind", [torch.optim.Adam, torch.optim.AdamW])
def test_fifty_updates_by_one_kernel_are_those_of_torch(kind, clip):
    """Weights, average and state; the kernel is not further from float64 than rounding takes torch, and repeats its bits."""

    def by_torch(dtype: torch.dtype) -> Trained:
        trained = Trained(kind, dtype)
        for step in range(50):
            trained.bring(step)
            if clip is not None:
                torch.nn.utils.clip_grad_norm_(trained.weights, clip)
            trained.optimiser.step()
            trained.average.update()
        return trained

    def by_kernel() -> Trained:
        trained = Trained(kind, torch.float32)
        update = CapturedOptimiser(trained.optimiser, trained.average)
        update.clip = (clip, "norm")
        for step in range(50):
            trained.bring(step)
            update.step()
        assert [kernel is not None for kernel in update.steps.kernels.values()] == [True, True]
        return trained

    exact, theirs, ours, again = by_torch(torch.float64), by_torch(torch.float32), by_kernel(), by_kernel()
    for number, weight in enumerate(exact.weights):
        state = exact.optimiser.state[weight]
        expected = [weight, exact.average.average[f"w{number}"], state["exp_avg"], state["exp_avg_sq"]]
        for trained in (ours, theirs):
            own = trained.optimiser.state[trained.weights[number]]
            assert float(own["step"]) == 50
            found = [trained.weights[number], trained.average.average[f"w{number}"], own["exp_avg"], own["exp_avg_sq"]]
            for a, b in zip(found, expected):
                assert float(((a.double() - b).norm() / b.norm()).detach()) < 2e-6
        assert torch.equal(ours.weights[number], again.weights[number])


def test_gradients_that_are_allocated_in_every_step_take_one_graph():
    """As those of accumulated batches are."""
    still, moving = Trained(torch.optim.Adam, torch.float32), Trained(torch.optim.Adam, torch.float32)
    updates = [
        CapturedOptimiser(still.optimiser, None),
        CapturedOptimiser(moving.optimiser, None, static_gradients=lambda: False),
    ]
    kept = []  # so that no two lie in the same place
    for step in range(8):
        for trained in (still, moving):
            trained.bring(step)
        for weight in moving.weights:
            weight.grad = weight.grad.clone()
            kept.append(weight.grad)
        for update in updates:
            update.step()
    assert len(updates[1].steps) == 1
    assert all(torch.equal(a, b) for a, b in zip(still.weights, moving.weights))


def test_a_step_is_left_out_where_the_device_requests_it():
    trained = Trained(torch.optim.AdamW, torch.float32)
    update = CapturedOptimiser(trained.optimiser, trained.average)
    found = torch.zeros((), device="cuda")
    for step in range(4):
        trained.bring(step)
        update.step()
    trained.optimiser.found_inf = found.fill_(1.0)
    kept = [t.clone() for t in (*trained.weights, *trained.average.average.values())]
    for step in (4, 5, 6, 7):
        trained.bring(step)
        trained.weights[0].grad[0] = torch.nan
        update.step()
    assert all(torch.equal(a, b) for a, b in zip(kept, (*trained.weights, *trained.average.average.values())))
    assert {float(state["step"]) for state in trained.optimiser.state.values()} == {4.0}


def settings(folder: Path, engine: str, **training):
    folder.mkdir(exist_ok=True)
    return tiny_config(
        folder,
        name=engine,
        training={
            "lr": 0.01,
            "ema": 0.9,
            "tensorboard": 0,
            "engine": engine,
            "graphs": {"compiled": False},
            **training,
        },
        trainer={"max_epochs": 3, "enable_progress_bar": False, "accelerator": "gpu", "devices": 1},
    )


def test_a_captured_training_follows_an_eager_one(tmp_path):
    options = {"clip_norm": 1.0, "scheduler": {"name": "cosine"}, "precision": "float64"}
    results = [train(settings(tmp_path, name, **options)) for name in ("eager", "graphs")]
    eager, graphs = ([row["val/loss"] for row in run.metrics()] for run in results)
    assert graphs == pytest.approx(eager, rel=1e-6)


def test_a_captured_training_resumes_bit_for_bit_also_in_eager(tmp_path):
    whole = train(settings(tmp_path / "a", "graphs"))
    half = settings(tmp_path / "b", "graphs")
    half["trainer"] = {**half["trainer"], "max_epochs": 2}
    train(half)
    half["trainer"]["max_epochs"] = 3
    resumed = train(half)
    a, b = (run.load_potential("last").state_dict() for run in (whole, resumed))
    assert {name: float((a[name] - b[name]).abs().max()) for name in a if not torch.equal(a[name], b[name])} == {}
    half["trainer"]["max_epochs"], half["training"] = 4, {**half["training"], "engine": "eager"}
    train(half)


def test_a_captured_training_with_one_kernel_follows_one_with_the_step_of_the_optimiser(tmp_path, monkeypatch):
    """More than 50 steps with clipping, decay, a schedule and an average."""
    options = {"clip_norm": 1.0, "scheduler": {"name": "cosine"}, "optimizer": {"name": "adamw", "weight_decay": 0.01}}
    losses = []
    for name in ("kernel", "torch"):
        if name == "torch":
            monkeypatch.setattr(captured_update, "adam_step", lambda *given: None)
        config = settings(tmp_path / name, "graphs", **options)
        config["trainer"] = {**config["trainer"], "max_epochs": 12}
        losses.append([row["val/loss"] for row in train(config).metrics()])
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)
