"""When one rank fails, all ranks end within seconds, with the error message of the rank that failed first.

A rank that dies leaves the others waiting for a message that never comes. The watch notifies them; what they do then is here.
Nothing is saved: the checkpoints on disk are complete, and the same command resumes from the newest.
"""

from __future__ import annotations

import os
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NoReturn

from forgefield.errors import ForgefieldError
from forgefield.parallel.ranks import Ranks
from forgefield.parallel.watch_thread import Loss, LossKind
from forgefield.processes import Terminated

NOTICE_DELAY = 1.0
"""Seconds in which the notice of a lost rank arrives; an error that comes first may be a consequence of the loss."""
GRACE = 3.0
"""Seconds that a rank has to end by itself once another one is gone."""


def on_loss(ranks: Ranks, loss: Loss) -> None:
    """Called on every remaining rank: one of them prints what happened, and each makes sure that its process ends."""
    # Rank 0 prints for all. It prints its own error itself; that it died without one is printed by rank 1.
    if ranks.rank == (0 if loss.rank > 0 else 1) and (loss.rank > 0 or loss.text is None):
        if loss.kind is LossKind.STOPPED:
            print(loss.text, flush=True)
        else:
            if loss.kind is LossKind.ERROR:  # all ranks meet a wrong setting at about the same time
                _wait_until(lambda: ranks.error_text is not None, NOTICE_DELAY / 2)
            everywhere = loss.kind is LossKind.ERROR and loss.text == ranks.error_text
            text = f"error: {loss.text}" if everywhere else describe_loss(ranks, loss)
            print(text, file=sys.stderr, flush=True)
    _exit_soon(loss.exit_code)


def _exit_soon(code: int) -> None:
    last_resort = threading.Timer(GRACE, os._exit, args=(code,))
    last_resort.daemon = True
    last_resort.start()


def describe_loss(ranks: Ranks, loss: Loss) -> str:
    where = f"rank {loss.rank} on {loss.host}"
    if loss.text is None:
        return (
            f"error: {where} exited without an error message (killed, or out of memory?); all {ranks.world_size} processes "
            "stop. The checkpoints are complete: run the same command to resume."
        )
    if loss.kind is LossKind.ERROR:
        return f"error: {loss.text} ({where})"
    return f"{loss.text.rstrip()}\nerror: {where} failed with the error above; all {ranks.world_size} processes stop."


def announce_failure(ranks: Ranks, error: BaseException) -> None:
    """Notify all ranks that this one is about to end, unless another one is gone already. Once per process.

    The exit code of all ranks is then 2 for an error that the user can correct, as in one process, and 1 for any other.
    """
    if ranks.watch is None or ranks.error_text is not None:
        return
    watch = ranks.watch
    expected = isinstance(error, ForgefieldError)
    text = str(error) if expected else "".join(traceback.format_exception(error))
    if not expected:
        _wait_until(lambda: watch.loss is not None, NOTICE_DELAY)
    ranks.failed_first = watch.loss is None
    ranks.error_text, ranks.error_code = text, 2 if expected else 1
    if ranks.failed_first:
        watch.fail(text, LossKind.ERROR if expected else LossKind.EXCEPTION, ranks.error_code)


def stop_all_ranks(ranks: Ranks, message: str, code: int) -> None:
    """Stop all ranks at once, wherever they are; nothing is saved. With several ranks this does not return.

    message: what rank 0 prints where this is another rank. code: exit code.
    """
    if ranks.watch is None:
        return
    if ranks.error_text is None and ranks.watch.loss is None:
        ranks.error_text, ranks.error_code = message, code
        ranks.watch.fail(message, LossKind.STOPPED, code)
    time.sleep(NOTICE_DELAY)  # rank 0 is printing; once this process is gone, a launcher may kill it
    exit_immediately(code)


@contextmanager
def abort_all_on_error(ranks: Ranks) -> Iterator[None]:
    """Inside the block an exception on one rank ends all ranks. It is raised on rank 0 if it happened there first; every other
    rank exits here without a message, because rank 0 prints for all."""
    if ranks.watch is None:
        yield
        return
    try:
        yield
    except Terminated as stopped:
        stop_all_ranks(ranks, f"stopped by {stopped}", stopped.exit_code)
        raise
    except BaseException as error:
        announce_failure(ranks, error)
        if ranks.failed_first and ranks.is_rank_zero:
            raise
        time.sleep(NOTICE_DELAY)  # rank 0 is printing; once this process is gone, a launcher may kill it
        loss = ranks.watch.loss
        exit_immediately(loss.exit_code if loss is not None else ranks.error_code)


def exit_immediately(code: int) -> NoReturn:
    """End the process without waiting for anything that may wait for a rank that is gone."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _wait_until(condition: Callable[[], bool], seconds: float) -> None:
    end = time.monotonic() + seconds
    while time.monotonic() < end and not condition():
        time.sleep(0.02)
