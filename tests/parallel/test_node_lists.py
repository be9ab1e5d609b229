"""SLURM's short form of lists of nodes is expanded as SLURM does it."""

from __future__ import annotations

import subprocess

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from forgefield.errors import ForgefieldError
from forgefield.parallel.launch import expand_node_list

WORD = st.from_regex("[a-z][a-z0-9-]{0,3}[a-z-]", fullmatch=True)


@st.composite
def ranges_and_numbers(draw) -> tuple[str, list[str]]:
    """The inside of a pair of brackets, and the numbers it stands for."""
    texts, numbers = [], []
    for _ in range(draw(st.integers(1, 3))):
        first, length = draw(st.integers(0, 1200)), draw(st.integers(1, 4))
        width = draw(st.integers(1, 5))
        padded = [str(first + i).zfill(max(width, len(str(first)))) for i in range(length)]
        texts.append(padded[0] if length == 1 else f"{padded[0]}-{padded[-1]}")
        numbers += padded
    return ",".join(texts), numbers


@st.composite
def node_lists(draw) -> tuple[str, list[str]]:
    texts, names = [], []
    for _ in range(draw(st.integers(1, 3))):
        text = draw(WORD)
        expanded = [text]
        for i in range(draw(st.integers(0, 2))):
            middle = draw(WORD) if i else ""
            inside, numbers = draw(ranges_and_numbers())
            text += f"{middle}[{inside}]"
            expanded = [name + middle + number for name in expanded for number in numbers]
        texts.append(text)
        names += expanded
    return ",".join(texts), names


@settings(deadline=None)
@given(node_lists())
def test_a_node_list_is_expanded_to_the_names_it_was_made_from(pair: tuple[str, list[str]]) -> None:
    assert expand_node_list(pair[0]) == pair[1]


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(pair=node_lists())
def test_a_node_list_is_expanded_as_by_scontrol(slurm, pair: tuple[str, list[str]]) -> None:
    done = subprocess.run(["scontrol", "show", "hostnames", pair[0]], capture_output=True, text=True, check=True)
    assert expand_node_list(pair[0]) == done.stdout.split()


def test_node_lists_of_the_manual() -> None:
    assert expand_node_list("gpu[003-005,9],login1") == ["gpu003", "gpu004", "gpu005", "gpu9", "login1"]
    assert expand_node_list("r[1-2]n[3-4]") == ["r1n3", "r1n4", "r2n3", "r2n4"]
    assert expand_node_list("n[9-11]") == ["n9", "n10", "n11"]
    assert expand_node_list("") == []


@pytest.mark.parametrize("text", ["n[1-3", "n1-3]", "n[3-1]", "n[a-b]", "n[]", "n[1,]"])
def test_a_broken_node_list_is_an_error_that_shows_it(text) -> None:
    with pytest.raises(ForgefieldError, match="node list"):
        expand_node_list(text)


# ------------------------------------------------------------------------------------- the launchers themselves
