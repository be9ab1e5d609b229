"""The convolution by compiled C code equals the reference operations in values and all derivatives, for any plan and graph."""

import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch
import torch.autograd.forward_ad as forward_ad

from forgefield.kernels.convolution.dispatch import EdgeHarmonics
from forgefield.kernels.convolution.form import key_of_plan
from forgefield.kernels.cpu import compiler
from forgefield.kernels.cpu.convolution import CConvolution, convolve_by_c, use_c
from forgefield.ops.execution import execution
from forgefield.ops.graph import EdgeGraph, GradientSwitch
from tests.support.convolutions import PLANS, by_reference, make_graph, make_inputs, make_plan


@pytest.fixture(params=PLANS, ids=list(PLANS))
def plan(request):
    return make_plan(request.param)


@pytest.fixture(params=[False, True], ids=["edges", "pairs"])
def graph(request):
    return make_graph(in_pairs=request.param)


def by_c(x, y, w, graph, plan, switch=None):
    couplings = y.detach() @ plan.coupling_matrix().to(y)
    return convolve_by_c(x, y, couplings, w, graph, plan, switch)


def force_loss_gradients(function, x, y, w, graph, plan):
    """Values, first derivatives, and derivatives of a function of these, as in a loss of forces."""
    inputs = [value.clone().requires_grad_() for value in (x, y, w)]
    out = function(*inputs, graph, plan)
    first = torch.autograd.grad(out.sin().sum(), inputs, create_graph=True)
    loss = sum(value.square().sum() for value in first) + out.cos().sum()
    return [out, *first, *torch.autograd.grad(loss, inputs)]


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 2e-5)], ids=str)
def test_values_first_and_second_derivatives_equal_the_reference(plan, graph, dtype, tolerance):
    inputs = make_inputs(plan, graph)
    expected = force_loss_gradients(by_reference, *inputs, graph, plan)
    results = force_loss_gradients(by_c, *(value.to(dtype) for value in inputs), graph, plan)
    for value, reference in zip(results, expected):
        assert value.dtype is dtype
        difference = (value.detach().double() - reference.detach()).norm()
        assert difference <= tolerance * max(float(reference.detach().norm()), 1.0)


def test_tangents_and_their_gradients_equal_the_reference(plan, graph):
    inputs = make_inputs(plan, graph)
    gen = torch.Generator().manual_seed(2)
    directions = [torch.randn(value.shape, generator=gen, dtype=value.dtype) for value in inputs]
    directions[1][:, 0] = 0.0

    def tangents(function):
        values = [value.clone().requires_grad_() for value in inputs]
        along = [value.clone().requires_grad_() for value in directions]
        with forward_ad.dual_level():
            duals = [forward_ad.make_dual(value, direction) for value, direction in zip(values, along)]
            tangent = forward_ad.unpack_dual(function(*duals, graph, plan)).tangent
        return [tangent, *torch.autograd.grad(tangent.square().sum(), [*values, *along])]

    for value, reference in zip(tangents(by_c), tangents(by_reference)):
        torch.testing.assert_close(value, reference, rtol=1e-11, atol=1e-11)


def test_harmonics_get_no_gradient_once_the_switch_is_off(plan, graph):
    x, y, w = (value.requires_grad_() for value in make_inputs(plan, graph))
    switch = GradientSwitch()
    out = by_c(x, y, w, graph, plan, switch)
    switch.off = True
    to_x, to_y, to_w = torch.autograd.grad(out.sum(), (x, y, w), allow_unused=True)
    assert to_y is None
    assert float(to_x.abs().sum()) > 0
    assert float(to_w.abs().sum()) > 0


def test_results_do_not_depend_on_the_number_of_threads(plan):
    graph = make_graph(in_pairs=True, n_atoms=40)
    inputs, before = make_inputs(plan, graph), torch.get_num_threads()
    results = []
    try:
        for threads in (1, 3):
            torch.set_num_threads(threads)
            results.append(force_loss_gradients(by_c, *inputs, graph, plan))
    finally:
        torch.set_num_threads(before)
    for one, three in zip(*results):
        assert torch.equal(one, three)


@pytest.mark.parametrize("n_edges", [0, 1])
def test_graphs_without_edges_and_with_one(plan, n_edges):
    graph = EdgeGraph(torch.zeros(n_edges, dtype=torch.int64), torch.zeros(n_edges, dtype=torch.int64), 2)
    inputs = make_inputs(plan, graph)
    for value, reference in zip(
        force_loss_gradients(by_c, *inputs, graph, plan), force_loss_gradients(by_reference, *inputs, graph, plan)
    ):
        torch.testing.assert_close(value, reference, rtol=1e-12, atol=1e-12)


def test_convolutions_use_it_unless_operators_are_excluded(plan, graph):
    x, y, w = make_inputs(plan, graph)
    assert use_c(x, plan)
    with execution(operators=False):
        assert not use_c(x, plan)
    convolution = EdgeHarmonics(y, graph, None)
    out = convolution.convolve(x, w, plan, plan.coupling_matrix(), key_of_plan(plan))
    assert torch.equal(out, by_c(x, y, w, graph, plan))
    with torch.utils._python_dispatch._disable_current_modes():
        torch.testing.assert_close(out, by_reference(x, y, w, graph, plan), rtol=1e-12, atol=1e-12)


def test_many_threads_may_compile_the_same_source(tmp_path, monkeypatch):
    monkeypatch.setenv("FORGEFIELD_CACHE", str(tmp_path))
    source = "int forgefield_number(void) { return 42; }\n"
    results = []
    threads = [threading.Thread(target=lambda: results.append(compiler.load_c.__wrapped__(source))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [library.forgefield_number() for library in results] == [42] * 4
    assert len(list((tmp_path / "c").glob("*.so"))) == 1
    assert [path for path in (tmp_path / "c").iterdir() if path.suffix != ".so"] == []


def test_a_source_that_does_not_compile_names_the_compiler(tmp_path, monkeypatch):
    monkeypatch.setenv("FORGEFIELD_CACHE", str(tmp_path))
    with pytest.raises(compiler.CompilerUnavailable, match="failed: .*error"):
        compiler.load_c.__wrapped__("this is not C\n")


def test_without_a_compiler_pytorch_computes_the_same_and_this_is_logged(tmp_path):
    script = (
        "import logging, torch; logging.basicConfig(level=logging.WARNING)\n"
        "from forgefield.kernels.convolution.dispatch import EdgeHarmonics\n"
        "from forgefield.kernels.convolution.form import key_of_plan\n"
        "from tests.support.convolutions import by_reference, make_graph, make_inputs, make_plan\n"
        "plan, graph = make_plan('vectors'), make_graph(in_pairs=True)\n"
        "x, y, w = make_inputs(plan, graph)\n"
        "for _ in range(2):\n"
        "    out = EdgeHarmonics(y, graph, None).convolve(x, w, plan, plan.coupling_matrix(), key_of_plan(plan))\n"
        "assert torch.equal(out, by_reference(x, y, w, graph, plan))\n"
    )
    root = str(Path(__file__).parents[3])
    environment = {**os.environ, "PATH": str(tmp_path), "CC": "", "PYTHONPATH": root}
    done = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("no working C compiler: none of $CC, cc, gcc and clang was found") == 1


def test_code_is_compiled_once_for_a_plan(plan):
    assert CConvolution.of(plan, torch.float64) is CConvolution.of(plan, torch.float64)
