"""Being asked to stop: SIGTERM or SIGUSR1 (a batch system, a shutdown) or Ctrl-C set a flag that is looked at between batches.

With several processes the signal may reach one of them only. The flag then travels with the message that every batch sends
anyway, and all ranks act on it at the same batch.
"""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Sequence
from types import FrameType, TracebackType
from typing import Any

STOPPING = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)
"""Signals that ask for a stop. SIGUSR1 is what batch systems send ahead of a time limit."""
REQUEUE = 75
"""Exit code of a run that a batch system stopped and that should be started again; EX_TEMPFAIL of sysexits.h."""


class StopRequested(Exception):
    """Training was asked to stop and everything is saved. `reason`: a plain phrase; `signal_number`: the signal, if any."""

    def __init__(self, reason: str, signal_number: int | None) -> None:
        super().__init__(reason)
        self.reason = reason
        self.signal_number = signal_number


class StopWish:
    """Whether training should stop. Inside its `with`, signals are noted instead of killing the process.

    max_seconds: wall-clock time after which it should stop as well.
    """

    def __init__(self, max_seconds: float | None) -> None:
        self._deadline = time.monotonic() + max_seconds if max_seconds is not None else None
        self._wish: StopRequested | None = None
        self._can_save = False
        self._before: dict[int, Any] = {}

    def __enter__(self) -> StopWish:
        if threading.current_thread() is threading.main_thread():
            self._before = {number: signal.getsignal(number) for number in STOPPING}
        self.listen()
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._before.clear()

    def seconds_left(self) -> float | None:
        """Until the time limit; None where there is none."""
        return None if self._deadline is None else self._deadline - time.monotonic()

    def listen(self) -> None:
        """Take over the signals, also from whoever put a handler in place since."""
        for number in self._before:
            signal.signal(number, self._note)

    def can_save_now(self) -> None:
        """Training begins: from now on Ctrl-C waits for the end of a step, too. Before, there is nothing to wait for."""
        self._can_save = True
        self.listen()

    def look(self) -> StopRequested | None:
        """The reason to stop now, if there is one."""
        if self._wish is None and self._deadline is not None and time.monotonic() > self._deadline:
            self._wish = _request(None)
        return self._wish

    def flags(self) -> tuple[float, ...]:
        """The wish as numbers that can be added up over ranks: one for each signal, one for the time limit."""
        wish = self.look()
        if wish is None:
            return (0.0,) * (len(STOPPING) + 1)
        return tuple(float(wish.signal_number == number) for number in (*STOPPING, None))

    def look_together(self, flags: Sequence[float]) -> StopRequested | None:
        """The reason to stop that follows from the flags of all ranks, the same on each."""
        for number, wishes in zip((*STOPPING, None), flags):
            if wishes > 0:
                return _request(number)
        return None

    def _note(self, number: int, frame: FrameType | None) -> None:
        if number == signal.SIGINT and (self._wish is not None or not self._can_save):
            raise KeyboardInterrupt  # asked twice, or nothing to save: do not wait for the step to end
        self._wish = _request(number)


def _request(number: int | None) -> StopRequested:
    if number is None:
        return StopRequested("trainer.max_time is over", None)
    name = "Ctrl-C" if number == signal.SIGINT else signal.Signals(number).name
    return StopRequested(f"{name} was received", int(number))
