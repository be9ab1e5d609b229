"""`report.html`: one page that needs nothing but itself.

Figures are inline SVG, the style is inline, the only script turns the theme, and the page's own security policy
forbids everything else, so it opens anywhere, also without a network. What the run folder lacks is said on the page,
with what makes it.
"""

from __future__ import annotations

import base64
import hashlib
from importlib.resources import files
from pathlib import Path

from forgefield.errors import ForgefieldError
from forgefield.files import write_atomically
from forgefield.report.analysis import QUANTITIES, pairs
from forgefield.report.canvas import house_style
from forgefield.report.figures import parity_row
from forgefield.report.folder import SPLITS, Note, RunData, predictions_from_npz, read_run, split_title
from forgefield.report.headline import headline, known_errors, title_block
from forgefield.report.markup import Html, join, tag, text
from forgefield.report.sections import config_section, data_and_model, learning_section, timing_section, use_section
from forgefield.report.sections_diagnosis import diagnosis_section
from forgefield.tasks.plausibility import ADVICE, implausible_errors

_SCRIPT = (
    "const root=document.documentElement;"
    "document.getElementById('theme').onclick=()=>{"
    "const now=root.dataset.theme||(matchMedia('(prefers-color-scheme: dark)').matches?'dark':'light');"
    "root.dataset.theme=now==='dark'?'light':'dark'};"
)
_CONTENTS = (
    ("results", "Results"),
    ("learning", "Learning"),
    ("errors", "Errors"),
    ("timing", "Timing"),
    ("diagnosis", "Diagnosis"),
    ("data", "Data and model"),
    ("use", "Use it"),
    ("config", "Config"),
)


def write_report(run_path: Path) -> Path:
    """Write `report.html` into the run folder and return its path. The old page, if any, is replaced in one step."""
    run = read_run(Path(run_path))
    return write_atomically(run.path / "report.html", report_html(run).encode("utf-8", errors="replace"))


def write_parity_png(run_path: Path, split: str = "test") -> Path:
    """Write `parity-SPLIT.png` (all outputs, as far as labelled) into the run folder and return its path."""
    run_path = Path(run_path)
    known = sorted(path.stem for path in (run_path / "predictions").glob("*.npz"))
    if split not in known and split not in SPLITS:
        raise ForgefieldError(f"There is no split `{split}`; the splits with predictions are: {', '.join(known)}.")
    source = run_path / "predictions" / f"{split}.npz"
    if not source.exists():
        raise ForgefieldError(f"{source} is not there; `forgefield test {run_path}` makes predictions.")
    predictions, units = predictions_from_npz(source), read_run(run_path).heads
    names = [name for name in (*QUANTITIES, *predictions.extra_outputs) if name in QUANTITIES or name in units]
    panels = [panel for name in names if (panel := pairs(predictions, name, units.get(name, ""))) is not None]
    if not panels:
        raise ForgefieldError(f"{source} holds no labelled values to compare with.")
    target = run_path / f"parity-{split}.png"
    with house_style():
        try:
            parity_row(panels).savefig(target, format="png", dpi=160, facecolor="white")
        except OSError as error:
            raise ForgefieldError(f"{target} cannot be written: {error.strerror}.") from error
    return target


def report_html(run: RunData) -> Html:
    """The whole page."""
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
        tag("title", f"{run.name} · Forgefield report"),
        tag("style", Html(style.replace("/*DARK*/", dark))),
    )
    main = tag(
        "main",
        tag("section", headline(run), unusable(run), notices(run), id="results"),
        learning_section(run),
        run.kind.errors_section.load()(run),
        timing_section(run),
        diagnosis_section(run),
        data_and_model(run),
        use_section(run),
        config_section(run),
        class_="wrap",
    )
    footer = tag("footer", tag("div", "Made by Forgefield from the run folder alone.", class_="wrap"))
    body = tag("body", title_block(run), _navigation(run), main, footer, tag("script", Html(_SCRIPT)))
    return Html(f"<!doctype html>\n{tag('html', head, body, lang='en')}\n")


def unusable(run: RunData) -> Html | None:
    """A box that says which errors are those of a model that learnt nothing."""
    statistics = run.info.get("statistics")
    by_split = known_errors(run)
    for name, test in run.tests.items():
        if isinstance(stored := test.get("errors"), dict):  # as written, infinite ones too
            by_split[name] = by_split.get(name, {}) | {k: v for k, v in stored.items() if isinstance(v, float)}
    found = [
        f"{split_title(split)}: {sentence}"
        for split, errors in by_split.items()
        for sentence in implausible_errors(errors, statistics if isinstance(statistics, dict) else {})
    ]
    if not found:
        return None
    items = [tag("li", sentence) for sentence in found]
    return tag("div", tag("h3", "These errors are too large"), tag("ul", *items), tag("p", ADVICE), class_="notices")


def notices(run: RunData) -> Html | None:
    """What the folder lacks, in one box."""
    if not run.notes:
        return None
    items = [tag("li", tag("code", note.file), f" {note.problem}: ", remedy(note), ".") for note in run.notes]
    return tag("div", tag("h3", "Not in this run folder"), tag("ul", *items), class_="notices")


def remedy(note: Note) -> Html:
    return tag("code", note.remedy) if note.is_command else text(note.remedy.replace("`", ""))


def _navigation(run: RunData) -> Html:
    shown = [entry for entry in _CONTENTS if entry[0] != "diagnosis" or run.diagnosis]
    links = join(tag("a", title, href=f"#{anchor}") for anchor, title in shown)
    button = tag("button", "Light / dark", id="theme", type="button")
    return tag("nav", tag("div", links, button, class_="wrap"))
