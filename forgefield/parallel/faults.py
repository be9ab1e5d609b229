"""When one rank fails, all end: within seconds, and with the words of the one that failed first.

A rank that dies leaves the others waiting for a message that never comes. The watch tells them; what they do then is here.
Nothing
is saved on this way out: the checkpoints on disk are whole, and the same command goes on from the newest.
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
from forgefield.parallel.group import Ranks
from forgefield.parallel.watch import Loss

MOMENT = 1.0
"""Seconds in which the news of a lost rank arrives; an error that comes first may be its consequence."""
GRACE = 3.0
"""Seconds that a rank has to end by itself once another one is gone."""
_ERROR = "error: "


def on_loss(ranks: Ranks, loss: Loss) -> None:
    """Called on every remaining rank: say it once, then see to it that this process ends."""
    if ranks.rank == (1 if loss.rank == 0 else 0):
        if exit_code(loss.text) == 2:  # a wrong setting is met by all ranks at about the same time
            _wait_until(lambda: ranks.own_error is not None, MOMENT / 2)
        text = loss.text if loss.text is not None and loss.text == ranks.own_error else describe_loss(ranks, loss)
        print(text, file=sys.stderr, flush=True)
    last_resort = threading.Timer(GRACE, os._exit, args=(exit_code(loss.text),))
    last_resort.daemon = True
    last_resort.start()


def describe_loss(ranks: Ranks, loss: Loss) -> str:
    where = f"rank {loss.rank} on {loss.host}"
    if loss.text is None:
        return (
            f"{_ERROR}{where} ended without a word (killed, or out of memory?); all {ranks.world_size} processes stop. "
            "The checkpoints are whole: run the same command to go on."
        )
    if loss.text.startswith(_ERROR):
        return f"{loss.text} ({where})"
    return f"{loss.text.rstrip()}\n{_ERROR}{where} failed with the error above; all {ranks.world_size} processes stop."


def exit_code(text: str | None) -> int:
    """2 for something the user can mend, as in one process; 1 for all else."""
    return 2 if text is not None and text.startswith(_ERROR) else 1


@contextmanager
def failing_together(ranks: Ranks) -> Iterator[None]:
    """Inside the block an exception on one rank ends all ranks. It is raised on rank 0 if it happened there; every other
    rank ends here, in silence, because rank 0 speaks for all."""
    if ranks.watch is None:
        yield
        return
    try:
        yield
    except BaseException as error:
        if ranks.own_error is not None:
            raise  # it has been told already, further inside
        watch = ranks.watch
        expected = isinstance(error, ForgefieldError)
        text = ranks.own_error = f"{_ERROR}{error}" if expected else traceback.format_exc()
        if not expected:
            _wait_until(lambda: watch.loss is not None, MOMENT)
        loss = watch.loss
        if loss is None:
            watch.fail(text)
            if ranks.is_first:
                raise
            leave_at_once(exit_code(text))
        # `on_loss` has been called, or is being called in its thread, and prints; a moment later nothing is left to say.
        time.sleep(MOMENT)
        leave_at_once(exit_code(loss.text))


def leave_at_once(code: int) -> NoReturn:
    """End the process without waiting for anything that may wait for a rank that is gone."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _wait_until(condition: Callable[[], bool], seconds: float) -> None:
    end = time.monotonic() + seconds
    while time.monotonic() < end and not condition():
        time.sleep(0.02)
