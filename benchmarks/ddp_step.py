"""One optimiser step with gradients averaged by SimpleDDP's buckets and by torch's DistributedDataParallel, side by side.

Same model, same batch, same process, in turns; wall time of the median step. Start it with torchrun, on CPU or GPU:

    torchrun --nproc-per-node 2 benchmarks/ddp_step.py --preset S --device cpu
    torchrun --nproc-per-node 1 benchmarks/ddp_step.py --preset M --device cuda
"""

from __future__ import annotations

import argparse
import copy
import os
import statistics
import time
from collections.abc import Callable

import numpy as np
import torch
import torch.distributed as dist
from ase.build import bulk
from ase.calculators.emt import EMT
from torch import Tensor, nn

from forgefield.data.batch import batch_from_frames, to_device
from forgefield.data.frame import Frame
from forgefield.data.species import SpeciesTable
from forgefield.models.building import build_model
from forgefield.models.nequip.options import preset_options
from forgefield.models.potential import Potential
from forgefield.parallel.reductions import GradientBuckets, StepExchange
from forgefield.parallel.rendezvous import backends
from forgefield.tasks.options import TargetOptions, TaskOptions
from forgefield.tasks.task import Task

SPECIES = ("Cu", "Ag", "Au")
CUTOFF = 5.0


class Loss(nn.Module):
    """The loss of a batch as one forward pass, the way a wrapper wants it. `exchange`: counts of all ranks, or none."""

    def __init__(self, potential: Potential, task: Task, exchange: StepExchange | None) -> None:
        super().__init__()
        self.potential, self.task, self.exchange = potential, task, exchange

    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        if self.exchange is not None:
            self.exchange.send(self.task.counts(batch))
        parts = self.task.loss(self.potential(batch, forces=True), batch)
        if self.exchange is None:
            return parts.total
        return self.task.combine(parts.sums, self.exchange.counts()) * dist.get_world_size()


def make_batch(n_frames: int, seed: int) -> dict[str, Tensor]:
    rng = np.random.default_rng(seed)
    frames = []
    for _ in range(n_frames):
        atoms = bulk("Cu", cubic=True, a=3.9) * (3, 3, 2)
        atoms.symbols[:] = rng.choice(SPECIES, size=len(atoms))
        atoms.positions += 0.1 * rng.standard_normal(atoms.positions.shape)
        atoms.calc = EMT()
        frames.append(
            Frame(
                positions=atoms.positions,
                numbers=atoms.numbers,
                cell=atoms.cell.array,
                pbc=np.ones(3, dtype=bool),
                energy=atoms.get_potential_energy(),
                forces=atoms.get_forces(),
                stress=None,
            )
        )
    return batch_from_frames(frames, SpeciesTable(SPECIES), CUTOFF)


def steps(loss: nn.Module, average: Callable[[], None], batch: dict[str, Tensor]) -> Callable[[], None]:
    optimiser = torch.optim.Adam(loss.parameters(), lr=1e-4, fused=batch["positions"].is_cuda)

    def step() -> None:
        optimiser.zero_grad(set_to_none=True)
        loss(batch).backward()
        average()
        optimiser.step()

    return step


def timed(step: Callable[[], None], n: int, on_gpu: bool) -> list[float]:
    found = []
    for _ in range(n):
        dist.barrier()
        began = time.perf_counter()
        step()
        if on_gpu:
            torch.cuda.synchronize()
        found.append(time.perf_counter() - began)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--preset", default="S", choices=("S", "M", "L"))
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--frames", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=10)
    args = parser.parse_args()
    on_gpu = args.device == "cuda"
    if on_gpu:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group(backends())
    rank, world_size = dist.get_rank(), dist.get_world_size()
    task = Task(TaskOptions(energy=TargetOptions(), forces=TargetOptions()), SPECIES)
    resolved = {
        "name": "nequip",
        **preset_options(args.preset, {}),
        "species": list(SPECIES),
        "cutoff": CUTOFF,
        "avg_num_neighbours": 42.0,
    }
    potential = build_model(resolved, precision="float32", seed=0).train().to(args.device)
    batch = to_device(make_batch(args.frames, seed=rank), args.device)
    exchange = StepExchange(lambda: (0.0,))
    models = {name: copy.deepcopy(potential) for name in ("alone", "simple", "simple+counts", "ddp")}
    simple = {
        name: GradientBuckets(list(models[name].parameters()), bucket_bytes=25 * 2**20)
        for name in ("simple", "simple+counts")
    }
    wrapped = nn.parallel.DistributedDataParallel(Loss(models["ddp"], task, None))
    ways = {
        "no averaging": steps(Loss(models["alone"], task, None), lambda: None, batch),
        "SimpleDDP": steps(Loss(models["simple"], task, None), simple["simple"].average, batch),
        "SimpleDDP with exact counts": steps(
            Loss(models["simple+counts"], task, exchange), simple["simple+counts"].average, batch
        ),
        "Lightning's DDP (torch's wrapper)": steps(wrapped, lambda: None, batch),
    }
    times: dict[str, list[float]] = {name: [] for name in ways}
    for step in ways.values():
        timed(step, 5, on_gpu)
    for _ in range(args.rounds):
        for name, step in ways.items():
            times[name] += timed(step, args.steps, on_gpu)
    if rank == 0:
        place = torch.cuda.get_device_name() if on_gpu else f"CPU, {torch.get_num_threads()} thread(s) a process"
        size = sum(p.numel() * p.element_size() for p in potential.parameters()) / 2**20
        print(
            f"NequIP preset {args.preset}, {args.frames} frames of 72 atoms a rank ({batch['edge_index'].shape[1]} edges), "
            f"{world_size} rank(s), {dist.get_backend()}, {place}, gradient {size:.1f} MiB, torch {torch.__version__}"
        )
        for name, values in times.items():
            middle = statistics.median(values)
            spread = statistics.quantiles(values, n=4)
            print(f"  {name:<34} {1000 * middle:8.2f} ms   ({1000 * spread[0]:.2f} to {1000 * spread[2]:.2f})")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
