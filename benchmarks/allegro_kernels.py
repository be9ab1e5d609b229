"""Allegro's kernels alone: microseconds and bytes of every pass, and the operators next to plain operations.

    python benchmarks/allegro_kernels.py [--atoms 6144] [--neighbours 54] [--channels 64] [--l-max 2]

First the passes, each many times in one CUDA graph, with the bytes that have to be read and written at least; then values,
values with cotangents, and these with their derivatives, by operators and by plain operations, launched one by one, in
milliseconds and with the memory they take. `shared`: one weight for all degrees. On a CPU with TRITON_INTERPRET=1 it goes
through every launch, for which `--atoms 3 --neighbours 2 --channels 4` is enough; times mean nothing there.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from engines import seconds_of
from kernels import microseconds
from torch import Tensor

from forgefield.kernels.edges.environment import edge_pass, environment_by_operator, launch, project_by_operator
from forgefield.kernels.edges.environment_source import EdgePass
from forgefield.ops.graph import Segments, cut
from forgefield.ops.harmonics import project, sum_weighted

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


class Scene:
    """Atoms with equally many edges each, and numbers drawn for all that passes read and write."""

    def __init__(self, args: argparse.Namespace) -> None:
        atoms = torch.arange(args.atoms, device=DEVICE)
        self.edges = Segments(atoms.repeat_interleave(args.neighbours), args.atoms, True)
        self.n_edges, self.n_atoms = args.atoms * args.neighbours, args.atoms
        self.channels, self.l_max = args.channels, args.l_max
        self.components = (args.l_max + 1) ** 2

    def weights(self, shared: bool) -> Tensor:
        return torch.randn(self.n_edges, self.channels * (1 if shared else self.l_max + 1), device=DEVICE)

    def rows(self) -> Tensor:
        return torch.randn(self.components, self.n_atoms, self.channels, device=DEVICE)

    def harmonics(self) -> Tensor:
        return torch.randn(self.n_edges, self.components, device=DEVICE)

    def tensors(self, of: EdgePass) -> dict[str, Tensor]:
        """Arguments of a pass."""
        found = {name: self.weights(of.shared) for name in ("w", "aw", "to_w")}
        found |= {name: self.rows() for name in ("q", "aq", "out")} | {name: self.harmonics() for name in ("y", "ay")}
        found |= {name: torch.randn(self.n_edges, self.channels, device=DEVICE) for name in ("p", "to_p")}
        found["to_y"] = torch.randn(of.n_chunks, self.n_edges, self.components, device=DEVICE)
        return found | {"pointers": self.edges.pointers}

    def bytes(self, of: EdgePass) -> int:
        """What is read and written at least, float32."""
        weights = of.channels * of.n_weights
        of_edge = of.n_harmonics * (2 if of.order == 2 else 1)
        of_edge += weights * ((of.projection or of.order != 1 or of.harmonics) + (of.order == 2) + (of.order > 0))
        of_edge += of.channels * of.projection * (2 if of.order == 2 else 1)
        of_edge += of.n_harmonics * of.harmonics
        rows = of.rows + (of.projection and of.order == 2) + of.sums
        return 4 * (self.n_edges * of_edge + self.n_atoms * of.n_harmonics * of.channels * rows)


def show_passes(scene: Scene) -> None:
    print(f"{'pass':40} {'us':>8} {'MB':>8} {'TB/s':>6}")
    for projection, shared in ((False, True), (False, False), (True, False)):
        for order, harmonics in ((0, False), (1, True), (1, False), (2, False)):
            of = edge_pass(projection, order, harmonics, scene.weights(shared), scene.harmonics(), shared)
            given = scene.tensors(of)
            taken, moved = microseconds(partial(launch, of, **given), DEVICE, 20), scene.bytes(of)
            name = of.name + (" shared" if shared else "")
            print(f"{name:40} {taken:8.1f} {moved / 1e6:8.1f} {moved / taken / 1e6:6.2f}", flush=True)


def show_operators(scene: Scene) -> None:
    print(f"\n{'ms':22} {'':10} {'values':>8} {'first':>8} {'second':>8} {'GiB':>6}")
    sizes, edges = [2 * degree + 1 for degree in range(scene.l_max + 1)], scene.edges
    for shared in (True, False):
        given = [scene.weights(shared), scene.harmonics()]
        name = "environment shared" if shared else "environment"
        show_ways(
            name,
            given,
            lambda w, y, shared=shared: environment_by_operator(w, y, edges, shared=shared),
            lambda w, y, shared=shared: sum_weighted(w, cut(y, sizes, 1), edges, shared=shared),
        )
    given = [scene.rows(), scene.weights(False), scene.harmonics()]
    show_ways(
        "projection",
        given,
        lambda q, w, y: project_by_operator(q, w, y, edges, shared=False),
        lambda q, w, y: project(q, w, cut(y, sizes, 1), edges),
    )


def show_ways(name: str, given: list[Tensor], ours: Callable[..., Tensor], plain: Callable[..., Tensor]) -> None:
    inputs = [tensor.requires_grad_() for tensor in given]
    for word, function in (("operators", ours), ("plain", plain)):
        before = torch.cuda.memory_allocated() if DEVICE.type == "cuda" else 0
        if DEVICE.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
        times = [milliseconds(partial(action, function, inputs)) for action in (values, first, second)]
        peak = (torch.cuda.max_memory_allocated() - before) / 2**30 if DEVICE.type == "cuda" else 0.0
        print(f"{name:22} {word:10}" + "".join(f" {taken:8.3f}" for taken in times) + f" {peak:6.2f}", flush=True)


def values(function: Callable[..., Tensor], inputs: list[Tensor]) -> Tensor:
    with torch.no_grad():
        return function(*inputs)


def first(function: Callable[..., Tensor], inputs: list[Tensor], again: bool = False) -> Any:
    out = function(*inputs)
    return torch.autograd.grad(out, inputs, torch.ones_like(out), create_graph=again)


def second(function: Callable[..., Tensor], inputs: list[Tensor]) -> Any:
    found = first(function, inputs, again=True)
    return torch.autograd.grad(found, inputs, [torch.ones_like(one) for one in found], allow_unused=True)


def milliseconds(action: Callable[[], Any], repeats: int = 5) -> float:
    """Launched one by one, after one run before."""
    action()
    return min(seconds_of(action, DEVICE, repeats) for _ in range(3)) / repeats * 1000


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--atoms", type=int, default=6144)
    parser.add_argument("--neighbours", type=int, default=54)
    parser.add_argument("--channels", type=int, default=64)
    parser.add_argument("--l-max", type=int, default=2)
    scene = Scene(parser.parse_args())
    name = torch.cuda.get_device_name() if DEVICE.type == "cuda" else "CPU"
    print(f"{name}, torch {torch.__version__}, {scene.n_atoms} atoms, {scene.n_edges} edges, {scene.channels} channels")
    show_passes(scene)
    show_operators(scene)


if __name__ == "__main__":
    main()
