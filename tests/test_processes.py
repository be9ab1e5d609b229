"""Processes and signals."""

from __future__ import annotations

import signal
import subprocess
import sys

import pytest

from forgefield.processes import interrupts_blocked

WORKER = "import sys; print('started', flush=True); sys.stdin.readline(); print('finished')"
"""A program that, like one that still imports, has no handler of signals yet."""


def start() -> subprocess.Popen[str]:
    worker = subprocess.Popen([sys.executable, "-c", WORKER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert worker.stdout is not None
    assert worker.stdout.readline() == "started\n"
    return worker


def test_processes_started_while_interrupts_are_blocked_never_receive_ctrl_c():
    with interrupts_blocked():
        worker = start()
    worker.send_signal(signal.SIGINT)
    out, _ = worker.communicate("\n", timeout=60)
    assert (worker.returncode, out) == (0, "finished\n")


def test_an_interrupt_inside_the_block_is_raised_after_it():
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    inside = False
    try:
        with pytest.raises(KeyboardInterrupt), interrupts_blocked():
            signal.raise_signal(signal.SIGINT)
            inside = True
    finally:
        signal.signal(signal.SIGINT, before)
    assert inside
