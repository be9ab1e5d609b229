"""Serve a live page of all runs in a folder: curves, comparison, diagnosis, log, and buttons to stop or to checkpoint.

The page is served on 127.0.0.1 only, and its address contains a random token. On another machine, forward the port with
`ssh -L PORT:127.0.0.1:PORT MACHINE` and open the same address. Ctrl-C ends the server; runs are not affected.
"""

from __future__ import annotations

import argparse
import threading

from forgefield.cli.importing import for_good
from forgefield.errors import ForgefieldError

EXAMPLES = """\
examples:
  forgefield watch                 all runs in runs/
  forgefield watch runs/water      the same, with this run shown first
  forgefield watch my-search/trials --open
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.epilog = EXAMPLES
    parser.add_argument(
        "run", metavar="RUN|FOLDER", nargs="?", default="runs", help="run, or folder of runs (default: runs)"
    )
    parser.add_argument(
        "--port", type=int, default=None, help="port of the page (default: the first free one from 8642 on)"
    )
    parser.add_argument("--open", action="store_true", help="open the page in a browser")


def run(args: argparse.Namespace) -> int:
    if args.port is not None and not 0 < args.port < 65536:
        raise ForgefieldError(f"--port must be between 1 and 65535, not {args.port}.")
    with for_good():
        from forgefield.report.live.verbs import watch

    with watch(args.run, port=args.port) as page:
        print(f"Live page of {page.folder}: {page.address}", flush=True)
        print(
            f"On another machine: ssh -L {page.port}:127.0.0.1:{page.port} this-machine, then open the same address. "
            "Ctrl-C ends the page, not the runs.",
            flush=True,
        )
        if args.open:
            import webbrowser

            webbrowser.open(page.address)
        threading.Event().wait()
    return 0
