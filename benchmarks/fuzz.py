"""Reads mutated files of every format: no crash, no hang, no traceback, no memory blow-up, no silently different value.

    python benchmarks/fuzz.py                            # 100,000 cases, all formats
    python benchmarks/fuzz.py --cases 2000 --format hdf5 lmdb --seed 7 --jobs 4
    python benchmarks/fuzz.py --format hdf5 --only 1234  # one case again, with its message

Cases are divided evenly among the formats and depend on format, seed and number alone. The exit code is 1 where one failed.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections import Counter
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
sys.path.insert(0, str(Path(__file__).parents[1]))

from tests.support.fuzz_formats import FORMATS
from tests.support.fuzz_server import CPU_SECONDS, MEBIBYTES, Result, run_cases

BLOCK = 500
"""Cases a process takes at a time."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=int, default=100_000, help="of all formats together")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--format", nargs="+", choices=sorted(FORMATS), default=list(FORMATS))
    parser.add_argument("--jobs", type=int, default=1, help="processes side by side")
    parser.add_argument("--only", type=int, help="the number of one case, of which the message is shown")
    args = parser.parse_args()
    if args.only is not None:
        for name in args.format:
            for result in run_cases(name, [args.only], args.seed):
                print(f"{name} {result.case}: {result.outcome} ({result.seconds:.2f} s) {result.detail}")
        return 0
    each = -(-args.cases // len(args.format))
    blocks = [(name, range(i, min(i + BLOCK, each))) for i in range(0, each, BLOCK) for name in args.format]
    print(f"{each * len(args.format)} cases, seed {args.seed}; limits of a case: {CPU_SECONDS:g} s, {MEBIBYTES} MiB")
    start, counts, slowest, failures = time.monotonic(), Counter[tuple[str, str]](), dict[str, float](), 0
    with ProcessPoolExecutor(args.jobs) as pool:
        waiting = [pool.submit(_block, name, cases, args.seed) for name, cases in blocks]
        for done in as_completed(waiting):
            for result in done.result():
                counts[result.format, result.outcome] += 1
                slowest[result.format] = max(slowest.get(result.format, 0.0), result.seconds)
                if result.failed:
                    failures += 1
                    print(f"{result.format} {result.case}: {result.outcome}: {result.detail}", flush=True)
    _table(args.format, counts, slowest)
    print(f"{failures} failures in {sum(counts.values())} cases, {time.monotonic() - start:.0f} s")
    return int(failures > 0)


def _block(name: str, cases: range, seed: int) -> list[Result]:
    return list(run_cases(name, cases, seed))


def _table(names: list[str], counts: Counter[tuple[str, str]], slowest: dict[str, float]) -> None:
    outcomes = ("read", "refused", "traceback", "wrong", "memory", "slow", "crash")
    print(f"{'format':15}" + "".join(f"{outcome:>10}" for outcome in outcomes) + "   slowest s")
    for name in names:
        cells = "".join(f"{counts[name, outcome]:>10}" for outcome in outcomes)
        print(f"{name:15}{cells}{slowest.get(name, 0.0):>12.2f}")


if __name__ == "__main__":
    sys.exit(main())
