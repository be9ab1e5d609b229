"""Fields in a config: every way to write one, and a sentence with the place for every way to write it wrong."""

import pytest

from forgefield.data.batch import SHAPES
from forgefield.data.field_options import FIELDS, RESERVED, FieldOptions, field_options
from forgefield.data.store.columns import EDGE_FIELDS
from forgefield.data.store.columns import FIELDS as COLUMNS
from forgefield.errors import ForgefieldError


def test_a_field_is_a_word_a_mapping_or_nothing_but_its_name(load):
    config = load(
        """
        data:
          train: a.xyz
          labels:
            energy: my_energy
            fields:
              band_gap:
              charge: atom
              fparam: {shape: [2]}
              dipole: {key: atomic_dipole, per: atom, shape: [3], species: [O], factor: 0.5, unit: e*A}
        """,
        "++data.labels.fields.fparam.key=T_e",
    )
    assert field_options(config.data.labels.fields) == {
        "band_gap": FieldOptions(),
        "charge": FieldOptions(per="atom"),
        "fparam": FieldOptions(shape=[2], key="T_e"),
        "dipole": FieldOptions("atomic_dipole", "atom", [3], ["O"], 0.5, "e*A"),
    }
    assert load("data: {train: a.xyz}").data.labels.fields is None
    assert field_options(None) == field_options({}) == {}


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        (
            "7",
            "my.yaml, line 1: 'data.labels.fields' must be a mapping such as {band_gap: {key: gap}, charge: atom}, not 7.",
        ),
        ("{gap: atoms}", "'data.labels.fields.gap' must be frame or atom, not 'atoms'. Did you mean 'atom'?"),
        ("{gap: [3]}", "'data.labels.fields.gap' must be frame, atom, or a mapping with the keys key, per, shape"),
        ("{gap: {per: cell}}", "'data.labels.fields.gap.per' must be frame or atom, not 'cell'."),
        ("{gap: {shapes: [3]}}", "unknown key 'data.labels.fields.gap.shapes'. Did you mean 'shape'?"),
        ("{gap: {shape: 3}}", "'data.labels.fields.gap.shape' must be a list of sizes, such as [] or [3], not 3."),
        ("{gap: {shape: [0]}}", "'data.labels.fields.gap.shape' must be a list of sizes, such as [] or [3], not [0]."),
        ("{gap: {factor: 0}}", "'data.labels.fields.gap.factor' must be a number other than zero, not 0."),
        ("{gap: {factor: much}}", "'data.labels.fields.gap.factor' must be a number other than zero, not 'much'."),
        ("{gap: {key: 3}}", "'data.labels.fields.gap.key' must be the name of the value in the source, not 3."),
        ("{gap: {species: [H]}}", "'data.labels.fields.gap.species' is for values of atoms; this one is per frame."),
        (
            "{gap: {per: atom, species: []}}",
            "'data.labels.fields.gap.species' must be a list of chemical symbols, not [].",
        ),
        ("{energy: {}}", "'energy' is a label of its own, named by data.labels.energy; call the field something else."),
        ("{Virial: {}}", "'Virial' is a label of its own, named by data.labels.virial"),
        ("{n_atoms: {}}", "the name 'n_atoms' is taken; call the field something else and give {key: n_atoms}."),
        ("{band gap: {}}", "the name of a field is made of letters, digits and underscores"),
        ("{../gap: {}}", "the name of a field is made of letters, digits and underscores"),
    ],
)
def test_an_error_in_a_field_names_its_location(refused, fields, sentence):
    message = refused(f"data: {{train: a.xyz, labels: {{fields: {fields}}}}}")
    assert message.startswith("my.yaml, line 1: ")
    assert sentence in message


def test_no_field_can_be_called_like_a_key_of_a_batch_or_a_column_of_a_store():
    assert {*SHAPES, *COLUMNS, *EDGE_FIELDS} <= RESERVED
    with pytest.raises(ForgefieldError, match=rf"^'{FIELDS}\.Edge_Index': the name 'Edge_Index' is taken"):
        field_options({"Edge_Index": {}})


@pytest.mark.parametrize(
    ("batch", "sentence"),
    [
        ("{atoms: 9, bound: most}", "'data.batch.bound' must be upper or lower, not 'most'."),
        ("{frames: 9, bound: lower}", "'data.batch.bound' is for batches counted in atoms or edges."),
        ("{bound: lower}", "'data.batch.bound' is for batches counted in atoms or edges."),
        (
            "{atoms: 9, bound: lower, oversized: skip}",
            "'data.batch.oversized' is for an upper bound; no frame is too large",
        ),
        (
            "{by_source: 3}",
            "'data.batch.by_source' must be true, false, or a list of numbers of frames, one for each source",
        ),
        ("{by_source: [3, 0]}", "'data.batch.by_source' must be a list of positive whole numbers, one for each source"),
        ("{frames: 4, by_source: [3, 4]}", "keep one of them (data.batch.by_source=true goes with frames)."),
    ],
)
def test_rules_of_batches_that_contradict_each_other_are_refused(refused, batch, sentence):
    assert sentence in refused(f"data: {{train: a.xyz, batch: {batch}}}")
