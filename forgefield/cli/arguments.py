"""Arguments shared by several verbs: files and overrides, and the options that select the weights of a run."""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from forgefield.config.nearest import did_you_mean
from forgefield.config.option import declared_limits
from forgefield.config.typed import field_types, without_none
from forgefield.errors import ForgefieldError

CONFIG_SUFFIXES = (".yaml", ".yml", ".json")
DATA_FORMATS = ("extxyz", "npz", "hdf5", "lmdb", "aselmdb", "db", "deepmd", "store", "traj", "cif", "vasp", "vasp-xml")
"""Formats that a user may pass instead of a config by mistake; others of ASE end in .cfg or .in, as configs may."""
SNAPSHOT = ".npy"
"""Ending of files of grid points."""
PACKAGE_SUFFIX = ".ff"
"""Ending of packaged models."""
READING = ("data.labels", "data.units")
"""Settings for reading a file."""


def is_package(word: str) -> bool:
    """Whether a word names a packaged model, which takes the place of a run."""
    return word.endswith(PACKAGE_SUFFIX) and Path(word).is_file()


def is_override(word: str) -> bool:
    """`key=value`, `+key=value`, `++key=value` or `~key`."""
    return "=" in word or word.startswith(("~", "+"))


def split_config(words: Sequence[str]) -> tuple[str | None, list[str]]:
    """The config file among `words`, if any, and the overrides."""
    configs, overrides = [], []
    for word in words:
        _refuse_data(word)
        if Path(word).is_file() or (word.endswith(CONFIG_SUFFIXES) and "=" not in word):
            configs.append(word)
        elif is_override(word):
            overrides.append(word)
        else:
            here = [path.name for path in Path.cwd().iterdir() if path.suffix in CONFIG_SUFFIXES]
            raise ForgefieldError(
                f"'{word}' is neither a config file nor an override (key=value).{did_you_mean(word, here)}"
                " If it names data, `forgefield init DATA` writes a config for it."
            )
    if len(configs) > 1:
        raise ForgefieldError(f"one config at a time, not {' and '.join(configs)}.")
    return (configs[0] if configs else None), overrides


def _refuse_data(word: str) -> None:
    """Refuse a data file, a folder that is a source of data, or a packaged model, instead of a config."""
    if is_package(word):
        raise ForgefieldError(
            f"'{word}' is a packaged model; name a config, which says what to train and on which data."
        )
    path = Path(word)
    if path.suffix in CONFIG_SUFFIXES or not path.exists():
        return
    from forgefield.data.readers.registry import file_format

    is_snapshot = path.suffix == SNAPSHOT
    if is_snapshot or file_format(path) in DATA_FORMATS:
        config = f"{(path.name.partition('.')[0] if is_snapshot else path.stem) or 'config'}.yaml"
        raise ForgefieldError(
            f"'{word}' is data, not a config; write a config for it with `forgefield init {word}`, then train with "
            f"`forgefield train {config}`."
        )


def refuse_files(words: Sequence[str]) -> list[str]:
    """`words` as overrides; anything else is an error."""
    for word in words:
        if not is_override(word):
            raise ForgefieldError(f"'{word}' is not an override (key=value).")
    return list(words)


class HelpOptions(argparse.Action):
    """Prints the options of a section of a config, or the list of sections, and exits."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: str | Sequence[object] | None,
        option_string: str | None = None,
    ) -> None:
        from forgefield.config.reference import option_help

        print(option_help(str(values or "")), end="")
        parser.exit()


def add_option(
    parser: argparse.ArgumentParser | argparse._ArgumentGroup,
    flag: str,
    section: type,
    name: str,
    *,
    default: str | None = None,
    metavar: str | tuple[str, ...] | None = None,
    nargs: int | str | None = None,
    read: Callable[[str], object] | None = None,
) -> None:
    """A flag for the option `name` of the dataclass `section`; it is None unless the user sets it.

    Description, type, choices, unit and default are those of the declaration. default: what is used without the flag, if it is
    not the declared default. read: converts a word, for types other than numbers and text.
    """
    from forgefield.config.reference import flag_help

    kind, text = without_none(field_types(section)[name]), flag_help(section, name, default=default)
    if kind is bool:
        parser.add_argument(flag, action="store_true", default=None, help=text)
        return
    limits = declared_limits(section, name)
    choices = limits.choices if kind is str and limits.open_choices is None else ()
    value = limits.unit or "N" if kind in (int, float) else flag.rpartition("-")[2].upper()
    parser.add_argument(
        flag,
        type=read or (kind if kind in (int, float) else str),
        choices=choices or None,
        metavar=metavar or (None if choices else value),
        nargs=nargs,
        help=text,
    )


def add_option_arguments(parser: argparse.ArgumentParser, cls: type, *, skip: Sequence[str] = ()) -> None:
    """A flag `--name` for each option of a dataclass."""
    for field in dataclasses.fields(cls):
        if field.name not in skip:
            add_option(parser, f"--{field.name.replace('_', '-')}", cls, field.name)


def options_set(args: argparse.Namespace, cls: type) -> dict[str, Any]:
    """The options of a dataclass that the user set, of those for which there are flags."""
    return selected(args, *(field.name for field in dataclasses.fields(cls) if field.name in vars(args)))


def selected(args: argparse.Namespace, *names: str) -> dict[str, Any]:
    """The arguments of these names that the user set."""
    return {name: vars(args)[name] for name in names if vars(args)[name] is not None}


def add_trust(parser: argparse.ArgumentParser) -> None:
    """--trust-code."""
    parser.add_argument(
        "--trust-code",
        action="store_true",
        help="import code that a run refers to, such as a user-defined model; only for runs whose origin you trust",
    )


def add_run_arguments(parser: argparse.ArgumentParser) -> None:
    """RUN, --which, --head, --device, --trust-code."""
    parser.add_argument(
        "run", metavar="RUN", help="name of a run in the folder runs/, its path, or a packaged model (.ff)"
    )
    parser.add_argument("--which", choices=("best", "last"), default="best", help="weights to use (default: best)")
    parser.add_argument("--head", metavar="NAME", default=None, help="branch of a model with several branches")
    parser.add_argument("--device", default=None, help="cpu, cuda, cuda:1, ... (default: cuda if available)")
    add_trust(parser)


def add_overrides(parser: argparse.ArgumentParser, allowed: Sequence[str]) -> None:
    """Trailing `key=value` words, of the settings that the verb uses."""
    parser.add_argument(
        "overrides",
        metavar="key=value",
        nargs="*",
        help=f"settings for reading this data: {', '.join(allowed)} (default: as in training)",
    )


def device_name(requested: str | None, *, local_rank: int = 0) -> str:
    """The requested device, or the fastest available one, which the first process of each node prints."""
    import torch

    if requested is None:
        requested = f"cuda:{local_rank % torch.cuda.device_count()}" if torch.cuda.is_available() else "cpu"
        if local_rank == 0:
            print(f"device: {requested}")
    try:
        device = torch.device(requested)
    except RuntimeError as error:
        raise ForgefieldError(
            f"--device {requested}: there is no such kind of device; use cpu, cuda or cuda:N."
        ) from error
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise ForgefieldError(f"--device {requested}: this machine has {torch.cuda.device_count()} CUDA devices.")
    return requested
