"""Arguments shared by several verbs: files and overrides, and the options that select the weights of a run."""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Sequence
from pathlib import Path

from forgefield.config.nearest import did_you_mean
from forgefield.config.option import field_docs, limits_of
from forgefield.config.typed import field_types, without_none
from forgefield.errors import ForgefieldError

CONFIG_SUFFIXES = (".yaml", ".yml", ".json")
DATA_FORMATS = ("extxyz", "npz", "hdf5", "lmdb", "aselmdb", "db", "deepmd", "store", "traj", "cif", "vasp", "vasp-xml")
"""Formats that a user may pass instead of a config by mistake; others of ASE end in .cfg or .in, as configs may."""
READING = ("data.labels", "data.units")
"""Settings for reading a file."""


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
    """Refuse a data file, or a folder that is a source of data, instead of a config."""
    from forgefield.data.readers.registry import file_format

    path = Path(word)
    if path.suffix in CONFIG_SUFFIXES or not path.exists():
        return
    if file_format(path) in DATA_FORMATS:
        config = f"{path.stem or 'config'}.yaml"
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


def add_option_arguments(parser: argparse.ArgumentParser, cls: type, *, skip: Sequence[str] = ()) -> None:
    """An argument `--name` for each option of a dataclass, with its type, choices and description."""
    types, docs = field_types(cls), field_docs(cls)
    for field in dataclasses.fields(cls):
        if field.name in skip:
            continue
        kind, limits = without_none(types[field.name]), limits_of(field)
        flag, default = f"--{field.name.replace('_', '-')}", field.default
        text = docs.get(field.name, "").replace("%", "%%")
        if kind is bool:
            parser.add_argument(flag, dest=field.name, action="store_true", default=argparse.SUPPRESS, help=text)
            continue
        unit = f" {limits.unit}" if limits.unit else ""
        shown = f" (default: {default}{unit})" if default is not None else ""
        parser.add_argument(
            flag,
            dest=field.name,
            type=kind,
            choices=limits.choices or None,
            metavar=None
            if limits.choices
            else (limits.unit or kind.__name__).upper()
            if kind is str
            else limits.unit or "N",
            default=argparse.SUPPRESS,
            help=f"{text}{shown}",
        )


def given_options(args: argparse.Namespace, cls: type) -> dict[str, object]:
    """The options of a dataclass that were set on the command line."""
    return {field.name: getattr(args, field.name) for field in dataclasses.fields(cls) if hasattr(args, field.name)}


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
