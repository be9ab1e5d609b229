"""What diagnosis callbacks cost: CPU time spent in their hooks over the CPU time of the training, in one process.

    python benchmarks/diagnosis.py [--steps 300] [--model example|S] [--pictures docs/images]

The training is the built-in example (copper-gold, EMT; small steps, the hard case), or preset S of NequIP on the same frames.
Every callback has its default settings. The first ten steps, in which the engine is started, are left out. With --pictures
figures of a run that was disturbed are made, as they are drawn for the report.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.trainer import call

from forgefield.api import example_config
from forgefield.diagnosis.loss_spike import LossSpike
from forgefield.diagnosis.records import FIGURES, image_of, read_records
from forgefield.parallel.ranks import single_process
from forgefield.training import fit as fitting
from forgefield.training.run.journal import Journal
from forgefield.training.trainer import CALLBACKS, build_callbacks

MEASURED = ("gradient_check", "training_helper", "autocorrelation", "loss_spike", "throughput", "energy")
ON_REQUEST: dict[str, dict[str, Any]] = {"forward_nan": {"name": "forward_nan"}}
LEFT_OUT = 10
HOOKS_A_STEP = 6
"""That Lightning calls in every step, of every callback."""


class WithRollback(LossSpike):
    name = "loss_spike_with_rollback"


class Account:
    """CPU seconds in the hooks of each callback, and of the whole training."""

    def __init__(self) -> None:
        self.spent: dict[str, float] = {}
        self.at_end: dict[str, float] = {}
        self.begin = self.end = 0.0
        self.steps = 0
        self.open = False
        self.of_lightning = 0.0
        """CPU seconds of one call of a hook that does nothing."""

    def watch(self, label: str, callback: Callback) -> Callback:
        """The callback itself, with its hooks replaced by ones that are timed."""
        self.spent[label] = self.at_end[label] = 0.0
        for name in dir(type(callback)):
            own = getattr(type(callback), name)
            if (name.startswith("on_") or name == "state_dict") and own is not getattr(Callback, name, None):
                kept = self.at_end if name == "on_train_end" else self.spent
                setattr(callback, name, self._timed(label, getattr(callback, name), kept))
        return callback

    def _timed(self, label: str, hook: Any, kept: dict[str, float]) -> Any:
        def timed(*arguments: Any, **options: Any) -> Any:
            begin = time.process_time()
            try:
                return hook(*arguments, **options)
            finally:
                if self.open:
                    kept[label] += time.process_time() - begin

        return timed


class Clock(Callback):
    """Opens the account after the first steps."""

    def __init__(self, account: Account) -> None:
        self.account = account

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if trainer.global_step == LEFT_OUT:
            self.account.open, self.account.begin = True, time.process_time()
        self.account.steps = trainer.global_step - LEFT_OUT

    def on_fit_end(self, trainer: Any, pl_module: Any) -> None:
        self.account.end = time.process_time()
        begin = time.process_time()
        for _ in range(500):  # a hook that none of the callbacks has: what Lightning's calls of it cost
            call._call_callback_hooks(trainer, "on_before_zero_grad", trainer.optimizers[0])
        self.account.of_lightning = (time.process_time() - begin) / 500 / len(trainer.callbacks)


def measure(steps: int, model: str, folder: Path, more: dict[str, dict[str, Any]]) -> Account:
    account = Account()
    overrides = [
        f"out={folder}/runs",
        f"++trainer.max_steps={steps}",
        "training.scheduler=null",
        "training.engine=eager",
    ]
    overrides += ["++trainer.enable_progress_bar=false", "++trainer.accelerator=cpu", "trainer.max_epochs=-1"]
    if model == "S":
        overrides += ["model={name: nequip, preset: S}"]
    config = example_config(overrides, make=True)
    specs: dict[str, Any] = {**{name: {"name": name} for name in MEASURED}, **more}

    def watched(_: Any) -> list[Callback]:
        made = {label: build_callbacks([spec])[0] for label, spec in specs.items()}
        made["loss_spike with rollback"] = WithRollback(rollback=True)
        return [*(account.watch(label, callback) for label, callback in made.items()), Clock(account)]

    original, fitting.build_callbacks = fitting.build_callbacks, watched
    journal = Journal()
    try:
        fitting.fit(config, fresh=True, journal=journal, ranks=single_process())
    finally:
        fitting.build_callbacks = original
        journal.close()
    return account


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--model", choices=("example", "S"), default="example")
    parser.add_argument("--pictures", type=Path, default=None)
    args = parser.parse_args()
    torch.set_num_threads(1)
    assert set(MEASURED) <= set(CALLBACKS)
    with tempfile.TemporaryDirectory() as place:
        account = measure(args.steps, args.model, Path(place), ON_REQUEST)
        whole = account.end - account.begin - sum(account.spent.values()) - sum(account.at_end.values())
        print(
            f"\n{args.model}, {account.steps} steps, {1000 * whole / account.steps:.2f} ms of CPU time a step without callbacks"
        )
        for label, seconds in account.spent.items():
            last = account.at_end[label]
            cost = f"{1e6 * seconds / account.steps:9.1f} us a step {100 * seconds / whole:7.2f} %"
            print(f"{label:28s} {cost}   and {last:.2f} s once at the end")
        lightning = HOOKS_A_STEP * account.of_lightning
        print(
            f"{'an empty callback':28s} {1e6 * lightning:9.1f} us a step {100 * lightning * account.steps / whole:7.2f} %"
        )
        together = sum(account.spent[name] for name in MEASURED)
        print(
            f"{'all at default settings':28s} {1e6 * together / account.steps:9.1f} us a step {100 * together / whole:7.2f} %"
        )
        if args.pictures is not None:
            save_pictures(Path(place), args.pictures)


def save_pictures(place: Path, folder: Path) -> None:
    """The figures of a run of the example whose weights are disturbed before step 200, from which it recovers."""
    from PIL import Image

    from forgefield.report.canvas import house_style

    overrides = [f"out={place}/runs", "name=disturbed", "++trainer.max_epochs=6", "training.engine=eager"]
    overrides += ["++trainer.enable_progress_bar=false", "++trainer.accelerator=cpu", "training.scheduler=null"]
    config = example_config(overrides, make=True)
    config.callbacks = [
        {"name": "gradient_check", "norms_every": 2},
        {"name": "training_helper", "every": 20},
        {"name": "autocorrelation", "window": 64, "every": 20},
        {"name": "loss_spike", "rollback": True, "snapshot_every": 20},
        {"name": "throughput", "every": 30},
    ]
    built = fitting.build_callbacks
    fitting.build_callbacks = lambda specs: [Disturb(), *built(specs)]
    journal = Journal()
    try:
        run = fitting.fit(config, fresh=True, journal=journal, ranks=single_process()).run.path
    finally:
        fitting.build_callbacks = built
        journal.close()
    records = read_records(run)
    for name, (_, figure_of) in FIGURES.items():
        with house_style():
            figure = figure_of(records[name])
            if figure is not None:
                pixels = Image.fromarray(image_of(figure, dpi=150)).quantize(64)
                pixels.save(folder / f"diagnosis-{name}.png", optimize=True)


class Disturb(Callback):
    """Makes the first weights forty times as large before step 200."""

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if trainer.global_step == 200:
            with torch.no_grad():
                next(iter(pl_module.potential.parameters())).mul_(40.0)


if __name__ == "__main__":
    main()
