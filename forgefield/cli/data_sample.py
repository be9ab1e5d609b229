"""Select a small representative sample of a data set.

The number of frames of each composition is proportional to its share, every species is included if the sample is large enough,
and the frames of a composition are spread evenly over the range of their energies. The same data gives the same sample. Labels
and weights are kept.

examples:
  forgefield data sample water 100                           writes water-100.extxyz
  forgefield data sample 'runs/*.extxyz' 500 -o devset       writes the store devset/
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

from forgefield.cli.data_arguments import add_graph, add_reading, graph_options, reading_options, source_of

SUMMARY = "select a small representative sample"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("paths", nargs="+", metavar="SRC", help="files, folders, globs or stores")
    parser.add_argument("number", type=_number, metavar="N", help="number of frames")
    parser.add_argument("-o", "--out", metavar="DST", help="file or store to write (default: SRC-N.extxyz)")
    add_graph(parser)
    add_reading(parser)


def _number(word: str) -> int:
    if not word.isdecimal() or int(word) < 1:
        raise argparse.ArgumentTypeError(f"the last argument must be the number of frames, 1 or more, not '{word}'")
    return int(word)


def run(args: argparse.Namespace) -> int:
    from forgefield.data.conversion import sample_data

    begin, (labels, units), graph = time.monotonic(), reading_options(args), graph_options(args)
    target = Path(args.out) if args.out is not None else _default_name(args.paths[0], args.number)
    sample = sample_data(source_of(args.paths), args.number, target, labels=labels, units=units, graph=graph)
    print(sample)
    print(f"wrote {sample.written}, in {time.monotonic() - begin:.1f} s\nin a config:  data.train: {target}")
    return 0


def _default_name(source: str, number: int) -> Path:
    path = Path(source.partition("#")[0])
    stem = path.name if path.is_dir() else path.stem
    return Path(f"{stem.strip('*?[]') or 'sample'}-{number}.extxyz")
