"""`report.html`: one self-contained page.

Figures are inline SVG, the style is inline, the only script switches the theme, and the security policy of the page forbids
everything else, so the page opens anywhere, also without a network. Files that are missing in the run folder are
listed with the command that writes them.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path

from forgefield.errors import ForgefieldError
from forgefield.files import write_atomically
from forgefield.report.analysis import QUANTITIES, pairs, predictions_from_npz
from forgefield.report.canvas import house_style
from forgefield.report.figures import parity_row
from forgefield.report.folder import SPLITS, Note, RunData, read_run, split_title
from forgefield.report.markup import Html, join, tag, text
from forgefield.report.sections.diagnosis import diagnosis_section
from forgefield.report.sections.evaluation import evaluation_section, has_evaluations
from forgefield.report.sections.headline import errors_by_split, headline, title_block
from forgefield.report.sections.learning import learning_section, timing_section
from forgefield.report.sections.members import members_section
from forgefield.report.sections.model import config_section, model_section
from forgefield.report.sections.uncertainty import compared, uncertainty_section
from forgefield.tasks.plausibility import ADVICE, implausible_errors

_SCRIPT = (
    "const root=document.documentElement;"
    "document.getElementById('theme').onclick=()=>{"
    "const now=root.dataset.theme||(matchMedia('(prefers-color-scheme: dark)').matches?'dark':'light');"
    "root.dataset.theme=now==='dark'?'light':'dark'};"
)


@dataclass(frozen=True)
class Section:
    """A section of the page, and an entry of its navigation bar."""

    anchor: str
    title: str
    """In the navigation bar."""
    render: Callable[[RunData], Html]
    applies: Callable[[RunData], bool] = lambda run: True
    """Whether a run has this section."""


def results_section(run: RunData) -> Html:
    """The headline, and warnings about errors and missing files."""
    return tag("section", headline(run), implausible_box(run), missing_files_box(run), id="results")


SECTIONS = (
    Section("results", "Results", results_section),
    Section("learning", "Learning", learning_section, applies=lambda run: not run.members),
    Section("members", "Members", members_section, applies=lambda run: bool(run.members)),
    Section("errors", "Errors", lambda run: run.kind.errors_section.load()(run)),
    Section("uncertainty", "Uncertainty", uncertainty_section, applies=lambda run: bool(compared(run))),
    Section("timing", "Timing", timing_section, applies=lambda run: not run.members),
    Section("diagnosis", "Diagnosis", diagnosis_section, applies=lambda run: bool(run.diagnosis)),
    Section("evaluation", "Physics", evaluation_section, applies=has_evaluations),
    Section("data", "Data and model", model_section),
    Section("use", "Use it", lambda run: run.kind.usage_section.load()(run)),
    Section("config", "Config", config_section),
)
"""All sections, in the order of the page."""


def write_report(run_path: Path) -> Path:
    """Write `report.html` into the run folder and return its path. An existing page is replaced atomically."""
    run = read_run(Path(run_path))
    return write_atomically(run.path / "report.html", report_html(run).encode("utf-8", errors="replace"))


def write_parity_png(run_path: Path, split: str = "test") -> Path:
    """Write `parity-SPLIT.png` into the run folder, with all outputs that have labels, and return its path."""
    run_path = Path(run_path)
    stored = sorted(path.stem for path in (run_path / "predictions").glob("*.npz"))
    if split not in stored and split not in SPLITS:
        raise ForgefieldError(f"There is no split `{split}`; the splits with predictions are: {', '.join(stored)}.")
    source = run_path / "predictions" / f"{split}.npz"
    if not source.exists():
        raise ForgefieldError(f"{source} does not exist; `forgefield test {run_path}` writes predictions.")
    predictions, units = predictions_from_npz(source), read_run(run_path).heads
    names = [name for name in (*QUANTITIES, *predictions.extra_outputs) if name in QUANTITIES or name in units]
    panels = [panel for name in names if (panel := pairs(predictions, name, units.get(name, ""))) is not None]
    if not panels:
        raise ForgefieldError(f"{source} has no labelled values to compare with.")
    target = run_path / f"parity-{split}.png"
    with house_style():
        try:
            parity_row(panels).savefig(target, format="png", dpi=160, facecolor="white")
        except OSError as error:
            raise ForgefieldError(f"{target} cannot be written: {error.strerror}.") from error
    return target


def report_html(run: RunData) -> Html:
    """The page as HTML."""
    sections = [section for section in SECTIONS if section.applies(run)]
    content = [(section.anchor, section.title, section.render(run)) for section in sections]
    footer = "Written by Forgefield from the run folder."
    return page_html(f"{run.name} · Forgefield report", title_block(run), content, footer=footer)


def page_html(title: str, header: Html, sections: Sequence[tuple[str, str, Html]], *, footer: str) -> Html:
    """A self-contained page. sections: (anchor, title in the navigation bar, content)."""
    style = files("forgefield.report").joinpath("style.css").read_text(encoding="utf-8")
    dark = files("forgefield.report").joinpath("dark.css").read_text(encoding="utf-8")
    digest = base64.b64encode(hashlib.sha256(_SCRIPT.encode()).digest()).decode()
    scripts = f"script-src 'sha256-{digest}'"
    policy = f"default-src 'none'; style-src 'unsafe-inline'; {scripts}; base-uri 'none'; form-action 'none'"
    head = tag(
        "head",
        tag("meta", charset="utf-8"),
        tag("meta", http_equiv="Content-Security-Policy", content=policy),
        tag("meta", name="viewport", content="width=device-width, initial-scale=1"),
        tag("title", title),
        tag("style", Html(style.replace("/*DARK*/", dark))),
    )
    main = tag("main", *[content for _, _, content in sections], class_="wrap")
    end = tag("footer", tag("div", footer, class_="wrap"))
    links = [(anchor, name) for anchor, name, _ in sections]
    body = tag("body", header, _navigation(links), main, end, tag("script", Html(_SCRIPT)))
    return Html(f"<!doctype html>\n{tag('html', head, body, lang='en')}\n")


def implausible_box(run: RunData) -> Html | None:
    """A warning that lists errors as large as those of an untrained model."""
    statistics = run.info.get("statistics")
    by_split = errors_by_split(run)
    for name, test in run.tests.items():
        if isinstance(stored := test.get("errors"), dict):  # as stored, including infinite ones
            by_split[name] = by_split.get(name, {}) | {k: v for k, v in stored.items() if isinstance(v, float)}
    warnings = [
        f"{split_title(split)}: {sentence}"
        for split, errors in by_split.items()
        for sentence in implausible_errors(errors, statistics if isinstance(statistics, dict) else {})
    ]
    if not warnings:
        return None
    items = [tag("li", sentence) for sentence in warnings]
    return tag("div", tag("h3", "These errors are too large"), tag("ul", *items), tag("p", ADVICE), class_="notices")


def missing_files_box(run: RunData) -> Html | None:
    """A list of the files that are missing, damaged or outdated."""
    if not run.notes:
        return None
    items = [tag("li", tag("code", note.file), f" {note.problem}: ", _remedy(note), ".") for note in run.notes]
    return tag("div", tag("h3", "Not in this run folder"), tag("ul", *items), class_="notices")


def _remedy(note: Note) -> Html:
    return tag("code", note.remedy) if note.is_command else text(note.remedy.replace("`", ""))


def _navigation(sections: Sequence[tuple[str, str]]) -> Html:
    links = join(tag("a", title, href=f"#{anchor}") for anchor, title in sections)
    button = tag("button", "Light / dark", id="theme", type="button")
    return tag("nav", tag("div", links, button, class_="wrap"))
