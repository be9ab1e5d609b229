"""What training on 1 to 4096 GPUs would cost, from a measured step of one rank and stated figures of a network.

    python benchmarks/scaling_model.py
    python benchmarks/scaling_model.py --bench s.json m.json           # steps measured with `forgefield bench --json`
    python benchmarks/scaling_model.py --frames li.extxyz --cutoff 5   # unequal frames, from a real data set
    python benchmarks/scaling_model.py --step-ms 20 --message-mb 2.5 --per-node 4 --bandwidth-between 25

A model, not a measurement: every figure is marked as measured, counted or assumed.
docs/explanations/scaling.md has the formulas in words.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from forgefield.data.neighbours.graph import neighbour_list
from forgefield.data.options import LabelOptions, UnitOptions
from forgefield.data.readers import read_frames
from forgefield.errors import ForgefieldError
from forgefield.models.building import build_model
from forgefield.models.resolving import resolve_model
from forgefield.parallel.strategies import BUCKET_MB

_H200 = (
    "`forgefield bench --steps 50 --warmup 10 --json`, one NVIDIA H200, torch 2.11, engine eager; aspirin of revised MD17, "
    "64 frames of 21 atoms, cutoff 5 A, float32; times scatter by 10 to 15 %"
)
MEASURED = {
    "S": {"data_ms": 6.52, "compute_ms": 22.78, "update_ms": 1.23, "frames": 64, "origin": _H200},
    "M": {"data_ms": 8.32, "compute_ms": 61.30, "update_ms": 2.12, "frames": 64, "origin": _H200},
    "L": {"data_ms": 8.27, "compute_ms": 86.66, "update_ms": 2.50, "frames": 64, "origin": _H200},
}
"""A step of one rank for each preset of the model. Another machine: put its numbers here, or give them with --bench."""

ASSUMED = {
    "per_node": (8, "GPUs per node", "HGX servers with Hopper GPUs"),
    "latency_inside": (3.4, "us a hop inside a node", "NCCL's tuning table, NVLink, protocol `simple`, its slowest"),
    "latency_between": (14.0, "us a hop between nodes", "NCCL's tuning table, network, protocol `simple`, its slowest"),
    "start": (8.4, "us to begin a collective", "NCCL's tuning table"),
    "bandwidth_inside": (360.0, "GB/s of a GPU inside a node", "80 % of the 450 GB/s a direction of NVLink 4"),
    "bandwidth_between": (40.0, "GB/s of a GPU between nodes", "80 % of one 400 Gb/s network card per GPU"),
    "memory": (3000.0, "GB/s of a GPU's memory", "about two thirds of the 4.8 TB/s in the data sheet of the H200"),
    "forward_share": (0.33, "of compute is the forward pass", "forces and their gradients take the rest"),
    "latency_host": (50.0, "us a message between hosts", "TCP, which carries what checkpoints gather"),
    "bandwidth_host": (1.0, "GB/s between hosts", "10 Gb/s Ethernet, or TCP over something faster"),
    "disk": (0.5, "GB/s to a checkpoint", "hashing weights, writing and flushing on a parallel file system"),
    "checkpoint_every": (1000, "steps between checkpoints", "a choice; the default is once an epoch"),
}
"""Figures that were not measured: value, unit, where it comes from. Each is an option of the command line."""

SPECIES = ("H", "C", "O")
STATE_BYTES = 14_575
"""Random states of one rank in a checkpoint, as they are sent: counted by pickling them."""
SMALL_BYTES = 100
"""The message of every batch, at most: 8 bytes for each term of the loss and each of four wishes to stop."""
BYTES_PER_PARAMETER = 16
"""In a checkpoint: weight, its average, and two moments of Adam, in float32."""
GATHERS, ALL_GATHERS = 2, 4
"""What a checkpoint sends over all ranks: two gathers of objects, one comparison of weights, each with its sizes ahead."""

LIMITS = """\
Where this model would break:
- The step was measured on one rank; no network was. Nothing was run on as many ranks as the table goes to.
- Slow or noisy ranks: one GPU that runs 5 % slower costs 5 %, at any number of ranks; random delays grow like a maximum does.
- The network is empty and non-blocking. Other jobs, a tapered fat tree or one card per node make it slower.
- With steps of a few ms the host is the limit: Lightning's loop takes about a millisecond of it a step.
- Start-up is left out: every rank reads all data, and thousands of them do so at once; so is validation.
- Thousands of ranks make large batches. How well those train is another matter: that is accuracy, not speed."""


@dataclass(frozen=True)
class Network:
    """Latencies in s a hop, bandwidths in bytes/s of one GPU and one direction. start: s before a collective does anything."""

    per_node: int
    latency_inside: float
    latency_between: float
    bandwidth_inside: float
    bandwidth_between: float
    start: float = 0.0

    def nodes(self, world: int) -> int:
        return -(-world // self.per_node)


@dataclass(frozen=True)
class Host:
    """What a checkpoint goes through: s a message, bytes/s between hosts, bytes/s to the disk, steps from one to the next."""

    latency: float
    bandwidth: float
    disk: float
    every: int


@dataclass(frozen=True)
class Step:
    """A step of one rank, in s, and what it sends. frames: of a rank in a step."""

    name: str
    data: float
    compute: float
    update: float
    frames: int
    message_bytes: int
    parameters: int
    origin: str

    @property
    def alone(self) -> float:
        return self.data + self.compute + self.update


@dataclass(frozen=True)
class Costs:
    """What several ranks add to a step, in s."""

    waiting: float
    reduction: float
    small: float
    checkpoint: float

    @property
    def total(self) -> float:
        return self.waiting + self.reduction + self.small + self.checkpoint


# ---- the network


def ring_seconds(n: int, n_bytes: float, latency: float, bandwidth: float) -> float:
    """All-reduce of n members around a ring: each byte leaves each member twice, but for its own share."""
    return 0.0 if n == 1 else 2 * (n - 1) * latency + 2 * (n - 1) / n * n_bytes / bandwidth


def tree_seconds(n: int, n_bytes: float, latency: float, bandwidth: float) -> float:
    """All-reduce of n members up and down two binary trees at once: each byte leaves each member twice."""
    return 0.0 if n == 1 else 2 * math.ceil(math.log2(n)) * latency + 2 * n_bytes / bandwidth


def all_reduce_seconds(world: int, n_bytes: float, network: Network) -> float:
    """Inside every node around a ring, each GPU with its share between nodes: ring or trees, whichever is faster."""
    if world == 1:
        return 0.0
    members, nodes = min(world, network.per_node), network.nodes(world)
    inside = ring_seconds(members, n_bytes, network.latency_inside, network.bandwidth_inside)
    between = min(
        algorithm(nodes, n_bytes / members, network.latency_between, network.bandwidth_between)
        for algorithm in (ring_seconds, tree_seconds)
    )
    return network.start + inside + between


def buckets(message_bytes: int) -> list[int]:
    """Sizes of the messages into which the gradient is divided."""
    full, rest = divmod(message_bytes, int(BUCKET_MB * 2**20))
    return [int(BUCKET_MB * 2**20)] * full + ([rest] if rest else [])


# ---- unequal frames


def imbalance(costs: np.ndarray, frames: int, world: int, random: np.random.Generator, trials: int) -> float:
    """How much longer the slowest of `world` ranks works than the average one, as a share: E[max] / mean - 1.

    costs: (n,), of the frames of a data set; every rank draws `frames` of them.
    """
    at_once = max(1, 2_000_000 // (world * frames))
    slowest = []
    while len(slowest) < trials:
        drawn = random.choice(costs, size=(min(at_once, trials - len(slowest)), world, frames))
        slowest += drawn.sum(-1).max(-1).tolist()
    return float(np.mean(slowest) / (frames * costs.mean()) - 1)


def frame_costs(file: Path, kind: str, cutoff: float) -> np.ndarray:
    """Atoms or edges of every frame of a file, (n,)."""
    frames = read_frames(str(file), LabelOptions(), UnitOptions(), required=False)
    if kind == "atoms":
        return np.array([len(frame) for frame in frames], dtype=float)
    lists = (neighbour_list(frame.positions, frame.cell, frame.pbc, cutoff) for frame in frames)
    return np.array([len(source) for source, _, _ in lists], dtype=float)


# ---- a step


def checkpoint_seconds(world: int, parameters: int, host: Host) -> float:
    """All ranks send their random states to rank 0 and compare weights; it writes, and the others wait for it."""
    messages = (GATHERS + ALL_GATHERS) * (world - 1) * host.latency
    gathered = (world - 1) * STATE_BYTES / host.bandwidth
    return messages + gathered + (BYTES_PER_PARAMETER * parameters + world * STATE_BYTES) / host.disk


def costs(
    step: Step, world: int, network: Network, host: Host, *, excess: float, memory: float, forward_share: float
) -> Costs:
    """excess: of the slowest rank's compute over the mean, a share. memory: bytes/s."""
    checkpoint = checkpoint_seconds(world, step.parameters, host) / host.every
    if world == 1:
        return Costs(0.0, 0.0, 0.0, checkpoint)
    packing = 4 * step.message_bytes / memory  # into the bucket and its division: both read and write all of it
    reduction = packing + sum(all_reduce_seconds(world, size, network) for size in buckets(step.message_bytes))
    hidden = max(0.0, all_reduce_seconds(world, SMALL_BYTES, network) - forward_share * step.compute)
    return Costs(excess * step.compute, reduction, hidden, checkpoint)


# ---- inputs


def preset_steps() -> list[Step]:
    """The presets with the step that was measured, and the size of the model that is really built."""
    facts = {"mean_neighbours": 20.0, "reference_energies": dict.fromkeys(SPECIES, 0.0), "forces_rms": 1.0}
    steps = []
    for preset, measured in MEASURED.items():
        options = {"name": "nequip", "preset": preset}
        resolved = resolve_model(options, species=SPECIES, cutoff=5.0, statistics=facts)
        parameters = list(build_model(resolved, precision="float32", seed=0).parameters())
        trained = [p for p in parameters if p.requires_grad]
        steps.append(
            Step(
                preset,
                *(float(measured[f"{part}_ms"]) / 1000 for part in ("data", "compute", "update")),
                frames=int(measured["frames"]),
                message_bytes=sum(p.numel() * p.element_size() for p in trained),
                parameters=sum(p.numel() for p in parameters),
                origin=str(measured["origin"]),
            )
        )
    return steps


def bench_step(file: Path) -> Step:
    """The step of the fewest ranks in a file of `forgefield bench --json`. Parts are scaled to the undisturbed step."""
    content = json.loads(file.read_text())
    row = min(content["measurements"], key=lambda row: row["ranks"])
    parts = {name: row["mean_ms"][name] for name in ("data", "compute", "update")}
    undisturbed = row["step_ms"] - (row["mean_ms"]["communication"] if row["ranks"] > 1 else 0.0)
    scale = undisturbed / sum(parts.values()) / 1000
    return Step(
        str(content["model"].get("preset") or content["config"]),
        *(scale * parts[name] for name in ("data", "compute", "update")),
        frames=row["frames_per_rank"] * row["accumulate"],
        message_bytes=row["message_bytes"],
        parameters=row["parameters"],
        origin=f"{file.name}: {row['ranks']} rank(s) on {row['device']}, {row['frames_per_rank']} frames each",
    )


def arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--bench", type=Path, nargs="+", metavar="FILE", help="JSON of `forgefield bench --json`")
    parser.add_argument("--step-ms", type=float, help="a step of one rank, instead of those at the top of this script")
    parser.add_argument("--message-mb", type=float, default=2.5, help="its gradients, MB (default: 2.5)")
    parser.add_argument("--batch", type=int, help="frames per rank of --step-ms (default: 4)", default=4)
    parser.add_argument("--frames", type=Path, metavar="EXTXYZ", help="data set whose frames are unequal")
    parser.add_argument("--cost", choices=("edges", "atoms"), default="edges", help="what a frame's time goes with")
    parser.add_argument("--cutoff", type=float, default=5.0, help="for its edges, A (default: 5)")
    parser.add_argument("--fixed-share", type=float, default=0.0, help="of compute that is the same for all frames")
    parser.add_argument("--trials", type=int, default=200, help="steps drawn at random (default: 200)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--ranks", default=",".join(str(2**i) for i in range(13)), help="default: 1,2,4,...,4096")
    parser.add_argument("--detail", metavar="NAME", help="whose costs are listed one by one (default: the first)")
    for name, (value, unit, _) in ASSUMED.items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=type(value), default=value, help=f"{unit} ({value:g})")
    return parser.parse_args(argv)


def steps_asked_for(args: argparse.Namespace) -> list[Step]:
    if args.bench:
        return [bench_step(file) for file in args.bench]
    if args.step_ms is not None:
        n_bytes = int(args.message_mb * 1e6)
        return [
            Step("given", 0, args.step_ms / 1000, 0, args.batch, n_bytes, n_bytes // 4, "given on the command line")
        ]
    return preset_steps()


# ---- output


def print_inputs(steps: Sequence[Step], args: argparse.Namespace) -> None:
    print("Inputs")
    for step in steps:
        parts = ", ".join(f"{name} {1000 * getattr(step, name):.4g}" for name in ("data", "compute", "update"))
        print(f"  measured  {step.name}: a step of {1000 * step.alone:.4g} ms ({parts}), {step.frames} frames")
        print(
            f"  counted   {step.name}: {step.parameters:,} parameters, {step.message_bytes / 1e6:.3g} MB of gradients"
        )
    for origin in dict.fromkeys(step.origin for step in steps):
        print(f"            by {origin}")
    for name, (value, unit, origin) in ASSUMED.items():
        given = getattr(args, name)
        print(f"  assumed   {given:g} {unit}: {origin if given == value else 'given on the command line'}")
    if args.frames is None:
        print("  assumed   all frames are equal (--frames FILE for others)")


def main(argv: Sequence[str] | None = None) -> None:
    args = arguments(argv)
    steps = steps_asked_for(args)
    worlds = [int(word) for word in args.ranks.split(",")]
    if min(worlds) < 1 or args.checkpoint_every < 1:
        raise ForgefieldError("--ranks and --checkpoint-every are whole numbers from 1 up.")
    network = Network(
        args.per_node,
        args.latency_inside * 1e-6,
        args.latency_between * 1e-6,
        args.bandwidth_inside * 1e9,
        args.bandwidth_between * 1e9,
        args.start * 1e-6,
    )
    host = Host(args.latency_host * 1e-6, args.bandwidth_host * 1e9, args.disk * 1e9, args.checkpoint_every)
    print_inputs(steps, args)
    per_frame = None if args.frames is None else frame_costs(args.frames, args.cost, args.cutoff)
    if per_frame is not None:
        spread = per_frame.std() / per_frame.mean()
        print(
            f"  counted   {len(per_frame)} frames of {args.frames.name}, {per_frame.mean():.4g} {args.cost} each on average, "
            f"{per_frame.min():.4g} to {per_frame.max():.4g}, deviation {100 * spread:.0f} %"
        )
        print(f"  assumed   {100 * (1 - args.fixed_share):.0f} % of compute goes with the {args.cost} of a frame")

    def costs_of(step: Step, world: int) -> Costs:
        random = np.random.default_rng([args.seed, world])
        excess = 0.0 if per_frame is None else imbalance(per_frame, step.frames, world, random, args.trials)
        excess *= 1 - args.fixed_share
        return costs(
            step,
            world,
            network,
            host,
            excess=excess,
            memory=args.memory * 1e9,
            forward_share=args.forward_share,
        )

    all_costs = {step.name: {world: costs_of(step, world) for world in {1, *worlds}} for step in steps}
    print_efficiency(steps, worlds, all_costs, network)
    detail = next((step for step in steps if step.name == args.detail), steps[0])
    print_costs(detail, worlds, all_costs[detail.name])
    print(f"\n{LIMITS}")


def efficiency(step: Step, world: int, by_world: dict[int, Costs]) -> float:
    """Samples per second and rank, relative to one rank with the same batch."""
    return (step.alone + by_world[1].total) / (step.alone + by_world[world].total)


def print_efficiency(
    steps: Sequence[Step], worlds: Sequence[int], all_costs: dict[str, dict[int, Costs]], network: Network
) -> None:
    print("\nEfficiency, batch per rank constant (weak scaling), %")
    print(f"{'ranks':>6} {'nodes':>6}" + "".join(f"{step.name:>9}" for step in steps))
    for world in worlds:
        cells = "".join(f"{100 * efficiency(step, world, all_costs[step.name]):9.2f}" for step in steps)
        print(f"{world:6} {network.nodes(world):6}{cells}")


def print_costs(step: Step, worlds: Sequence[int], by_world: dict[int, Costs]) -> None:
    print(f"\nWhat it adds to a step of {step.name}, ms; last: the step of one rank that 90 % efficiency would need")
    columns = ("waiting", "all-reduce", "small", "checkpoint", "added", "for 90 %")
    print(f"{'ranks':>6}" + "".join(f"{column:>12}" for column in columns))
    for world in worlds:
        one = by_world[world]
        # Waiting goes with the step itself: (step + waiting + rest) * 0.9 = step
        share = one.waiting / step.alone
        rest = one.total - one.waiting - by_world[1].total
        needed = f"{1000 * 0.9 * rest / (0.1 - 0.9 * share):12.2f}" if 0.9 * share < 0.1 else f"{'never':>12}"
        values = (one.waiting, one.reduction, one.small, one.checkpoint, one.total)
        print(f"{world:6}" + "".join(f"{1000 * value:12.3f}" for value in values) + needed)


if __name__ == "__main__":
    main()
