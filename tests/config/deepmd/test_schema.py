"""The translation against DeePMD-kit's own schema, where it is installed: no key of it is unknown, no default changes a run."""

from __future__ import annotations

import copy
import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from forgefield.config.deepmd import translate
from forgefield.errors import ForgefieldError
from forgefield.models.deeppot.options import descriptor_part
from forgefield.models.resolving import check_model
from tests.support.deepmd_inputs import DPA3, WATER, changed

SCRIPT = """
import json, sys
from deepmd.utils.argcheck import gen_args, normalize
from deepmd.utils.compat import update_deepmd_input

KINDS = {
    "model": ["standard"],
    "model.descriptor": ["se_e2_a", "se_e2_r", "se_atten", "se_e3_tebd", "dpa2", "dpa3"],
    "model.fitting_net": ["ener"],
    "learning_rate": ["exp", "cosine", "wsd"],
    "optimizer": ["Adam", "AdamW"],
    "loss": ["ener"],
}

def keys(argument, path, kind):
    for name, inner in argument.sub_fields.items():
        for spelling in (name, *inner.alias):
            yield [path, kind, spelling]
        if inner.sub_fields or inner.sub_variants:
            yield from everything(inner, f"{path}.{name}" if path else name)

def everything(argument, path):
    yield from keys(argument, path, None)
    for variant in argument.sub_variants.values():
        for kind in KINDS.get(path, []):
            yield from keys(variant.choice_dict[kind], path, kind)

found = []
for argument in gen_args():
    if argument.name != "nvnmd":
        found += everything(argument, argument.name)
inputs = json.load(sys.stdin)
print(json.dumps({"keys": found, "normal": [normalize(update_deepmd_input(one)) for one in inputs]}))
"""

BLOCK = {"rcut": 6.0, "rcut_smth": 0.5, "nsel": 120}
DPA2 = {"type": "dpa2", "repinit": BLOCK, "repformer": {**BLOCK, "rcut": 4.0}}
INPUTS: list[dict[str, Any]] = [
    WATER,
    changed({"learning_rate": {"type": "wsd", "start_lr": 0.01}, "optimizer": {"type": "AdamW"}}),
    changed({"learning_rate": {"type": "cosine", "start_lr": 0.01}, "loss": {}}),
    changed({"model.descriptor": {"type": "se_atten", "sel": 120}, "training.validation_data": ...}),
    changed({"model.descriptor": DPA3}),
    changed({"model.descriptor": {"type": "se_e3_tebd", "sel": 40}}),
    changed(
        {"model.descriptor": {"type": "se_r", "sel": [46, 92]}, "training.numb_steps": ..., "training.num_epoch": 3}
    ),
    changed({"training": {"systems": ["a", "b"], "batch_size": 2, "stop_batch": 100, "opt_type": "Adam"}}),
    changed({"validating": {"full_validation": True, "validation_metric": "F:RMSE"}}),
]
NESTED = changed({"model.descriptor": DPA2})
"""An input whose descriptor has sections of its own."""
SECTIONS = ("model.modifier", "model.compress", "model.type_embedding")
"""Refused as a whole, so what is in them is not looked at."""


@pytest.fixture(scope="module")
def theirs() -> dict[str, Any]:
    named = os.environ.get("FORGEFIELD_DEEPMD_PYTHON")
    if named is None and importlib.util.find_spec("deepmd") is None:
        pytest.skip("deepmd-kit is not installed; FORGEFIELD_DEEPMD_PYTHON may name an interpreter that has it")
    answer = subprocess.run(
        [named or sys.executable, "-c", SCRIPT],
        input=json.dumps([*INPUTS, NESTED]),
        capture_output=True,
        text=True,
        check=False,
    )
    assert answer.returncode == 0, answer.stderr[-2000:]
    return json.loads(answer.stdout)


@pytest.mark.parametrize("number", range(len(INPUTS)))
def test_an_input_with_all_defaults_written_out_is_the_same_run(number: int, theirs: dict[str, Any]) -> None:
    ours = translate(INPUTS[number], Path("input.json"))
    written = copy.deepcopy(theirs["normal"][number])
    assert written["learning_rate"].pop("scale_by_worker") == "linear"  # said, but never done by its PyTorch
    # What is passed on to the model is passed on as written; the model has the same defaults.
    model = translate(written, Path("input.json"))["model"]
    for part in ("descriptor", "fitting_net"):
        for name in set(model[part]) - set(ours["model"][part]):
            section = written["model"][part]
            (section if name in section else section["repflow"]).pop(name)
    assert translate(written, Path("input.json")) == ours


@pytest.mark.parametrize("number", range(len(INPUTS)))
def test_the_model_takes_every_option_with_its_default(number: int, theirs: dict[str, Any]) -> None:
    check_model(translate(theirs["normal"][number], Path("input.json"))["model"])


def test_defaults_of_dpa2_are_those_of_deepmd(theirs: dict[str, Any]) -> None:
    written, ours = (translate(one, Path("input.json"))["model"] for one in (theirs["normal"][-1], NESTED))
    found, expected = (descriptor_part({**model["descriptor"], "precision": "float64"})[1] for model in (written, ours))
    assert found == expected


def test_no_key_of_the_schema_is_unknown(theirs: dict[str, Any]) -> None:
    assert len(theirs["keys"]) > 200
    unknown = []
    for path, kind, name in theirs["keys"]:
        if path in SECTIONS:
            continue
        base: dict[str, Any] = {f"{path}.type": kind} if kind is not None else {}
        if path == "learning_rate" and kind is not None:
            base = {"learning_rate": {"type": kind, "start_lr": 0.001}}
        if path == "model.descriptor" and kind is not None:
            blocks = {"dpa2": DPA2, "dpa3": DPA3}
            base = {"model.descriptor": copy.deepcopy(blocks.get(kind, {"type": kind}))}
        if path == "model.spin":
            base = {"model.spin": {"use_spin": [True, False], "virtual_scale": 0.3}}
        if path.startswith("model.descriptor."):
            base = {"model.descriptor": copy.deepcopy(DPA3 if path.endswith("repflow") else DPA2)}
        try:
            translate(changed({**base, f"{path}.{name}": 1}), Path("input.json"))
        except ForgefieldError as error:
            if "unknown key" in str(error):
                unknown.append(str(error))
    assert unknown == []
