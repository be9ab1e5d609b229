"""Write the pages of the reference that are made from declarations in the code: options, options of models, commands.

python docs/generate.py            # or: make reference
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from forgefield.cli.describe import Argument, Command, all_commands
from forgefield.config.option import class_doc
from forgefield.config.reference import option_table, options_of, reference
from forgefield.config.template import flow
from forgefield.config.typed import field_types, section_class
from forgefield.kinds import ImportPath
from forgefield.ldos.model import LDOSOptions
from forgefield.models.deeppot.options import DESCRIPTORS, FITTINGS
from forgefield.models.heads.options import HeadOptions
from forgefield.models.registry import ARCHITECTURES, registered_class

FOLDER = Path(__file__).parent / "reference"
MODELS = """# Options of models

Options of the section `model`, next to `name` and `preset`. A default of `null` is usually computed from the training data;
options that a preset sets are listed after each table. What the models are: [Models](models.md).
"""
COMMANDS = """# Commands

`forgefield VERB --help` prints the same in a terminal. Every verb accepts `--debug`, which shows where an error was raised.
Exit codes: 0 success, 1 a check failed, 2 an error that the message explains, 75 stopped by a signal after saving a
checkpoint, 130 interrupted.
"""


def model_options() -> str:
    """The page model-options.md."""
    parts = [MODELS]
    for name in ARCHITECTURES:
        model = registered_class(name)
        parts += [f"## {name}", *_tables(model.Options, "###"), *_presets(model.presets)]
    for title, variants in (("Descriptors of deeppot", DESCRIPTORS), ("Fitting networks of deeppot", FITTINGS)):
        parts.append(f"## {title}")
        for name, path in variants.items():
            options = ImportPath(f"forgefield.models.deeppot.{path}").load().Options
            parts += [f"### {name}", *_tables(options, "####")]
    parts += ["## Heads (model.heads.NAME)", *_tables(HeadOptions, "###")]
    parts += ["## ldos", *_tables(LDOSOptions, "###")]
    return "\n\n".join(part.strip("\n") for part in parts) + "\n"


def _tables(cls: type, level: str) -> Iterator[str]:
    """Description and table of a dataclass, then those of the sections within it."""
    if about := class_doc(cls):
        yield about
    yield option_table(options_of(cls))
    for name, kind in field_types(cls).items():
        inner = section_class(kind)
        if inner is not None:
            yield f"{level} {name}"
            yield from _tables(inner, f"{level}#")


def _presets(presets: Mapping[str, Mapping[str, object]]) -> Iterator[str]:
    if presets:
        yield "\n".join(f"- preset {name}: `{flow(dict(options))}`" for name, options in presets.items())


def commands() -> str:
    """The page commands.md."""
    return "\n\n".join([COMMANDS.strip("\n"), *map(_command, all_commands())]) + "\n"


def _command(command: Command) -> str:
    parts = [f"{'##' if len(command.words) == 1 else '###'} forgefield {command.name}"]
    if command.examples:
        parts.append(f"```bash\n{_commented(command.examples)}\n```")
    parts += [_paragraph(text) for text in command.description.split("\n\n")]
    if command.arguments:
        rows = [f"| {_names(argument)} | {_cell(argument.help)} |" for argument in command.arguments]
        parts.append("\n".join(["| argument | meaning |", "|---|---|", *rows]))
    return "\n\n".join(parts)


def _commented(examples: str) -> str:
    """Examples with their explanations, which are set off by spaces, as comments."""
    return re.sub(r"(?<=\S)( {2,})(?=\S)", r"\1# ", examples)


def _paragraph(text: str) -> str:
    """Lines that are indented in help are code."""
    return f"```text\n{text}\n```" if text.startswith("  ") else text.replace("*", "\\*")


def _names(argument: Argument) -> str:
    shown = ", ".join(argument.options) + (f" {argument.value}" if argument.options and argument.value else "")
    return "`" + (shown or argument.value).replace("|", "\\|") + "`"


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("*", "\\*").replace("~", "\\~")


PAGES: dict[str, Callable[[], str]] = {
    "options.md": reference,
    "model-options.md": model_options,
    "commands.md": commands,
}

if __name__ == "__main__":
    for page, write in PAGES.items():
        (FOLDER / page).write_text(write(), encoding="utf-8")
        print(FOLDER / page)
