"""Each defect is planted in a plain Lightning script and has to be named; a healthy training has nothing to say."""

from __future__ import annotations

import json
import math
from types import SimpleNamespace

import lightning as L
import pytest
import torch

from forgefield.diagnosis.autocorrelation import ModelAutocorrelation, autocorrelation
from forgefield.diagnosis.forward_nan import ForwardNaNDetection, first_bad_module
from forgefield.diagnosis.gradient_check import GradientCheck
from forgefield.diagnosis.loss_spike import LossSpike
from forgefield.diagnosis.records import FOLDER, findings_of, read_records
from forgefield.diagnosis.training_helper import TrainingHelper
from forgefield.errors import ForgefieldError
from forgefield.training.optim.sam import SAM
from forgefield.training.probing import ProbedModule
from tests.support.plain_modules import Net, fit, samples, weights

DEFECTS = {
    "dead": ((Net("dead"), {}), "dead layer: encoder.1"),
    "exploding": ((Net("exploding"), {}), "exploding embedding: encoder.2"),
    "unused": ((Net("unused"), {}), "unused parameters"),
    "detached": ((Net("detached"), {}), "encoder not reached"),
    "lr far too high": ((Net(lr=30.0), {}), "learning rate too high"),
    "lr far too low": ((Net(lr=1e-12), {}), "learning rate too low"),
    "constant target": ((Net(), {"all": 3.0}), "constant target: labels"),
    "outlier": ((Net(), {"at_7": 1e4}), "outliers: labels"),
    "nothing learnt": ((Net("dead"), {}), "output is the mean: labels"),
}


@pytest.mark.parametrize("defect", DEFECTS)
def test_the_helper_names_what_is_wrong(defect, tmp_path):
    (module, labels), kind = DEFECTS[defect]
    helper = TrainingHelper(every=8)
    fit(module, helper, folder=tmp_path, data=samples(**labels))
    assert kind in [finding.kind for finding in helper.findings]
    stored = findings_of(read_records(tmp_path)["training_helper"])
    assert stored == helper.findings
    assert all(finding.advice for finding in stored)


def test_a_healthy_training_has_no_findings(tmp_path):
    callbacks = (
        TrainingHelper(every=8),
        GradientCheck(),
        LossSpike(window=16),
        ModelAutocorrelation(window=16, every=8),
    )
    plain, watched = Net(), Net()
    fit(plain, folder=tmp_path)
    fit(watched, *callbacks, folder=tmp_path)
    assert [finding for callback in callbacks for finding in callback.findings] == []
    assert torch.equal(weights(plain), weights(watched))  # and looking changes nothing


def test_an_encoder_that_is_not_there_is_refused(tmp_path):
    with pytest.raises(ForgefieldError, match="no submodule 'encodr'"):
        fit(Net(), TrainingHelper(encoder="encodr"), folder=tmp_path)


def step_without(batches: set[int], optimiser, **options) -> torch.Tensor:
    """The oracle of skipping: a loop that leaves the batches out."""
    module = Net("root", **options)
    chosen = optimiser(module.parameters(), **{"lr": 0.01, **options})
    module.log = lambda *words: None
    for _ in range(3):
        for number, batch in enumerate(samples(at_13=1e3)):
            if number in batches:
                continue
            chosen.zero_grad()
            module.training_step(batch, number).backward()
            chosen.step()
    return weights(module)


@pytest.mark.parametrize(
    ("optimiser", "options", "lag"),
    [
        (torch.optim.AdamW, {"weight_decay": 0.1}, None),
        (torch.optim.SGD, {"momentum": 0.9}, None),
        (torch.optim.AdamW, {"weight_decay": 0.1, "fused": True}, 2),
    ],
)
def test_a_skipped_step_is_as_if_the_batch_were_not_there(optimiser, options, lag, tmp_path):
    """The loss is finite, its gradient is NaN: only a look at gradients finds it. Also when the host reads it later."""
    check = GradientCheck(policy="skip", lag=lag)
    module = Net("root", optimiser=optimiser, **options)
    fit(module, check, folder=tmp_path, data=samples(at_13=1e3))
    assert torch.equal(weights(module), step_without({1}, optimiser, **options))
    events = check.numbers["events"]
    assert [event["step"] for event in events] == [2, 14, 26]
    assert [event["frames"] for event in events] == [["sample 5 of batch 1"]] * 3
    assert "encoder.0.weight" in events[0]["layers"]
    assert check.count == 3
    assert check.numbers["checked"] == 36


def test_a_bad_gradient_stops_before_it_reaches_the_weights(tmp_path):
    module = Net()
    with pytest.raises(ForgefieldError, match=r"step 2: the gradient holds NaN in encoder.*sample 5 of batch 1"):
        fit(module, GradientCheck(), folder=tmp_path, data=samples(at_13=math.nan))
    assert weights(module).isfinite().all()
    assert json.loads((tmp_path / FOLDER / "gradient_check.json").read_text())["bad"] == 1


def test_zero_continues_with_the_finite_values(tmp_path):
    module, check = Net("root"), GradientCheck(policy="zero")
    fit(module, check, folder=tmp_path, data=samples(at_13=1e3))
    assert check.count == 3
    assert weights(module).isfinite().all()


def test_what_never_gets_better_is_not_skipped_for_ever(tmp_path):
    with pytest.raises(ForgefieldError, match="4th in a row"):
        fit(Net(), GradientCheck(policy="skip", patience=4), folder=tmp_path, data=samples(all=math.inf))
    with pytest.raises(ForgefieldError, match="Did you mean 'skip'"):
        GradientCheck(policy="skp")


@pytest.mark.parametrize("always", [False, True])
def test_the_module_that_first_gave_nan_is_named(always, tmp_path):
    module = Net("logarithm")
    with pytest.raises(
        ForgefieldError, match=r"module bad \(Logarithm\) is the first .* finite, on sample \d of batch 0"
    ):
        fit(module, ForwardNaNDetection(always=always), folder=tmp_path)


def test_a_label_that_is_nan_is_not_blamed_on_a_module(tmp_path):
    with pytest.raises(ForgefieldError, match=r"step 2: .*arises in the loss or in the labels.*on sample 5 of batch 1"):
        fit(Net(), ForwardNaNDetection(), folder=tmp_path, data=samples(at_13=math.nan))


def test_autocorrelation_is_that_of_each_series():
    """Against its definition, summed in a loop; white noise, a slow wave and a constant."""
    time = torch.arange(200.0, dtype=torch.float64)
    noise = torch.randn(200, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    series = torch.stack([noise, torch.sin(time / 30), torch.full_like(time, 3.0)], 1)
    found = autocorrelation(series, 20)
    for column in (0, 1):
        d = series[:, column] - series[:, column].mean()
        for lag in (0, 1, 7, 20):
            expected = sum(d[t] * d[t + lag] for t in range(200 - lag)) / sum(d * d)
            assert float(found[lag, column]) == pytest.approx(float(expected), abs=1e-12)
    assert abs(float(found[1, 0])) < 0.2 < 0.9 < float(found[1, 1])
    assert found[:, 2].isnan().all()


def test_gradients_that_repeat_themselves_are_found(tmp_path):
    """A learning rate so small that the same batch gives the same gradient: drifting slowly, it is correlated with itself."""
    watch = ModelAutocorrelation(window=32, every=8)
    fit(Net(optimiser=torch.optim.SGD, lr=1e-3), watch, folder=tmp_path, data=samples(8), max_epochs=48)
    assert [finding.kind for finding in watch.findings] == ["correlated gradients"]
    assert watch.numbers["gradients"]["mean"][0] == pytest.approx(1.0)
    assert len(watch.numbers["history"]["step"]) == 3


def test_a_spike_is_noticed_and_undone(tmp_path):
    """An outlier in batch 9 of the second epoch on; with a rollback the weights are those of a training that went back."""
    noticed, undone = LossSpike(window=16), LossSpike(window=16, rollback=True, snapshot_every=5)
    fit(Net(), noticed, folder=tmp_path, data=samples(at_75=1e4), max_epochs=2)
    assert [spike["step"] for spike in noticed.numbers["spikes"]] == [10, 22]
    module = Net()
    trainer = fit(module, undone, folder=tmp_path, data=samples(at_75=1e4), max_steps=10, max_epochs=-1)
    assert undone.numbers["spikes"][0]["action"] == "rolled back"
    again = Net()
    fit(again, folder=tmp_path, data=samples(at_75=1e4), max_steps=5, max_epochs=-1)
    assert torch.equal(weights(module), weights(again))
    states = trainer.optimizers[0].state
    assert {float(states[p]["step"]) for p in module.parameters()} == {5.0}


@pytest.mark.parametrize("rollback", [False, True])
def test_a_loss_that_is_not_finite_is_a_spike_from_the_first_step_on(rollback, tmp_path):
    watch = LossSpike(window=64, rollback=rollback, snapshot_every=1)
    fit(Net(), watch, folder=tmp_path, data=samples(at_9=math.inf), max_steps=2, max_epochs=-1)
    assert [spike["step"] for spike in watch.numbers["spikes"]] == [2]


class Raised(L.Callback):
    """Multiplies the weights by 1e3 before some steps, as a bad update would."""

    def __init__(self, *steps: int) -> None:
        self.steps = steps

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx) -> None:
        if trainer.global_step in self.steps:
            for parameter in pl_module.parameters():
                parameter.data.mul_(1e3)


def learning() -> Net:
    """A model whose loss falls by orders of magnitude in the first steps."""
    return Net(optimiser=torch.optim.SGD, lr=0.05)


def test_the_higher_losses_of_an_earlier_state_are_not_spikes(tmp_path):
    """From step 60 back to step 40, where the loss was many times higher than just before the spike."""
    watch = LossSpike(window=8, rollback=True, snapshot_every=40, factor=1.2, threshold=3.0)
    fit(learning(), Raised(60), watch, folder=tmp_path, data=samples(8), max_steps=100, max_epochs=-1)
    losses = dict(zip(watch.numbers["losses"]["step"], watch.numbers["losses"]["loss"]))
    assert losses[62] > 1.2 * losses[60]
    assert [spike["step"] for spike in watch.numbers["spikes"]] == [61]
    assert "were restored from step 40 (rollback 1 of at most 10)" in watch.findings[0].what


def test_a_second_rollback_starts_from_the_same_checkpoint_as_the_first(tmp_path):
    """Spikes at steps 50 and 52: snapshots are of steps 0, 20 and 40, and the second spike comes before the next one."""
    watch, went_back = LossSpike(window=8, rollback=True, snapshot_every=20), []
    go_back = watch._roll_back

    def recorded(*given) -> None:
        go_back(*given)
        went_back.append(watch.memory["snapshots"][-1]["step"])

    watch._roll_back = recorded  # type: ignore[method-assign]
    fit(learning(), Raised(50, 52), watch, folder=tmp_path, data=samples(8), max_steps=58, max_epochs=-1)
    assert went_back == [40, 40]
    with pytest.raises(ForgefieldError, match="rolled back to step 40 2 times in a row and did not complete 20 steps"):
        fit(
            learning(),
            Raised(*range(50, 58)),
            LossSpike(window=8, rollback=True, snapshot_every=20),
            folder=tmp_path,
            data=samples(8),
            max_steps=58,
            max_epochs=-1,
        )


def test_a_loss_that_stays_high_becomes_the_usual_one(tmp_path):
    class Heavier(Net):
        def training_step(self, batch, number):
            return super().training_step(batch, number) * (100.0 if self.global_step >= 30 else 1.0)

    watch = LossSpike(window=16)
    fit(Heavier(lr=0.0), watch, folder=tmp_path, data=samples(8), max_steps=90, max_epochs=-1)
    assert [spike["step"] for spike in watch.numbers["spikes"]] == list(range(31, 39))


@pytest.mark.parametrize("batches", [1, 3])
def test_the_loss_of_a_step_is_the_mean_over_its_batches(batches, tmp_path):
    watch = LossSpike()
    fit(Net(lr=0.0), watch, folder=tmp_path, data=samples(72), max_epochs=1, accumulate_grad_batches=batches)
    whole = LossSpike()
    data = samples(72)
    large = torch.utils.data.DataLoader(data.dataset, batch_size=8 * batches)
    fit(Net(lr=0.0), whole, folder=tmp_path, data=large, max_epochs=1)
    assert watch.numbers["losses"]["loss"] == pytest.approx(whole.numbers["losses"]["loss"])


class OtherName(Net):
    """The second argument of its step has a name of its own; Lightning passes it by position."""

    def training_step(self, batch, number):
        assert isinstance(number, int)
        return super().training_step(batch, number)


class AnyNumber(Net):
    def training_step(self, *given):
        return super().training_step(*given)


@pytest.mark.parametrize("kind", [OtherName, AnyNumber])
def test_the_step_is_called_by_position(kind, tmp_path):
    check = GradientCheck(policy="skip")
    fit(kind("root"), check, folder=tmp_path, data=samples(at_13=1e3), max_epochs=1)
    assert check.numbers["events"][0]["frames"] == ["sample 5 of batch 1"]
    with pytest.raises(ForgefieldError, match=r"module bad \(Logarithm\)"):
        fit(kind("logarithm"), ForwardNaNDetection(), folder=tmp_path)
    fit(kind(), SAM(), folder=tmp_path, max_epochs=1)


def test_all_batches_of_an_accumulated_step_are_looked_at(tmp_path):
    """The bad sample is in the first of three batches of a step."""
    check = GradientCheck(policy="skip")
    fit(Net("root"), check, folder=tmp_path, data=samples(at_2=1e3), max_epochs=1, accumulate_grad_batches=3)
    assert check.numbers["events"][0]["frames"] == ["sample 2 of batch 0"]
    with pytest.raises(ForgefieldError, match="step 1: the loss is not finite.*on sample 2 of batch 0"):
        fit(Net(), ForwardNaNDetection(), folder=tmp_path, data=samples(at_2=math.nan), accumulate_grad_batches=3)
    helper = TrainingHelper(every=1)
    fit(Net(), helper, folder=tmp_path, max_epochs=1, accumulate_grad_batches=3)
    assert helper.numbers["looks"] == 4


class Overwrites(torch.nn.Module):
    """Writes what it computes into the dictionary it was given, as many models do."""

    def forward(self, data):
        data["energy"] = torch.log(data["x"] - 1e9)
        return data


class InDictionaries(Net):
    def __init__(self) -> None:
        super().__init__()
        self.log_of = Overwrites()

    def training_step(self, batch, number):
        return self.log_of({"x": self.encoder(batch[0])})["energy"].mean()


class KeywordInput(Net):
    def training_step(self, batch, number):
        features = torch.log(self.encoder(batch[0]) - 1e9)
        return self.head(input=features).mean()


class Parameter(Net):
    def __init__(self) -> None:
        super().__init__()
        self.scale = torch.nn.Parameter(torch.tensor(math.nan))

    def training_step(self, batch, number):
        return super().training_step(batch, number) * self.scale


@pytest.mark.parametrize(
    ("module", "text"),
    [
        (
            InDictionaries,
            r"module log_of \(Overwrites\) is the first with NaN or Inf in its output, although all its",
        ),
        (KeywordInput, r"module head \(Linear\) is the first with NaN or Inf, and its inputs were not finite"),
        (Parameter, r"parameters are no longer finite \(scale\)"),
    ],
)
def test_inputs_are_blamed_only_where_they_are_not_finite(module, text, tmp_path):
    with pytest.raises(ForgefieldError, match=text):
        fit(module(), ForwardNaNDetection(), folder=tmp_path)


class ReadsBatches(Net, ProbedModule):
    """As modules of Forgefield do: batches are dictionaries in which a label that is missing is NaN."""

    task = SimpleNamespace(targets=[SimpleNamespace(label="gap")])
    notify = discard_step = None

    def __init__(self) -> None:
        super().__init__()
        self.log_of = Overwrites()

    def eager_loss(self, batch):
        return self.log_of(dict(batch))["energy"].mean()


def test_missing_labels_are_not_inputs():
    missing = torch.full((4,), math.nan)
    batch = {"x": torch.ones(4), "energy": missing, "gap": missing}
    assert "module log_of (Overwrites) is the first with NaN or Inf in its output, although" in first_bad_module(
        ReadsBatches(), batch, 0
    )
    batch["x"] = missing.clone()
    assert "the batch itself contains NaN or Inf" in first_bad_module(ReadsBatches(), batch, 0)


def test_a_batch_that_is_not_finite_is_blamed(tmp_path):
    data = samples()
    data.dataset.tensors[0][3, 1] = math.nan
    with pytest.raises(ForgefieldError, match="the batch itself contains NaN or Inf, on sample 3 of batch 0"):
        fit(Net(), ForwardNaNDetection(), folder=tmp_path, data=data)


def test_one_that_goes_back_again_and_again_stops(tmp_path):
    with pytest.raises(ForgefieldError, match="was rolled back 2 times"):
        fit(
            Net(),
            LossSpike(window=16, rollback=True, snapshot_every=2, most=2),
            folder=tmp_path,
            data=samples(at_75=1e4),
            max_epochs=5,
        )
