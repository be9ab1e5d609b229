"""How fast training goes: frames and atoms per second of training proper, validation not counted."""

from __future__ import annotations

import time


class Throughput:
    """Counts batches and the time between `resume` and `pause`. Nothing is read from the device."""

    def __init__(self) -> None:
        self._frames = self._atoms = 0
        self._seconds = 0.0
        self._since: float | None = None

    def resume(self) -> None:
        if self._since is None:
            self._since = time.perf_counter()

    def pause(self) -> None:
        if self._since is not None:
            self._seconds += time.perf_counter() - self._since
            self._since = None

    def count(self, *, n_frames: int, n_atoms: int) -> None:
        self.resume()
        self._frames += n_frames
        self._atoms += n_atoms

    @property
    def seconds(self) -> float:
        return self._seconds + (time.perf_counter() - self._since if self._since is not None else 0.0)

    @property
    def frames_per_second(self) -> float | None:
        return self._frames / self.seconds if self._frames and self.seconds > 0 else None

    @property
    def atoms_per_second(self) -> float | None:
        return self._atoms / self.seconds if self._atoms and self.seconds > 0 else None

    def take(self) -> dict[str, float | int | None]:
        """The counts since the last call, and a fresh start."""
        row = {
            "seconds": self.seconds,
            "frames": self._frames,
            "atoms": self._atoms,
            "frames_per_second": self.frames_per_second,
            "atoms_per_second": self.atoms_per_second,
        }
        running = self._since is not None
        self._frames = self._atoms = 0
        self._seconds, self._since = 0.0, None
        if running:
            self.resume()
        return row
