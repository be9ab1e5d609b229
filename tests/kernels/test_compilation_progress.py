"""What is compiled is counted and reported; kernels on disk are not. Triton compiles for a GPU without having one."""

from __future__ import annotations

import pytest

triton = pytest.importorskip("triton")

import triton.language as tl  # noqa: E402
from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.compiler import ASTSource  # noqa: E402
from triton.runtime.jit import JITFunction  # noqa: E402

from forgefield.kernels.core.compiling import compilation_reported  # noqa: E402
from forgefield.kernels.core.runtime import interpreted  # noqa: E402

pytestmark = pytest.mark.skipif(interpreted(), reason="the interpreter replaces the language that is compiled")


def copy_rows(x, y, n, block: tl.constexpr):
    i = tl.arange(0, block)
    tl.store(y + i, tl.load(x + i, mask=i < n), mask=i < n)


def compile_for_a_gpu(block: int) -> None:
    signature = {"x": "*fp32", "y": "*fp32", "n": "i32", "block": "constexpr"}
    source = ASTSource(JITFunction(copy_rows), signature, constexprs={"block": block})
    triton.compile(source, target=GPUTarget("cuda", 80, 32))


def test_compiled_kernels_are_counted_and_those_on_disk_are_not(tmp_path, monkeypatch):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    lines: list[str] = []
    with compilation_reported(lines.append, "Skip it so.", every=0.0):
        compile_for_a_gpu(32)
        compile_for_a_gpu(32)
        compile_for_a_gpu(64)
    first, second, last = lines
    assert first.startswith("Compiling kernels for this GPU: 1 in ")
    assert first.endswith("the latest is copy_rows. Later starts load them from disk. Skip it so.")
    assert second.startswith("Compiling kernels for this GPU: 2 in ")
    assert second.endswith("the latest is copy_rows.")
    assert last.startswith("Compiled 2 kernels in ")
    lines.clear()
    compile_for_a_gpu(128)  # outside
    with compilation_reported(lines.append, every=3600.0):
        compile_for_a_gpu(256)
    assert lines == []  # too short to be reported
