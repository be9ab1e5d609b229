"""Being asked to stop by SIGTERM or SIGUSR1 (a batch system, a shutdown), Ctrl-C or a time limit.

During training steps a request is noted and acted on between batches, when everything can be saved. Where there is nothing to
save (reading data, waiting for the first batch, compiling, the final evaluation) it ends what is going on at once.

With several processes the signal may reach one of them only. A noted request then travels with the message that every batch
sends anyway, and all ranks act on it at the same batch; an immediate stop is passed on by `parallel.faults.stop_all_ranks`.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from types import FrameType, TracebackType
from typing import Any

from forgefield.processes import STUCK_AFTER_S, descendants, end_process, hearing_signals, kill

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


class StopNow(BaseException):
    """Raised by a signal where there is nothing to save. `request`: why."""

    def __init__(self, request: StopRequested) -> None:
        super().__init__(request.reason)
        self.request = request


STARTING, TRAINING, AT_ONCE = "starting", "training", "at once"
_SETTLE_S = 0.2
"""A signal to a group of processes may end a compiler a moment before it reaches this one."""


class StopControl:
    """Whether training should stop. Inside its `with`, signals are handled here instead of killing the process.

    max_seconds: wall-clock time after which it should stop as well. requeue_exit: exit code after a batch system's signal.
    """

    def __init__(self, max_seconds: float | None, *, requeue_exit: int = REQUEUE) -> None:
        self._deadline = time.monotonic() + max_seconds if max_seconds is not None else None
        self._requeue_exit = requeue_exit
        self._wish: StopRequested | None = None
        self._phase = STARTING
        self._before: dict[int, Any] = {}
        self._heard = threading.Event()
        self._stack = ExitStack()

    def __enter__(self) -> StopControl:
        if threading.current_thread() is threading.main_thread():
            self._before = {number: signal.getsignal(number) for number in STOPPING}
            self._stack.enter_context(hearing_signals(self._end_if_stuck))
        self.listen()
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._phase = TRAINING
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._before.clear()
        self._stack.close()

    def seconds_left(self) -> float | None:
        """Until the time limit; None where there is none."""
        return None if self._deadline is None else self._deadline - time.monotonic()

    def listen(self) -> None:
        """Take over the signals, also from whoever put a handler in place since."""
        for number in self._before:
            signal.signal(number, self._note)

    def on_training_start(self) -> None:
        """Until the first batch is there, a stop still happens at once, Ctrl-C included."""
        self._phase = AT_ONCE
        self.listen()

    def on_first_batch(self) -> None:
        """From now on a stop waits for the end of a batch, when everything is saved."""
        self._phase = TRAINING

    @contextmanager
    def at_once(self) -> Iterator[None]:
        """Inside the block a signal ends what is going on, and the block ends with `StopNow`, whatever else was raised in it.
        Processes that were started inside (compilers) are then killed."""
        phase, before = self._phase, descendants()
        try:
            self._phase = AT_ONCE
            self._require_no_signal()
            yield
        except Exception:
            self._phase = phase
            time.sleep(_SETTLE_S)
            if not self._was_signalled:
                raise
        except StopNow:
            pass
        finally:
            self._phase = phase
            if self._was_signalled:
                kill(descendants() - before)
        self._require_no_signal()

    @property
    def _was_signalled(self) -> bool:
        return self._wish is not None and self._wish.signal_number is not None

    def _require_no_signal(self) -> None:
        if self._was_signalled:
            assert self._wish is not None
            raise StopNow(self._wish)

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

    def combined_request(self, flags: Sequence[float]) -> StopRequested | None:
        """The reason to stop that follows from the flags of all ranks, the same on each."""
        for number, wishes in zip((*STOPPING, None), flags):
            if wishes > 0:
                return _request(number)
        return None

    def _note(self, number: int, frame: FrameType | None) -> None:
        self._heard.set()
        is_first = self._wish is None
        if number == signal.SIGINT and (not is_first or self._phase == STARTING):
            raise KeyboardInterrupt  # asked twice, or nothing has begun
        if is_first:
            self._wish = _request(number)
            if self._phase != TRAINING:
                raise StopNow(self._wish)

    def _end_if_stuck(self, number: int) -> None:
        """Called in another thread: the main thread may be in compiled code that takes minutes."""
        if number not in self._before or signal.getsignal(number) != self._note or self._phase == TRAINING:
            return
        if not self._heard.wait(STUCK_AFTER_S):
            code = exit_code(_request(number), self._requeue_exit)
            end_process(code, f"Stopped: {_request(number).reason}. Run the same command to resume.")


def exit_code(stopped: StopRequested, requeue_exit: int) -> int:
    """A time limit the user set is a success, Ctrl-C is what a shell reports, a batch system gets the code to start again."""
    if stopped.signal_number is None:
        return 0
    return 128 + signal.SIGINT if stopped.signal_number == signal.SIGINT else requeue_exit


def _request(number: int | None) -> StopRequested:
    if number is None:
        return StopRequested("trainer.max_time is over", None)
    name = "Ctrl-C" if number == signal.SIGINT else signal.Signals(number).name
    return StopRequested(f"{name} was received", int(number))


def ask_slurm_to_requeue(notify: Callable[[str], None]) -> None:
    """Called after SIGUSR1, the warning that `sbatch --signal=USR1@SECONDS` asks for. Outside of SLURM it does nothing."""
    job = os.environ.get("SLURM_JOB_ID")
    if job is None:
        return
    if "SLURM_ARRAY_JOB_ID" in os.environ:
        job = f"{os.environ['SLURM_ARRAY_JOB_ID']}_{os.environ['SLURM_ARRAY_TASK_ID']}"
    if shutil.which("scontrol") is None:
        notify(f"scontrol is not to be found here, so SLURM could not be asked to requeue job {job}.")
        return
    asked = subprocess.run(["scontrol", "requeue", job], capture_output=True, text=True, check=False)
    if asked.returncode == 0:
        notify(f"SLURM was asked to requeue job {job}; it will go on from here.")
    else:
        notify(f"SLURM would not requeue job {job}: {asked.stderr.strip() or asked.stdout.strip()}")
