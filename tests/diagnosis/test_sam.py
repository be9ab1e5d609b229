"""SAM against a loop that does the same by hand, with engines, ranks and what it cannot work with."""

from __future__ import annotations

import pytest
import torch

from forgefield.diagnosis.gradient_check import GradientCheck
from forgefield.errors import ForgefieldError
from forgefield.training.optim.sam import SAM
from tests.support.plain_modules import Net, fit, samples, weights


def by_hand(rho: float, adaptive: bool) -> torch.Tensor:
    module = Net()
    module.log = lambda *words: None
    optimiser = torch.optim.Adam(module.parameters(), lr=0.01)
    parameters = list(module.parameters())
    for number, batch in enumerate(samples()):
        gradients = torch.autograd.grad(module.training_step(batch, number), parameters)
        scale = [p.detach().abs() if adaptive else torch.ones_like(p) for p in parameters]
        norm = torch.cat([(s * g).reshape(-1) for s, g in zip(scale, gradients)]).norm()
        kept = [p.detach().clone() for p in parameters]
        for p, s, g in zip(parameters, scale, gradients):
            p.data += rho * s * s * g / norm
        optimiser.zero_grad()
        module.training_step(batch, number).backward()
        for p, before in zip(parameters, kept):
            p.data.copy_(before)
        optimiser.step()
    return weights(module)


@pytest.mark.parametrize("adaptive", [False, True])
def test_steps_are_those_done_by_hand(adaptive, tmp_path):
    module = Net()
    fit(module, SAM(rho=0.2, adaptive=adaptive), folder=tmp_path, max_epochs=1)
    assert torch.allclose(weights(module), by_hand(0.2, adaptive), rtol=0, atol=1e-13)
    plain = Net()
    fit(plain, SAM(rho=0.2, start_step=99), folder=tmp_path, max_epochs=1)
    assert not torch.allclose(weights(module), weights(plain), atol=1e-6)


def test_weights_come_back_when_the_second_evaluation_fails(tmp_path):
    class Fails(Net):
        calls = 0

        def training_step(self, batch, batch_idx):
            self.calls += 1
            if self.calls == 4:
                raise RuntimeError("the second evaluation of the second step")
            return super().training_step(batch, batch_idx)

    module, before = Fails(), []
    with pytest.raises(RuntimeError, match="second evaluation"):
        fit(module, SAM(rho=5.0), folder=tmp_path)
    one_step = Net()
    fit(one_step, SAM(rho=5.0), folder=tmp_path, max_steps=1, max_epochs=-1)
    assert torch.equal(weights(module), weights(one_step)), before


@pytest.mark.parametrize(
    ("options", "words"),
    [({"accumulate_grad_batches": 2}, "accumulation"), ({"optimiser": torch.optim.LBFGS}, "LBFGS")],
)
def test_what_it_cannot_work_with_is_refused(options, words, tmp_path):
    module = Net(optimiser=options.pop("optimiser", torch.optim.Adam))
    with pytest.raises(ForgefieldError, match=words):
        fit(module, SAM(), folder=tmp_path, **options)


def test_a_step_whose_gradients_were_taken_away_is_not_made(tmp_path):
    class Breaks(Net):
        def training_step(self, batch, batch_idx):
            loss = super().training_step(batch, batch_idx)
            return loss * float("nan") if batch_idx == 1 else loss

    module, check = Breaks(), GradientCheck(policy="skip")
    fit(module, check, SAM(rho=0.2), folder=tmp_path, max_epochs=1)
    assert check.count == 1
    assert bool(weights(module).isfinite().all())
