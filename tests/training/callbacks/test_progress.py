"""The progress display says where a training is, in physical units, rarely enough, and gives the terminal back."""

from __future__ import annotations

import io
import re
from pathlib import Path

import lightning as L
import pytest
import torch
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from rich.console import Console

from forgefield.parallel.ranks import single_process
from forgefield.training.callbacks.progress import RunProgress, line_is_due, short_duration, short_number
from forgefield.training.module import Throughput
from forgefield.training.run.start_summary import process_rows
from forgefield.training.run.summary import digits, end_summary, model_rows, print_summary

SHOW_CURSOR, HIDE_CURSOR = "\x1b[?25h", "\x1b[?25l"


class Counters(Throughput):
    """Throughput at a fixed rate; None after each row of metrics, as the real one."""

    rates: dict[str, float] = {}

    def per_second(self, name: str) -> float | None:
        return self.rates.get(name)


class Line(L.LightningModule):
    """Fits one number; its metrics have the names of a real training. `fail_at`: the step that raises."""

    def __init__(self, fail_at: int | None = None) -> None:
        super().__init__()
        self.slope = torch.nn.Parameter(torch.tensor(0.0))
        self.fail_at = fail_at
        self.throughput = Counters()

    def training_step(self, batch, batch_idx):
        if self.global_step == self.fail_at:
            raise RuntimeError("on purpose")
        self.throughput.rates = {"atoms": 8123.0, "frames": 341.0}
        return (self.slope - batch).square().mean()

    def validation_step(self, batch, batch_idx):
        pass

    def on_validation_epoch_end(self):
        epoch = float(self.current_epoch)
        self.log_dict({"train/loss": 0.5 / (1 + epoch), "train/forces_mae": 50.0})
        self.log_dict({"val/loss": abs(epoch - 2.0), "val/energy_mae": 3.21, "val/forces_mae": 41.0 + epoch})
        self.throughput.rates = {}

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.01)


def train(
    progress: RunProgress | None, *, epochs: int = 3, batches: int = 4, module: Line | None = None, **options
) -> L.Trainer:
    module = module or Line()
    data = torch.utils.data.DataLoader(torch.ones(batches))
    trainer = L.Trainer(
        max_epochs=epochs,
        callbacks=[progress] if progress else [],
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_model_summary=False,
        **{"num_sanity_val_steps": 0, **options},
    )
    trainer.fit(module, data, torch.utils.data.DataLoader(torch.ones(2)))
    return trainer


def log_console() -> Console:
    return Console(file=io.StringIO(), width=60, highlight=False)


def terminal_console() -> Console:
    return Console(file=io.StringIO(), force_terminal=True, width=140, height=30, color_system=None)


def written(console: Console) -> str:
    return console.file.getvalue()


def test_a_log_gets_one_line_per_epoch_with_units() -> None:
    console = log_console()
    train(RunProgress(console))
    lines = written(console).splitlines()
    assert len(lines) == 3
    expected = (
        r"epoch 2/3  step 8  loss 0\.250  val energy MAE 3\.21 meV/atom  val forces MAE 42\.0 meV/A  lr 0\.01"
        r"  8\.1k atoms/s  left \d+s"
    )
    assert re.fullmatch(expected, lines[1]), lines[1]
    assert lines[2].endswith("left 0s")


@pytest.mark.parametrize("term", ["xterm-color", "dumb"])
def test_the_cell_of_a_notebook_and_the_log_of_a_ci_get_lines(monkeypatch: pytest.MonkeyPatch, term: str) -> None:
    """Both are told to use colours (FORCE_COLOR), but cannot redraw lines."""
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("GIT_PAGER", "cat")
    monkeypatch.setenv("TERM", term)
    console = Console(file=io.StringIO(), width=200)
    assert console.is_terminal
    train(RunProgress(console))
    assert [line[:9] for line in written(console).splitlines()] == ["epoch 1/3", "epoch 2/3", "epoch 3/3"]


def test_a_long_log_is_thinned_but_keeps_the_last_line() -> None:
    console = log_console()
    train(RunProgress(console), epochs=137, batches=1)
    lines = written(console).splitlines()
    epochs = [int(re.match(r"epoch +(\d+)/137", line)[1]) for line in lines]
    assert epochs[:20] == list(range(1, 21))
    assert epochs[-1] == 137
    assert len(epochs) <= 41


@pytest.mark.parametrize("total", [1, 20, 39, 40, 41, 57, 100, 1000, 123_457])
def test_lines_are_bounded_and_the_last_occasion_is_one(total: int) -> None:
    due = [moment for moment in range(1, total + 1) if line_is_due(moment, total, 40)]
    assert len(due) == min(total, 40)
    assert due[: min(total, 20)] == list(range(1, min(total, 20) + 1))
    assert due[-1] == total


def test_lines_grow_slowly_where_the_end_is_unknown() -> None:
    due = [moment for moment in range(1, 100_001) if line_is_due(moment, None, 40)]
    assert due[:20] == list(range(1, 21))
    assert len(due) < 80


def test_validations_inside_an_epoch_have_lines_of_their_own() -> None:
    console = log_console()
    train(RunProgress(console), epochs=1, batches=6, val_check_interval=2)
    steps = [int(re.search(r"step (\d+)", line)[1]) for line in written(console).splitlines()]
    assert steps == [2, 4, 6]


def test_a_training_by_steps_knows_its_epochs_and_end() -> None:
    console = log_console()
    train(RunProgress(console), epochs=-1, batches=4, max_steps=10)
    assert [line.split("  ")[0] for line in written(console).splitlines()] == ["epoch 1/3", "epoch 2/3", "epoch 3/3"]


def test_best_is_the_validation_with_the_lowest_monitored_value() -> None:
    by_loss, by_forces = RunProgress(log_console()), RunProgress(log_console(), monitor="val/forces_mae")
    train(by_loss, epochs=5)
    train(by_forces, epochs=5)
    assert by_loss.best == pytest.approx({"val/loss": 0.0, "val/energy_mae": 3.21, "val/forces_mae": 43.0, "epoch": 3})
    assert by_forces.best["epoch"] == 1


def test_best_survives_a_resume() -> None:
    first, second = RunProgress(log_console()), RunProgress(log_console())
    train(first, epochs=4)
    second.load_state_dict(first.state_dict())
    assert second.best == first.best != {}


def test_a_terminal_shows_bar_errors_speed_and_best() -> None:
    console = terminal_console()
    train(RunProgress(console), epochs=4)
    assert "epoch 5" not in written(console)
    last = written(console).split("epoch 4/4")[-1]
    assert "4/4" in last
    assert "energy MAE 3.21 meV/atom" in last
    assert "forces MAE 44.0 meV/A" in last
    assert "8.1k atoms/s" in last
    assert "341 frames/s" in last
    assert "lr 0.01" in last
    assert re.search(r"best .*forces MAE 43\.0 meV/A +epoch 3", last)


def test_the_terminal_is_restored_at_the_end_and_after_an_error() -> None:
    for module in (Line(), Line(fail_at=5)):
        console = terminal_console()
        if module.fail_at is None:
            train(RunProgress(console), module=module)
        else:
            with pytest.raises(RuntimeError, match="on purpose"):
                train(RunProgress(console), module=module)
        output = written(console)
        assert output.count(HIDE_CURSOR) == output.count(SHOW_CURSOR) > 0
        assert output.rindex(SHOW_CURSOR) > output.rindex(HIDE_CURSOR)
        assert console._live_stack == [] if hasattr(console, "_live_stack") else console._live is None


def test_steps_between_two_refreshes_read_no_metrics(monkeypatch) -> None:
    reads = []
    original = RunProgress._read_values
    monkeypatch.setattr(RunProgress, "_read_values", lambda self, trainer: (reads.append(1), original(self, trainer)))
    train(RunProgress(terminal_console(), per_second=1e-6), epochs=2, batches=300)
    # the first refresh, and at each validation and at the end a fixed few; not one per step
    assert len(reads) < 12


def test_a_log_reads_metrics_only_for_its_lines(monkeypatch) -> None:
    reads = []
    original = RunProgress._read_values
    monkeypatch.setattr(RunProgress, "_read_values", lambda self, trainer: (reads.append(1), original(self, trainer)))
    train(RunProgress(log_console()), epochs=2, batches=300)
    assert len(reads) == 4


def test_a_disabled_bar_is_silent() -> None:
    for console in (log_console(), terminal_console()):
        progress = RunProgress(console)
        progress.disable()
        train(progress)
        assert written(console) == ""


def test_other_ranks_are_silent(monkeypatch) -> None:
    monkeypatch.setattr(L.Trainer, "is_global_zero", property(lambda self: False))
    console = log_console()
    train(RunProgress(console))
    assert written(console) == ""


def test_enable_progress_bar_false_is_lightnings_to_enforce() -> None:
    with pytest.raises(MisconfigurationException, match="enable_progress_bar=False"):
        train(RunProgress(log_console()), enable_progress_bar=False)


def test_printing_goes_above_the_bar_and_is_not_markup() -> None:
    console = log_console()
    RunProgress(console).print("[bold]", 3)
    assert written(console) == "[bold] 3\n"


def test_speeds_and_times_are_short() -> None:
    assert [short_number(x) for x in (3.14159, 812.0, 8123.0, 312_000.0, 1.3e6)] == [
        "3.1",
        "812",
        "8.1k",
        "312k",
        "1.3M",
    ]
    assert [short_duration(x) for x in (48, 80, 8040, 273_600, None)] == ["48s", "1m20s", "2h14m", "3d04h", "?"]
    values = [digits(x) for x in (0.0, 0.9999, 41.04, 12345.0, 1.2e-5, None)]
    assert values == ["0", "1.00", "41.0", "12300", "1.20e-05", "-"]


# ---- summaries


def test_the_summary_before_training_shows_every_row_as_it_is() -> None:
    console = log_console()
    sections = {"Data": [("train", "360 frames of [red]water[/red].xyz")], "Model": [("name", "nequip")], "Empty": []}
    print_summary(console, sections)
    output = written(console)
    assert "360 frames of [red]water[/red].xyz" in output
    assert output.index("Data") < output.index("train") < output.index("Model") < output.index("nequip")
    assert "Empty" not in output


def test_model_rows_count_parameters_by_part() -> None:
    core = torch.nn.ModuleDict({"embedding": torch.nn.Linear(3, 4), "readout": torch.nn.Linear(4, 1, bias=False)})
    core["readout"].weight.requires_grad_(False)
    rows = dict(model_rows(torch.nn.ModuleDict({"model": core})))
    assert rows["parameters"] == "20, 16 of them trained"
    assert rows["  embedding"] == "16"
    assert rows["  readout"] == "4"
    assert "  others" not in rows
    core.register_parameter("species_shift", torch.nn.Parameter(torch.zeros(2)))
    assert dict(model_rows(torch.nn.ModuleDict({"model": core})))["  others"] == "2"
    assert rows["type of weights"] == "float32"


def test_the_table_shows_ranks_and_devices() -> None:
    trainer = L.Trainer(accelerator="cpu", devices=1, logger=False, enable_checkpointing=False)
    rows = dict(process_rows(trainer, single_process()))
    assert rows["distributed"] == "no, one process"
    assert rows["launcher"] == "none"
    assert rows["world size"] == "1"
    assert rows["device"].endswith("(cpu)")
    assert rows["threads"] == f"{torch.get_num_threads()} per process"
    assert f"torch {torch.__version__.partition('+')[0]}" in rows["versions"]


def test_the_end_shows_errors_with_units_and_whole_hints() -> None:
    console = Console(file=io.StringIO(), width=80, highlight=False)
    test = {"energy_mae": 3.2111, "energy_rmse": 4.0, "forces_mae": 41.04, "forces_rmse": 60.0, "forces_mae/Cu": 39.0}
    hint = "forgefield predict runs/a-run-with-a-rather-long-name structures.extxyz -o predicted.extxyz"
    end_summary(console, Path("runs/x"), {"test": test, "val": {"energy_mae": 2.5}}, [hint])
    lines = written(console).splitlines()
    assert f"  {hint}" in lines
    energy = next(line for line in lines if "energy" in line)
    assert energy.split()[1:-1] == ["energy", "3.21", "4.00", "2.50", "-", "meV/atom"]
    forces = next(line for line in lines if "forces" in line)
    assert forces.split()[1:-1] == ["forces", "41.0", "60.0", "-", "-", "meV/A"]
    assert any(line.split()[1:3] == ["Cu", "39.0"] for line in lines)


def test_the_end_takes_the_errors_of_a_test_alone() -> None:
    console = log_console()
    end_summary(console, Path("runs/x"), {"test/stress_mae": 0.5, "test/stress_rmse": 0.7}, [])
    assert re.search(r"stress +0\.500 +0\.700 +GPa", written(console))


def test_the_end_points_out_errors_far_above_the_spread_of_the_labels() -> None:
    console = Console(file=io.StringIO(), width=140, highlight=False)
    statistics = {"energy_residual_std": 0.02, "forces_rms": 1.2}
    absurd = {"val": {"forces_mae": 1e17, "forces_rmse": 1.2e17}}
    end_summary(console, Path("runs/x"), absurd, [], statistics=statistics)
    shown = " ".join(written(console).split())
    assert "WARNING: forces RMSE 1.2e+17 meV/A is 1e+14 times that of predicting zero forces" in shown
    assert "not usable" in shown
    usual = Console(file=io.StringIO(), width=140, highlight=False)
    end_summary(usual, Path("runs/x"), {"val": {"forces_mae": 40.0, "forces_rmse": 60.0}}, [], statistics=statistics)
    assert "WARNING" not in written(usual)
