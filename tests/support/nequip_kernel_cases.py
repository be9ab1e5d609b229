"""NequIP models, a batch and one training step with and without Forgefield's kernels."""

from __future__ import annotations

import torch

from forgefield.models.edges import StepMemory
from forgefield.ops.execution import execution
from tests.support.kernels import DEVICE
from tests.support.structures import make_batch, make_frame

CASES = {
    "plain": {"l_max": 1, "num_layers": 2, "num_features": 4},
    "degrees of unequal width": {"l_max": 2, "num_layers": 2, "num_features": [6, 3, 2], "parity": False},
    "parities, norm, resnet": {
        "l_max": 1,
        "num_layers": 3,
        "num_features": 2,
        "nonlinearity": "norm",
        "convnet_resnet": True,
    },
    "pair cutoffs": {"per_edge_type_cutoff": {"H": {"O": 2.0}}, "l_max": 1, "zbl": True},
    "deep radial networks": {
        "l_max": 1,
        "num_layers": 2,
        "num_features": 4,
        "radial_mlp_depth": 3,
        "radial_mlp_width": 6,
    },
    "trained frequencies": {
        "radial_mlp_depth": 2,
        "bessel_trainable": True,
        "avg_num_neighbours": {"H": 5.0, "O": 9.0},
    },
}


def batch():
    """12 edges: a crystal, a molecule, and an atom that is alone."""
    made = make_batch(
        make_frame(3, seed=1, box=4.5), make_frame(2, seed=2, periodic=False), make_frame(1, seed=4, periodic=False)
    )
    return {key: value.to(DEVICE) for key, value in made.items()}


def step(potential, given, by_kernels: bool) -> tuple[dict[str, torch.Tensor], list[torch.Tensor]]:
    """What a training makes of a batch: outputs, and gradients in all weights for adjoints drawn at random."""
    generator = torch.Generator().manual_seed(7)
    adjoints = {
        "energy": torch.randn(3, dtype=torch.float64, generator=generator).to(DEVICE),
        "forces": torch.randn(6, 3, dtype=torch.float64, generator=generator).to(DEVICE),
        "stress": torch.randn(3, 3, 3, dtype=torch.float64, generator=generator).to(DEVICE),
    }
    memory = StepMemory()
    with execution(kernels=by_kernels):
        outputs = potential(given, stress=True, memory=memory)  # kernels of the response need what the first pass left
        values, cotangents = potential.response(given, adjoints, memory)
        weights = [p for p in potential.parameters() if p.requires_grad]
        found = torch.autograd.grad(values, weights, cotangents, allow_unused=True)
    assert (memory.state is not None) == by_kernels
    return outputs, [torch.zeros_like(p) if g is None else g for p, g in zip(weights, found)]
