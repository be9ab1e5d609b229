"""The `forgefield` command: one module per verb, imported only when it is used.

A verb's module has `add_arguments(parser)` and `run(args) -> int`. Errors that the user can fix end as one line on
stderr and exit code 2, an interrupt from the keyboard as exit code 130, SIGTERM as 143.
"""

from __future__ import annotations

import argparse
import importlib
import os
import signal
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import NoReturn

from forgefield._version import __version__
from forgefield.cli.arguments import is_override
from forgefield.config.nearest import did_you_mean
from forgefield.config.peer_terms import option_hint
from forgefield.deferred_imports import defer_torchmetrics
from forgefield.errors import ForgefieldError, missing_package
from forgefield.processes import Terminated, terminating

VERBS = {
    "init": ("init", "write a commented config for your data"),
    "train": ("train", "train a model from a config, or resume a run; without a config: the built-in example"),
    "tune": ("tune", "search for good settings with many trainings, ending unpromising ones early (needs Optuna)"),
    "test": ("test", "measure the errors of a trained model on labelled data, in physical units"),
    "predict": ("predict", "predict energies, forces and stress of the structures in a file"),
    "uncertainty": ("uncertainty", "compute the uncertainties of a trained model from its training data"),
    "select": ("select", "choose structures of a pool to compute next: where the model is unsure"),
    "md": ("md", "molecular dynamics with a trained model, continued exactly after an interruption"),
    "relax": ("relax", "relax structures, and their cells, with a trained model"),
    "learn": ("learn", "active learning: explore, select, label, train and repeat, resumable at any stage"),
    "evaluate": ("evaluate", "test the physics: elastic constants, phonons, stability, liquids, next to a reference"),
    "check": ("check", "check symmetry, exact derivatives and smoothness of your model on your data"),
    "data": ("data", "inspect data, convert it to a store, select a small sample"),
    "bench": ("bench", "measure the speed of each engine, its scaling, and the memory it needs"),
    "watch": ("watch", "a live page of all runs in a folder: curves, comparison, log, and buttons to stop or save"),
    "runs": ("runs", "list the runs in a folder with their state and errors"),
    "compare": ("compare", "compare the errors and settings of runs"),
    "report": ("report", "rewrite the report of a run, a self-contained HTML page"),
    "convert-config": (
        "convert_config",
        "convert an input of DeePMD-kit, NequIP or Allegro to a Forgefield config",
    ),
    "import": ("import_", "import a model of another program as a run"),
    "export": ("export", "export the model of a run for another program"),
    "lammps": ("lammps", "run a LAMMPS input file with pair_style forgefield"),
    "completion": ("completion", "print a script that completes commands in bash, zsh or fish"),
}

EXAMPLES = """\
examples:
  forgefield train                                   the built-in example, about half a minute on two cores
  forgefield init water.extxyz                       writes water.yaml
  forgefield train water.yaml training.lr=3e-3 ++trainer.max_epochs=200
  forgefield test runs/water --data test.extxyz
  forgefield predict runs/water new.extxyz -o out.extxyz

`forgefield VERB --help` explains a verb. `--debug` shows where an error was raised.
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code."""
    words = list(sys.argv[1:] if argv is None else argv)
    debug = "--debug" in words
    words = [word for word in words if word != "--debug"]
    defer_torchmetrics()
    with _noticing_interrupts() as interrupted:
        try:
            with terminating():
                return _dispatch(words)
        except SystemExit as leave:  # argparse has printed its message
            return leave.code if isinstance(leave.code, int) else int(leave.code is not None)
        except (Exception, KeyboardInterrupt, Terminated) as error:
            if debug:
                raise
            if isinstance(error, Terminated):
                print(f"stopped by {error}", file=sys.stderr)
                return error.exit_code
            if interrupted.is_set() or isinstance(error, KeyboardInterrupt):
                print("interrupted", file=sys.stderr)
                return 130
            sentence = missing_package(error) if isinstance(error, ImportError) else None
            if sentence is None and not isinstance(error, ForgefieldError):
                raise
            print(f"error: {sentence or error}", file=sys.stderr)
            return 2


@contextmanager
def _noticing_interrupts() -> Iterator[threading.Event]:
    """An event that is set when Ctrl-C was pressed: an interrupted import may fail with an error of any other type."""
    interrupted = threading.Event()

    def interrupt(number: int, frame: FrameType | None) -> NoReturn:
        interrupted.set()
        raise KeyboardInterrupt

    if signal.getsignal(signal.SIGINT) is not signal.default_int_handler or (
        threading.current_thread() is not threading.main_thread()
    ):
        yield interrupted
        return
    signal.signal(signal.SIGINT, interrupt)
    try:
        yield interrupted
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def _dispatch(words: list[str]) -> int:
    verb = words[0] if words else "--help"
    if verb in ("-h", "--help", "help"):
        print(_overview(), end="")
        return 0
    if verb in ("-V", "--version"):
        print(f"forgefield {__version__}")
        return 0
    if verb not in VERBS:
        kind = "option" if verb.startswith("-") else "verb"
        hint = did_you_mean(verb, VERBS) or f" Verbs: {', '.join(VERBS)}."
        raise ForgefieldError(f"unknown {kind} '{verb}'.{hint}")
    _refuse_company(verb)
    name, description = VERBS[verb]
    module = importlib.import_module(f"forgefield.cli.{name}")
    parser = Parser(prog=f"forgefield {verb}", description=module.__doc__ or description)
    module.add_arguments(parser)
    parse = vars(module).get("parse", Parser.parse)
    return int(module.run(parse(parser, words[1:])))


TOGETHER = ("train", "test", "bench", "lammps")
"""Verbs that several processes can run as one."""


def _refuse_company(verb: str) -> None:
    """A verb that runs in one process would be run once by every process of a launcher, all writing the same files."""
    if verb in TOGETHER:
        return
    from forgefield.parallel.launch import detect_launch

    launch = detect_launch(os.environ)
    if launch.world_size > 1:
        raise ForgefieldError(
            f"forgefield {verb} runs in one process, and {launch.world_size} were started by {launch.launcher}; "
            f"{', '.join(TOGETHER)} can use them."
        )


def _overview() -> str:
    width = max(map(len, VERBS))
    verbs = "\n".join(f"  {verb:<{width}}  {text}" for verb, (_, text) in VERBS.items())
    return (
        f"Forgefield {__version__}: train atomistic models, exactly and fast.\n\n"
        f"usage: forgefield VERB ...\n\nverbs:\n{verbs}\n\n{EXAMPLES}"
    )


REQUIRED = "the following arguments are required: "
"""How argparse begins the message about missing arguments."""


def _is_set(action: argparse.Action, words: Sequence[str]) -> bool:
    """Whether an option is among the words of a command: `--out FILE`, `--out=FILE`, `-o FILE` or `-oFILE`.

    True for positional arguments, which argparse reports itself.
    """
    short = tuple(option for option in action.option_strings if not option.startswith("--"))
    return not action.option_strings or any(
        word.partition("=")[0] in action.option_strings or (bool(short) and word.startswith(short)) for word in words
    )


class Parser(argparse.ArgumentParser):
    """argparse that takes options anywhere, accepts no abbreviations and names the nearest valid option."""

    def __init__(
        self,
        *,
        prog: str | None = None,
        description: str | None = None,
        formatter_class: type[argparse.HelpFormatter] = argparse.RawDescriptionHelpFormatter,
    ) -> None:
        super().__init__(prog=prog, description=description, formatter_class=formatter_class, allow_abbrev=False)
        self._missing: list[argparse.Action] = []

    def parse(self, words: list[str]) -> argparse.Namespace:
        """All of `words`; overrides and options may stand in any order."""
        # argparse cannot mix positions freely where a verb has verbs of its own.
        if self._subparsers is not None:
            return self.parse_args(words)
        if not {"-h", "--help"} & set(words):
            # argparse would report missing options before it looks at the positional arguments. The usage shows that they are
            # required.
            self.usage = self.format_usage().removeprefix("usage: ")
            self._missing = [action for action in self._actions if action.required and not _is_set(action, words)]
            for action in self._missing:
                action.required = False
        parsed = self.parse_intermixed_args(words)
        if self._missing:
            self.error(REQUIRED)
        return parsed

    def error(self, message: str) -> NoReturn:
        if message.startswith(REQUIRED):
            optional = {str(action.metavar) for action in self._actions if action.nargs == "*"}
            named = message.removeprefix(REQUIRED).split(", ")
            missing = [name for name in named if name and name not in optional]
            missing += ["/".join(action.option_strings) for action in self._missing]
            message = f"{REQUIRED}{', '.join(missing)}"
        unknown = message.partition("unrecognized arguments: ")[2].split()
        options = [option for action in self._actions for option in action.option_strings]
        if unknown and is_override(unknown[0]) and not unknown[0].startswith("-"):
            message = f"'{unknown[0]}': {self.prog} takes no settings (key=value)"
        hint = option_hint(unknown[0]) or did_you_mean(unknown[0], options) if unknown else ""
        self.exit(2, f"error: {message}.{hint}\n{self.format_usage()}")
