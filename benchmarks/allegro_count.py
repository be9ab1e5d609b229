"""Work that a training step of Allegro cannot avoid, counted from shapes, and how long a GPU takes for it at least.

    python benchmarks/allegro_count.py [--edges 335722] [--atoms 6144] [--bandwidth 4.2e12] [--rate 50e12]

The model is `A` of `engines.py`: degree 2, two layers, 64 scalar and 64 tensor features, float32, on 32 frames of 192 atoms. A
part is counted as if it read what it needs and wrote what it makes once. A product of matrices takes the longer of its
arithmetic and its traffic; everything else its traffic.
"""

from __future__ import annotations

import argparse

WIDTH = CHANNELS = 64
COMPONENTS, DEGREES, LAYERS, READOUT, BASIS = 9, 3, 2, 32, 8
FOLLOWING = 2 * WIDTH + READOUT
"""Columns that read the first features: of both latents and of the readout."""
PRODUCTS = {
    "radial embedding": (BASIS, WIDTH),
    "scalar embedding": (WIDTH, WIDTH),
    "own tensor weights": (WIDTH, DEGREES * CHANNELS),
    "first features as they are read": (WIDTH, FOLLOWING),
    "scalars of layer 1": (CHANNELS, WIDTH),
    "second features as they are read": (WIDTH, FOLLOWING - WIDTH),
    "scalars of layer 2": (CHANNELS, WIDTH),
    "last features as they are read": (WIDTH, READOUT),
    "energies": (READOUT, 1),
}
"""Of rows of edges with matrices."""
PASSES = 6
"""The product itself, for forces that of its cotangents; for the loss two of each kind, and two gradients of the matrix."""
COUPLINGS = 1 + 2 + 6 + 3
"""Of a layer with the one below: values, cotangents for forces, derivatives of these, cotangents for the loss."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--edges", type=int, default=335_722)
    parser.add_argument("--atoms", type=int, default=6144)
    parser.add_argument("--bandwidth", type=float, default=4.2e12, help="bytes a second")
    parser.add_argument("--rate", type=float, default=50e12, help="float32 operations a second of matrix products")
    args = parser.parse_args()
    row, plane = 4 * args.edges * CHANNELS, 4 * args.atoms * CHANNELS * COMPONENTS
    harmonics = 4 * args.edges * COMPONENTS
    own, total = DEGREES * row, 0.0

    def show(name: str, n_bytes: float, flops: float = 0.0) -> None:
        nonlocal total
        taken = max(n_bytes / args.bandwidth, flops / args.rate)
        total += taken
        work = f"{flops / 1e9:8.1f} GFLOP" if flops else " " * 14
        print(f"{name:52s} {work} {n_bytes / 1e9:7.2f} GB {1000 * taken:7.2f} ms")

    for name, (n_in, n_out) in PRODUCTS.items():
        show(f"product: {name}", PASSES * 4 * args.edges * (n_in + n_out), PASSES * 2 * args.edges * n_in * n_out)
    per_layer = {
        "environment, values": row + harmonics + plane,
        "environment, cotangents for forces": 2 * row + 2 * harmonics + plane,
        "environment, derivatives of these": 3 * row + 2 * harmonics + 2 * plane,
        "environment, cotangents for the loss": row + harmonics + plane,
        "projection, values": own + row + harmonics + plane,
        "projection, cotangents for forces": 2 * own + row + 2 * harmonics + 2 * plane,
        "projection, derivatives of these": 3 * own + 2 * row + 2 * harmonics + 3 * plane,
        "projection, cotangents for the loss": 2 * own + row + harmonics + 2 * plane,
    }
    for name, n_bytes in per_layer.items():
        show(f"kernel: {name}, {LAYERS} layers", LAYERS * n_bytes)
    show("cotangents of own weights, added over layers", 3 * own + 5 * own)
    show("activations", (2 + 3 + 5 + 4) * row * (3 * WIDTH + READOUT) / CHANNELS)
    show("kernel: coupling of a layer with the one below", COUPLINGS * 3 * plane)
    show(f"atoms: rows of scalars, {LAYERS} layers", PASSES * LAYERS * 3 * plane)
    by_matrix = 2 * args.atoms * COMPONENTS * WIDTH * CHANNELS
    show(
        f"atoms: environments times matrices, {LAYERS} layers", PASSES * LAYERS * 2 * plane, PASSES * LAYERS * by_matrix
    )
    print(f"{'together':52s} {'':14s} {'':10s} {1000 * total:7.2f} ms, geometry and launches not counted")


if __name__ == "__main__":
    main()
