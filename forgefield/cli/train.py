"""Train as a config says. The same command again continues the run where it was; --fresh starts over.

Without a config the built-in example runs: it makes a small data set, trains on it and writes a report.
With torchrun, srun or mpirun in front, all processes train one model together.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING

from forgefield.cli.arguments import CONFIG_SUFFIXES, split_config
from forgefield.errors import ForgefieldError

if TYPE_CHECKING:
    from forgefield.parallel.group import Ranks

EXAMPLES = """\
examples:
  forgefield train
  forgefield train my.yaml
  forgefield train my.yaml training.lr=3e-3 ++trainer.max_epochs=200 '~task.stress'
  forgefield train -cp configs -cn water --name water-2 --fresh
  torchrun --nproc-per-node 4 --no-python forgefield train my.yaml -l train.log -m collect
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.epilog = EXAMPLES
    parser.add_argument(
        "words", metavar="CONFIG | key=value", nargs="*", help="config file (YAML), and settings that override it"
    )
    parser.add_argument("-cn", "--config-name", metavar="NAME", help="config by name, with or without .yaml")
    parser.add_argument("-cp", "--config-path", metavar="DIR", help="folder of the config (default: this one)")
    parser.add_argument("--name", help="name of the run (default: that of the config)")
    parser.add_argument("--fresh", action="store_true", help="start over; the old run of that name is moved aside")
    parser.add_argument("-l", "--log", metavar="FILE", type=Path, help="write what is said to this file too")
    parser.add_argument(
        "-m",
        "--log-mode",
        choices=("master", "collect", "workers"),
        default="master",
        help="whose words go into the log: those of rank 0, those of all ranks, or of each rank into its own file",
    )


def run(args: argparse.Namespace) -> int:
    from forgefield.parallel.session import run_as_one

    return run_as_one(lambda ranks: _run(args, ranks))


def _run(args: argparse.Namespace, ranks: Ranks) -> int:
    config, overrides = config_and_overrides(args)
    from forgefield import api
    from forgefield.config.components import look_where_the_parent_did

    look_where_the_parent_did()
    if config is None:
        loaded = api.example_config(overrides, make=ranks.is_first)
        ranks.barrier()
    else:
        from forgefield.config.loading import load_config, require_training_data

        loaded = load_config(config, overrides)
        require_training_data(loaded, config)
    return api.train_with_outcome(loaded, fresh=args.fresh, log=args.log, log_mode=args.log_mode).exit_code


def config_and_overrides(args: argparse.Namespace) -> tuple[Path | None, list[str]]:
    """The config file that the arguments name, and all overrides."""
    word, overrides = split_config(args.words)
    if args.name is not None:
        overrides.append(f"name={json.dumps(args.name)}")
    name, folder = args.config_name, args.config_path
    if word is not None and name is not None:
        raise ForgefieldError(f"the config is given twice: {word} and -cn {name}.")
    if folder is not None and name is None:
        raise ForgefieldError("-cp names a folder; say which config in it with -cn NAME.")
    if name is None:
        return (None if word is None else Path(word)), overrides
    return Path(folder or "") / (name if name.endswith(CONFIG_SUFFIXES) else f"{name}.yaml"), overrides
