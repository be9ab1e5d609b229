"""What lies around a captured step, by our kernels and by torch: the update after the gradient, the loading of a batch.

    python benchmarks/update.py [--models S M] [--batches small 8]

Device time of one update, many of them in one CUDA graph, with and without an average of the weights and clipping by norm, and
how far weights and averages are from torch in float64 after 20 steps, in units of the largest number of each tensor. Then the
device and host time of loading a batch into the tensors of a captured step. Models and batches are those of
`benchmarks/engines.py`. Needs an NVIDIA GPU.
"""

from __future__ import annotations

import argparse
import copy
import time
from collections.abc import Callable
from contextlib import nullcontext
from unittest import mock

import torch
from engines import BATCHES, MODELS, batch_of, trained
from torch import Tensor, nn

from forgefield.data.padding import blank_frames, sizes
from forgefield.training.engines.graphs import StaticInputs
from forgefield.training.optim import captured_update
from forgefield.training.optim.averages import WeightAverage
from forgefield.training.optim.captured_optimiser import CapturedOptimiser

STEPS, MANY, CLIP = 20, 40, 1.0
"""Compared; captured in one graph; largest norm of a gradient."""


class Case:
    """A copy of a model's weights with an optimiser and gradients drawn by number, which lie still."""

    def __init__(self, potential: nn.Module, averaged: bool, clip: float | None, dtype: torch.dtype) -> None:
        net = copy.deepcopy(potential).to(dtype)
        self.weights = [weight for weight in net.parameters() if weight.requires_grad]
        self.gradients = [torch.zeros_like(weight) for weight in self.weights]
        self.optimiser = torch.optim.AdamW(self.weights, lr=1e-3, weight_decay=0.01)
        self.average = WeightAverage(net, 0.99) if averaged else None
        self.clip = clip

    def bring(self, step: int) -> None:
        device = self.weights[0].device
        chance = torch.Generator(device).manual_seed(step)
        for number, (weight, place) in enumerate(zip(self.weights, self.gradients)):
            drawn = torch.randn(weight.shape, generator=chance, device=device)
            weight.grad = place.copy_(drawn * 10.0 ** (number % 4 - 3))

    def by_torch(self) -> list[Tensor]:
        """Weights and averages after some steps, as an eager training makes them."""
        for step in range(STEPS):
            self.bring(step)
            if self.clip is not None:
                nn.utils.clip_grad_norm_(self.weights, self.clip)
            self.optimiser.step()
            if self.average is not None:
                self.average.update()
        return self.results()

    def captured(self, kernel: bool) -> CapturedOptimiser:
        """The same by a captured update. kernel: ours, or torch's fused ones."""
        with nullcontext() if kernel else mock.patch.object(captured_update, "adam_step", return_value=None):
            update = CapturedOptimiser(self.optimiser, self.average)
            update.clip = (self.clip, "norm")
            for step in range(STEPS):
                self.bring(step)
                update.step()
        return update

    def results(self) -> list[Tensor]:
        averages = [] if self.average is None else list(self.average.average.values())
        return [weight.detach() for weight in self.weights] + averages


def microseconds(action: Callable[[], object]) -> float:
    """Device time of one of many actions in a graph."""
    action()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        for _ in range(MANY):
            action()
    graph.replay()
    return min(_elapsed(graph.replay) for _ in range(10)) / MANY


def _elapsed(action: Callable[[], object]) -> float:
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    action()
    end.record()
    torch.cuda.synchronize()
    return 1000 * begin.elapsed_time(end)


def host_microseconds(action: Callable[[], object], repeats: int = 50) -> float:
    start = time.perf_counter()
    for _ in range(repeats):
        action()
    taken = time.perf_counter() - start
    torch.cuda.synchronize()
    return 1e6 * taken / repeats


def show_updates(name: str, potential: nn.Module) -> None:
    for averaged in (False, True):
        for clip in (None, CLIP):
            expected = Case(potential, averaged, clip, torch.float64).by_torch()
            words = f"{name} update{', average' if averaged else ''}{', clipped' if clip else ''}"
            for kernel in (True, False):
                case = Case(potential, averaged, clip, torch.float32)
                update = case.captured(kernel)
                found = zip(case.results(), expected)
                differs = max(float((a.double() - b).abs().max() / b.abs().max().clamp(min=1e-30)) for a, b in found)
                (step,) = update.steps.kernels.values()
                taken = microseconds(update.update.launch if step is None else step.launch)
                host = host_microseconds(update.step)
                way = "kernel" if kernel else "torch"
                print(f"{words:28} {way:7} {taken:7.2f} us, host {host:6.1f} us, differs {differs:.1e}", flush=True)


def show_loading(name: str, device: torch.device) -> None:
    batch = batch_of(name, device)
    frames, atoms, edges = sizes(batch)
    blank = blank_frames(batch, frames=frames + 1, atoms=atoms + 2, edges=edges + 64, cutoff=BATCHES[name][2])
    for kernel in (True, False):
        loader = StaticInputs(blank, None)
        if not kernel:
            loader._copies = None

        def load(loader: StaticInputs = loader) -> None:
            loader.load(batch, None)

        host = host_microseconds(load)
        taken = microseconds(loader.launch if kernel else load)
        way = "kernel" if kernel else "torch"
        print(f"load {name}, {edges} edges {way:7} {taken:7.2f} us, host {host:6.1f} us", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--models", nargs="+", choices=list(MODELS), default=["S", "M"])
    parser.add_argument("--batches", nargs="+", choices=list(BATCHES), default=["small", "8"])
    args = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("needs an NVIDIA GPU")
    device = torch.device("cuda")
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}")
    for name in args.models:
        show_updates(name, trained(name, 5.0, "float32", device).potential)
    for name in args.batches:
        show_loading(name, device)


if __name__ == "__main__":
    main()
