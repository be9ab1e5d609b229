"""The page is complete, in physical units, needs nothing but itself, and says what a run folder lacks."""

from __future__ import annotations

import json
import re
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest

from forgefield.errors import ForgefieldError
from forgefield.report.folder import read_run
from forgefield.report.page import write_parity_png, write_report
from forgefield.report.sections.headline import best_row
from tests.support.example_run import make_predictions, write_example_run

VOID = {"meta", "input", "hr", "br"}
FILES = (
    "run.json",
    "config.yaml",
    "metrics.jsonl",
    "timing.csv",
    "test.json",
    "predictions/val.npz",
    "predictions/test.npz",
)


class Page(HTMLParser):
    """Reads a page as a browser would: which elements and attributes there are, what text they hold, is it balanced."""

    def __init__(self, source: str) -> None:
        super().__init__(convert_charrefs=True)
        self.open: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.texts: list[str] = []
        self.mismatched: list[str] = []
        self.feed(source)

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag):
        if not self.open or self.open.pop() != tag:
            self.mismatched.append(tag)

    def handle_data(self, data):
        if not self.open or self.open[-1] not in ("style", "script"):
            self.texts.append(data)

    @property
    def text(self) -> str:
        return re.sub(r"[\s\u2009]+", " ", " ".join(self.texts))

    def count(self, tag: str) -> int:
        return sum(name == tag for name, _ in self.tags)


def page_of(folder: Path) -> Page:
    return Page(write_report(folder).read_text(encoding="utf-8"))


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return write_example_run(tmp_path / "runs" / "copper-gold", epochs=8, frames=8)


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> str:
    """The page of a complete run, made once: many tests only read it."""
    folder = tmp_path_factory.mktemp("runs") / "copper-gold"
    return write_report(write_example_run(folder, epochs=30, frames=30)).read_text(encoding="utf-8")


def test_report_is_well_formed_and_holds_every_section(whole: str) -> None:
    page = Page(whole)
    assert page.mismatched == []
    assert page.open == []
    sections = [attributes["id"] for tag, attributes in page.tags if tag == "section"]
    assert sections == ["results", "learning", "errors", "timing", "data", "use", "config"]
    # loss, three errors; three parities, species, magnitude, distribution for each split; two timings
    assert page.count("svg") == 4 + 2 * 6 + 2
    assert "Not in this run folder" not in page.text


def test_headline_shows_the_errors_of_the_test_with_units(run: Path) -> None:
    (run / "test.json").write_text(
        json.dumps({"errors": {"energy_mae": 1.2344, "forces_mae": 13.572, "stress_mae": 0.5}})
    )
    text = page_of(run).text
    assert "Energy MAE, test 1.23 meV/atom" in text
    assert "Forces MAE, test 13.6 meV/Å" in text
    assert "Stress MAE, test 0.500 GPa" in text
    assert "Parameters 612 k" in text
    assert "360 training frames" in text


def test_without_a_test_the_headline_is_labelled_validation(run: Path) -> None:
    (run / "test.json").unlink()
    (run / "predictions" / "test.npz").unlink()
    (run / "predictions" / "val.npz").unlink()
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    best = min(rows, key=lambda row: row["val/loss"])
    text = page_of(run).text
    assert f"Forces MAE, validation {best['val/forces_mae']:.1f} meV/Å" in text
    assert f"Best weights, epoch {best['epoch'] + 1}" in text


def test_the_kept_model_is_chosen_by_the_monitor_of_the_config(run: Path) -> None:
    rows = [{"epoch": e, "step": e, "val/loss": 3.0 - e, "val/forces_mae": 1.0 + e} for e in range(3)]
    (run / "metrics.jsonl").write_text("\n".join(json.dumps(row) for row in rows))
    assert best_row(read_run(run))["epoch"] == 3
    (run / "config.yaml").write_text("training: {monitor: val/forces_mae}\n")
    assert best_row(read_run(run))["epoch"] == 1


def test_report_needs_nothing_but_itself(whole: str) -> None:
    page = Page(whole)
    for tag, attributes in page.tags:
        assert tag not in ("link", "img", "iframe", "object", "embed", "base", "form")
        for name, value in attributes.items():
            if name in ("src", "href", "xlink:href", "action", "srcset"):
                assert (value or "").startswith("#"), (tag, name, value)
    assert "http://" not in whole
    assert "https://" not in whole
    assert "@import" not in whole
    assert all(reference.startswith("#") for reference in re.findall(r"url\(([^)]*)\)", whole))
    policies = [a["content"] for t, a in page.tags if a.get("http-equiv") == "Content-Security-Policy"]
    assert len(policies) == 1
    assert policies[0].startswith("default-src 'none'")


def test_references_inside_the_drawings_resolve_and_are_unique(whole: str) -> None:
    ids = re.findall(r'\bid="([^"]*)"', whole)
    used = set(re.findall(r'xlink:href="#([^"]*)"', whole)) | set(re.findall(r"url\(#([^)]*)\)", whole))
    assert used
    assert used <= set(ids)
    assert len(ids) == len(set(ids))


def test_report_follows_the_theme_of_the_screen(whole: str) -> None:
    assert "prefers-color-scheme: dark" in whole
    assert "/*DARK*/" not in whole
    used = set(re.findall(r"var\((--[\w-]+)", whole))
    light, _, dark = whole.partition("@media (prefers-color-scheme: dark)")
    for variable in used:
        assert f"{variable}:" in light, variable
        assert f"{variable}:" in dark.partition("</style>")[0], variable


def test_the_same_run_gives_the_same_bytes_and_nothing_else_is_touched(run: Path) -> None:
    before = {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
    first = write_report(run).read_bytes()
    assert write_report(run).read_bytes() == first
    after = {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
    assert after.keys() - before.keys() == {run / "report.html"}
    assert all(after[path] == content for path, content in before.items())


def test_size_stays_bounded_for_a_large_run(tmp_path: Path) -> None:
    run = write_example_run(tmp_path / "large", epochs=3000, frames=1500)
    assert write_report(run).stat().st_size < 2_000_000


# ---- what is missing or damaged


def problem(folder: Path, name: str) -> str:
    """What the report would say about one file."""
    notes = [note for note in read_run(folder).notes if note.file == name]
    assert len(notes) <= 1
    return notes[0].problem if notes else ""


@pytest.mark.parametrize("name", FILES)
def test_a_missing_file_is_noticed(run: Path, name: str) -> None:
    assert problem(run, name) == ""
    (run / name).unlink()
    if name == "metrics.jsonl":
        (run / "metrics.csv").unlink()
        name = "metrics.csv"
    assert problem(run, name) == "does not exist"


@pytest.mark.parametrize("name", [name for name in FILES if name != "config.yaml"])
@pytest.mark.parametrize("keep", [0.0, 0.02, 0.41, 0.93, 0.999])
def test_a_truncated_file_is_noticed_and_its_good_part_kept(run: Path, name: str, keep: float) -> None:
    whole = read_run(run)
    content = (run / name).read_bytes()
    (run / name).write_bytes(content[: int(keep * len(content))])
    assert problem(run, name) != ""
    cut = read_run(run)
    for rows, all_rows in ((cut.metrics, whole.metrics), (cut.timing, whole.timing)):
        assert rows == all_rows[: len(rows)]


@pytest.mark.parametrize("name", FILES)
def test_noise_in_a_file_is_noticed(run: Path, name: str) -> None:
    (run / name).write_bytes(np.random.default_rng(1).bytes(3000))
    assert problem(run, name) != ""


@pytest.mark.parametrize("damage", ["cut", "noise"])
def test_a_run_of_damaged_files_still_gives_a_page_that_names_them(run: Path, damage: str) -> None:
    for name in FILES:
        content = (run / name).read_bytes()
        noise = np.random.default_rng(1).bytes(500)
        (run / name).write_bytes(content[: int(0.41 * len(content))] if damage == "cut" else noise)
    page = page_of(run)
    assert page.mismatched == []
    assert "Not in this run folder" in page.text
    for name in FILES:
        if damage == "noise" or name != "config.yaml":  # a config cut between two lines is still a config
            assert re.search(rf"{re.escape(name)} \S", page.text), name


def test_an_empty_folder_gives_a_page_that_explains_how_to_fill_it(tmp_path: Path) -> None:
    folder = tmp_path / "runs" / "new"
    folder.mkdir(parents=True)
    text = page_of(folder).text
    assert "forgefield test runs/new" in text
    assert "forgefield train" in text
    assert "not tested or validated yet" in text


def test_a_damaged_line_of_metrics_is_left_out_and_named(run: Path) -> None:
    lines = (run / "metrics.jsonl").read_text().splitlines()
    lines[6] = lines[6][:25]
    (run / "metrics.jsonl").write_text("\n".join(lines))
    assert problem(run, "metrics.jsonl") == "line 7 is truncated or damaged and left out"
    assert len(read_run(run).metrics) == 7


def test_predictions_of_wrong_shape_are_refused_with_the_array_named(run: Path) -> None:
    arrays = make_predictions(np.random.default_rng(0), 10)
    arrays["forces_pred"] = arrays["forces_pred"][:-1]
    np.savez(run / "predictions" / "test.npz", **arrays)
    assert "`forces_pred` has shape" in problem(run, "predictions/test.npz")


def test_pickled_objects_in_predictions_are_not_loaded(run: Path, tmp_path: Path) -> None:
    class Trap:
        def __reduce__(self):
            return (Path.touch, (tmp_path / "sprung",))

    arrays = make_predictions(np.random.default_rng(0), 4)
    arrays["energy_ref"] = np.array([Trap()] * 4, dtype=object)
    np.savez(run / "predictions" / "test.npz", **arrays)
    assert "cannot be read" in problem(run, "predictions/test.npz")
    assert not (tmp_path / "sprung").exists()


def test_a_run_without_forces_or_stress_shows_energies_alone(run: Path) -> None:
    full = make_predictions(np.random.default_rng(0), 10)
    for split in ("val", "test"):
        kept = {key: full[key] for key in ("n_atoms", "species", "species_symbols", "energy_ref", "energy_pred")}
        np.savez(run / "predictions" / f"{split}.npz", **kept)
    (run / "test.json").unlink()
    text = page_of(run).text
    assert "Energy MAE, test" in text
    assert "Forces MAE, test" not in text
    assert "Distribution of errors, energy" in text


def test_a_single_frame_and_exact_predictions_can_be_drawn(run: Path) -> None:
    arrays = make_predictions(np.random.default_rng(0), 1)
    for name in ("energy", "forces", "stress"):
        arrays[f"{name}_pred"] = arrays[f"{name}_ref"]
    np.savez(run / "predictions" / "test.npz", **arrays)
    (run / "test.json").unlink()
    text = page_of(run).text
    assert "all errors are exactly zero" in text
    assert "Energy MAE, test 0 meV/atom" in text


def test_not_a_folder_is_one_clear_sentence(tmp_path: Path) -> None:
    with pytest.raises(ForgefieldError, match="is not a run folder"):
        write_report(tmp_path / "nowhere")


# ---- what comes from files is text, never markup

ATTACK = """"'><script>alert(1)</script><img src=x onerror=alert(2)></pre></svg><!-- $\\frac{x$ & style="font: 3px """


def test_no_word_from_any_file_becomes_markup(tmp_path: Path) -> None:
    reference = page_of(write_example_run(tmp_path / "runs" / "plain", epochs=5, frames=6))
    folder = tmp_path / "runs" / ATTACK.replace("/", "")
    write_example_run(folder, epochs=5, frames=6)
    info = json.loads((folder / "run.json").read_text())
    info["species"] = [ATTACK, "Au"]
    info["status"] = info["precision"] = ATTACK
    info["model"] = {ATTACK: ATTACK, "name": ATTACK}
    info["versions"] = {ATTACK: [ATTACK]}
    info["data"] = [[ATTACK, ATTACK]]
    info["task"] = {ATTACK: ATTACK}
    info["statistics"]["reference_kind"] = ATTACK
    info["statistics"]["labels"] = {ATTACK: 3}
    info["statistics"]["species_counts"] = {ATTACK: 3}
    (folder / "run.json").write_text(json.dumps(info))
    (folder / "config.yaml").write_text(f"{ATTACK}\n# {ATTACK}\n")
    test = {"source": ATTACK, "weights": ATTACK, "errors": {ATTACK: 1.0, "forces_mae": 2.0}}
    (folder / "test.json").write_text(json.dumps(test))
    (folder / "metrics.jsonl").write_text(json.dumps({ATTACK: 1.0, "epoch": 0, "val/loss": 1.0}) + "\n" + ATTACK)
    for split in ("val", "test"):
        arrays = make_predictions(np.random.default_rng(0), 6)
        arrays["species_symbols"] = np.array([ATTACK, "Au"])
        np.savez(folder / "predictions" / f"{split}.npz", **arrays)
    page = page_of(folder)
    assert page.mismatched == []
    assert page.count("script") == reference.count("script") == 1
    assert page.count("img") == 0
    assert not [name for _, attributes in page.tags for name in attributes if name.startswith("on")]
    assert {tag for tag, _ in page.tags} <= {tag for tag, _ in reference.tags} | {"li", "ul", "code"}
    assert page.text.count("<script>alert(1)</script>") >= 12  # shown as the words they are


# ---- parity on its own


def test_parity_png_is_written_for_either_split(run: Path) -> None:
    for split in ("val", "test"):
        path = write_parity_png(run, split)
        assert path == run / f"parity-{split}.png"
        assert path.read_bytes().startswith(b"\x89PNG")


def test_parity_png_without_predictions_explains_how_to_make_them(run: Path) -> None:
    (run / "predictions" / "test.npz").unlink()
    with pytest.raises(ForgefieldError, match="forgefield test"):
        write_parity_png(run, "test")
    with pytest.raises(ForgefieldError, match="no split `train`"):
        write_parity_png(run, "train")


@pytest.mark.parametrize(("error", "shown"), [(9e16, "forces RMSE 9e+16 meV/A"), (float("inf"), "forces_rmse is inf")])
def test_errors_of_a_model_that_learnt_nothing_are_pointed_out(run: Path, error: float, shown: str) -> None:
    assert "too large" not in Page(write_report(run).read_text()).text
    stored = json.loads((run / "test.json").read_text())
    stored["errors"]["forces_rmse"] = error
    (run / "test.json").write_text(json.dumps(stored))
    text = Page(write_report(run).read_text()).text
    assert "These errors are too large" in text
    assert shown in text
    assert "not usable" in text
