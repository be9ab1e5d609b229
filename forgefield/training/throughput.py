"""How fast training goes: samples per second of training proper, validation not counted."""

from __future__ import annotations

import time


class Throughput:
    """Counts samples, of each kind in `samples` (frames, atoms, points), and the time between `resume` and `pause`. Nothing is
    read from the device."""

    def __init__(self, samples: tuple[str, ...] = ("frames", "atoms")) -> None:
        self.samples = samples
        self._counts = dict.fromkeys(samples, 0)
        self._seconds = 0.0
        self._since: float | None = None

    @property
    def columns(self) -> list[str]:
        """Keys of what `take` gives."""
        return ["seconds", *self.samples, *(f"{name}_per_second" for name in self.samples)]

    def resume(self) -> None:
        if self._since is None:
            self._since = time.perf_counter()

    def pause(self) -> None:
        if self._since is not None:
            self._seconds += time.perf_counter() - self._since
            self._since = None

    def count(self, **counts: int) -> None:
        """counts: further samples of each kind."""
        self.resume()
        for name in self.samples:
            self._counts[name] += counts[name]

    @property
    def seconds(self) -> float:
        return self._seconds + (time.perf_counter() - self._since if self._since is not None else 0.0)

    def per_second(self, name: str) -> float | None:
        """Rate of one kind of sample; None where nothing was counted, or nothing of that kind is."""
        count = self._counts.get(name, 0)
        return count / self.seconds if count and self.seconds > 0 else None

    @property
    def frames_per_second(self) -> float | None:
        return self.per_second("frames")

    @property
    def atoms_per_second(self) -> float | None:
        return self.per_second("atoms")

    @property
    def points_per_second(self) -> float | None:
        return self.per_second("points")

    def take(self) -> dict[str, float | int | None]:
        """The counts since the last call, and a fresh start."""
        row: dict[str, float | int | None] = {"seconds": self.seconds, **self._counts}
        row |= {f"{name}_per_second": self.per_second(name) for name in self.samples}
        running = self._since is not None
        self._counts = dict.fromkeys(self.samples, 0)
        self._seconds, self._since = 0.0, None
        if running:
            self.resume()
        return row
