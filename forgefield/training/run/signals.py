"""Requests to stop: SIGTERM or SIGUSR1 (from a batch system, or a shutdown), Ctrl-C, or a time limit; SIGUSR2 requests a
checkpoint.

During training steps a request is stored and acted on between batches, when everything can be saved. When there is nothing to
save (while data is read, before the first batch, while code is compiled, in the final evaluation) the training stops at once.

With several processes the signal may reach only one of them. A stored request is sent with the message of every batch, and all
ranks act on it at the same batch; an immediate stop is passed on by `parallel.session.stop_all_ranks`.
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
from typing import TypeAlias

from forgefield.processes import STUCK_AFTER_S, descendants, end_process, hearing_signals, kill

Handler: TypeAlias = "Callable[[int, FrameType | None], object] | int | None"

STOPPING = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)
"""Signals that request a stop. Batch systems send SIGUSR1 before a time limit."""
CHECKPOINT = signal.SIGUSR2
"""The signal that requests a checkpoint; the training continues."""
REQUEUE = 75
"""Exit code of a run that a batch system stopped and that should be started again; EX_TEMPFAIL of sysexits.h."""


class StopRequested(Exception):
    """A stop was requested and everything is saved. reason: a phrase for messages. signal_number: the signal, if any."""

    def __init__(self, reason: str, signal_number: int | None) -> None:
        super().__init__(reason)
        self.reason = reason
        self.signal_number = signal_number


class StopNow(BaseException):
    """Raised by a signal when there is nothing to save."""

    def __init__(self, request: StopRequested) -> None:
        super().__init__(request.reason)
        self.request = request


STARTING, TRAINING, AT_ONCE = "starting", "training", "at once"
_SETTLE_S = 0.2
"""A signal to a group of processes may end a compiler shortly before it reaches this process."""


class StopControl:
    """Handles requests to stop. Inside its `with` block, signals do not end the process.

    max_seconds: wall-clock limit of the training.
    requeue_exit: exit code after a signal of a batch system.
    """

    def __init__(self, max_seconds: float | None, *, requeue_exit: int = REQUEUE) -> None:
        self._deadline = time.monotonic() + max_seconds if max_seconds is not None else None
        self._requeue_exit = requeue_exit
        self._request: StopRequested | None = None
        self._wants_checkpoint = False
        self._phase = STARTING
        self._before: dict[int, Handler] = {}
        self._received = threading.Event()
        self._stack = ExitStack()

    def __enter__(self) -> StopControl:
        if threading.current_thread() is threading.main_thread():
            self._before = {number: signal.getsignal(number) for number in (*STOPPING, CHECKPOINT)}
            self._stack.enter_context(hearing_signals(self._end_if_stuck))
        self.listen()
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._phase = TRAINING
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._before.clear()
        self._stack.close()

    @property
    def hears_signals(self) -> bool:
        """Whether the handlers are installed, which Python allows in the main thread only."""
        return bool(self._before)

    def seconds_left(self) -> float | None:
        """Seconds until the time limit; None without limit."""
        return None if self._deadline is None else self._deadline - time.monotonic()

    def listen(self) -> None:
        """Install the signal handlers, also in place of handlers that were installed later."""
        for number in self._before:
            signal.signal(number, self._handle if number in STOPPING else self._note_checkpoint)

    def on_training_start(self) -> None:
        """Until the first batch a request, Ctrl-C included, stops the training at once."""
        self._phase = AT_ONCE
        self.listen()

    def on_first_batch(self) -> None:
        """From now on a request waits for the end of a batch, when everything is saved."""
        self._phase = TRAINING

    @contextmanager
    def at_once(self) -> Iterator[None]:
        """Inside the block a signal stops the training at once: the block ends with `StopNow`, also if it raises another
        exception, and processes that were started inside (compilers) are killed."""
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
        return self._request is not None and self._request.signal_number is not None

    def _require_no_signal(self) -> None:
        if self._request is not None and self._request.signal_number is not None:
            raise StopNow(self._request)

    def request(self) -> StopRequested | None:
        """The request to stop of this rank, if any."""
        if self._request is None and self._deadline is not None and time.monotonic() > self._deadline:
            self._request = _stop_request(None)
        return self._request

    def flags(self) -> tuple[float, ...]:
        """The requests as numbers that can be summed over ranks: to stop, one for each signal and one for the time limit; and
        for a checkpoint."""
        request = self.request()
        stop = (request is not None and request.signal_number == number for number in (*STOPPING, None))
        return tuple(map(float, (*stop, self._wants_checkpoint)))

    def combined_request(self, flags: Sequence[float]) -> StopRequested | None:
        """The request to stop of any rank, the same on all. flags: summed over ranks."""
        for number, count in zip((*STOPPING, None), flags):
            if count > 0:
                return _stop_request(number)
        return None

    def wants_checkpoint(self, flags: Sequence[float] | None = None) -> bool:
        """Whether a checkpoint was requested, on this rank or, with `flags` summed over ranks, on any."""
        return self._wants_checkpoint if flags is None else bool(flags and flags[len(STOPPING) + 1])

    def checkpoint_is_saved(self) -> None:
        """The state after the request is saved; called on all ranks."""
        self._wants_checkpoint = False

    def _note_checkpoint(self, number: int, frame: FrameType | None) -> None:
        self._wants_checkpoint = True

    def _handle(self, number: int, frame: FrameType | None) -> None:
        self._received.set()
        is_first = self._request is None
        if number == signal.SIGINT and (not is_first or self._phase == STARTING):
            raise KeyboardInterrupt  # the second Ctrl-C, or nothing has been computed yet
        if is_first:
            self._request = _stop_request(number)
            if self._phase != TRAINING:
                raise StopNow(self._request)

    def _end_if_stuck(self, number: int) -> None:
        """Called in another thread, because the main thread may be in compiled code that takes minutes."""
        if number not in self._before or signal.getsignal(number) != self._handle or self._phase == TRAINING:
            return
        if not self._received.wait(STUCK_AFTER_S):
            request = _stop_request(number)
            end_process(
                exit_code(request, self._requeue_exit), f"Stopped: {request.reason}. Run the same command to resume."
            )


def exit_code(stopped: StopRequested, requeue_exit: int) -> int:
    """0 after a time limit, 130 after Ctrl-C as in a shell, and `requeue_exit` after a signal of a batch system."""
    if stopped.signal_number is None:
        return 0
    return 128 + signal.SIGINT if stopped.signal_number == signal.SIGINT else requeue_exit


def _stop_request(number: int | None) -> StopRequested:
    """number: of the signal; None for the time limit."""
    if number is None:
        return StopRequested("trainer.max_time is over", None)
    name = "Ctrl-C" if number == signal.SIGINT else signal.Signals(number).name
    return StopRequested(f"{name} was received", int(number))


def ask_slurm_to_requeue(notify: Callable[[str], None]) -> None:
    """Called after SIGUSR1, which `sbatch --signal=USR1@SECONDS` sends. Outside of SLURM it does nothing."""
    job = os.environ.get("SLURM_JOB_ID")
    if job is None:
        return
    if "SLURM_ARRAY_JOB_ID" in os.environ:
        job = f"{os.environ['SLURM_ARRAY_JOB_ID']}_{os.environ['SLURM_ARRAY_TASK_ID']}"
    if shutil.which("scontrol") is None:
        notify(f"Job {job} was not requeued, because scontrol was not found.")
        return
    result = subprocess.run(["scontrol", "requeue", job], capture_output=True, text=True, check=False)
    if result.returncode == 0:
        notify(f"SLURM requeues job {job}; it will resume from here.")
    else:
        notify(f"SLURM did not requeue job {job}: {result.stderr.strip() or result.stdout.strip()}")
