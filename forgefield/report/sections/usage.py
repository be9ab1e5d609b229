"""The last sections: how to use the model, and the config of the run."""

from __future__ import annotations

import shlex

from forgefield.report.folder import RunData
from forgefield.report.layout import card, dim_comments, empty_card, section
from forgefield.report.markup import Html, tag
from forgefield.report.numbers import count, shorten

CONFIG_LIMIT = 100_000
"""Longest config shown on the page, in characters; config.yaml has all of it."""


def usage_section(run: RunData) -> Html:
    """Commands and Python code that use the model."""
    name = shorten(run.argument, 300)
    permission, flag = (", trust_code=True", " --trust-code") if run.needs_code else ("", "")
    python = "\n".join(
        (
            "import forgefield",
            "from ase.io import read",
            "",
            'atoms = read("structure.extxyz")',
            f"atoms.calc = forgefield.Calculator({name!r}{permission})",
            "print(atoms.get_potential_energy())  # eV",
            "print(atoms.get_forces())  # eV/A",
        )
    )
    quoted = shlex.quote(name)
    shell = [
        f"forgefield predict {quoted} structures.extxyz -o predicted.extxyz{flag}",
        f"forgefield test {quoted} --data more.extxyz{flag}",
    ]
    cards = [card("On the command line", tag("pre", "\n".join([*shell, f"forgefield check {quoted}{flag}"])))]
    if run.has_energy:
        cards.insert(0, card("In Python, with ASE", tag("pre", dim_comments(python))))
    else:
        cards = [card("On the command line", tag("pre", "\n".join(shell)))]
    return section("use", "Use this model", None, tag("div", *cards, class_="grid two"))


def config_section(run: RunData) -> Html:
    if run.config_text is None:
        return section("config", "Config", None, tag("div", empty_card(run, "config.yaml", "Config"), class_="grid"))
    shown = run.config_text[:CONFIG_LIMIT]
    if len(run.config_text) > CONFIG_LIMIT:
        shown += "\n# ... truncated; see config.yaml in the run folder"
    lines = count(len(run.config_text.splitlines()))
    summary = tag("summary", f"config.yaml · {lines} lines")
    folded = tag("details", summary, tag("pre", dim_comments(shown)), class_="card")
    return section("config", "Config", "All settings, including defaults.", folded)
