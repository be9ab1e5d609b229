"""Whole-number arithmetic in configs."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from omegaconf import OmegaConf

from forgefield.config.hydra import int_div, int_mul, register_resolvers


@given(st.integers(-1000, 1000), st.integers(1, 50), st.integers(0, 49))
def test_division_rounds_down(quotient, divisor, remainder):
    assert int_div(quotient * divisor + remainder % divisor, divisor) == quotient


@given(st.integers(), st.integers())
def test_product_is_exact(a, b):
    assert int_mul(a, b) == a * b


@pytest.mark.parametrize("bad", [2.5, 2.0, True, None, "two", "2.0"])
def test_anything_but_whole_numbers_is_refused(bad):
    with pytest.raises(ValueError, match="takes whole numbers"):
        int_div(bad, 2)
    with pytest.raises(ValueError, match="takes whole numbers"):
        int_mul(2, bad)


def test_division_by_zero_is_a_clear_error():
    with pytest.raises(ValueError, match="cannot divide 3 by zero"):
        int_div(3, 0)


def test_registering_twice_is_harmless_and_text_from_the_environment_counts():
    register_resolvers()
    register_resolvers()
    config = OmegaConf.create({"a": "${int_div:'33',4}", "b": "${int_mul:${a},3}"})
    assert (config.a, config.b) == (8, 24)
