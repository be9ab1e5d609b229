"""All commands with their arguments, read from the parsers: for the reference in the documentation and for shell completion."""

from __future__ import annotations

import argparse
import importlib
import re
from dataclasses import dataclass

from forgefield.cli import VERBS, Parser


@dataclass(frozen=True)
class Argument:
    """One argument of a command. options: `-o`, `--out`; empty for a positional argument."""

    options: tuple[str, ...]
    value: str
    """What follows an option, or the name of a positional argument; empty for a flag."""
    choices: tuple[str, ...]
    help: str


@dataclass(frozen=True)
class Command:
    """A verb (`train`) or a verb within a verb (`data info`)."""

    words: tuple[str, ...]
    summary: str
    """What it does, in a few words."""
    description: str
    """Paragraphs, separated by empty lines."""
    examples: str
    """Command lines with their comments; empty if there are none."""
    arguments: tuple[Argument, ...]

    @property
    def name(self) -> str:
        return " ".join(self.words)


def all_commands() -> tuple[Command, ...]:
    """All commands in the order of the overview; verbs within a verb follow it."""
    commands: list[Command] = []
    for verb, (module_name, summary) in VERBS.items():
        module = importlib.import_module(f"forgefield.cli.{module_name}")
        parser = Parser(prog=f"forgefield {verb}", description=module.__doc__ or summary)
        module.add_arguments(parser)
        commands.append(_command((verb,), summary, parser))
        for action in parser._actions:
            if isinstance(action, argparse._SubParsersAction):
                helps = {choice.dest: choice.help or "" for choice in action._choices_actions}
                commands += [_command((verb, name), helps[name], inner) for name, inner in action.choices.items()]
    return tuple(commands)


def _command(words: tuple[str, ...], summary: str, parser: argparse.ArgumentParser) -> Command:
    text = "\n\n".join(filter(None, [(parser.description or "").strip(), (parser.epilog or "").strip()]))
    description, _, examples = text.partition("\nexample")
    return Command(
        words=words,
        summary=summary,
        description=description.strip(),
        examples=re.sub(r"^  ", "", examples.partition(":\n")[2], flags=re.MULTILINE).strip(),
        arguments=tuple(
            _argument(action)
            for action in parser._actions
            if not isinstance(action, (argparse._HelpAction, argparse._SubParsersAction))
            and action.help is not argparse.SUPPRESS
        ),
    )


def _argument(action: argparse.Action) -> Argument:
    choices = tuple(map(str, action.choices or ()))
    value = ""
    if action.nargs != 0:
        shown = action.metavar or ("|".join(choices) if choices else action.dest.upper())
        value = " ".join(shown) if isinstance(shown, tuple) else shown
    help_text = (action.help or "") % {**vars(action), "prog": "forgefield"}
    return Argument(tuple(action.option_strings), value, choices, help_text)
