"""A convolution's plan as a line of text, so that an operator in an exported graph says by itself what it computes."""

from __future__ import annotations

import json
from functools import lru_cache

from torch.utils._python_dispatch import _disable_current_modes

from forgefield.errors import ForgefieldError
from forgefield.kernels.convolution import form, source
from forgefield.kernels.convolution.form import Form, form_of
from forgefield.kernels.core.modules import mark_of_code
from forgefield.ops.convolution_plan import Block, ConvolutionPlan, plan_convolution


def key_of_plan(plan: ConvolutionPlan) -> str:
    """JSON: blocks of features as [channels, l, parity], l_max of harmonics, kinds of the results as [l, parity].

    `code` is a mark of how kernels are written, so that compiled graphs are not taken for those of other code.
    """
    out = sorted({(path.l3, path.p3) for path in plan.paths})
    content = {"features": plan.in_blocks, "l_max": plan.l_max, "outputs": out, "code": mark_of_code(form, source)}
    return json.dumps(content, separators=(",", ":"))


@lru_cache(maxsize=256)
def plan_of_key(key: str) -> ConvolutionPlan:
    """The plan that a key was made of, in whichever process."""
    try:
        content = json.loads(key)
        blocks = tuple(Block(*block) for block in content["features"])
        with _disable_current_modes():  # its coefficients outlive a trace during which they may be asked for first
            return plan_convolution(blocks, content["l_max"], frozenset((l3, p) for l3, p in content["outputs"]))
    except (KeyError, TypeError, ValueError) as error:
        raise ForgefieldError(
            f"forgefield::convolve is given {key!r} as its form; it should be what key_of_plan makes of a plan."
        ) from error


@lru_cache(maxsize=256)
def form_of_key(key: str) -> Form:
    """The form whose features and outputs are the rows of the plain convolution: every path has a block of its own there."""
    plan = plan_of_key(key)
    paths = range(len(plan.paths))
    with _disable_current_modes():
        return form_of(plan, tuple((path,) for path in paths), tuple(0 for _ in paths), rows=True)
