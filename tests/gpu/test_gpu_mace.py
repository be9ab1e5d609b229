"""On a GPU: training steps of MACE by generated kernels, captured ones included, against reference operations on a CPU."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from forgefield.data.padding import plan_sizes, sizes
from forgefield.kernels.core.runtime import has_triton
from forgefield.models.mace import kernels
from forgefield.training.engines.compiled import CompileEngine
from forgefield.training.engines.engine import Engine
from forgefield.training.engines.graphs import GraphsEngine
from forgefield.training.engines.step import Differentiated
from forgefield.training.engines.verify import largest_difference
from forgefield.training.precision import Precision
from tests.support.engine_cases import labelled, step_function
from tests.support.mace_kernel_cases import CASES, mace

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available() or not has_triton(), reason="needs a CUDA device and Triton"
)
WIDE = {"hidden_irreps": "128x0e + 128x1o", "max_ell": 3, "correlation": 3, "radial_mlp": [64, 64, 64]}


def on_gpu(batch: dict[str, Tensor]) -> dict[str, Tensor]:
    return {key: value.cuda() for key, value in batch.items()}


def on_cpu(result: Differentiated) -> Differentiated:
    measured = type(result.measured)(*(tensor.cpu() for tensor in result.measured))
    gradients = [None if gradient is None else gradient.cpu() for gradient in result.gradients]
    return Differentiated(gradients, result.loss.cpu(), measured)


def difference_from_cpu(engine: Engine, reference: Engine, batch: dict[str, Tensor]) -> float:
    found = on_cpu(engine.differentiate(on_gpu(batch)))
    return largest_difference(found, reference.differentiate(batch), reference.function.trained)[0]


def reference_on_cpu(**options: object) -> Engine:
    return Engine(step_function(mace("float64", **options), c_code=0))


def captured(engine: Engine, batch: dict[str, Tensor]) -> GraphsEngine:
    return GraphsEngine(engine, plan=plan_sizes(np.array([sizes(batch)])))


@pytest.mark.parametrize("case", CASES)
def test_captured_steps_by_kernels_are_those_of_a_cpu(case):
    batch, reference = labelled(6, 5, 9), reference_on_cpu(**CASES[case])
    inner = Engine(step_function(mace("float64", **CASES[case]).cuda(), derivative="kernels"))
    assert difference_from_cpu(captured(inner, batch), reference, batch) < 1e-9


@pytest.mark.parametrize("correlation", [1, 2, 3])
def test_captured_steps_in_float32_with_tables(correlation):
    options = {**WIDE, "correlation": correlation}
    batch, reference = labelled(12, 7), reference_on_cpu(**options)
    single = mace("float32", **options).cuda()
    inner = Engine(step_function(single, derivative="kernels"))
    by_kernels = difference_from_cpu(captured(inner, batch), reference, batch)
    plain = difference_from_cpu(Engine(step_function(single)), reference, batch)
    assert by_kernels < 3 * plain + 1e-5


def test_compiled_steps_are_those_of_a_cpu():
    options = {"radial_mlp": [6], "hidden_irreps": "4x0e", "num_interactions": 1}
    batch, reference = labelled(*(6,) * 11), reference_on_cpu(**options)
    engine = CompileEngine(step_function(mace("float64", **options).cuda()))
    assert difference_from_cpu(engine, reference, batch) < 1e-9
    assert difference_from_cpu(captured(engine, batch), reference, batch) < 1e-9


def test_the_same_bits_on_repetition_and_nothing_is_compiled_for_other_sizes(monkeypatch):
    import triton

    engine = Engine(step_function(mace("float32", correlation=3).cuda(), derivative="kernels"))
    compiled: list[object] = []
    monkeypatch.setattr(triton.knobs.compilation, "listener", lambda **about: compiled.append(about["src"]))
    batch = on_gpu(labelled(5, 3))
    first = engine.differentiate(batch)
    made = len(compiled)
    for several in ((4, 6, 2), (7,), (16,), (3, 3, 3, 3)):
        engine.differentiate(on_gpu(labelled(*several)))
    again = engine.differentiate(batch)
    assert len(compiled) == made > 0
    for one, other in zip(first.gradients, again.gradients, strict=True):
        assert (one is None and other is None) or torch.equal(one, other)


def test_nothing_is_left_to_compile_after_compiling_together(monkeypatch):
    import triton

    compiled: list[object] = []
    together = kernels.compile_layers

    def then_listen(*arguments: object) -> None:
        together(*arguments)
        monkeypatch.setattr(triton.knobs.compilation, "listener", lambda **about: compiled.append(about["src"].name))

    monkeypatch.setattr(kernels, "compile_layers", then_listen)
    Engine(step_function(mace("float32", correlation=3).cuda(), derivative="kernels")).differentiate(
        on_gpu(labelled(5, 3))
    )
    assert not [name for name in compiled if name.startswith(("convolution", "contraction"))]


def test_a_step_in_tf32():
    options = {**WIDE, "correlation": 2}
    batch, reference = labelled(12, 7), reference_on_cpu(**options)
    with Precision("tf32").applied("tf32"):
        engine = Engine(step_function(mace("float32", **options).cuda(), derivative="kernels"))
        assert difference_from_cpu(engine, reference, batch) < 1e-2
