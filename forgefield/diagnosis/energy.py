"""`EnergyMeter`: how much energy a training consumed, where the machine can measure it.

If CodeCarbon is installed, it measures energy and emissions. Otherwise the counters of processor packages (RAPL, Linux) and of
NVIDIA GPUs (NVML) are read at the beginning and at the end; one sentence is printed if there are none. The counters include
everything that runs on a package or GPU, not only this training.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import TYPE_CHECKING

import lightning as L

from forgefield.diagnosis.callback import Diagnosis, notify
from forgefield.errors import ForgefieldError

if TYPE_CHECKING:
    from codecarbon import OfflineEmissionsTracker

RAPL = Path("/sys/class/powercap")
JOULES_PER_KWH = 3.6e6


class EnergyMeter(Diagnosis):
    """Measures the energy of a training in kWh.

    country: three-letter code for CodeCarbon, which computes emissions with the power grid of that country; without it only
    energy is measured. source: auto, codecarbon or counters.
    """

    name = "energy"
    measures_time = True

    def __init__(self, country: str | None = None, source: str = "auto") -> None:
        super().__init__()
        if source not in ("auto", "codecarbon", "counters"):
            raise ForgefieldError(f"EnergyMeter: source is auto, codecarbon or counters, not {source!r}.")
        if source == "codecarbon" and importlib.util.find_spec("codecarbon") is None:
            raise ForgefieldError(
                "EnergyMeter: source=codecarbon needs the package codecarbon; install it, or use counters."
            )
        if source == "codecarbon" and country is None:
            raise ForgefieldError(
                "EnergyMeter: source=codecarbon needs a country, such as DEU or USA, to work without a network."
            )
        installed = importlib.util.find_spec("codecarbon") is not None
        self.country = country
        self.source = "codecarbon" if installed and country is not None and source != "counters" else "counters"
        self._tracker: OfflineEmissionsTracker | None = None
        self._begin: dict[str, float] = {}

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if not trainer.is_global_zero:
            return
        if self.source == "codecarbon":
            from codecarbon import OfflineEmissionsTracker

            self._tracker = OfflineEmissionsTracker(
                country_iso_code=self.country, save_to_file=False, log_level="error", tracking_mode="process"
            )
            self._tracker.start()
            return
        self._begin = read_counters()
        if not self._begin:
            self.numbers["note"] = "Energy cannot be measured here: neither RAPL nor NVML counters can be read."
            notify(trainer, pl_module, f"EnergyMeter: {self.numbers['note']}")

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._finish()
        super().on_train_end(trainer, pl_module)
        if trainer.is_global_zero and "kwh" in self.numbers:
            notify(trainer, pl_module, f"EnergyMeter: {self.numbers['kwh']:.4g} kWh ({self.numbers['source']}).")

    def on_exception(self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException) -> None:
        self._finish()
        super().on_exception(trainer, pl_module, exception)

    def _finish(self) -> None:
        if self._tracker is not None:
            emissions = self._tracker.stop()
            data = self._tracker.final_emissions_data
            self.numbers.update(kwh=float(data.energy_consumed), kg_co2=float(emissions or 0.0), source="CodeCarbon")
            self._tracker = None
        elif self._begin:
            joules = spent(self._begin, read_counters())
            self.numbers.update(kwh=sum(joules.values()) / JOULES_PER_KWH, joules=joules, source=", ".join(joules))
            self._begin = {}


def read_counters(rapl: Path = RAPL) -> dict[str, float]:
    """Readable energy counters by name, in J."""
    return {**_packages(rapl), **_gpus()}


def spent(begin: dict[str, float], end: dict[str, float], rapl: Path = RAPL) -> dict[str, float]:
    """Energy used between two readings, by name, in J. A package counter that is smaller at the end has overflowed once."""
    used = {}
    for name in begin.keys() & end.keys():
        difference = end[name] - begin[name]
        if difference < 0:
            top = _number(rapl / name / "max_energy_range_uj")
            difference = difference + top * 1e-6 if top is not None else 0.0
        used[name] = difference
    return dict(sorted(used.items()))


def _packages(rapl: Path) -> dict[str, float]:
    joules = {}
    for folder in sorted(rapl.glob("intel-rapl:*")):
        if folder.name.count(":") == 1:  # parts of a package are counted within it
            value = _number(folder / "energy_uj")
            if value is not None:
                joules[folder.name] = value * 1e-6
    return joules


def _number(path: Path) -> float | None:
    try:
        return float(path.read_text())
    except (OSError, ValueError):
        return None


def _gpus() -> dict[str, float]:
    if importlib.util.find_spec("pynvml") is None:
        return {}
    import pynvml

    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return {}
    joules = {}
    for index in range(pynvml.nvmlDeviceGetCount()):
        try:
            handle = pynvml.nvmlDeviceGetHandleByIndex(index)
            joules[f"gpu:{index}"] = pynvml.nvmlDeviceGetTotalEnergyConsumption(handle) * 1e-3
        except pynvml.NVMLError:
            continue
    pynvml.nvmlShutdown()
    return joules
