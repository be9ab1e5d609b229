"""Gradients that are written out, terms on snapshots and captured blocks, each against autograd or the plain way."""

from __future__ import annotations

import pytest
import torch

from forgefield.ldos.loss import PointErrors, SnapshotReference, SnapshotTerms
from forgefield.ldos.model import ACTIVATIONS
from forgefield.ldos.options import SnapshotTermOptions
from forgefield.ldos.training import engines
from forgefield.ldos.training.blocks import Block
from forgefield.ldos.training.data import RowLayout
from forgefield.ldos.training.engines import EagerEngine, GraphsEngine
from forgefield.ldos.training.gradient import AutogradGradient, ManualGradient
from forgefield.ldos.training.snapshots import TermGradient
from forgefield.ops.execution import products_in
from forgefield.parallel.ranks import single_process
from forgefield.training.optim.averages import WeightAverage
from forgefield.training.optim.update import Update
from tests.support.point_networks import DTYPE, network, rows, task
from tests.support.snapshots import FERMI, GRID, TEMPERATURE


@pytest.mark.parametrize("activation", [*sorted(ACTIVATIONS), ["gelu", "relu"]], ids=str)
@pytest.mark.parametrize("loss", ["mse", "mae", "huber"])
def test_written_gradients_are_those_of_autograd(activation, loss):
    output = activation if isinstance(activation, str) else "tanh"
    model, how = network(activation, output if loss == "mse" else None), task(loss, [1.0, 2, 0, 1, 1, 0.5, 1])
    x, y = rows(13)
    weight = torch.ones(13, dtype=DTYPE)
    weight[9:] = 0
    factor = how.slope_factor(9)
    written, reference = ManualGradient(model, how.loss), AutogradGradient(model, how.loss)
    by_level = written(x, y, factor, weight)
    torch.testing.assert_close(by_level, reference(x[:9], y[:9], factor, None), rtol=1e-12, atol=1e-14)
    for mine, other in zip(written.gradients, reference.gradients):
        torch.testing.assert_close(mine, other, rtol=1e-11, atol=1e-13)


def test_what_is_compiled_is_one_graph_for_each_shape_and_precision():
    """Without calls of `product`, on which torch's compiler gives up; weights are read as they are at each call."""
    model, how, graphs = network("relu", dtype=torch.float32), task(), []
    compiled = AutogradGradient(model, how.loss, lambda graph: graphs.append(graph) or graph)
    x, y = (values.float() for values in rows(13))
    factor, weight = how.slope_factor(13).float(), torch.ones(13)
    for turn in range(2):
        for dtype in (None, torch.bfloat16):
            for given in (None, weight):
                plain = AutogradGradient(model, how.loss)
                with products_in(dtype):
                    by_level, expected = (step(x, y, factor, given) for step in (compiled, plain))
                torch.testing.assert_close(by_level, expected)
                torch.testing.assert_close(compiled.gradients, plain.gradients)
        torch._foreach_mul_([p.data for p in model.parameters()], 1.1)
        assert len(graphs) == 4, turn
    assert all(isinstance(graph, torch.fx.GraphModule) for graph in graphs)


def test_the_loss_is_the_plain_mean_of_squared_scaled_errors():
    model, how = network(), task()
    x, y = rows(13)
    by_level = ManualGradient(model, how.loss)(x, y, how.slope_factor(13), None)
    expected = torch.nn.functional.mse_loss(model.network(x), y)
    assert how.report(*how.sums(by_level, 13)) == pytest.approx(float(expected.detach()), rel=1e-12)
    (expected_gradient,) = torch.autograd.grad(expected, [model.weights[0]])
    written = ManualGradient(model, how.loss)
    written(x, y, how.slope_factor(13), None)
    torch.testing.assert_close(written.gradients[0], expected_gradient, rtol=1e-11, atol=1e-14)


def test_raw_descriptors_go_in_and_physical_units_come_out_to_float64():
    model = network(output="relu")
    raw = 300 * torch.randn(5, 3, dtype=DTYPE)
    scaled = (raw - torch.tensor([1.0, -2.0, 300.0])) / torch.tensor([2.0, 0.5, 30.0])
    expected = model.network(scaled.to(DTYPE)) * 0.1 + 0.01
    torch.testing.assert_close(model(raw), expected, rtol=1e-13, atol=0)
    assert model.float().input_shift.dtype == torch.float64
    assert float(model(raw.float()).min()) >= 0.01 - 1e-9  # the activation is on the scaled output
    errors = PointErrors("ldos", model.output_scale)
    errors.add(PointErrors.measure(torch.full((4, 7), 2.0)))
    assert errors.compute() == pytest.approx({"ldos_mae": 0.2, "ldos_rmse": 0.2})


class OneSnapshot:
    """Stands for the training snapshots of `TermGradient`: one of them, whose points are in memory."""

    def __init__(self, inputs: torch.Tensor, reference: SnapshotReference) -> None:
        self.rows = self
        self._inputs = inputs
        self.facts = [self]
        self.point_range = (0, len(inputs))
        self.n_points, self.voxel_volume = len(inputs), reference.voxel_volume
        for name in ("electrons", "temperature", "n_atoms"):
            setattr(self, name, getattr(reference, name))

    def inputs(self, number: int, start: int, stop: int):
        yield self._inputs[start : stop // 2]
        yield self._inputs[stop // 2 : stop]


def test_terms_on_snapshots_have_the_gradient_of_autograd():
    terms = {"dos": 0.3, "electrons": 2.0, "band_energy": 0.7}
    how = task(**{name: SnapshotTermOptions(weight=weight, every=2) for name, weight in terms.items()})
    model = network()
    x, _ = rows(40)
    dos = 0.9 * model.physical(model.network(x)).detach().sum(0) * 0.1
    reference = SnapshotReference(dos, FERMI, 0.8, 1.1, TEMPERATURE, 2, 0.1)
    adder = TermGradient(model, how, OneSnapshot(x, reference), single_process())  # type: ignore[arg-type]
    adder._references[0] = reference
    gradients = [torch.zeros_like(p) for p in model.parameters()]
    sums = adder.add_to(gradients, list(terms), step=4)
    predicted = model.physical(model.network(x)).sum(0) * 0.1
    values = SnapshotTerms(GRID, how).values(list(terms), predicted, reference)
    total = sum(weight * values[name] for name, weight in terms.items())
    for mine, other in zip(gradients, torch.autograd.grad(total, list(model.parameters()))):
        torch.testing.assert_close(mine, other, rtol=1e-9, atol=1e-12)
    assert sums[:, 1:].tolist() == [[pytest.approx(float(values[name])) for name in terms], [1.0] * 3]
    assert how.due(3) == []
    assert how.due(4) == list(terms)


def test_every_term_goes_through_all_snapshots_however_often_it_comes():
    how = task(dos=SnapshotTermOptions(every=2), band_energy=SnapshotTermOptions(every=4))
    model, (x, _) = network(), rows(8)
    training = OneSnapshot(x, SnapshotReference(torch.ones(7), FERMI, 0.8, 1.1, TEMPERATURE, 2, 0.1))
    training.facts *= 2
    adder = TermGradient(model, how, training, single_process())  # type: ignore[arg-type]
    turns = [adder._terms_by_snapshot(how.due(step), step) for step in range(0, 8, 2)]
    assert turns == [{0: ["dos", "band_energy"]}, {1: ["dos"]}, {0: ["dos"], 1: ["band_energy"]}, {1: ["dos"]}]


class Rows:
    """Stands for `ResidentRows`."""

    def __init__(self, n: int) -> None:
        self.layout = RowLayout(3, 7)
        self.rows = torch.zeros(n, self.layout.width, dtype=DTYPE)
        for room, values in zip(self.layout.split(self.rows), rows(n)):
            room.copy_(values)


@pytest.mark.parametrize("optimiser", [torch.optim.Adam, torch.optim.SGD])
def test_blocks_of_captured_steps_take_the_steps_of_the_eager_engine(optimiser):
    """What is captured on a GPU, made one after the other here: any block length, a short last batch, rates that change."""
    ends = []
    for captured in (0, 1, 3, 8):
        model, how, resident = network("relu"), task("huber"), Rows(50)
        update = Update(
            optimiser(model.parameters(), lr=0.1), WeightAverage(model, 0.9), clip=(0.5, "norm"), reduce=None
        )
        engine = EagerEngine(model, how, ManualGradient(model, how.loss), update, resident=resident)  # type: ignore[arg-type]
        engine = GraphsEngine(engine, captured, 6) if captured else engine
        rates = iter([[0.1 / (n + 1)] for n in range(100)])
        places = torch.randperm(50, generator=torch.Generator().manual_seed(2))
        places = torch.cat([places, places[:4]]).view(9, 6)  # the last step has two real points
        found, step = torch.zeros(7, dtype=DTYPE), 0
        for length in (5, 4):
            own = [6] * length if step == 0 else [6, 6, 6, 2]
            sums = engine.run(
                Block(own, own, places[step : step + length], None), step, lambda rates=rates: next(rates)
            )
            found, step = found + sums.by_level, step + length
        ends.append([found, *model.parameters(), *update.average.average.values()])  # type: ignore[union-attr]
    for other in ends[1:]:
        for mine, expected in zip(other, ends[0]):
            torch.testing.assert_close(mine, expected, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("chosen", [True, False])
def test_a_resumed_run_captures_the_kind_of_steps_that_it_began_with(chosen, monkeypatch):
    made = []
    monkeypatch.setattr(engines, "current_factor_dtype", lambda: torch.float32)
    monkeypatch.setattr(GraphsEngine, "_execute", lambda self, length, rates: made.append(self._fused is not None))
    model, how, resident = network("relu", dtype=torch.float32), task(), Rows(50)
    resident.rows = resident.rows.float()
    update = Update(torch.optim.Adam(model.parameters()), None, clip=(None, "norm"), reduce=None)
    inner = EagerEngine(model, how, ManualGradient(model, how.loss), update, resident=resident)  # type: ignore[arg-type]
    engine = GraphsEngine(inner, 4, 6, fuses=True, choices={"float32": chosen})
    engine.run(Block([6] * 5, [6] * 5, torch.arange(30).view(5, 6), None), 0, lambda: [0.1])
    assert made == [chosen]
    assert engine.choices == {"float32": chosen}
