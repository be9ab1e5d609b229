"""Average cosine similarity distances by MALA 1.4.0, from random pairs of points; needs a Python with MALA.

    python benchmarks/acsd_peer.py ../shared/data/be2_ldos

To compare with `forgefield data acsd FILE --points 8748`, which is exact for snapshots of 8748 points.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np
from mala.network.acsd_analyzer import ACSDAnalyzer

POINTS, REPEATS = 100, 8


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("folder", type=Path, help="folder of NAME.in.npy and NAME.out.npy")
    for path in sorted(parser.parse_args().folder.glob("*.in.npy")):
        descriptors, ldos = np.load(path), np.load(path.with_name(path.name.replace(".in.", ".out.")))
        found = [ACSDAnalyzer._calculate_acsd(descriptors, ldos, POINTS) for _ in range(REPEATS)]
        print(f"{path.name}: {np.mean(found):.2e} +- {np.std(found):.1e}, {REPEATS} times {POINTS} x {POINTS} pairs")


main()
