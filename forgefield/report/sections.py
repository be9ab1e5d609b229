"""The sections of the report other than the headline and the errors: learning, timing, data, model, use, config."""

from __future__ import annotations

import shlex
from datetime import datetime
from typing import Any

from forgefield.report.analysis import Quantity, quantities
from forgefield.report.canvas import to_svg
from forgefield.report.figures import learning_figure, timing_figure
from forgefield.report.folder import Row, RunData, as_number
from forgefield.report.headline import best_row, mean_atoms, median_of, parameter_count, species
from forgefield.report.markup import Child, Html, join, key_values, table, tag
from forgefield.report.numbers import NOTHING, count, duration, short_count, shorten, significant, with_unit

CONFIG_LIMIT = 100_000
"""A config longer than this many characters is cut on the page; the file itself has it all."""


def section(anchor: str, title: str, lead: Child, *content: Child) -> Html:
    return tag("section", tag("h2", title), tag("p", lead, class_="lead") if lead else None, *content, id=anchor)


def card(title: str | None, *content: Child) -> Html:
    return tag("div", tag("h3", title) if title else None, *content, class_="card")


def empty_card(run: RunData, file: str, title: str) -> Html:
    """Stands where a figure would be: what is missing and what makes it."""
    note = run.note(file)
    problem = f" {note.problem}. " if note else " holds nothing to show. "
    if note is None:
        hint: Child = None
    elif note.is_command:
        hint = join(["To make it: ", tag("code", note.remedy)])
    else:
        hint = note.remedy.replace("`", "") + "."
    return tag("div", tag("h3", title), tag("p", tag("code", file), problem, hint), class_="card empty")


def learning_section(run: RunData) -> Html:
    lead = "Errors are in physical units, independent of loss weights. The dotted line marks the best model, which is deployed."
    if uses_average(run):
        lead += (
            " Training curves are of the weights as they are trained, validation curves of their moving average (EMA)."
        )
    x_key = _x_axis(run.metrics)
    best = best_row(run)
    at = best.get(x_key) if best else None
    cards: list[Html] = []
    loss = _curves(run.metrics, x_key, "loss")
    if loss:
        rate = _curve(run.metrics, x_key, "lr")
        figure = learning_figure(loss, x_label=x_key, y_label="loss", learning_rate=rate, best=at)
        drawing = to_svg(figure, "curve-loss", "Loss and learning rate over training")
        cards.append(card("Loss and learning rate", drawing))
    shown = quantities(run.heads)
    for quantity in shown.values():
        curves = _curves(run.metrics, x_key, f"{quantity.name}_mae")
        if curves:
            figure = learning_figure(curves, x_label=x_key, y_label=with_unit("MAE", quantity.error_unit), best=at)
            drawing = to_svg(figure, f"curve-{quantity.name}", f"{quantity.title} MAE over training")
            cards.append(card(f"{quantity.title} MAE", drawing))
    if cards and best is not None:
        cards.append(_kept_card(run, best, x_key, len(cards), shown))
    if not cards:
        name = "metrics.jsonl" if run.note("metrics.jsonl") else "metrics.csv"
        cards = [empty_card(run, name, "Learning curves")]
    return section("learning", "Learning", lead, tag("div", *cards, class_="grid"))


def uses_average(run: RunData) -> bool:
    """Whether validation is with averaged weights, and training with those of the moment."""
    training = run.config.get("training")
    return isinstance(training, dict) and bool(training.get("ema"))


def _kept_card(run: RunData, best: Row, x_key: str, n_before: int, shown: dict[str, Quantity]) -> Html:
    """Errors of training and validation at the kept model; as wide as the row of figures leaves room for."""
    rows: list[list[Child]] = []
    for quantity in shown.values():
        for kind in ("mae", "rmse"):
            train, val = (best.get(f"{split}/{quantity.name}_{kind}") for split in ("train", "val"))
            if train is not None or val is not None:
                name = with_unit(f"{quantity.title} {kind.upper()}", quantity.error_unit)
                rows.append([name, significant(train), significant(val)])
    rows.append(["Loss", significant(best.get("train/loss")), significant(best.get("val/loss"))])
    when = f"{x_key} {count(best.get(x_key))}" if x_key in best else "the best row"
    width = {0: "whole-row", 1: "two-cells"}.get(n_before % 3, "")
    note = "Training errors are averages over the epoch while the weights still move."
    if uses_average(run):
        note += " Validation uses the exponential moving average of the weights (EMA)."
    content = (table(["", "Train", "Validation"], rows), tag("p", note, class_="note"))
    return tag("div", tag("h3", f"The best model, {when}"), *content, class_=f"card {width}")


TABS = 8
"""How many panels a page has room for; the style sheet numbers as many."""


def tabbed(panels: list[tuple[str, Html]]) -> Html:
    """Panels of which one is shown, with a tab for each, (title, content)."""
    buttons: list[Child] = []
    for number, (title, _) in enumerate(panels[:TABS]):
        buttons.append(tag("input", type="radio", name="split", id=f"tab-{number}", checked=number == 0))
        buttons.append(tag("label", title, for_=f"tab-{number}"))
    shown = [tag("div", content, class_=f"panel panel-{number}") for number, (_, content) in enumerate(panels[:TABS])]
    return tag("div", *buttons, *shown, class_="tabs")


def stacks(*columns: list[Html | None]) -> Html:
    """Cards in columns of their own, so that short and long ones leave no holes."""
    return tag("div", *[tag("div", *column, class_="stack") for column in columns if any(column)], class_="grid two")


def timing_section(run: RunData) -> Html:
    lead = "Wall-clock time of training proper, from one row of metrics to the next; validation is not counted."
    x_key = _x_axis(run.timing)
    cards: list[Html] = []
    for key, title, label in (
        ("seconds", "Seconds per epoch" if x_key == "epoch" else "Seconds per row", "seconds"),
        ("points_per_second", "Speed", "points/s") if run.of_points else ("atoms_per_second", "Speed", "atoms/s"),
    ):
        curve = _curve(run.timing, x_key, key, positive=False)
        if curve is not None:
            figure = timing_figure(curve, y_label=label, x_label=x_key)
            cards.append(card(title, to_svg(figure, f"timing-{key}", f"{title} over training")))
    if not cards:
        rows = _hardware_rows(run)
        about = card("Date and hardware", key_values(rows)) if rows else None
        missing = empty_card(run, "timing.csv", "Timing")
        return section("timing", "Timing", lead, tag("div", missing, about, class_="grid"))
    cards.append(card("In numbers", key_values(_timing_rows(run))))
    if rows := _hardware_rows(run):
        cards.append(tag("div", tag("h3", "Date and hardware"), key_values(rows), class_="card whole-row wide-pairs"))
    return section("timing", "Timing", lead, tag("div", *cards, class_="grid"))


def _hardware_rows(run: RunData) -> list[tuple[str, Child]]:
    """Dates, devices and versions, as far as the run recorded them."""
    stored, versions = run.info.get("hardware"), run.info.get("versions")
    found = stored if isinstance(stored, dict) else {}
    started, finished = (_moment(run.info.get(key)) for key in ("started", "finished"))
    rows: list[tuple[str, Child]] = []
    for title, moment in (("Started", started), ("Finished", finished)):
        if moment is not None:
            rows.append((title, f"{moment:%Y-%m-%d %H:%M}"))
    if started is not None and finished is not None and finished >= started:
        rows.append(("From start to finish", duration((finished - started).total_seconds())))
    for key, title in (("cuda", "GPU"), ("xpu", "XPU"), ("mps", "GPU"), ("cpu", "CPU")):
        if found.get(key):
            rows.append((title, shorten(found[key], 80)))
    processes = as_number(found.get("processes", run.info.get("world_size")))
    if processes is not None:
        rows.append(("Processes (ranks)", count(processes)))
    if as_number(found.get("threads")) is not None:
        rows.append(("Threads of each", count(as_number(found["threads"]))))
    if found.get("cuda_version"):
        rows.append(("CUDA", shorten(found["cuda_version"], 20)))
    known = versions if isinstance(versions, dict) else {}
    packages = [name for name in ("forgefield", "torch", "lightning", "python") if known.get(name)]
    return [*rows, *((name, shorten(known[name], 40)) for name in packages)]


def _moment(value: Any) -> datetime | None:
    try:
        return datetime.fromisoformat(value) if isinstance(value, str) else None
    except ValueError:
        return None


def _timing_rows(run: RunData) -> list[tuple[str, Child]]:
    seconds = sorted(row["seconds"] for row in run.timing if "seconds" in row)
    steps = [row["step"] for row in run.timing if "step" in row]
    rows: list[tuple[str, Child]] = []
    if seconds:
        rows += [
            ("Whole training", duration(sum(seconds))),
            ("Rows of metrics", count(len(seconds))),
            ("Median of a row", duration(seconds[len(seconds) // 2])),
            ("Slowest row", duration(seconds[-1])),
        ]
    if steps:
        rows.append(("Optimiser steps", count(max(steps))))
    for unit in ("atoms/s", "frames/s", "points/s"):
        key = f"{unit.removesuffix('/s')}_per_second"
        speed = median_of(run.timing, key)
        if speed is not None:
            rows.append((f"Median {unit}", short_count(speed)))
    return rows


def data_and_model(run: RunData) -> Html:
    if run.note("run.json"):
        content = tag("div", empty_card(run, "run.json", "Data, model and versions"), class_="grid")
    else:
        statistics = run.info.get("statistics")
        statistics = statistics if isinstance(statistics, dict) else {}
        described = stored_rows(run.info.get("data"))
        model = _model_rows(run)
        data = _pairs_card("Data", described if len(described) > 1 else described + _data_rows(run, statistics))
        left, right = [data, _species_card(run, statistics)], [_pairs_card("Model", model)]
        shorter = left if len(model) > 18 else right
        shorter += [_pairs_card(title, stored_rows(run.info.get(title.lower()))) for title in ("Task", "Versions")]
        content = stacks(left, right)
    return section("data", "Data and model", None, content)


def _pairs_card(title: str, rows: list[tuple[str, Child]]) -> Html | None:
    return card(title, key_values(rows)) if rows else None


def stored_rows(stored: Any) -> list[tuple[str, Child]]:
    """Rows from what `run.json` holds: a mapping, a list of (name, value), or a plain sentence."""
    if isinstance(stored, dict):
        return flat_rows(stored)
    if isinstance(stored, list):
        rows = [row for row in stored if isinstance(row, list) and len(row) == 2]
        return flat_rows({str(name): value for name, value in rows})
    return [("Description", shorten(stored, 1000))] if stored else []


def _data_rows(run: RunData, statistics: dict[str, Any]) -> list[tuple[str, Child]]:
    if not statistics:
        return []
    number = {key: as_number(value) for key, value in statistics.items()}
    rows: list[tuple[str, Child]] = [
        ("Frames", count(number.get("n_frames"))),
        ("Atoms", count(number.get("n_atoms"))),
        ("Atoms per frame", significant(mean_atoms(run))),
        ("Species", ", ".join(shorten(symbol, 12) for symbol in species(run)[:118]) or NOTHING),
    ]
    labels = statistics.get("labels")
    if isinstance(labels, dict):
        listed = list(labels.items())[:8]
        rows += [(f"Frames with {shorten(key, 30)}", count(as_number(value))) for key, value in listed]
    for key, title, unit in (
        ("mean_neighbours", "Neighbours per atom", ""),
        ("min_distance", "Shortest distance", " Å"),
        ("forces_rms", "RMS of force components", " eV/Å"),
        ("energy_residual_std", "Spread of energies about the references", " eV/atom"),
    ):
        if number.get(key) is not None:
            rows.append((title, significant(number[key]) + unit))
    return rows


def _species_card(run: RunData, statistics: dict[str, Any]) -> Html | None:
    rows = _species_rows(run, statistics)
    if not rows:
        return None
    header: list[Child] = ["Species", "Atoms", "Share", "Reference, eV", "Neighbours", "Force RMS, eV/Å"]
    kind = statistics.get("reference_kind")
    note = tag("p", f"Reference energies: {shorten(kind, 60)}.", class_="note") if kind else None
    return card("Species", table(header, rows), note)


def _species_rows(run: RunData, statistics: dict[str, Any]) -> list[list[Child]]:
    def column(key: str) -> dict[str, float]:
        stored = statistics.get(key)
        pairs = stored.items() if isinstance(stored, dict) else ()
        return {str(symbol): number for symbol, value in pairs if (number := as_number(value)) is not None}

    counts, references = column("species_counts"), column("reference_energies")
    neighbours, forces = column("mean_neighbours_by_species"), column("forces_rms_by_species")
    total = sum(counts.values())
    rows: list[list[Child]] = []
    for symbol in species(run)[:118] if counts or references else []:
        share = f"{significant(100 * counts[symbol] / total)} %" if total and symbol in counts else NOTHING
        reference = references.get(symbol)
        energy = f"{reference:.4f}".replace("-", "−") if reference is not None else NOTHING
        numbers = (significant(neighbours.get(symbol)), significant(forces.get(symbol)))
        rows.append([shorten(symbol, 20), count(counts.get(symbol)), share, energy, *numbers])
    return rows


def _model_rows(run: RunData) -> list[tuple[str, Child]]:
    rows: list[tuple[str, Child]] = [("Parameters", count(parameter_count(run)))]
    cutoff = as_number(run.info.get("cutoff"))
    if cutoff is not None:
        rows.append(("Cutoff", f"{significant(cutoff)} Å"))
    if run.info.get("precision"):
        rows.append(("Precision", shorten(run.info["precision"], 40)))
    model = run.info.get("model")
    options = model if isinstance(model, dict) else {}
    return rows + flat_rows(
        {key: value for key, value in options.items() if key not in ("species", "cutoff", "module_folder")}
    )


def flat_rows(values: dict[Any, Any], prefix: str = "", limit: int = 60) -> list[tuple[str, Child]]:
    """A nested mapping as `outer.inner` rows, bounded in number and length."""
    rows: list[tuple[str, Child]] = []
    for key, value in values.items():
        name = f"{prefix}{shorten(key, 60)}"
        if isinstance(value, dict) and value and prefix.count(".") < 4:
            rows += flat_rows(value, f"{name}.", limit)
        else:
            rows.append((name, _readable(value)))
    return rows[:limit]


def _readable(value: Any) -> str:
    if isinstance(value, bool) or value is None:
        return {True: "yes", False: "no", None: "none"}[value]
    if isinstance(value, float):
        return f"{value:.6g}".replace("-", "−", 1) if value < 0 else f"{value:.6g}"
    if isinstance(value, (list, tuple)):
        return shorten(", ".join(_readable(entry) for entry in value[:50]), 160)
    return shorten(value, 160)


def use_section(run: RunData) -> Html:
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
    if run.of_points:
        loading = f"import forgefield\n\nmodel = forgefield.load({name!r})\nldos = model(descriptors)  # 1/(eV A^3)"
        command = tag("pre", f"forgefield test {quoted} --data snapshots")
        cards = [card("In Python", tag("pre", _dim_comments(loading))), card("On the command line", command)]
        return section("use", "Use this model", None, tag("div", *cards, class_="grid two"))
    shell = [
        f"forgefield predict {quoted} structures.extxyz -o predicted.extxyz{flag}",
        f"forgefield test {quoted} --data more.extxyz{flag}",
    ]
    cards = [card("On the command line", tag("pre", "\n".join([*shell, f"forgefield check {quoted}{flag}"])))]
    if run.has_energy:
        cards.insert(0, card("In Python, with ASE", tag("pre", _dim_comments(python))))
    else:
        cards = [card("On the command line", tag("pre", "\n".join(shell)))]
    return section("use", "Use this model", None, tag("div", *cards, class_="grid two"))


def config_section(run: RunData) -> Html:
    if run.config_text is None:
        return section("config", "Config", None, tag("div", empty_card(run, "config.yaml", "Config"), class_="grid"))
    shown = run.config_text[:CONFIG_LIMIT]
    if len(run.config_text) > CONFIG_LIMIT:
        shown += "\n# ... cut here; config.yaml in the run folder has the rest"
    lines = count(len(run.config_text.splitlines()))
    summary = tag("summary", f"config.yaml · {lines} lines")
    folded = tag("details", summary, tag("pre", _dim_comments(shown)), class_="card")
    return section("config", "Config", "Everything that was set, defaults included.", folded)


def _dim_comments(source: str) -> Html:
    """The text with its comments set back."""
    lines: list[Child] = []
    for line in source.splitlines():
        start = 0 if line.lstrip().startswith("#") else line.find("  # ")
        if start < 0:
            start = line.find(" # ")
        if start < 0:
            lines.append(line)
        else:
            lines.append(join([line[:start], tag("span", line[start:], class_="comment")]))
    return join(lines, "\n")


def _x_axis(rows: list[Row]) -> str:
    """Epochs, unless several rows share one: then optimiser steps."""
    epochs = [row["epoch"] for row in rows if "epoch" in row]
    return "epoch" if epochs and (len(set(epochs)) == len(epochs) or not any("step" in row for row in rows)) else "step"


def _curves(rows: list[Row], x_key: str, name: str) -> dict[str, tuple[list[float], list[float]]]:
    found = {"train": _curve(rows, x_key, f"train/{name}"), "validation": _curve(rows, x_key, f"val/{name}")}
    return {key: curve for key, curve in found.items() if curve is not None}


def _curve(rows: list[Row], x_key: str, y_key: str, *, positive: bool = True) -> tuple[list[float], list[float]] | None:
    """(x, y) of the rows that have both; only values above zero where the axis is logarithmic."""
    both = [(row[x_key], row[y_key]) for row in rows if x_key in row and y_key in row]
    kept = [(x, y) for x, y in both if y > 0 or not positive]
    return ([x for x, _ in kept], [y for _, y in kept]) if kept else None
