"""Deep Potential files of DeePMD-kit: import, export and back, what is refused, and nothing that is executed."""

from __future__ import annotations

import pickle

import numpy as np
import pytest
import torch
import yaml

from forgefield.cli import main
from forgefield.errors import ForgefieldError
from forgefield.models import Potential, build_model
from forgefield.models.deeppot.exporter import model_tree, write_deepmd
from forgefield.models.deeppot.importer import read_deepmd
from forgefield.runs import Run, create_run_from_model
from tests.support.deeppots import CUTOFF, SPECIES, make_deeppot, section
from tests.support.structures import make_batch, make_frame, make_potential

ROOM = {"sel": [40, 30]}
MODELS = {
    "both sides": {**ROOM, "resnet_dt": True},
    "one side": {**ROOM, "type_one_side": True, "exclude_types": [[0, 1]], "env_protection": 0.01},
    "float32": {**ROOM, "precision": "float32", "fitting": {"precision": "float32", "trainable": [True, False, True]}},
    "radial": {**ROOM, "kind": "se_e2_r", "type_one_side": True},
    "attention": {"sel": 70, "kind": "se_atten", "attn_layer": 2, "attn": 6, "tebd_dim": 3, "axis_neuron": 3},
    "stripped": {"sel": 70, "kind": "se_atten_v2", "attn_layer": 0, "tebd_dim": 3, "axis_neuron": 3},
    "excluded": {**ROOM, "model": {"pair_exclude_types": [[0, 0]], "atom_exclude_types": [1]}},
    "isolated": {**ROOM, "fitting": {"atom_ener": [-1.0, None], "rcond": 1e-8}},
}


def make(name: str) -> Potential:
    options = dict(MODELS[name])
    return make_deeppot(options.pop("kind", "se_e2_a"), **options)


def load(path) -> Potential:
    imported = read_deepmd(path)
    potential = build_model(imported.resolved, precision=imported.precision, seed=7)
    potential.load_state_dict(imported.state)
    return potential


@pytest.mark.parametrize("suffix", ["yaml", "dp"])
@pytest.mark.parametrize("name", MODELS)
def test_what_was_written_is_read_back_exactly(name, suffix, tmp_path):
    potential = make(name)
    again = load(write_deepmd(potential, tmp_path / f"model.{suffix}"))
    for key, value in potential.state_dict().items():
        torch.testing.assert_close(again.state_dict()[key], value, rtol=0, atol=0)
    batch = make_batch(make_frame(9, seed=1, box=4.5), make_frame(4, seed=2))
    for key, value in potential.eval()(batch).items():
        torch.testing.assert_close(again.eval()(batch)[key], value, rtol=0, atol=0)
    flags = [parameter.requires_grad for parameter in potential.parameters()]
    assert [parameter.requires_grad for parameter in again.parameters()] == flags


@pytest.mark.parametrize(
    "options",
    [
        {"type_one_side": True},
        {"resnet_dt": True, "exclude_types": [[0, 0]]},
        {"kind": "se_e2_r", "type_one_side": True},
        {"set_davg_zero": True, "type_one_side": True},
    ],
    ids=str,
)
def test_a_model_without_room_gets_it_and_predicts_the_same(options, tmp_path):
    options = dict(options)
    potential = make_deeppot(options.pop("kind", "se_e2_a"), **options).eval()
    batch = make_batch(make_frame(9, seed=1, box=4.5), make_frame(1, seed=2, periodic=False))
    expected = potential(batch)
    for sel in ([40, 30], [100, 200]):
        found = load(write_deepmd(potential, tmp_path / "model.dp", sel=sel)).eval()(batch)
        for key in ("atomic_energy", "forces"):
            torch.testing.assert_close(found[key], expected[key], rtol=1e-11, atol=1e-11)


def test_room_is_made_for_the_neighbours_of_the_training_data(tmp_path):
    potential = make_deeppot(most_neighbours=[21, 30])
    assert model_tree(potential.model)["model"]["descriptor"]["sel"] == [24, 36]
    with pytest.raises(ForgefieldError, match="number of H, O neighbours"):
        write_deepmd(make_deeppot(), tmp_path / "model.dp")


REFUSED = {
    "another model": (lambda: make_potential(), None, "only a model with model.name=deeppot"),
    "another suffix": (lambda: make("radial"), "model.pb", "end in .yaml"),
    "another sel": (lambda: make("radial"), None, "trained with sel"),
    "zbl": (lambda: make_deeppot(model={"zbl": True}, **ROOM), None, "zbl"),
    "radial with a network for each pair": (lambda: make_deeppot("se_e2_r", **ROOM), None, "type_one_side"),
    "a norm of its own": (lambda: make_deeppot(**ROOM, neighbour_norm=3.0), None, "neighbour_norm"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_cannot_be_written_is_refused(what, tmp_path):
    build, name, message = REFUSED[what]
    with pytest.raises(ForgefieldError, match=message):
        write_deepmd(build(), tmp_path / (name or "model.dp"), sel=[1, 1] if what == "another sel" else None)
    assert not list(tmp_path.iterdir())


def test_the_commands_make_a_run_and_a_file(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    potential = make("both sides")
    write_deepmd(potential, tmp_path / "water.yaml")
    assert main(["import", "deepmd", "water.yaml"]) == 0
    assert "species H O, cutoff 3 A" in capsys.readouterr().out
    run = Run.open("water")
    batch = make_batch(make_frame(6, seed=4))
    expected = potential.eval()(batch)["forces"]
    torch.testing.assert_close(run.load_potential()(batch)["forces"], expected, rtol=0, atol=0)
    assert main(["export", "water", "--to", "deepmd", "-o", "again.dp"]) == 0
    torch.testing.assert_close(load("again.dp").eval()(batch)["forces"], expected, rtol=0, atol=0)
    assert main(["import", "deepmd", "water.yaml", "--weights", "raw", "--name", "other"]) == 2
    assert "--weights does not apply to" in capsys.readouterr().err
    assert main(["export", "water", "--to", "deepmd", "-o", "again.dp"]) == 2
    assert "again.dp exists already; --force overwrites it" in capsys.readouterr().err
    assert main(["export", "water", "--to", "deepmd", "-o", "again.dp", "--force", "--sel", "5", "5"]) == 2
    assert "trained with sel" in capsys.readouterr().err


def test_a_run_is_rebuilt_from_its_options_alone(tmp_path):
    potential = make_deeppot(precision="float32", most_neighbours=[3, 4])
    from forgefield.models import resolve_model

    resolved = resolve_model(section(most_neighbours=[3, 4]), species=SPECIES, cutoff=CUTOFF)
    made = {"name": "run", "out": tmp_path, "resolved": resolved, "potential": potential}
    run = create_run_from_model(**made, origin="a test", precision="float32")
    batch = make_batch(make_frame(6, seed=4))
    found = Run.open(run.path).load_potential()(batch)["energy"]
    torch.testing.assert_close(found, potential.eval()(batch)["energy"], rtol=0, atol=0)


def checkpoint(potential: Potential) -> dict:
    """As DeePMD-kit's torch backend writes it."""
    model = model_tree(potential.model)["model"]
    descriptor, fitting = model["descriptor"], model["fitting"]
    state = {"model.Default.atomic_model.out_bias": model["@variables"]["out_bias"]}
    prefix = "model.Default.atomic_model.descriptor.sea"
    state |= {f"{prefix}.mean": descriptor["@variables"]["davg"], f"{prefix}.stddev": descriptor["@variables"]["dstd"]}
    parts = ((prefix, descriptor["embeddings"]), ("model.Default.atomic_model.fitting_net", fitting["nets"]))
    for place, collection in parts:
        for i, network in enumerate(collection["networks"]):
            for j, layer in enumerate(network["layers"]):
                for ours, theirs in (("w", "matrix"), ("b", "bias"), ("idt", "idt")):
                    if layer["@variables"][ours] is not None:
                        state[f"{place}.filter_layers.networks.{i}.layers.{j}.{theirs}"] = layer["@variables"][ours]
    keys = ("type", "sel", "rcut", "rcut_smth", "neuron", "axis_neuron", "resnet_dt", "type_one_side")
    params = {
        "type_map": list(SPECIES),
        "descriptor": {key: descriptor[key] for key in keys},
        "fitting_net": {key: fitting[key] for key in ("neuron", "resnet_dt")},
    }
    tensors = {key: torch.from_numpy(np.array(value)) for key, value in state.items()}
    return {"model": {"_extra_state": {"model_params": params}, **tensors}, "optimizer": {"state": {}}}


def test_a_checkpoint_is_read(tmp_path):
    potential = make("both sides")
    torch.save(checkpoint(potential), tmp_path / "model.pt")
    again = load(tmp_path / "model.pt")
    for key, value in potential.state_dict().items():
        torch.testing.assert_close(again.state_dict()[key], value, rtol=0, atol=0)


class Trap:
    """Writes a file if anybody unpickles it."""

    def __init__(self, path) -> None:
        self.path = str(path)

    def __reduce__(self):
        return open, (self.path, "w")


def test_nothing_in_a_file_is_executed(tmp_path):
    content = checkpoint(make("both sides"))
    content["optimizer"]["trap"] = Trap(tmp_path / "trapped")
    torch.save(content, tmp_path / "model.pt", pickle_module=pickle)
    load(tmp_path / "model.pt")
    tree = "!!python/object/apply:builtins.open [trapped2, w]"
    (tmp_path / "model.yaml").write_text(f"model: {tree}\n")
    with pytest.raises(ForgefieldError, match="not readable YAML"):
        read_deepmd(tmp_path / "model.yaml")
    assert {path.name for path in tmp_path.iterdir()} == {"model.pt", "model.yaml"}


def damage(tree: dict, what: str) -> None:
    model = tree["model"]
    if what == "another model type":
        model["type"] = "polarisable"
    if what == "another descriptor":
        model["descriptor"]["type"] = "loc_frame"
    if what == "another fitting":
        model["fitting"]["type"] = "population"
    if what == "spin":
        model["descriptor"]["spin"] = {"use_spin": [True]}
    if what == "case embedding":
        model["fitting"]["dim_case_embd"] = 2
        values = {**model["fitting"]["@variables"]["bias_atom_e"], "value": [0.5, 0.5]}
        model["fitting"]["@variables"]["case_embd"] = values
    if what == "slots":
        model["descriptor"]["@variables"]["davg"]["value"][0][3][0] = 9.0
    if what == "lost layer":
        for network in model["fitting"]["nets"]["networks"]:
            del network["layers"][-1]
    if what == "lost key":
        del model["descriptor"]["neuron"]


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("another model type", "type polarisable"),
        ("another descriptor", "descriptor loc_frame"),
        ("another fitting", "type population"),
        ("spin", "descriptor.spin"),
        ("case embedding", "case_embd is .0.5, 0.5.; it should be one 1 among zeros"),
        ("slots", "differs between the neighbours"),
        ("lost layer", "does not contain the weights"),
        ("lost key", "'neuron'"),
    ],
)
def test_what_has_no_counterpart_is_refused_by_name(what, message, tmp_path):
    path = write_deepmd(make("one side"), tmp_path / "model.yaml")
    tree = yaml.safe_load(path.read_text())
    damage(tree, what)
    path.write_text(yaml.safe_dump(tree))
    with pytest.raises(ForgefieldError, match=message):
        read_deepmd(path)


def test_files_that_are_not_models_are_refused_with_their_name(tmp_path):
    for name, message in (("model.pb", "convert-backend"), ("missing.dp", "does not exist")):
        with pytest.raises(ForgefieldError, match=message):
            read_deepmd(tmp_path / name)
    for name in ("text.yaml", "text.dp", "text.pt"):
        (tmp_path / name).write_text("just: text")
        with pytest.raises(ForgefieldError, match=name):
            read_deepmd(tmp_path / name)
    torch.save({"state": {}}, tmp_path / "other.pt")
    with pytest.raises(ForgefieldError, match="does not contain the options of its model"):
        read_deepmd(tmp_path / "other.pt")
