"""The nearest valid word, as error messages give it."""

import pytest

from forgefield.config.nearest import did_you_mean, nearest


@pytest.mark.parametrize(
    ("word", "expected"),
    [("lrr", "lr"), ("max_epoch", "max_epochs"), ("CUTOFF", "cutoff"), ("max-epochs", "max_epochs"), ("zzzzz", None)],
)
def test_nearest_ignores_case_and_dashes_and_gives_nothing_for_a_stranger(word, expected):
    assert nearest(word, ["lr", "max_epochs", "cutoff"]) == expected


def test_same_word_in_another_case_beats_a_similar_word():
    assert nearest("CU", ["Cf", "Cu", "Cr"]) == "Cu"


def test_hint_is_a_sentence_with_its_space_or_nothing():
    assert did_you_mean("cutof", ["cutoff", "seed"]) == " Did you mean 'cutoff'?"
    assert did_you_mean("zzzzz", ["cutoff"]) == ""
    assert did_you_mean("x", []) == ""
