"""On a GPU: the convolution as operators, launched one by one, compiled, packaged and captured, against plain operations."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from forgefield.bench.training import CUTOFF, water
from forgefield.data.frame import Frame
from forgefield.inference.ase import Calculator
from forgefield.kernels.convolution import dispatch
from forgefield.kernels.core.runtime import has_triton
from forgefield.models import Potential, build_model, resolve_model
from forgefield.ops.execution import execution
from forgefield.training.engines.compiled import CompiledFunction
from forgefield.training.engines.tracing import export_evaluation, trace
from tests.support.structures import SPECIES, STATISTICS, make_batch, make_frame, make_potential

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available() or not has_triton(), reason="needs a CUDA device and Triton"
)
Batch = dict[str, Tensor]
MODEL = {"l_max": 2, "num_layers": 3, "num_features": [8, 4, 4], "parity": False}
READ = ("positions", "species", "frame", "n_atoms", "cell", "edge_index", "edge_shift", "edge_reverse")
"""What an evaluation reads of a batch."""


def on_gpu(batch: Batch) -> Batch:
    return {key: batch[key].cuda() for key in READ}


def small_batches() -> list[Batch]:
    """As large as compiled code asks for."""
    sizes = ([6] * 11, [5, 7] * 7)
    return [on_gpu(make_batch(*(make_frame(n, seed=i) for i, n in enumerate(several)))) for several in sizes]


def evaluation_of(potential: Potential):
    potential.eval().requires_grad_(False)

    def evaluate(static: list[Tensor], batch: Batch) -> list[Tensor]:
        out = potential(batch)
        return [out["energy"], out["forces"]]

    return evaluate


def plain(evaluate, batch: Batch) -> list[Tensor]:
    with execution(operators=False):
        return evaluate([], batch)


def assert_close(found: list[Tensor], expected: list[Tensor], tolerance: float) -> None:
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=tolerance * float(other.abs().max()))


@pytest.mark.parametrize(("precision", "tolerance"), [("float64", 1e-12), ("float32", 3e-6)])
def test_evaluations_are_those_of_plain_operations(precision, tolerance):
    evaluate = evaluation_of(make_potential(precision=precision, **MODEL).cuda())
    for batch in small_batches():
        with execution(operators=True):
            ours, again = evaluate([], batch), evaluate([], batch)
        assert_close(ours, plain(evaluate, batch), tolerance)
        assert all(torch.equal(one, other) for one, other in zip(ours, again))


def test_gradients_of_a_loss_of_forces_are_those_of_plain_operations():
    potential, batch = make_potential(precision="float64", **MODEL).cuda().train(), small_batches()[0]

    def gradients() -> list[Tensor]:
        out = potential(batch)
        loss = out["forces"].square().sum() + out["energy"].square().sum()
        found = torch.autograd.grad(loss, list(potential.parameters()), allow_unused=True)
        return [gradient for gradient in found if gradient is not None]

    with execution(operators=True):
        ours = gradients()
    with execution(operators=False):
        expected = gradients()
    for one, other in zip(ours, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-9 * float(other.abs().max()) + 1e-14)


def test_calculators_use_operators_unless_they_are_switched_off(monkeypatch):
    asked: list[bool] = []
    decide = dispatch.use_operators
    monkeypatch.setattr(dispatch, "use_operators", lambda x: asked.append(decide(x)) or asked[-1])
    atoms = water(np.random.default_rng(3), along_edge=2)
    atoms.calc = Calculator(make_potential(precision="float64", **MODEL), device="cuda", engine=False)
    ours = atoms.get_forces()
    assert asked
    assert all(asked)
    with execution(operators=False):
        atoms.calc.reset()
        np.testing.assert_allclose(ours, atoms.get_forces(), rtol=0, atol=1e-11)
    assert not asked[-1]


# ---- compilers


def test_a_compiled_graph_looks_inside_and_holds_for_any_sizes():
    """By torch.compile, and as the compile engine does it. Code is made once."""
    evaluate = evaluation_of(make_potential(precision="float64", **MODEL).cuda())
    first, second = small_batches()
    with execution(operators=True):
        traced = trace(evaluate, [], first)
        engine = CompiledFunction(evaluate, {})
        found = [engine([], batch) for batch in (first, second)]
    assert sum("forgefield.convolve" in str(node.target) for node in traced.graph.graph.nodes) == 6
    compiled = torch.compile(traced.graph, fullgraph=True, dynamic=True)
    for batch, by_engine in zip((first, second), found):
        assert_close(list(compiled(*(batch[key] for key in traced.keys))), plain(evaluate, batch), 1e-12)
        assert_close(by_engine, plain(evaluate, batch), 1e-12)
    assert engine.compilations == 1


def test_compiled_code_launches_the_generated_kernels():
    from torch._inductor.utils import run_and_get_code

    evaluate = evaluation_of(make_potential(precision="float32", **MODEL).cuda())
    batch = small_batches()[0]
    with execution(operators=True):
        traced = trace(evaluate, [], batch)
    compiled = torch.compile(traced.graph, fullgraph=True, dynamic=True)
    with torch._inductor.config.patch(force_disable_caches=True):
        _, (code, *_) = run_and_get_code(compiled, *(batch[key] for key in traced.keys))
    assert "def convolution_backward" in code
    assert "forgefield.convolve" not in code.split("def call(")[1]


@pytest.mark.skipif(
    torch.__version__.startswith("2.11"), reason="torch 2.11 makes the package and crashes when it loads it"
)
def test_a_package_of_aotinductor_gives_the_same(tmp_path):
    evaluate = evaluation_of(make_potential(precision="float64", **MODEL).cuda())
    first, second = small_batches()
    with execution(operators=True):
        exported = export_evaluation(lambda batch: evaluate([], batch), first)
    assert sum("forgefield.convolve" in str(node.target) for node in exported.graph.nodes) == 6
    path = torch._inductor.aoti_compile_and_package(exported, package_path=str(tmp_path / "evaluation.pt2"))
    package = torch._inductor.aoti_load_package(path)
    for batch in (first, second):
        assert_close(list(package(**batch)), plain(evaluate, batch), 1e-12)


def test_evaluations_can_be_captured():
    evaluate = evaluation_of(make_potential(precision="float64", **MODEL).cuda())
    batch = small_batches()[0]
    with execution(operators=True):
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(2):
                evaluate([], batch)
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured = evaluate([], batch)
    batch["positions"].mul_(1.001)
    graph.replay()
    torch.cuda.synchronize()
    assert_close(captured, plain(evaluate, batch), 1e-12)


# ---- time


def water_batch(frames: int) -> Batch:
    rng = np.random.default_rng(7)
    boxes = [water(rng) for _ in range(frames)]
    made = [
        Frame(positions=box.positions, numbers=box.numbers, cell=np.array(box.cell), pbc=np.array(box.pbc))
        for box in boxes
    ]
    return on_gpu(make_batch(*made, cutoff=CUTOFF))


def milliseconds(function, *given) -> float:
    for _ in range(3):
        function(*given)
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    for _ in range(10):
        function(*given)
    end.record()
    torch.cuda.synchronize()
    return begin.elapsed_time(end) / 10


def report(text: str, capsys) -> None:
    """Prints, and appends to the file that FORGEFIELD_TIMES names, since tests in several processes print nothing."""
    with capsys.disabled():
        print(f"\n{text}")
    if path := os.environ.get("FORGEFIELD_TIMES"):
        with Path(path).open("a") as file:
            file.write(f"{text}\n")


@pytest.mark.parametrize("frames", [1, 32])
def test_time_of_an_evaluation(frames, capsys):
    """Energy and forces of preset M; what is measured is printed and kept."""
    chosen = {"name": "nequip", "preset": "M"}
    resolved = resolve_model(chosen, species=SPECIES, cutoff=CUTOFF, statistics=STATISTICS)
    evaluate = evaluation_of(build_model(resolved, precision="float32", seed=0).cuda())
    batch, taken, results = water_batch(frames), {}, {}
    for name, by_operators in (("plain operations", False), ("operators", True)):
        with execution(operators=by_operators):
            compiled = CompiledFunction(evaluate, {})
            results[name] = compiled([], batch)
            taken[f"{name}, eager"] = milliseconds(evaluate, [], batch)
            taken[f"{name}, compiled"] = milliseconds(compiled, [], batch)
    assert_close(results["operators"], results["plain operations"], 1e-5)
    edges = batch["edge_index"].shape[1]
    lines = [f"energy and forces of M, {frames} x 192 atoms, {edges} edges, {torch.cuda.get_device_name()}:"]
    lines += [f"  {name:30s} {spent:8.2f} ms" for name, spent in taken.items()]
    report("\n".join(lines), capsys)
