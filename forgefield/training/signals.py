"""Being asked to stop: SIGTERM (a batch system, a shutdown) or Ctrl-C set a flag that is looked at between two batches."""

from __future__ import annotations

import signal
import threading
import time
from types import FrameType, TracebackType
from typing import Any


class StopRequested(Exception):
    """Training was asked to stop and everything is saved. `reason`: a plain phrase; `signal_number`: the signal, if any."""

    def __init__(self, reason: str, signal_number: int | None) -> None:
        super().__init__(reason)
        self.reason = reason
        self.signal_number = signal_number

    @property
    def exit_code(self) -> int:
        """As a shell reports it: 128 + signal; a time limit the user set is a success."""
        return 0 if self.signal_number is None else 128 + self.signal_number


class StopWish:
    """Whether training should stop. Inside its `with`, signals are noted instead of killing the process.

    max_seconds: wall-clock time after which it should stop as well.
    """

    def __init__(self, max_seconds: float | None) -> None:
        self._deadline = time.monotonic() + max_seconds if max_seconds is not None else None
        self._wish: StopRequested | None = None
        self._before: dict[int, Any] = {}

    def __enter__(self) -> StopWish:
        if threading.current_thread() is threading.main_thread():
            self._before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
        self.listen()
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._before.clear()

    def listen(self) -> None:
        """Take over the signals, also from whoever put a handler in place since."""
        for number in self._before:
            signal.signal(number, self._note)

    def look(self) -> StopRequested | None:
        """The reason to stop now, if there is one."""
        if self._wish is None and self._deadline is not None and time.monotonic() > self._deadline:
            self._wish = StopRequested("trainer.max_time is over", None)
        return self._wish

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self._wish is not None and number == signal.SIGINT:
            raise KeyboardInterrupt  # asked twice: do not wait for the step to end
        name = "Ctrl-C" if number == signal.SIGINT else signal.Signals(number).name
        self._wish = StopRequested(f"{name} was received", int(number))
