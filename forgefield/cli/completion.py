"""Print a script that completes `forgefield` commands, options, config keys and files in bash, zsh or fish.

The script is generated from the commands and options of this version and does not start Python; print it again after an update.
"""

from __future__ import annotations

import argparse

from forgefield.cli.describe import Argument, Command, all_commands

EXAMPLES = """\
examples:
  forgefield completion bash > ~/.local/share/bash-completion/completions/forgefield
  forgefield completion zsh > ~/.forgefield.zsh          then add to ~/.zshrc: source ~/.forgefield.zsh
  forgefield completion fish > ~/.config/fish/completions/forgefield.fish
"""
SETTINGS = ("train", "tune", "bench", "check", "init", "test", "predict")
"""Verbs that take `key=value`."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.epilog = EXAMPLES
    parser.add_argument("shell", choices=("bash", "zsh", "fish"), help="the shell to write the script for")


def run(args: argparse.Namespace) -> int:
    write = {"bash": bash_script, "zsh": zsh_script, "fish": fish_script}[args.shell]
    print(write(all_commands()), end="")
    return 0


def config_keys() -> list[str]:
    """Keys of a config that the command line can set, except those with a name that the user chooses."""
    from forgefield.config.reference import sections

    keys = {
        f"{key}.{entry.name}" if key else entry.name
        for section in sections()
        for key in section.keys
        for entry in section.entries
        if "NAME" not in key and entry.type != "section"
    }
    return sorted(keys)


def _words(command: Command, commands: tuple[Command, ...]) -> list[str]:
    """Options of a command, verbs within it, and choices of its positional arguments."""
    inner = [each.words[1] for each in commands if len(each.words) == 2 and each.words[0] == command.words[0]]
    options = [option for argument in command.arguments for option in argument.options]
    choices = [choice for argument in command.arguments if not argument.options for choice in argument.choices]
    return [*(inner if len(command.words) == 1 else []), *choices, *options, "--help"]


def _chosen(commands: tuple[Command, ...]) -> dict[tuple[str, str], tuple[str, ...]]:
    """Values of options that allow a few, by command and option."""
    return {
        (command.name, option): argument.choices
        for command in commands
        for argument in command.arguments
        for option in argument.options
        if argument.choices
    }


def bash_script(commands: tuple[Command, ...]) -> str:
    """Completion for bash."""
    return f"""# bash completion of forgefield, written by `forgefield completion bash`
_forgefield() {{
    local current previous verb words
    current="${{COMP_WORDS[COMP_CWORD]}}"; previous="${{COMP_WORDS[COMP_CWORD-1]}}"; verb="${{COMP_WORDS[1]}}"
    if [ "$COMP_CWORD" -eq 1 ]; then
        COMPREPLY=($(compgen -W "{_verbs(commands)} --help --version" -- "$current")); return
    fi
{_bash_body(commands)}}}
complete -o bashdefault -o default -F _forgefield forgefield
"""


def _bash_body(commands: tuple[Command, ...]) -> str:
    inner = "|".join(sorted({command.words[0] for command in commands if len(command.words) == 2}))
    lines = [f'case "$verb" in {inner}) [ "$COMP_CWORD" -gt 2 ] && verb="$verb ${{COMP_WORDS[2]}}";; esac']
    lines += ['case "$verb $previous" in']
    lines += [
        f'    "{name} {option}") COMPREPLY=($(compgen -W "{" ".join(choices)}" -- "$current")); return;;'
        for (name, option), choices in _chosen(commands).items()
    ]
    lines += ["esac", 'case "$verb" in']
    lines += [f'    "{command.name}") words="{" ".join(_words(command, commands))}";;' for command in commands]
    lines += ["esac", f'case "$verb" in {"|".join(SETTINGS)})', '    case "$current" in -*|*=*) ;; [a-z]*.*|[a-z]*)']
    lines += [f'        words="$words {" ".join(f"{key}=" for key in config_keys())}";; esac;; esac']
    lines += ['COMPREPLY=($(compgen -W "$words" -- "$current"))']
    lines += ['case "${COMPREPLY[*]}" in *=) type compopt > /dev/null 2>&1 && compopt -o nospace;; esac']
    return "".join(f"    {line}\n" for line in lines)


def zsh_script(commands: tuple[Command, ...]) -> str:
    """Completion for zsh: that of bash, which zsh can run."""
    body = bash_script(commands).partition("\n")[2]
    return (
        "# zsh completion of forgefield, written by `forgefield completion zsh`\n"
        f"autoload -U compinit bashcompinit && compinit -u && bashcompinit\n{body}"
    )


def fish_script(commands: tuple[Command, ...]) -> str:
    """Completion for fish, with descriptions."""
    lines = ["# fish completion of forgefield, written by `forgefield completion fish`"]
    for command in commands:
        if len(command.words) == 1:
            where = "__fish_use_subcommand"
        else:
            siblings = [
                each.words[1] for each in commands if each.words[0] == command.words[0] and len(each.words) == 2
            ]
            where = f"__fish_seen_subcommand_from {command.words[0]}; and not __fish_seen_subcommand_from {' '.join(siblings)}"
        lines.append(f"complete -c forgefield -f -n '{where}' -a {command.words[-1]} -d {_quoted(command.summary)}")
        seen = "; and ".join(f"__fish_seen_subcommand_from {word}" for word in command.words)
        lines += [
            _fish_argument(argument, seen) for argument in command.arguments if argument.options or argument.choices
        ]
    seen = f"__fish_seen_subcommand_from {' '.join(SETTINGS)}"
    lines.append(f"complete -c forgefield -n '{seen}' -a '{' '.join(f'{key}=' for key in config_keys())}'")
    return "\n".join(lines) + "\n"


def _fish_argument(argument: Argument, seen: str) -> str:
    flags = " ".join(
        f"-l {option[2:]}"
        if option.startswith("--")
        else f"-s {option[1:]}"
        if len(option) == 2
        else f"-o {option[1:]}"
        for option in argument.options
    )
    values = f" -x -a '{' '.join(argument.choices)}'" if argument.choices else " -r" if argument.value else ""
    return " ".join(f"complete -c forgefield -n '{seen}' {flags}{values} -d {_quoted(argument.help)}".split())


def _quoted(text: str) -> str:
    return "'" + text.replace("\\", "\\\\").replace("'", "\\'") + "'"


def _verbs(commands: tuple[Command, ...]) -> str:
    return " ".join(command.words[0] for command in commands if len(command.words) == 1)
