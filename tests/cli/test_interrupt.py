"""Ctrl-C while the program starts: exit code 130 and one word, whatever was being imported."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

SENDER = """
import os, signal, sys

class Interrupting:
    '''Sends SIGINT to this process when a module is looked for the n-th time.'''
    def __init__(self, n):
        self.left = n
    def find_spec(self, name, path=None, target=None):
        if name.startswith(("forgefield.", "numpy", "torch", "lightning", "omegaconf", "ase")):
            self.left -= 1
            if self.left == 0:
                os.kill(os.getpid(), signal.SIGINT)

sys.meta_path.insert(0, Interrupting(int(os.environ["INTERRUPT_AT"])))
"""


@pytest.mark.parametrize("module", [4, 6, 60, 150, 400])
def test_an_interrupt_during_imports_ends_the_program_quietly(tmp_path, module):
    """4 and 6 are imports of the command line itself; 60 and later are in the middle of numpy, torch and ASE."""
    (tmp_path / "sitecustomize.py").write_text(SENDER)
    path = os.pathsep.join([str(tmp_path), str(Path(__file__).parents[2])])
    command = [sys.executable, "-m", "forgefield", "data", "info", "missing.extxyz"]
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        timeout=120,
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": path, "INTERRUPT_AT": str(module)},
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )
    assert done.returncode == 130, done.stderr
    assert done.stderr == "interrupted\n"
