"""Execute the tutorials in docs/notebooks (Markdown with code cells) and store them with their output in docs/tutorials.

python docs/execute.py                       # all; or: make tutorials
python docs/execute.py first-potential
"""

from __future__ import annotations

import argparse
import os
import re
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import jupytext
import nbformat
from nbclient import NotebookClient

DOCS = Path(__file__).parent
SOURCES, TUTORIALS = DOCS / "notebooks", DOCS / "tutorials"
TIMEOUT = 3600
"""Seconds that a single cell may take."""
SETUP = """
def run_command(command):
    import os, subprocess
    of_jupyter = {"MPLBACKEND", "FORCE_COLOR", "CLICOLOR", "CLICOLOR_FORCE", "TERM"}
    environ = {key: value for key, value in os.environ.items() if key not in of_jupyter}
    ran = subprocess.run(command, shell=True, env=environ, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    print(ran.stdout, end="")
    if ran.returncode and not command.rstrip().endswith("|| true"):
        raise RuntimeError(f"exit code {ran.returncode}: {command}")

get_ipython().system = run_command
"""
"""Run first, and not stored: a command that fails ends the tutorial, and output is that of a log file, not of a terminal."""


def read_source(name: str, replacements: Sequence[tuple[str, str]] = ()) -> nbformat.NotebookNode:
    """The notebook of a tutorial without output. replacements: made in its code, each of which must occur."""
    text = (SOURCES / f"{name}.md").read_text(encoding="utf-8")
    for old, new in replacements:
        if old not in text:
            raise ValueError(f"{name}.md does not contain {old!r}")
        text = text.replace(old, new)
    notebook = jupytext.reads(text, fmt="md:myst")
    for number, cell in enumerate(notebook.cells):
        cell["id"] = f"cell-{number}"  # the same in every execution
    return notebook


def execute(notebook: nbformat.NotebookNode, folder: Path) -> float:
    """Run all cells in `folder`, with output; returns seconds. An error in a cell is raised."""
    root = str(DOCS.parent)
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH")]))
    os.environ.setdefault("PYTHONWARNINGS", "ignore")
    os.environ["COLUMNS"] = "100"
    started = time.monotonic()
    notebook.cells.insert(0, nbformat.v4.new_code_cell(SETUP))
    try:
        NotebookClient(notebook, timeout=TIMEOUT, resources={"metadata": {"path": str(folder)}}).execute()
    finally:
        del notebook.cells[0]
    for cell in notebook.cells:
        cell.metadata.pop("execution", None)
        if cell.get("execution_count"):
            cell["execution_count"] -= 1
        for output in cell.get("outputs", []):
            if output.get("output_type") == "stream":
                output["text"] = _final_text(output["text"]).replace(f"{folder}/", "").replace(str(Path.home()), "~")
    return time.monotonic() - started


def with_stored_output(notebook: nbformat.NotebookNode, name: str) -> nbformat.NotebookNode:
    """The notebook with the output of the stored one, whose code must be the same."""
    stored = nbformat.read(TUTORIALS / f"{name}.ipynb", as_version=4)
    old = [cell for cell in stored.cells if cell.cell_type == "code"]
    new = [cell for cell in notebook.cells if cell.cell_type == "code"]
    if [cell.source for cell in old] != [cell.source for cell in new]:
        raise ValueError(f"the code of {name}.md has changed: execute it again")
    for cell, executed in zip(new, old, strict=True):
        cell["outputs"], cell["execution_count"] = executed["outputs"], executed["execution_count"]
    notebook["metadata"] = stored["metadata"]
    return notebook


def _final_text(text: str) -> str:
    """What remains visible in a terminal: without colours, and without lines that were overwritten."""
    text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", text).replace("\r\n", "\n")
    return "\n".join(line.rpartition("\r")[2] for line in text.split("\n"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    known = sorted(path.stem for path in SOURCES.glob("*.md"))
    parser.add_argument("--text", action="store_true", help="only update the text; code cells and output stay")
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"tutorials (default: all): {', '.join(known)}")
    args = parser.parse_args()
    for name in args.names or known:
        notebook = read_source(name)
        if args.text:
            nbformat.write(with_stored_output(notebook, name), TUTORIALS / f"{name}.ipynb")
            continue
        with tempfile.TemporaryDirectory() as folder:
            seconds = execute(notebook, Path(folder))
        notebook.metadata["execution_seconds"] = round(seconds)
        nbformat.write(notebook, TUTORIALS / f"{name}.ipynb")
        print(f"{name}: {seconds:.0f} s")


if __name__ == "__main__":
    main()
