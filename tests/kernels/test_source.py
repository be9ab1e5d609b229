"""The code of kernels as text, for which neither Triton nor a GPU is needed: the documentation shows what is written."""

from pathlib import Path

from forgefield.kernels.convolution.form import form_of
from forgefield.kernels.convolution.source import Kind, write_kernel
from forgefield.ops.convolution_plan import Block, plan_convolution

PAGE = Path(__file__).parents[2] / "docs" / "kernels.md"


def test_documented_kernel_is_the_generated_one():
    plan = plan_convolution((Block(4, 1, -1),), l_max=1, out=frozenset({(0, 1)}))
    source = write_kernel(form_of(plan, targets=((0,),), extra=(0,)), Kind())
    (shown,) = [block for block in PAGE.read_text().split("```") if "def block_0" in block]
    assert shown.removeprefix("text\n") in source
