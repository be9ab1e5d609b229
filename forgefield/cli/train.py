"""Train a model from a config. Run the same command again to resume; or name the folder of the run instead of the config, to
resume it with the settings stored there. --fresh starts over.

Without a config, the built-in example generates a small data set, trains on it and writes a report. If started by torchrun,
srun or mpirun, all processes train one model together.
"""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path
from typing import TYPE_CHECKING

from forgefield.cli.arguments import CONFIG_SUFFIXES, HelpOptions, add_option, add_trust, is_package, split_config
from forgefield.cli.importing import for_good
from forgefield.errors import ForgefieldError
from forgefield.parallel.launch import detect_launch
from forgefield.settings import Config

if TYPE_CHECKING:
    from forgefield.parallel.ranks import Ranks

EXAMPLES = """\
examples:
  forgefield train
  forgefield train my.yaml
  forgefield train my.yaml training.lr=3e-3 ++trainer.max_epochs=200 '~task.stress'
  forgefield train runs/my                           resumes the run
  forgefield train runs/my trainer.max_epochs=400    trains it longer
  forgefield train -cp configs -cn water --name water-2 --fresh
  forgefield train other.yaml --finetune runs/my
  torchrun --nproc-per-node 4 --no-python forgefield train my.yaml -l train.log -m collect
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.epilog = EXAMPLES
    parser.add_argument(
        "words",
        metavar="CONFIG | RUN | key=value",
        nargs="*",
        help="config file (YAML, or an input file of DeePMD-kit) or run to resume, and settings that override it",
    )
    parser.add_argument("-cn", "--config-name", metavar="NAME", help="name of the config, with or without .yaml")
    parser.add_argument(
        "-cp", "--config-path", metavar="DIR", help="folder of the config (default: the current folder)"
    )
    add_option(parser, "--name", Config, "name")
    parser.add_argument("--fresh", action="store_true", help="start over; an existing run of that name is renamed")
    initial = parser.add_mutually_exclusive_group()
    initial.add_argument(
        "--init-model",
        metavar="RUN",
        help="start from the model and weights of a run, trained or imported (model.from)",
    )
    initial.add_argument(
        "--finetune", metavar="RUN", help="the same, with energy shifts fitted to the new data (model.shifts=fit)"
    )
    add_trust(parser)
    parser.add_argument(
        "--help-options",
        metavar="SECTION",
        nargs="?",
        const="",
        action=HelpOptions,
        help="list the sections of a config, or the options of one section (training, data.batch, ...), and exit",
    )
    parser.add_argument("-l", "--log", metavar="FILE", type=Path, help="also write all messages to this file")
    parser.add_argument(
        "-m",
        "--log-mode",
        choices=("master", "collect", "workers"),
        default="master",
        help="ranks that write to the log: rank 0 (master), all ranks (collect), or each rank to its own file (workers)",
    )


def run(args: argparse.Namespace) -> int:
    if detect_launch(os.environ).world_size == 1:
        _require_config_file(args)
    from forgefield.parallel.session import run_on_all_ranks

    return run_on_all_ranks(lambda ranks: _run(args, ranks))


def _run(args: argparse.Namespace, ranks: Ranks) -> int:
    folder, words = _split_run(args.words)
    config, overrides = config_and_overrides(args, words)
    with for_good():
        from forgefield import api
    from forgefield.config.components import look_where_the_parent_did

    look_where_the_parent_did()
    if folder is not None:
        from forgefield.config.loading import require_training_data
        from forgefield.training.run.folder import config_of_run

        if config is not None:
            raise ForgefieldError(f"name either the run {folder} or the config {config}, not both.")
        loaded = config_of_run(api.Run(folder), overrides, trust_code=args.trust_code)
        require_training_data(loaded, folder / "config.yaml")
    elif config is None:
        loaded = api.example_config(overrides, make=ranks.is_rank_zero)
        ranks.barrier()
    else:
        from forgefield.config.loading import load_config, require_training_data

        loaded = load_config(config, overrides, trust_code=args.trust_code)
        require_training_data(loaded, config)
        if ranks.is_rank_zero:
            _print_notes(config, overrides)
    return api.train_with_outcome(
        loaded, fresh=args.fresh, log=args.log, log_mode=args.log_mode, trust_code=args.trust_code
    ).exit_code


def _split_run(words: list[str]) -> tuple[Path | None, list[str]]:
    """The run folder among `words`, if any, and all other words."""
    for word in words:
        if is_package(word):
            raise ForgefieldError(
                f"{word} is a packaged model, which has no training to resume; "
                f"to train it further: forgefield train CONFIG --finetune {word}"
            )
    runs = [word for word in words if (Path(word) / "run.json").is_file()]
    if len(runs) > 1:
        raise ForgefieldError(f"one run at a time, not {' and '.join(runs)}.")
    return (Path(runs[0]) if runs else None), [word for word in words if word not in runs]


def _require_config_file(args: argparse.Namespace) -> None:
    """Refuse a config file that cannot be read before PyTorch is imported, which takes seconds."""
    from forgefield.config.sources import read_text

    run, words = _split_run(args.words)
    config, _ = config_and_overrides(args, words)
    if config is not None and run is None:
        read_text(config)


def _print_notes(config: Path, overrides: list[str]) -> None:
    """Print how keys of an input of another program that do not correspond to a setting are treated."""
    from forgefield.config.deepmd import is_deepmd_input, read_input, translation
    from forgefield.config.loading import given_species
    from forgefield.config.matsciml import is_matsciml_script, matsciml_translation
    from forgefield.config.nequip import is_nequip_config, nequip_translation

    is_script = is_matsciml_script(config)
    content, notes = {} if is_script else read_input(config), dict[str, str]()
    if is_script:
        notes = matsciml_translation(config).notes
    elif is_deepmd_input(content):
        notes = translation(content, config, given_species(overrides)).notes
    elif is_nequip_config(content):
        notes = nequip_translation(content, config).notes
    for key, text in notes.items():
        print(f"{config}: {key}: {text}", flush=True)


def config_and_overrides(args: argparse.Namespace, words: list[str]) -> tuple[Path | None, list[str]]:
    """The config file that the arguments name, and all overrides. words: those of the arguments that do not name a run."""
    word, overrides = split_config(words)
    if args.name is not None:
        overrides.append(f"name={json.dumps(args.name)}")
    overrides += _initial_model(args, overrides)
    name, folder = args.config_name, args.config_path
    if word is not None and name is not None:
        raise ForgefieldError(f"two configs are named: {word} and -cn {name}.")
    if folder is not None and name is None:
        raise ForgefieldError("-cp names a folder; name the config in it with -cn NAME.")
    if name is None:
        return (None if word is None else Path(word)), overrides
    return Path(folder or "") / (name if name.endswith(CONFIG_SUFFIXES) else f"{name}.yaml"), overrides


def _initial_model(args: argparse.Namespace, overrides: list[str]) -> list[str]:
    """--init-model and --finetune as overrides."""
    run, flag = (args.finetune, "--finetune") if args.init_model is None else (args.init_model, "--init-model")
    if run is None:
        return []
    for text in overrides:
        if text.lstrip("+~").partition("=")[0] in ("model", "model.from", "model.shifts"):
            raise ForgefieldError(f"{flag} and '{text}' both set the initial model; leave one of them out.")
    return [f"model.from={json.dumps(run)}", *(["model.shifts=fit"] if flag == "--finetune" else [])]
