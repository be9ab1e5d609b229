"""A short run of `benchmarks/fuzz.py`: damaged files of every format, each read in a process that may die."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from forgefield.errors import ForgefieldError
from tests.support import fuzz_formats as formats
from tests.support import fuzz_server as server
from tests.support.fuzz_formats import FORMATS, Format

CASES = 40


@pytest.mark.parametrize("name", FORMATS)
def test_damaged_files_are_refused_or_read_as_they_are(name):
    results = list(server.run_cases(name, range(CASES), seed=2026))
    assert [result.case for result in results] == list(range(CASES))
    assert [f"{result.case}: {result.outcome}: {result.detail}" for result in results if result.failed] == []
    assert any(result.outcome == "refused" for result in results)


def _crash(folder: Path) -> None:
    if folder.name == "case-3":
        signal.raise_signal(signal.SIGSEGV)


def _hang(folder: Path) -> None:
    while folder.name == "case-3":
        pass


def _trace(folder: Path) -> None:
    if folder.name == "case-3":
        raise KeyError("x")
    if folder.name != "good":
        raise ForgefieldError("refused")


def _swallow(folder: Path) -> int:
    return len(bytearray(b"x") * (300 * 2**20 if folder.name == "case-3" else 1))


@pytest.mark.parametrize(
    ("look", "outcome"), [(_crash, "crash"), (_hang, "slow"), (_trace, "traceback"), (_swallow, "memory")]
)
def test_every_kind_of_failure_is_noticed_and_survived(monkeypatch, look, outcome):
    toy = Format("toy", lambda folder: (folder / "a").write_bytes(bytes(100)), look)
    monkeypatch.setitem(formats.FORMATS, "toy", toy)
    monkeypatch.setattr(server, "MEBIBYTES", 200)
    monkeypatch.setattr(server, "CPU_SECONDS", 0.3 if outcome == "slow" else 20.0)
    results = list(server.run_cases("toy", range(6), seed=0))
    assert [result.case for result in results] == list(range(6))
    assert [result.outcome for result in results if result.failed] == [outcome]
    assert results[3].failed
