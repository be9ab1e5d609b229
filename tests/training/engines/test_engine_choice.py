"""Which engine runs: what the config says, the device allows and a measurement finds; a wrong one is refused."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from forgefield.data.batch import halves
from forgefield.data.padding import SizePlan
from forgefield.errors import ForgefieldError
from forgefield.models import Potential
from forgefield.parallel.ranks import single_process
from forgefield.tasks.losses import MSE
from forgefield.tasks.targets import Target
from forgefield.training.engines.choose import (
    Choice,
    EngineSetup,
    EngineStarter,
    build,
    can_use_kernels,
    engine_refusal,
    measure_and_choose,
    refuse_engine,
    requested_choice,
    start,
)
from forgefield.training.engines.engine import Engine, MemoryLimitedEngine, split_batch
from forgefield.training.engines.script import ScriptEngine
from forgefield.training.engines.step import StepFunction
from forgefield.training.engines.verify import (
    largest_difference,
    require_equal,
    require_equal_evaluation,
    shifted_labels,
)
from forgefield.training.optim.update import capture_refusal, portable_optimiser_states
from forgefield.training.options import TrainingOptions
from tests.support.engine_cases import ReadsAValue, difference, labelled, learnt, step_function
from tests.support.structures import make_potential

CPU = torch.device("cpu")


def settings(**changes):
    compile_options = SimpleNamespace(options=changes.pop("options", {}))
    graphs = SimpleNamespace(sizes=4, compiled=True)
    values = {"engine": "auto", "derivative": "auto", "compile": compile_options, "graphs": graphs} | changes
    return SimpleNamespace(**values)


def engine_setup(potential, said: list[str], **changes) -> EngineSetup:
    on = EngineSetup(
        function=lambda form: step_function(potential, ("energy", "forces"), derivative=form),
        options=settings(),
        world_size=1,
        steps=100,
        plan=lambda: SizePlan(()),
        tolerance=1e-9,
        notify=said.append,
    )
    return replace(on, **changes)


@pytest.mark.parametrize(
    ("given", "choice"),
    [
        ({"engine": "eager"}, Choice("eager", "double")),
        ({"engine": None}, Choice("eager", "double")),
        ({"engine": "script", "derivative": "tangent"}, Choice("script", "tangent")),
        ({"engine": "graphs"}, Choice("graphs", "double", "compiled")),
        ({"engine": "auto"}, None),
    ],
)
def test_what_the_config_asks_for(given, choice):
    assert requested_choice(settings(**given)) == choice


def test_kernels_are_taken_with_graphs_where_they_can_run():
    assert requested_choice(settings(engine="graphs"), can_use_kernels=True) == Choice("graphs", "kernels", "eager")
    assert requested_choice(settings(engine="graphs", derivative="double"), can_use_kernels=True).derivative == "double"
    assert requested_choice(settings(engine="compile"), can_use_kernels=True) == Choice("compile", "double")
    assert not can_use_kernels(engine_setup(make_potential(precision="float32"), []), CPU)


@pytest.mark.parametrize(
    ("choice", "potential", "targets", "reason"),
    [
        (Choice("compile", "kernels"), {}, ("forces",), "cannot be compiled or scripted"),
        (Choice("eager", "kernels"), {}, ("forces",), "NVIDIA GPU"),
        (Choice("eager", "kernels"), {}, ("energy",), "neither forces nor stress are trained"),
        (Choice("eager", "kernels"), {"type_embed_num_features": 1}, ("forces",), "no more species"),
    ],
)
def test_kernels_are_refused_with_a_reason(choice, potential, targets, reason, monkeypatch):
    if reason != "NVIDIA GPU":
        monkeypatch.setattr("forgefield.training.engines.choose.interpreted", lambda: True)
        monkeypatch.setattr("forgefield.training.engines.choose.has_triton", lambda: True)
    made = make_potential(**potential)
    on = engine_setup(made, [], function=lambda form: step_function(made, targets, derivative=form))
    with pytest.raises(ForgefieldError, match=f"training.derivative=kernels: .*{reason}"):
        build(choice, on, CPU)


def test_kernels_are_refused_for_models_that_have_none(monkeypatch):
    monkeypatch.setattr("forgefield.training.engines.choose.interpreted", lambda: True)
    monkeypatch.setattr("forgefield.training.engines.choose.has_triton", lambda: True)
    own = Potential(ReadsAValue("value"))
    with pytest.raises(ForgefieldError, match="this model has none"):
        build(Choice("eager", "kernels"), engine_setup(own, []), CPU)


@pytest.mark.parametrize(("before", "now"), [("double", False), ("kernels", True), (None, True)])
def test_a_resumed_run_keeps_its_form(before, now, monkeypatch):
    monkeypatch.setattr("forgefield.training.engines.choose.can_use_kernels", lambda on, device: True)
    chosen = None if before is None else {"name": "graphs", "derivative": before, "captured": "eager"}
    options = settings(engine="graphs")
    starter = EngineStarter(
        options, single_process(), plan=lambda: SizePlan(()), tolerance=1e-9, notify=print, stored_choice=chosen
    )
    assert starter._uses_kernels(engine_setup(make_potential(), []), labelled(3)) is now


def test_graphs_without_a_gpu_are_an_error():
    assert "NVIDIA GPU" in engine_refusal("graphs", CPU)
    with pytest.raises(ForgefieldError, match="training.engine=graphs: CUDA graphs need an NVIDIA GPU"):
        build(Choice("graphs", "double", "eager"), engine_setup(make_potential(), []), CPU)


def test_a_cpu_without_compiler_is_reported(monkeypatch):
    monkeypatch.setenv("PATH", "/nonexistent")
    assert "none is installed" in engine_refusal("compile", CPU)
    assert engine_refusal("eager", CPU) is None


def test_settings_that_inductor_does_not_have_are_refused():
    on = engine_setup(make_potential(), [], options=settings(options={"max_autotun": True}))
    with pytest.raises(ForgefieldError, match="no setting 'max_autotun'.*max_autotune"):
        build(Choice("compile", "double"), on, CPU)


def test_a_short_training_on_a_cpu_stays_eager_without_compiling():
    said: list[str] = []
    choice, engine = measure_and_choose(engine_setup(make_potential(), said), labelled(4, 3))
    assert choice == Choice("eager", "double")
    assert type(engine) is Engine
    assert "Engine auto: eager" in said[-1]


def test_an_engine_is_compared_before_it_is_used_and_the_deviation_is_reported():
    said: list[str] = []
    potential = make_potential(num_layers=1, l_max=0)
    engine = start(Choice("script", "tangent"), engine_setup(potential, said), labelled(4, 3))
    assert isinstance(engine, ScriptEngine)
    assert "loss, errors and all gradients equal those of the eager engine to" in said[-1]


def test_a_users_model_that_cannot_be_traced_is_named_with_its_line():
    on = engine_setup(Potential(ReadsAValue("value")), [])
    with pytest.raises(ForgefieldError, match=r"cannot be scripted because of .*engine_cases.py:\d+: .*item\(\)"):
        start(Choice("script", "double"), on, labelled(4, 3))


# ---- verification


class Wrong(Engine):
    """An engine with a mistake in one gradient, or in what it evaluates."""

    name = "wrong"

    def differentiate(self, batch, denominators=None):
        result = super().differentiate(batch, denominators)
        assert result.gradients[2] is not None
        result.gradients[2] = result.gradients[2] * (1 + 1e-3)
        return result

    def evaluate(self, batch):
        result = super().evaluate(batch)
        return result._replace(errors=result.errors + 1e-3)


class Rounded(Engine):
    """An engine whose values are those of atoms moved a little, as if they were rounded."""

    name = "rounded"

    def differentiate(self, batch, denominators=None):
        return super().differentiate(self.moved(batch), denominators)

    def evaluate(self, batch):
        return super().evaluate(self.moved(batch))

    @staticmethod
    def moved(batch):
        return {**batch, "positions": batch["positions"] * (1 + 1e-8)}


def test_an_engine_with_one_wrong_gradient_stops_the_run_with_the_numbers():
    function = step_function(make_potential())
    name = function.trained[2]
    with pytest.raises(ForgefieldError, match=f"gradient of {name} differs from that of the eager engine by 0.001"):
        require_equal(Wrong(function), Engine(function), labelled(4, 3), 1e-9)
    assert 0.0 < require_equal(Engine(function), Engine(function), labelled(4, 3), 1e-9).difference < 1e-14  # C code
    function.c_code = False
    assert require_equal(Engine(function), Engine(function), labelled(4, 3), 1e-9).difference == 0.0


def test_a_model_that_has_learnt_its_labels_can_be_compared():
    """As where a long training is continued: of the gradients of its loss rounding leaves nothing to compare."""
    potential = make_potential()
    function = step_function(potential)
    engine, reference, batch = Rounded(function), Engine(function), learnt(potential, labelled(4, 3))
    of_loss, _ = largest_difference(engine.differentiate(batch), reference.differentiate(batch), function.trained)
    assert of_loss > 1e-3
    difference = require_equal(engine, reference, batch, 1e-4).difference
    assert difference is not None
    assert 0 < difference < 1e-4
    require_equal_evaluation(engine, reference, batch, 1e-4)


def test_labels_are_moved_away_from_what_was_learnt():
    targets = [
        Target(name, 1.0, MSE, False, None, scale=scale, classes=classes)
        for name, scale, classes in (
            ("energy", 1.0, None),
            ("virial", 1.0, None),
            ("gap", (0.5, 2.0), None),
            ("group", 1.0, (1.0, 2.0)),
        )
    ]
    batch = labelled(4, 3) | {"gap": torch.zeros(2, 2, dtype=torch.float64), "group": torch.ones(2)}
    moved = shifted_labels(batch, SimpleNamespace(targets=targets))
    assert torch.equal(moved["energy"], batch["energy"] + torch.tensor([4, 3]))
    assert torch.equal(moved["stress"], -batch["stress"])
    assert moved["gap"].tolist() == [[0.5, 2.0]] * 2
    assert all(moved[name] is batch[name] for name in batch if name not in ("energy", "stress", "gap"))


def only_below(limit: float):
    """A loss of a user's that is defined for some labels only."""
    return lambda prediction, target: (prediction - target).square() * (limit - target).log().exp()


def never_finite(prediction, target):
    return (prediction - target).square() * torch.log(-prediction.square())


def with_energy_loss(loss):
    function = step_function(make_potential())
    task = function.task
    task.targets = tuple(replace(t, loss=loss) if t.name == "energy" else t for t in task.targets)
    return function


class GivesNaN(Engine):
    """An engine with one value of one gradient that is not finite."""

    name = "gives nan"

    def differentiate(self, batch, denominators=None):
        result = super().differentiate(batch, denominators)
        assert result.gradients[2] is not None
        result.gradients[2][(0,) * result.gradients[2].dim()] = float("nan")
        return result

    def evaluate(self, batch):
        result = super().evaluate(batch)
        return result._replace(errors=result.errors * float("nan"))


@pytest.mark.parametrize(
    ("room", "share", "text"), [(99.0, 1.0, ""), (1e-3, -1.0, "labels shifted by -1 of the usual amount")]
)
def test_labels_are_moved_to_where_the_loss_is_finite(room, share, text):
    batch = labelled(4, 3)
    function = with_energy_loss(only_below(float((batch["energy"] / batch["n_atoms"]).nan_to_num(-99.0).max()) + room))
    compared = require_equal(Rounded(function), Engine(function), batch, 1e-4)
    assert (compared.share, compared.is_finite) == (share, True)
    assert compared.difference is not None
    assert compared.difference < 1e-4
    assert text in compared.describe()
    require_equal_evaluation(Rounded(function), Engine(function), batch, 1e-4)
    for wrong, what in ((Wrong, "differs from that of the eager"), (GivesNaN, "is not finite where that of the eager")):
        with pytest.raises(ForgefieldError, match=what):
            require_equal(wrong(function), Engine(function), batch, 1e-4)
        with pytest.raises(ForgefieldError, match=what):
            require_equal_evaluation(wrong(function), Engine(function), batch, 1e-9)


def test_only_models_that_declare_convolutions_use_c_code_in_training(monkeypatch):
    function = step_function(make_potential())
    assert function.convolves_by_c
    monkeypatch.setattr(type(function.potential.interface), "convolves", False)
    assert not function.convolves_by_c
    assert require_equal(Engine(function), Engine(function), labelled(4, 3), 1e-9).difference == 0.0


def test_where_no_labels_give_a_finite_loss_the_rest_is_compared():
    """Eager would train on the same numbers; an engine that is finite there, or wrong in what is finite, is not the same."""
    function, batch = with_energy_loss(never_finite), labelled(4, 3)
    compared = require_equal(Rounded(function), Engine(function), batch, 1e-4)
    assert (compared.share, compared.is_finite) == (0.0, False)
    assert "values of the eager engine are not finite" in compared.describe()
    finite = step_function(function.potential)
    with pytest.raises(ForgefieldError, match="is not finite where that of PyTorch's operations"):
        require_equal(Engine(finite), Engine(function), batch, 1e-4)
    with pytest.raises(ForgefieldError, match="in validation an error"):
        require_equal_evaluation(Wrong(function), Engine(function), batch, 1e-9)


def test_an_engine_that_evaluates_wrongly_stops_the_run():
    function = step_function(make_potential())
    with pytest.raises(ForgefieldError, match="in validation an error differs"):
        require_equal_evaluation(Wrong(function), Engine(function), labelled(4, 3), 1e-9)


@pytest.mark.parametrize("by_kernels", [False, True])
def test_what_is_at_fault_is_to_be_left_out(by_kernels, monkeypatch):
    """Where sums over edges are made by kernels the eager engine makes them so, too."""
    monkeypatch.setattr(StepFunction, "sums_by_kernels", property(lambda function: by_kernels))
    function, batch = step_function(make_potential()), labelled(4, 3)
    other, setting = (
        ("PyTorch's operations", "kernels.edges=false") if by_kernels else ("the eager engine", "engine=eager")
    )
    for require in (require_equal, require_equal_evaluation):
        with pytest.raises(
            ForgefieldError, match=f"differs from that of {other} by .*use training.{setting}, and please"
        ):
            require(Wrong(function), Engine(function), batch, 1e-9)
    said: list[str] = []
    start(Choice("eager", "double"), engine_setup(make_potential(), said), batch)
    expected = (
        "Engine eager, double derivative, sums over edges by kernels: loss, errors and all gradients equal those of "
    )
    assert [line.startswith(expected + other) for line in said] == [True] * by_kernels


class Noisy(nn.Module):
    species, cutoff, only_edge_vectors = ("H", "O"), 3.0, True

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(5, dtype=torch.float64))

    def forward(self, batch):
        weight = nn.functional.dropout(self.weight, 0.5, self.training)
        squares = batch["edge_vectors"].square().sum(1) * weight.sum()
        return squares.new_zeros(batch["species"].shape[0]).index_add(0, batch["edge_index"][1], squares)


def test_a_random_model_is_compared_with_the_same_random_numbers_and_draws_none():
    function = step_function(Potential(Noisy()), ("energy", "forces"))
    torch.manual_seed(3)
    state = torch.get_rng_state()
    assert require_equal(Engine(function), Engine(function), labelled(4, 3), 1e-9).difference == 0.0
    assert torch.equal(torch.get_rng_state(), state)


# ---- memory


@pytest.mark.parametrize("atoms", [(4, 3), (5, 1, 1, 1), (2, 2, 9)])
def test_halves_are_batches_whose_gradients_add_up_to_those_of_the_whole(atoms):
    function = step_function(make_potential())
    batch = labelled(*atoms)
    first, second = halves(batch)
    assert first["n_atoms"].shape[0] + second["n_atoms"].shape[0] == len(atoms)
    engine, counts = Engine(function), function.task.counts(batch)
    whole = engine.differentiate(batch)
    parts = [engine.differentiate(part, lambda: counts) for part in (first, second)]
    for gradient, a, b in zip(whole.gradients, *(part.gradients for part in parts)):
        torch.testing.assert_close(a + b, gradient, rtol=1e-12, atol=1e-13)


class Hungry(nn.Module):
    """Needs memory that no machine has where a batch has more than `most` edges: the allocator itself refuses."""

    species, cutoff = ("H", "O"), 3.0

    def __init__(self, most: int) -> None:
        super().__init__()
        self.most, self.weight = most, nn.Parameter(torch.ones(3, dtype=torch.float64))

    def forward(self, batch):
        vectors = batch["edge_vectors"]
        if vectors.shape[0] > self.most:
            torch.empty(1 << 48, dtype=torch.float64)
        squares = vectors.square().sum(1) * self.weight.sum()
        return squares.new_zeros(batch["species"].shape[0]).index_add(0, batch["edge_index"][1], squares)


def test_where_memory_runs_out_the_batch_and_the_remedies_are_named():
    batch = labelled(5, 4, 6)
    function = step_function(Potential(Hungry(10)), ("energy", "forces"))
    message = (
        f"batch of 3 frames, 15 atoms and {batch['edge_index'].shape[1]} edges.*training.memory.split=true.*--plan"
    )
    with pytest.raises(ForgefieldError, match=message):
        MemoryLimitedEngine(Engine(function), split=False).step(batch)
    with pytest.raises(ForgefieldError, match=r"data.eval_batch"):
        MemoryLimitedEngine(Engine(function), split=False).evaluate(batch)


def test_on_request_a_batch_that_does_not_fit_is_split_with_the_same_gradients():
    batch = labelled(5, 4, 6, 3)
    most = int(torch.bincount(batch["frame"][batch["edge_index"][1]]).max())
    said: list[str] = []
    sparing = MemoryLimitedEngine(
        Engine(step_function(Potential(Hungry(most)), ("energy", "forces"))), split=True, notify=said.append
    )
    plenty = Engine(step_function(Potential(Hungry(10**9)), ("energy", "forces")))
    found, expected = sparing.differentiate(batch), plenty.differentiate(batch)
    torch.testing.assert_close(found.gradients[0], expected.gradients[0], rtol=1e-12, atol=0)
    torch.testing.assert_close(found.measured.sums, expected.measured.sums, rtol=1e-12, atol=0)
    assert "computed in parts" in said[0]
    n = len(said)
    sparing.differentiate(batch)
    assert len(said) == n  # it is split beforehand from then on


def test_an_evaluation_that_does_not_fit_is_split_without_being_asked():
    batch = labelled(5, 4, 6, 3)
    most = int(torch.bincount(batch["frame"][batch["edge_index"][1]]).max())
    found = MemoryLimitedEngine(
        Engine(step_function(Potential(Hungry(most)), ("energy", "forces"))), split=False
    ).evaluate(batch)
    expected = Engine(step_function(Potential(Hungry(10**9)), ("energy", "forces"))).evaluate(batch)
    torch.testing.assert_close(found.sums, expected.sums, rtol=1e-12, atol=0)
    torch.testing.assert_close(found.errors, expected.errors, rtol=1e-12, atol=0)


def test_a_single_frame_that_does_not_fit_is_an_error_even_so():
    function = step_function(Potential(Hungry(1)), ("energy", "forces"))
    with pytest.raises(ForgefieldError, match="Memory ran out on a batch of 1 frames"):
        MemoryLimitedEngine(Engine(function), split=True).step(labelled(6))


@pytest.mark.parametrize("parts", [2, 3, 9])
def test_a_batch_in_parts_has_the_gradients_of_the_whole(parts):
    function, batch = step_function(make_potential()), labelled(5, 1, 4, 2, 6)
    pieces = split_batch(batch, parts)
    assert len(pieces) == min(parts, 5)
    assert sum(piece["positions"].shape[0] for piece in pieces) == 18
    assert difference(MemoryLimitedEngine(Engine(function), parts=parts, split=False), Engine(function), batch) < 1e-11


def test_sparing_changes_nothing_where_memory_suffices():
    function = step_function(make_potential())
    assert difference(MemoryLimitedEngine(Engine(function), split=True), Engine(function), labelled(4, 3)) < 1e-12


# ---- what cannot be captured


def test_optimisers_that_the_host_steers_are_named():
    weights = [nn.Parameter(torch.zeros(2))]
    assert capture_refusal(torch.optim.AdamW(weights)) is None
    for optimiser in (torch.optim.SGD(weights), torch.optim.LBFGS(weights)):
        assert f"{type(optimiser).__name__} cannot be captured" in capture_refusal(optimiser)


def test_stored_optimisers_can_be_taken_over_by_any_engine():
    weights = [nn.Parameter(torch.ones(2))]
    optimiser = torch.optim.Adam(weights)
    weights[0].grad = torch.ones(2)
    optimiser.step()
    optimiser.param_groups[0]["capturable"] = True
    stored = [optimiser.state_dict()]
    portable_optimiser_states(stored, [optimiser])
    assert stored[0]["param_groups"][0]["capturable"] is False
    again = torch.optim.Adam(weights)
    again.load_state_dict(stored[0])
    again.step()
    assert float(again.state[weights[0]]["step"]) == 2.0


@pytest.mark.parametrize("engine", ["auto", "eager", "compile", "graphs"])
def test_kernels_without_a_gpu_are_refused_before_anything_is_done(engine, monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    with pytest.raises(
        ForgefieldError, match="training.derivative=kernels: kernels need an NVIDIA GPU, but this training runs on cpu"
    ):
        refuse_engine(TrainingOptions(engine=engine, derivative="kernels"), CPU)
