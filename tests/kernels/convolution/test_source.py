"""The code of kernels as text, for which neither Triton nor a GPU is needed: the documentation shows what is written."""

import re
from pathlib import Path

import pytest

from forgefield.kernels.convolution.form import ARGUMENTS, Kind, form_of
from forgefield.kernels.convolution.source import write_kernel
from forgefield.kernels.core.generation import ArgumentTable
from forgefield.ops.convolution_plan import Block, plan_convolution

PAGE = Path(__file__).parents[3] / "docs" / "explanations" / "kernel-code.md"


def test_documented_kernel_is_the_generated_one():
    plan = plan_convolution((Block(4, 1, -1),), l_max=1, out=frozenset({(0, 1)}))
    source = write_kernel(form_of(plan, targets=((0,),), extra=(0,)), Kind())
    (shown,) = [block for block in PAGE.read_text().split("```") if "def block_0" in block]
    assert shown.removeprefix("text\n") in source


@pytest.mark.parametrize(
    "kind",
    [
        Kind(),
        Kind(dual=True),
        Kind(backward=True),
        Kind(dual=True, backward=True),
        Kind(dual=True, table=True, packed=True, still=True),
        Kind(backward=True, table=True, features=False),
        Kind(dual=True, backward=True, table=True, packed=True, shares=2),
    ],
)
def test_a_kernel_uses_exactly_the_arguments_that_its_kind_names(kind):
    """The launcher requires those, and would pass any tensor for the others."""
    plan = plan_convolution((Block(4, 1, -1),), l_max=1, out=frozenset({(0, 1), (1, -1)}))
    paths = range(len(plan.paths))
    source = write_kernel(form_of(plan, tuple((path,) for path in paths), tuple(0 for _ in paths)), kind)
    body = source[source.index("\n", source.index("def block_0")) : source.index("@triton.jit(do_not")]
    numbers = {"n_atoms", "n_edges"}
    used = {name for name in ARGUMENTS if re.search(rf"\b{name}\b", body)} - numbers
    assert used == set(kind.arguments) - numbers


def test_a_wrong_name_or_a_missing_argument_is_named():
    table = ArgumentTable(x="features", out="result", n_atoms="number of atoms")
    with pytest.raises(TypeError, match=r"double\(\) has no argument 'y'; its arguments are x, out, n_atoms"):
        table.bind("double", {"x": 1, "y": 2})
    with pytest.raises(TypeError, match=r"double\(\) needs the argument 'out'"):
        table.bind("double", {"x": 1, "n_atoms": 3})
    assert table.bind("double", {"x": 1}, unused=0, used=("x",)) == {"x": 1, "out": 0, "n_atoms": 0}
