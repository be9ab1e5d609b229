"""Errors of trained models, at the end of a training and on other data.

Every rank predicts a share of the samples; rank 0 combines them and writes predictions, errors and the report to the run
folder. This module evaluates frames and holds what all kinds of samples share; `kinds` names the evaluation of the others.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Mapping
from datetime import datetime
from itertools import chain, count
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from forgefield.config.schema import Config, DataOptions
from forgefield.config.test_sets import test_sets
from forgefield.config.trust import code_of_model
from forgefield.data.batch_spec import BatchSpec
from forgefield.data.dataset import GraphDataset
from forgefield.data.labels.label_reader import LabelReader
from forgefield.data.reading import label_settings, read_table, unit_settings
from forgefield.data.sampling.batching import evaluation_budget
from forgefield.data.sampling.loader import FrameLoader
from forgefield.data.sampling.plan import Budget
from forgefield.data.species import SpeciesTable
from forgefield.data.splits.splits import is_lazy
from forgefield.errors import ForgefieldError
from forgefield.files import write_atomically, written_whole
from forgefield.inference.evaluate import evaluate_batches, join_in_order, per_atom_outputs
from forgefield.models.resolving import branch_names, single_branch
from forgefield.parallel.accelerators import evaluation_device
from forgefield.parallel.ranks import Ranks
from forgefield.report.page import write_parity_png, write_report
from forgefield.runs import Run, built
from forgefield.tasks.classes import auroc
from forgefield.tasks.metrics import ErrorMetrics
from forgefield.tasks.targets import LABELS
from forgefield.training.fit import TrainingResult
from forgefield.training.problem.preflight import require_same_data
from forgefield.training.run.evaluation_progress import with_progress
from forgefield.training.run.journal import Journal
from forgefield.training.run.summary import end_summary


def is_unmeasured(fitted: TrainingResult) -> bool:
    """A complete run whose results are missing, were computed with other weights, or are of other test data."""
    if fitted.outcome != "complete" or fitted.data is None:
        return False
    run = fitted.run
    needs_test = any(not (run.path / f"{name}.json").exists() for name in fitted.data.tests)
    if needs_test or not (run.path / "report.html").exists():
        return True
    info = run.info
    if "measured" not in info:  # a run of an earlier version, which kept no record
        return "data.test" in fitted.changed
    return bool(info["measured"] != _what_is_measured(run, run.config))


def _what_is_measured(run: Run, config: Config) -> dict[str, str]:
    """What the results of a run depend on: the best weights and the test data."""
    return {"weights_sha256": run.read_weights("best").sha256, "test": str(config.data.test)}


def measure(fitted: TrainingResult, config: Config, journal: Journal, ranks: Ranks) -> None:
    """Evaluate the best weights on validation and test data; rank 0 writes the results and the report."""
    run, data = fitted.run, fitted.data
    assert data is not None
    run.kind.measure.load()(run, config, data, journal, ranks)
    if ranks.is_rank_zero:  # last: results count only when all of them are there
        run.write_info(measured=_what_is_measured(run, config))


def measure_frames(run: Run, config: Config, data: Any, journal: Journal, ranks: Ranks) -> None:
    """Errors on validation and test frames, each frame predicted by one rank; rank 0 writes."""
    batch = evaluation_budget(config.data)
    device = evaluation_device(config.trainer.get("accelerator"))
    data = data.serve(BatchSpec(on_gpu=device.startswith("cuda"))).data
    results: dict[str, dict[str, float]] = {}
    for split, dataset in data.splits():
        if split != "train" and has_outputs(run):
            results[split] = evaluate(
                run, dataset, split, which="best", device=device, batch=batch, ranks=ranks, journal=journal
            )
    if not ranks.is_rank_zero:
        return
    sources = test_sets(config.data.test)
    for name in data.tests.keys() & results.keys():
        write_test(run, results[name], name=name, data=sources[name], which="best", frames=len(data.tests[name]))
    write_report(run.path)
    branches = branch_names(run.info["model"])
    head, flag = (f", head={branches[0]!r}", f" --head {branches[0]}") if branches else ("", "")
    if any(code_of_model(run.info["model"])):
        head, flag = f"{head}, trust_code=True", f"{flag} --trust-code"
    hints = [
        *(
            [f"from forgefield import Calculator; atoms.calc = Calculator({str(run.path)!r}{head})"]
            if run.has_energy
            else []
        ),
        *([] if has_outputs(run) else [f"train further: model: {{from: {run.name}}}"]),
        *([f"forgefield predict {run.path} structures.extxyz -o predicted.extxyz{flag}"] if has_outputs(run) else []),
        f"report: {run.path / 'report.html'}",
    ]
    journal.show(
        lambda console: end_summary(
            console,
            run.path,
            results,
            hints,
            units=run.units,
            statistics=run.info.get("statistics"),
            note=run.info.get("stopped_early"),
        )
    )


def test_frames(
    run: Run,
    data: Any,
    options: DataOptions,
    name: str,
    *,
    which: str,
    device: str,
    labels_required: bool,
    head: str | None,
    ranks: Ranks,
) -> dict[str, float]:
    """Errors of a run on other frames, by name; predictions, errors and a parity plot are written to the run as `name`.

    data: a file, folder, glob or list of them. options: labels, units and batch size of that data. Other arguments as in
    `api.test`.
    """
    labels, units = label_settings(options.labels), unit_settings(options.units)
    reader = LabelReader(labels, units)
    frames = read_table(data, labels, units, lazy=is_lazy(options), required=labels_required, reader=reader)
    require_same_data(frames.fingerprint, ranks)
    dataset = GraphDataset(frames, SpeciesTable(run.species), run.graph)
    batch = evaluation_budget(options)
    errors = evaluate(
        run, dataset, name, which=which, device=device, batch=batch, ranks=ranks, head=head, hints=reader.hints()
    )
    if ranks.is_rank_zero:
        write_test(run, errors, name=name, data=data, which=which, head=head, frames=len(frames))
        if any("_mae" in error for error in errors):
            write_parity_png(run.path, name)
    return ranks.broadcast(errors)


def evaluate(
    run: Run,
    dataset: GraphDataset,
    split: str,
    *,
    which: str,
    device: str,
    batch: Budget,
    ranks: Ranks,
    head: str | None = None,
    hints: Mapping[str, str] | None = None,
    journal: Journal | None = None,
) -> dict[str, float]:
    """Predict a data set, keep the predictions in the run, give the errors (on rank 0; the others only predict).

    hints: for labels that may be missing, a sentence on values of other names. journal: where progress is shown.
    """
    potential: Any = load_shared(run, which, device, ranks, head)
    ours = [name for name in dict.fromkeys(LABELS.values()) if potential.has_energy or name == "forces"]
    ours = ours if potential.has_energy or potential.forces_are_direct else []
    outputs = [*ours, *potential.extra_outputs]
    if not outputs:
        raise ForgefieldError(ONLY_NOISE.format(run.name))
    labels = [name for name in outputs if name in _labels_of(dataset) and dataset.frames.carries(name).any()]
    if not labels:
        seen = "".join(f"{hint}, or " for name, hint in (hints or {}).items() if name in outputs)
        raise ForgefieldError(
            f"None of these frames carries {', '.join(outputs[:-1])}{' or ' if outputs[1:] else ''}{outputs[-1]}, so there "
            f"is nothing to compare with; {seen}use forgefield predict."
        )
    loader = FrameLoader(dataset, batch, rank=ranks.rank, world_size=ranks.world_size)
    batches = loader if journal is None else with_progress(loader, len(loader), journal, f"{split} frames")
    parts = evaluate_batches(
        potential,
        batches,
        forces="forces" in labels,
        stress="stress" in labels,
        device=device,
    )
    all_gather = ranks.gather(parts)
    if not ranks.is_rank_zero:
        return {}
    arrays = join_in_order([part for of_rank in all_gather for part in of_rank], per_atom=per_atom_outputs(potential))
    arrays["species_symbols"] = np.array(run.species)
    arrays |= _origins(dataset)
    (run.path / "predictions").mkdir(exist_ok=True)
    with written_whole(run.path / "predictions" / f"{split}.npz") as partial:
        np.savez_compressed(partial, allow_pickle=False, **arrays)
    names = tuple(labels)
    classes = {name: values for name, values in run.classes.items() if name in names}
    uncounted = {name: head.get("uncounted") or () for name, head in run.heads.items()}
    metrics = ErrorMetrics(names, run.species, classes=classes, extensive=run.extensive, uncounted=uncounted)
    tensors = {
        key: torch.from_numpy(np.ascontiguousarray(value)) for key, value in arrays.items() if value.dtype.kind != "U"
    }
    logits = {name: tensors[f"{name}_prob"].clamp(min=1e-300).log() for name in classes}
    metrics.update(
        {name: tensors[f"{name}_pred"] for name in names} | logits,
        {
            **{name: tensors[f"{name}_ref"] for name in names},
            "n_atoms": tensors["n_atoms"],
            "species": tensors["species"],
        },
    )
    return metrics.compute() | _auroc(arrays, classes)


ONLY_NOISE = "Run {} learnt noise alone and predicts nothing; train it further (model.from)."


def has_outputs(run: Run) -> bool:
    """Whether its model predicts anything; one that learnt noise alone does not."""
    return run.has_energy or run.forces_are_direct or bool(run.heads)


def _auroc(arrays: dict[str, np.ndarray], classes: dict[str, list[float]]) -> dict[str, float]:
    """Of targets with two classes; the second is the positive one."""
    found = {}
    for name, values in classes.items():
        labelled = ~np.isnan(arrays[f"{name}_ref"])
        area = auroc(arrays[f"{name}_prob"][labelled, -1], arrays[f"{name}_ref"][labelled] == values[-1])
        if len(values) == 2 and area is not None:
            found[f"{name}_auroc"] = area
    return found


def _labels_of(dataset: GraphDataset) -> set[str]:
    """What its frames may carry."""
    return {*LABELS.values(), *dataset.fields}


def load_shared(run: Run, which: str, device: str, ranks: Ranks, head: str | None = None) -> nn.Module:
    """The trained model (one branch of it) on every rank, read from the disk by rank 0 alone."""
    if ranks.world_size == 1:
        return run.load_model(which, device, head=head)
    potential = run.load_model(which, "cpu", head=head) if ranks.is_rank_zero else None
    resolved = run.info["model"] if head is None else single_branch(run.info["model"], None, head)[0]
    recipe = ranks.broadcast((resolved, run.info["precision"], potential.state_dict()) if potential else None)
    if potential is None:
        potential = built(recipe[0], recipe[1], run.trust)
        potential.load_state_dict(recipe[2])
    return potential.to(device).eval()


def _origins(dataset: GraphDataset) -> dict[str, np.ndarray]:
    """The file of each frame, as an index into a list of files, and the index of the frame in that file."""
    origins = dataset.frames.origins(np.arange(len(dataset)))
    files = list(dict.fromkeys(file for file, _ in origins))
    number = {file: i for i, file in enumerate(files)}
    return {
        "files": np.array([_short(file) for file in files], dtype=np.str_),
        "frame_file": np.array([number[file] for file, _ in origins], dtype=np.int64),
        "frame_index": np.array([index for _, index in origins], dtype=np.int64),
    }


def name_of_test(run: Run, data: Any, *, which: str, head: str | None = None, called: str = "") -> str:
    """Name of the results on some data: that of `data.test` where it is the same data, else what the data is called or the
    name of its first file. Results on other data or with other weights that have this name already are kept: a number is
    added."""
    wanted = _identity(data, which, head)
    own = run.config.data.test
    names = [name for name, files in test_sets(own).items() if _identity(files, "best", None) == wanted]
    if names:
        return names[0]
    first = data[0] if isinstance(data, (list, tuple)) else data
    first = first.get("path", first) if isinstance(first, dict) else first
    words = [
        called or Path(str(first)).stem,
        *([head] if head is not None else []),
        *([which] if which != "best" else []),
    ]
    stem = "test-" + re.sub(r"[^A-Za-z0-9_.+-]+", "-", "-".join(words))
    candidates = chain(
        ["test"] if own in (None, 0) and not called else [], [stem], (f"{stem}-{number}" for number in count(2))
    )
    return next(name for name in candidates if _is_free(run, name, wanted, data))


def _is_free(run: Run, name: str, identity: str, data: Any) -> bool:
    """Whether results of that name are of the same data and weights, or there are none."""
    try:
        stored = json.loads((run.path / f"{name}.json").read_text())
    except FileNotFoundError:
        return name not in test_sets(run.config.data.test) or name == "test"
    except (OSError, ValueError):
        return True  # nobody can read it
    if "identity" not in stored:  # written by an earlier version
        return stored.get("source") == _short(str(data))
    return stored["identity"] == identity


def _identity(data: Any, which: str, head: str | None) -> str:
    """The same for the same files, weights and branch, wherever they are named from."""
    words = json.dumps([_absolute(data), which, head], default=str)
    return hashlib.blake2b(words.encode(), digest_size=8).hexdigest()


def _absolute(data: Any) -> Any:
    if isinstance(data, (str, os.PathLike)):
        return os.path.abspath(data)
    if isinstance(data, (list, tuple)):
        parts = [_absolute(item) for item in data]
        return parts[0] if len(parts) == 1 else parts
    return {key: _absolute(value) for key, value in data.items()} if isinstance(data, dict) else data


def _short(text: str) -> str:
    """Without the folder that this is run in, which tells the reader of a report nothing."""
    return text.replace(f"{Path.cwd()}{os.sep}", "")


def write_test(
    run: Run, errors: dict[str, float], *, name: str, data: Any, which: str, head: str | None = None, **counts: int
) -> None:
    """Write `NAME.json`. counts: how many samples there were, by what they are."""
    content = {
        "source": _short(str(data)),
        "weights": which,
        "weights_sha256": run.read_weights(which).sha256,
        **({} if head is None else {"head": head}),
        **counts,
        "date": f"{datetime.now():%Y-%m-%d %H:%M}",
        "identity": _identity(data, which, head),
        "errors": errors,
    }
    write_atomically(run.path / f"{name}.json", json.dumps(content, indent=1) + "\n")
