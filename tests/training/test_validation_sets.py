"""Named validation sets: `data.val: {bulk: a.extxyz, surface: b.extxyz}`."""

from __future__ import annotations

import pytest

from forgefield.config.loading import load_config
from forgefield.errors import ForgefieldError
from tests.support.helpers import tiny_config, write_emt
from tests.support.train_many import train_only


def test_every_set_has_the_metrics_of_a_run_that_is_validated_on_it_alone(tmp_path):
    sets = {
        "hot": str(write_emt(tmp_path / "a.extxyz", 3, seed=5)),
        "cold": str(write_emt(tmp_path / "b.extxyz", 4, seed=6)),
    }
    training = {"engine": "eager", "max_errors": True, "monitor": "val-cold/forces_mae"}

    def rows(name, val, **changes):
        config = tiny_config(tmp_path, name=name, data={"val": val, "eval_batch": 2}, training=training | changes)
        return train_only(config).metrics()

    together = rows("together", sets)
    for name, file in sets.items():
        for row, alone in zip(together, rows(name, file, monitor="val/loss"), strict=True):
            errors = {key.partition("/")[2]: value for key, value in alone.items() if key.startswith("val/")}
            del errors["loss"]
            assert {key: row[f"val-{name}/{key}"] for key in errors} == pytest.approx(errors, rel=1e-12)
    last = together[-1]
    assert last["val/forces_max"] == max(last["val-hot/forces_max"], last["val-cold/forces_max"])
    mean = (3 * last["val-hot/energy_mae"] + 4 * last["val-cold/energy_mae"]) / 7
    assert last["val/energy_mae"] == pytest.approx(mean, rel=1e-12)


@pytest.mark.parametrize(
    ("val", "message"),
    [
        ({"a/b": "x.xyz"}, "cannot be the name of a validation set"),
        ({"a": 0.1}, "a file, folder, pattern"),
        ({"path": "a.xyz", "b": "b.xyz"}, "data.val"),
        ({}, "data.val"),
    ],
)
def test_sets_without_a_meaning_are_refused(tmp_path, val, message):
    with pytest.raises(ForgefieldError, match=message):
        load_config(tiny_config(tmp_path, data={"val": val}))
