"""Several workers of one search on this machine: processes that share its study, each with one GPU if there are GPUs."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Sequence

import torch

from forgefield.config.components import environment_of_children
from forgefield.processes import die_with_parent


def run_workers(words: Sequence[str], n: int) -> int:
    """Run `forgefield tune WORDS --worker i` for i below n and return the first exit code that is not 0. Stop signals are
    passed on to the workers."""
    gpus = _gpus()
    children = []
    for number in range(n):
        environ = {**os.environ, **environment_of_children()}
        if gpus:
            environ["CUDA_VISIBLE_DEVICES"] = gpus[number % len(gpus)]
        command = [sys.executable, "-m", "forgefield", "tune", *words, "--worker", str(number)]
        children.append(subprocess.Popen(command, env=environ, preexec_fn=die_with_parent()))

    def forward_signal(number: int, frame: object) -> None:
        for child in children:
            if child.poll() is None:
                child.send_signal(number)

    before = {number: signal.signal(number, forward_signal) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        codes = [child.wait() for child in children]
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    return next((code for code in codes if code != 0), 0)


def _gpus() -> list[str]:
    """The GPUs that this process can use, as named in CUDA_VISIBLE_DEVICES."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible:
        return visible.split(",")
    return [str(number) for number in range(torch.cuda.device_count())]
