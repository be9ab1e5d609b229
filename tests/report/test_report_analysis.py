"""The errors on the page are those the training reports, and groups add up to the whole."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from matplotlib.figure import Figure

from forgefield.report import canvas, figures
from forgefield.report.analysis import (
    Predictions,
    errors,
    errors_by_magnitude,
    errors_by_species,
    pairs,
    predictions_from_npz,
    worst_frames,
)
from forgefield.report.canvas import log_tick_values, to_svg
from forgefield.report.markup import count, duration, short_count, significant
from forgefield.tasks.metrics import ErrorMetrics
from tests.support.example_run import make_predictions


@pytest.fixture
def predictions(tmp_path) -> Predictions:
    """Twelve frames, some of whose labels are missing."""
    arrays = make_predictions(np.random.default_rng(5), 12)
    arrays["energy_ref"][3] = np.nan
    arrays["forces_ref"][40:60] = np.nan
    arrays["stress_ref"][:2] = np.nan
    np.savez(tmp_path / "test.npz", **arrays)
    return predictions_from_npz(tmp_path / "test.npz")


def test_errors_equal_the_metrics_of_the_training(predictions: Predictions) -> None:
    metrics = ErrorMetrics(("energy", "forces", "stress"), predictions.symbols)
    tensors = {
        name: {q: torch.tensor(getattr(predictions, f"{q}_{name}")) for q in ("energy", "forces", "stress")}
        for name in ("pred", "ref")
    }
    atoms = {"n_atoms": torch.tensor(predictions.n_atoms), "species": torch.tensor(predictions.species)}
    metrics.update(tensors["pred"], {**tensors["ref"], **atoms})
    expected = metrics.compute()
    found = errors(predictions)
    assert set(found) == {f"{q}_{kind}" for q in ("energy", "forces", "stress") for kind in ("mae", "rmse")}
    for name, value in found.items():
        assert value == pytest.approx(expected[name], rel=1e-12), name
    for group in errors_by_species(predictions):
        assert group.mae == pytest.approx(expected[f"forces_mae/{group.label}"], rel=1e-12)
        assert group.rmse == pytest.approx(expected[f"forces_rmse/{group.label}"], rel=1e-12)


@pytest.mark.parametrize("grouping", [errors_by_species, errors_by_magnitude])
def test_groups_add_up_to_the_whole(predictions: Predictions, grouping) -> None:
    groups = grouping(predictions)
    total = sum(group.n_atoms for group in groups)
    assert total == predictions.n_atoms.sum() - 20
    mae = sum(group.mae * group.n_atoms for group in groups) / total
    assert mae == pytest.approx(errors(predictions)["forces_mae"], rel=1e-12)


def test_magnitude_bins_of_equal_forces_are_one_bin(tmp_path) -> None:
    arrays = make_predictions(np.random.default_rng(5), 3)
    arrays["forces_ref"][:] = 0.0
    np.savez(tmp_path / "test.npz", **arrays)
    (group,) = errors_by_magnitude(predictions_from_npz(tmp_path / "test.npz"))
    assert np.isnan(group.relative)


def test_the_worst_frame_is_the_one_that_was_spoiled(tmp_path) -> None:
    arrays = make_predictions(np.random.default_rng(5), 9)
    start = arrays["n_atoms"][:7].sum()
    arrays["forces_pred"][start] += 50.0
    np.savez(tmp_path / "test.npz", **arrays)
    predictions = predictions_from_npz(tmp_path / "test.npz")
    worst = worst_frames(predictions)[0]
    frame = slice(start, start + arrays["n_atoms"][7])
    error = arrays["forces_pred"][frame] - arrays["forces_ref"][frame]
    assert worst.index == 7
    assert worst.forces == pytest.approx(1000 * np.sqrt((error**2).mean()), rel=1e-12)


def test_a_figure_without_labels_is_none(predictions: Predictions) -> None:
    unlabelled = np.full_like(predictions.energy_pred, np.nan)
    bare = Predictions(**{**_fields(predictions), "energy_ref": unlabelled})
    assert pairs(bare, "energy") is None


def test_parity_writes_its_errors_in(predictions: Predictions) -> None:
    values = pairs(predictions, "forces")
    figure = figures.parity_figure(values)
    assert isinstance(figure, Figure)
    drawing = to_svg(figure, "parity", "Forces")
    assert f"MAE {significant(values.mae)} meV/Å" in drawing
    assert f"RMSE {significant(values.rmse)} meV/Å" in drawing


def test_the_layout_is_that_of_matplotlib(predictions: Predictions, monkeypatch: pytest.MonkeyPatch) -> None:
    values = pairs(predictions, "forces")
    drawing = to_svg(figures.parity_figure(values), "parity", "Forces")
    monkeypatch.setattr(canvas, "_arrange", lambda figure: None)
    assert to_svg(figures.parity_figure(values), "parity", "Forces") == drawing


def test_energies_far_from_zero_are_shown_about_their_mean(predictions: Predictions) -> None:
    shift = -17_617.0 * predictions.n_atoms
    moved = {"energy_pred": predictions.energy_pred + shift, "energy_ref": predictions.energy_ref + shift}
    values = pairs(Predictions(**{**_fields(predictions), **moved}), "energy")
    drawing = to_svg(figures.parity_figure(values), "parity", "Energy")
    assert "reference E + 17\u2009600" in drawing


@pytest.mark.parametrize(
    ("low", "high"), [(0.9, 1.1), (38.0, 180.0), (2.3, 4.7), (1e-6, 1e5), (1e-40, 1e40), (0.01, 0.1)]
)
def test_a_logarithmic_axis_has_a_few_round_ticks_inside_it(low: float, high: float) -> None:
    ticks = log_tick_values(low, high, 6)
    assert 1 <= len(ticks) <= 6
    assert ticks == sorted(ticks)
    assert all(low <= tick <= high for tick in ticks)


def test_figures_leave_the_users_matplotlib_settings_alone(predictions: Predictions) -> None:
    import matplotlib

    before = dict(matplotlib.rcParams)
    to_svg(figures.parity_figure(pairs(predictions, "energy")), "a", "b")
    assert dict(matplotlib.rcParams) == before


@pytest.mark.parametrize(
    ("value", "written"),
    [
        (0.0, "0"),
        (1.2345, "1.23"),
        (0.99999, "1.00"),
        (41.04, "41.0"),
        (-3.3, "−3.30"),
        (12345.0, "12\u2009300"),
        (3.2e-7, "3.20e-07"),
        (None, "–"),
        (float("nan"), "–"),
    ],
)
def test_numbers_have_three_significant_digits(value, written: str) -> None:
    assert significant(value) == written


def test_counts_and_durations_read_as_words() -> None:
    assert count(1234567) == "1\u2009234\u2009567"
    assert [short_count(x) for x in (812, 8100, 61_300, 1_250_000)] == [
        "812",
        "8\u2009100",
        "61.3\u2009k",
        "1.25\u2009M",
    ]
    assert [duration(x) for x in (4.2, 48, 185, 8040, 273_600)] == [
        "4.2 s",
        "48 s",
        "3 min 05 s",
        "2 h 14 min",
        "3 d 04 h",
    ]


def _fields(predictions: Predictions) -> dict:
    return {name: getattr(predictions, name) for name in Predictions.__dataclass_fields__}
