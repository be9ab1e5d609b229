"""Labels and units of single sources: the frames are those of sources that were converted before."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from forgefield.data.options import LabelOptions, UnitOptions
from forgefield.data.readers import read_frames
from forgefield.data.reading import read_table
from forgefield.data.store.convert import convert
from forgefield.data.store.store import open_store
from forgefield.errors import ForgefieldError
from forgefield.physics.units import label_energy_factor
from tests.support.lmdb_files import sample, write_lmdb

KCAL = label_energy_factor("kcal/mol")[0]
COLUMNS = "Properties=species:S:1:pos:R:3:f:R:3"


@pytest.fixture
def sources(tmp_path) -> list[object]:
    """The same frames in kcal/mol and under other names, per atom, and in eV; the gap has three names."""
    lines = [
        f"2\nE=-230.6 Eg=1.5 {COLUMNS}\nH 0 0 0 1 2 3\nO 0 0 1 -1 -2 -3\n",
        f"2\nE=-461.2 Eg=2.5 {COLUMNS}\nH 0 0 0 4 5 6\nO 0 0 1 -4 -5 -6\n",
    ]
    (tmp_path / "a.xyz").write_text("".join(lines))
    write_lmdb(tmp_path / "b.lmdb", {"0": sample(-2.0, band_gap=30.0)})
    (tmp_path / "c.xyz").write_text(
        f"2\nenergy=-7.0 gap=0.5 {COLUMNS.replace('f:R', 'forces:R')}\nH 0 0 0 7 8 9\nO 0 0 1 0 0 0\n"
    )
    first = {
        "path": str(tmp_path / "a.xyz"),
        "labels": {"energy": "E", "forces": "f", "fields": {"gap": {"key": "Eg"}}},
        "units": {"energy": "kcal/mol", "forces": "kcal/mol/A"},
    }
    second = {
        "path": str(tmp_path / "b.lmdb"),
        "weight": 2.0,
        "units": {"energy": "eV/atom"},
        "labels": {"fields": {"gap": {"key": "band_gap", "factor": 0.1}}},
    }
    return [first, second, str(tmp_path / "c.xyz")]


LABELS = LabelOptions(fields={"gap": {"unit": "eV"}})


def assert_converted(frames) -> None:
    energies = [-230.6 * KCAL, -461.2 * KCAL, -4.0, -7.0]
    np.testing.assert_allclose([frame.energy for frame in frames], energies, rtol=1e-12)
    np.testing.assert_allclose([frame.forces[0, 0] for frame in frames], [KCAL, 4 * KCAL, 0, 7], rtol=1e-12)
    np.testing.assert_allclose([frame.fields["gap"] for frame in frames], [1.5, 2.5, 3.0, 0.5], rtol=1e-12)
    assert [frame.weight for frame in frames] == [1, 1, 2, 1]


def test_each_source_has_its_own_names_and_units(sources):
    assert_converted(read_frames(sources, LABELS))
    assert_converted(read_table(sources, LABELS))


@pytest.mark.parametrize("workers", [1, 2])
def test_stores_are_written_with_them(sources, tmp_path, workers):
    convert(sources, tmp_path / "store", labels=LABELS, workers=workers)
    assert_converted(open_store(tmp_path / "store").table())
    assert_converted(read_table(sources, LABELS, lazy=True))
    with pytest.raises(ForgefieldError, match="store: labels and units of a store were settled"):
        read_frames({"path": str(tmp_path / "store"), "units": {"energy": "kcal/mol"}})


def test_settings_of_the_data_hold_where_a_source_has_none(sources):
    frames = read_frames(sources, LABELS, UnitOptions(energy="Ry"))
    assert frames[0].energy == pytest.approx(-230.6 * KCAL)
    assert frames[3].energy == pytest.approx(-7.0 * label_energy_factor("Ry")[0])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"labels": {"energy": "E_tot"}},
            r"labels.energy=E_tot: no frame of .* with labels.energy=E_tot, .* has that key; .*E, Eg",
        ),
        ({"labels": {"enrgy": "E"}}, "unknown key 'enrgy'. Did you mean 'energy'"),
        ({"units": {"energy": "kcal"}}, "kcal"),
        ({"units": {"energy": 1.0}}, "it must be text"),
        ({"units": []}, "they must be a mapping of energy, length, forces, stress"),
        ({"labels": {"fields": {"gap": {"shape": [3]}}}}, "only key, factor, species, values, cumulative may differ"),
        ({"labels": {"fields": {"charge": {"key": "q"}}}}, "data.labels.fields has no 'charge'"),
        ({"labels": {"fields": {"gap": {"key": "Egap"}}}}, "fields.gap: no frame of .* has the key 'Egap'"),
    ],
)
def test_wrong_settings_are_named(sources, change, message):
    with pytest.raises(ForgefieldError, match=message):
        read_frames([{**sources[0], **change}, sources[2]], LABELS)


def test_settings_of_nested_sources(sources):
    inner = {"path": sources[0]["path"], "weight": 3.0}
    frames = read_frames({**sources[0], "path": [inner]}, LABELS)
    assert [frame.weight for frame in frames] == [3, 3]
    assert frames[0].energy == pytest.approx(-230.6 * KCAL)
    with pytest.raises(ForgefieldError, match="given twice"):
        read_frames({**sources[0], "path": [{**inner, "units": {"energy": "eV"}}]}, LABELS)


def test_a_label_of_the_data_that_no_source_has(sources, tmp_path: Path):
    with pytest.raises(ForgefieldError, match="data.labels.stress=sigma: no frame"):
        read_frames(sources, LabelOptions(fields=LABELS.fields, stress="sigma"))
