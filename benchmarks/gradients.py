"""How far gradients in float32 are from double backward in float64: of plain operations and of kernels, fresh and after steps.

    python benchmarks/gradients.py [--case M-8] [--steps 300] [--precision tf32]

Cases are those of `benchmarks/engines.py`. The steps are made by kernels on the one batch, so that its labels are nearly met
afterwards: gradients are then made of small differences, and errors of energies and forces show most. Needs an NVIDIA GPU, or
TRITON_INTERPRET=1 and what that can do in a minute: `--case tiny --steps 5`.
"""

from __future__ import annotations

import argparse

import torch
from engines import BATCHES, Trained, batch_of, trained, whole_step

from forgefield.data.batch import Batch
from forgefield.training.engines.engine import Engine
from forgefield.training.precision import Precision


def compare(when: str, model: Trained, exact: Trained, batch: Batch) -> None:
    exact.potential.load_state_dict(model.potential.state_dict())
    expected = Engine(exact.function("double")).differentiate(batch).gradients
    for derivative in ("double", "kernels"):
        function = model.function(derivative)
        found = Engine(function).differentiate(batch).gradients
        off, size, worst = 0.0, 0.0, (0.0, "")
        for name, gradient, reference in zip(function.trained, found, expected):
            if gradient is None or reference is None:
                continue
            difference, length = float((gradient.double() - reference).norm()), float(reference.norm())
            off, size = off + difference**2, size + length**2
            worst = max(worst, (difference / max(length, 1e-300), name))
        print(f"{when:16} {derivative:8} all {(off / size) ** 0.5:.2e}, worst {worst[0]:.2e} {worst[1]}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--case", default="M-8")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument(
        "--precision", choices=["float32", "tf32"], default="float32", help="tf32: of products, by both"
    )
    arguments = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    name, _, size = arguments.case.partition("-")
    size = size or "tiny"
    with Precision(arguments.precision).applied(arguments.precision):
        model, exact = (trained(name, BATCHES[size][2], precision, device) for precision in ("float32", "float64"))
        batch = batch_of(size, device)
        compare("fresh", model, exact, batch)
        engine = "graphs-eager" if device.type == "cuda" else "eager"
        step = whole_step(model.engine(engine, "kernels", batch), batch)
        for _ in range(arguments.steps):
            step()
        compare(f"after {arguments.steps} steps", model, exact, batch)


if __name__ == "__main__":
    main()
