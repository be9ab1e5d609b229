"""When one rank fails, all end: within seconds, and with the words of the one that failed first.

A rank that dies leaves the others waiting for a message that never comes. The watch tells them; what they do then is here.
Nothing
is saved on this way out: the checkpoints on disk are whole, and the same command goes on from the newest.
"""

from __future__ import annotations

import os
import re
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NoReturn

from forgefield.errors import ForgefieldError
from forgefield.parallel.ranks import Ranks
from forgefield.parallel.watch_thread import Loss
from forgefield.processes import Terminated

MOMENT = 1.0
"""Seconds in which the news of a lost rank arrives; an error that comes first may be its consequence."""
GRACE = 3.0
"""Seconds that a rank has to end by itself once another one is gone."""
_ERROR = "error: "
_STOPPED = re.compile(r"stopped with exit code (\d+): ")


def on_loss(ranks: Ranks, loss: Loss) -> None:
    """Called on every remaining rank: say it once, then see to it that this process ends."""
    # Rank 0 speaks for all. Of its own error it speaks itself; that it ended without a word is for rank 1 to say.
    if ranks.rank == (0 if loss.rank > 0 else 1) and (loss.rank > 0 or loss.text is None):
        if loss.text is not None and (stopped := _STOPPED.match(loss.text)):
            print(loss.text[stopped.end() :], flush=True)
            _end_soon(exit_code(loss.text))
            return
        if exit_code(loss.text) == 2:  # a wrong setting is met by all ranks at about the same time
            _wait_until(lambda: ranks.own_error is not None, MOMENT / 2)
        text = loss.text if loss.text is not None and loss.text == ranks.own_error else describe_loss(ranks, loss)
        print(text, file=sys.stderr, flush=True)
    _end_soon(exit_code(loss.text))


def _end_soon(code: int) -> None:
    last_resort = threading.Timer(GRACE, os._exit, args=(code,))
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
    """2 for something the user can mend, as in one process; that of a stop on request; 1 for all else."""
    if text is not None and (stopped := _STOPPED.match(text)):
        return int(stopped[1])
    return 2 if text is not None and text.startswith(_ERROR) else 1


def tell_failure(ranks: Ranks, error: BaseException) -> None:
    """Have all ranks know that this one is about to end, unless another one has gone before. Once per process."""
    if ranks.watch is None or ranks.own_error is not None:
        return
    watch = ranks.watch
    expected = isinstance(error, ForgefieldError)
    text = f"{_ERROR}{error}" if expected else "".join(traceback.format_exception(error))
    if not expected:
        _wait_until(lambda: watch.loss is not None, MOMENT)
    ranks.failed_first = watch.loss is None
    ranks.own_error = text
    if ranks.failed_first:
        watch.fail(text)


def stop_together(ranks: Ranks, sentence: str, code: int) -> None:
    """Stop all ranks at once, wherever they are; nothing is saved. With several ranks this does not return.

    sentence: what rank 0 tells the user where this is another rank.
    """
    if ranks.watch is None:
        return
    if ranks.own_error is None and ranks.watch.loss is None:
        ranks.own_error = f"stopped with exit code {code}: {sentence}"
        ranks.watch.fail(ranks.own_error)
    time.sleep(MOMENT)  # rank 0 is printing; once this process has gone, a launcher may kill it
    leave_at_once(code)


@contextmanager
def failing_together(ranks: Ranks) -> Iterator[None]:
    """Inside the block an exception on one rank ends all ranks. It is raised on rank 0 if it happened there first; every other
    rank ends here, in silence, because rank 0 speaks for all."""
    if ranks.watch is None:
        yield
        return
    try:
        yield
    except Terminated as stopped:
        stop_together(ranks, f"stopped by {stopped}", stopped.exit_code)
        raise
    except BaseException as error:
        tell_failure(ranks, error)
        if ranks.failed_first and ranks.is_first:
            raise
        time.sleep(MOMENT)  # rank 0 is printing; once this process has gone, a launcher may kill it
        loss = ranks.watch.loss
        leave_at_once(exit_code(loss.text if loss is not None else ranks.own_error))


def leave_at_once(code: int) -> NoReturn:
    """End the process without waiting for anything that may wait for a rank that is gone."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _wait_until(condition: Callable[[], bool], seconds: float) -> None:
    end = time.monotonic() + seconds
    while time.monotonic() < end and not condition():
        time.sleep(0.02)
