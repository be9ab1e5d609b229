"""A loss of the user's own whose module gets a signal while it is imported: that is, before training begins."""

import os
import signal
import time

if os.environ.get("SIGNAL_ON_IMPORT") and os.environ.get("RANK", "0") == os.environ.get("SIGNAL_RANK", "0"):
    os.kill(os.getpid(), signal.Signals[os.environ["SIGNAL_ON_IMPORT"]])
    time.sleep(0.1)


def squared(prediction, target):
    return (prediction - target).square()
