"""How long a refresh of the live page takes: 100 runs of 300 epochs, some of which have new rows at each refresh.

python benchmarks/live_page.py [--runs 100] [--epochs 300] [--growing 10]

Prints the times of the server for the table of all runs, and for everything that the page asks for with four runs selected, as
a browser does: over HTTP, with what it already has. The first refresh reads every file.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import statistics
import tempfile
import time
import urllib.error
import urllib.request
from pathlib import Path

import forgefield
from forgefield.api import example_config
from forgefield.config.template import commented_yaml

METRICS = [f"{split}/{name}" for split in ("train", "val") for name in (
    "loss", "energy_mae", "energy_rmse", "energy_total_mae", "energy_total_rmse", "forces_mae", "forces_rmse", "forces_mae/Cu",
    "forces_rmse/Cu", "forces_mae/Au", "forces_rmse/Au", "stress_mae", "stress_rmse",
)]  # fmt: skip
SELECTED = 4


def row(epoch: int) -> str:
    values = {name: random.random() / (1 + epoch) for name in METRICS}
    return json.dumps({"epoch": epoch, "step": 45 * (epoch + 1), "lr": 0.01, **values}) + "\n"


def write_run(folder: Path, config: str, epochs: int) -> None:
    """A run folder with files of the size that a training of the built-in example writes."""
    folder.mkdir(parents=True)
    info = {
        "format_version": 2,
        "name": folder.name,
        "status": "finished",
        "model": {"name": "nequip"},
        "parameters": 22088,
    }
    info |= {"monitor": "val/loss", "max_epochs": epochs, "max_steps": -1, "started": "2026-11-18T19:54:49+00:00"}
    (folder / "run.json").write_text(json.dumps(info))
    (folder / "config.yaml").write_text(config.replace("lr: 0.01", f"lr: {random.random():.4f}"))
    (folder / "metrics.jsonl").write_text("".join(map(row, range(epochs))))
    times = "".join(f"{epoch},{45 * (epoch + 1)},{random.random()},270,2762,700,7000\n" for epoch in range(epochs))
    header = "epoch,step,seconds,frames,atoms,frames_per_second,atoms_per_second\n"
    (folder / "timing.csv").write_text(header + times)
    errors = {name.removeprefix("val/"): random.random() for name in METRICS if name.startswith("val/")}
    (folder / "test.json").write_text(json.dumps({"source": "t.extxyz", "weights": "best", "errors": errors}))
    (folder / "log.txt").write_text(
        "a line of the log with the errors of an epoch, as long as such lines usually are\n" * epochs
    )


class Client:
    """Asks as the page does, with the tags of earlier answers."""

    def __init__(self, address: str) -> None:
        self.address, self.tags, self.bytes = address, {}, 0

    def ask(self, path: str) -> None:
        request = urllib.request.Request(self.address + path)
        if path in self.tags:
            request.add_header("If-None-Match", self.tags[path])
        try:
            with urllib.request.urlopen(request) as answer:
                self.tags[path] = answer.headers["ETag"]
                self.bytes += len(answer.read())
        except urllib.error.HTTPError as error:
            if error.code != 304:
                raise

    def refresh(self, names: list[str]) -> tuple[float, float]:
        """Milliseconds of the table, and of everything."""
        start = time.perf_counter()
        self.ask("api/runs?errors=mae")
        table = time.perf_counter()
        runs = "&".join(f"run={name}" for name in names)
        metrics = "&".join(f"metric={name}" for name in METRICS if name.endswith(("loss", "_mae")))
        for path in (
            f"api/curves?{runs}",
            f"api/curves?{runs}&{metrics}",
            f"api/compare?{runs}",
            f"api/run?run={names[0]}",
        ):
            self.ask(path)
        return 1000 * (table - start), 1000 * (time.perf_counter() - start)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    for name, default in (("--runs", 100), ("--epochs", 300), ("--growing", 10), ("--refreshes", 20)):
        parser.add_argument(name, type=int, default=default)
    options = parser.parse_args()
    folder = Path(tempfile.mkdtemp())
    config = commented_yaml(example_config([], make=False))
    names = [f"run-{number:03d}" for number in range(options.runs)]
    for name in names:
        write_run(folder / name, config, options.epochs)
    with forgefield.watch(folder, port=0) as page:
        client = Client(page.address)
        first = client.refresh(names[:SELECTED])
        first_bytes, client.bytes = client.bytes, 0
        unchanged = [client.refresh(names[:SELECTED]) for _ in range(options.refreshes)]
        growing = []
        for number in range(options.refreshes):
            for name in names[: options.growing]:
                with open(folder / name / "metrics.jsonl", "a") as file:
                    file.write(row(options.epochs + number))
            growing.append(client.refresh(names[:SELECTED]))
    shutil.rmtree(folder)
    print(f"{options.runs} runs of {options.epochs} epochs, {SELECTED} selected; load {os.getloadavg()[0]:.1f}")
    print(f"{'refresh':<42}{'table, ms':>12}{'page, ms':>12}")
    print(f"{'first, everything is read':<42}{first[0]:>12.0f}{first[1]:>12.0f}    ({first_bytes / 1000:.0f} kB)")
    for title, times in (("nothing new", unchanged), (f"{options.growing} runs with a new row", growing)):
        for kind, select in (("median", statistics.median), ("slowest", max)):
            table, whole = (select(column) for column in zip(*times))
            print(f"{title + ', ' + kind:<42}{table:>12.1f}{whole:>12.1f}")


if __name__ == "__main__":
    main()
