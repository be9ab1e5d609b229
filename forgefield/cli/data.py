"""Inspect data, convert it, select a small sample.

examples:
  forgefield data info train.xyz --figure train.png
  forgefield data info 'rmd17/*.npz' --energy-unit kcal/mol --cutoff 6
  forgefield data convert water_dp/ water --cutoff 6        writes the store water/; then data.train: water
  forgefield data convert water water.extxyz                and back
  forgefield data sample water 100                          writes water-100.extxyz
  forgefield data cubes 'tmp.pp*.cube' -o Be_snapshot0.out.npy --info pw.out
  forgefield data descriptors Be_snapshot0.info.json -o Be_snapshot0.in.npy
  forgefield data acsd Be_snapshot0.info.json --twojmax 4 6 8
  forgefield data structure-factor trajectory.extxyz -o s.csv
"""

from __future__ import annotations

import argparse

from forgefield.cli import (
    Parser,
    data_acsd,
    data_align,
    data_convert,
    data_cubes,
    data_descriptors,
    data_info,
    data_openpmd,
    data_sample,
    data_shuffle,
    data_structure_factor,
)
from forgefield.cli.data_arguments import apply_settings, without_settings

_VERBS = {
    "info": data_info,
    "convert": data_convert,
    "sample": data_sample,
    "cubes": data_cubes,
    "descriptors": data_descriptors,
    "shuffle": data_shuffle,
    "acsd": data_acsd,
    "align": data_align,
    "openpmd": data_openpmd,
    "structure-factor": data_structure_factor,
}


def parse(parser: Parser, words: list[str]) -> argparse.Namespace:
    """Settings may stand anywhere among the files."""
    words, settings = without_settings(words)
    args = parser.parse(words)
    args.settings = settings
    return args


def add_arguments(parser: argparse.ArgumentParser) -> None:
    verbs = parser.add_subparsers(dest="data_verb", required=True, metavar="VERB")
    for name, module in _VERBS.items():
        verb = verbs.add_parser(
            name,
            help=module.SUMMARY,
            description=module.__doc__,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        module.add_arguments(verb)


def run(args: argparse.Namespace) -> int:
    apply_settings(args, args.settings)
    return int(_VERBS[args.data_verb].run(args))
