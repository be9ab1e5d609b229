"""Branches of a Deep Potential: inputs with several models, data and losses of each, laws of training, use of one of them."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from typing import Any

import ase.io
import numpy as np
import pytest
import torch

from forgefield import Calculator, api, load
from forgefield.bench.step import bare_step
from forgefield.cli import main
from forgefield.config.deepmd import translation
from forgefield.config.loading import load_config
from forgefield.data.module import read_data
from forgefield.data.sampling.batching import training_order
from forgefield.errors import ForgefieldError
from forgefield.inference.uncertainty import load_uncertainty
from forgefield.models.building import build_model
from forgefield.models.deeppot.exporter import write_deepmd
from forgefield.models.deeppot.importer import read_deepmd
from forgefield.runs import Run
from forgefield.training.engines.engine import Engine
from forgefield.training.engines.script import ScriptEngine
from forgefield.training.engines.step import StepFunction
from forgefield.training.problem.model_options import build_task
from forgefield.training.problem.transfer import shifts_of
from forgefield.trust.uncertainty import fit_uncertainty
from tests.support.deepmd_systems import several_input
from tests.support.engine_cases import difference
from tests.support.launching import ranks, weights
from tests.support.train_many import train_only


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Run:
    folder = tmp_path_factory.mktemp("branches")
    return api.train(several_input(folder), f"out={folder}/runs")


def frames_of(run: Run, rows: list[int]) -> dict[str, torch.Tensor]:
    """Of the training data: five of wet, then four of dry."""
    data = read_data(load_config(run.path.parents[1] / "several.json").data, 0, branches=["dry", "wet"])
    return data.train.batch(rows)


def test_an_input_with_several_models_is_a_model_with_branches(trained):
    file = trained.path.parents[1] / "several.json"
    config = translation(json.loads(file.read_text()), file).config
    assert config["model"]["branches"]["dry"] == {"fitting_net": {"type": "ener", "neuron": [6, 6], "seed": 2}}
    assert [source["branch"] for source in config["data"]["train"]] == ["wet", "dry"]
    assert config["data"]["sampling"] == {"branches": {"wet": 0.5, "dry": 0.5}, "rule": "size"}
    assert config["task"]["branches"]["wet"]["forces"] == {
        "weight": 100.0,
        "schedule": {"kind": "lr", "to": 1.0},
        "loss": "mse",
    }
    assert set(config["task"]["branches"]["dry"]) == {"energy"}


def test_curve_and_metrics_have_columns_for_each_branch(trained):
    header, _, *rows = (trained.path / "lcurve.out").read_text().splitlines()
    columns = [f"{name}_{split}_wet" for name in ("rmse", "rmse_e", "rmse_f") for split in ("val", "trn")]
    columns += [f"{name}_{split}_dry" for name in ("rmse", "rmse_e") for split in ("val", "trn")]
    found = header.split()[2:-1]
    assert sorted(found) == sorted(columns)
    values = dict(zip(found, map(float, rows[0].split()[1:])))
    assert np.isnan(values["rmse_val_dry"])
    metrics = {k: v for k, v in trained.metrics()[0].items() if v is not None}
    assert values["rmse_e_val_wet"] == pytest.approx(metrics["val/wet.energy_rmse"] / 1000, rel=0.01)
    assert not {"val/dry.energy_rmse", "train/dry.forces_rmse"} & metrics.keys()


def test_each_branch_has_the_bias_of_its_own_data(trained):
    branches, folder = trained.info["model"]["branches"], trained.path.parents[1]
    for name, system, counts in (("wet", "a", [2, 4]), ("dry", "b", [3, 4])):
        energies = np.load(folder / system / "set.000" / "energy.npy").ravel()
        expected = np.linalg.lstsq(np.repeat([counts], len(energies), 0).astype(float), energies, rcond=None)[0]
        assert np.allclose(branches[name]["out_bias"], expected)


def test_a_branch_taken_out_predicts_what_it_predicts_among_the_others(trained, tmp_path, capsys):
    whole = trained.load_potential("last")
    batch = frames_of(trained, [0, 6, 7, 3])
    together = whole(batch, forces=True)
    assert batch["branch"].tolist() == [1, 0, 0, 1]
    for name, rows, frames in (("wet", [0, 3], [0, 3]), ("dry", [6, 7], [1, 2])):
        alone = load(trained, which="last", head=name)
        own = {key: value for key, value in frames_of(trained, rows).items() if key != "branch"}
        assert torch.allclose(alone(own)["energy"], together["energy"][frames], rtol=0, atol=1e-12)
        file = tmp_path / f"{name}.dp"
        assert (
            main(["export", str(trained.path), "--to", "deepmd", "--which", "last", "--head", name, "-o", str(file)])
            == 0
        )
        found = read_deepmd(file)
        again = build_model(found.resolved, precision=found.precision, seed=0)
        again.load_state_dict(found.state)
        assert torch.equal(again.eval()(own)["energy"], alone(own)["energy"])
    folder = trained.path.parents[1]
    written = api.predict(trained, str(folder / "b"), tmp_path / "out.extxyz", which="last", head="dry")
    atoms = ase.io.read(written, 0)
    energy = atoms.get_potential_energy()
    atoms.calc = Calculator(trained.path, which="last", head="dry", dtype="float64")
    assert atoms.get_potential_energy() == pytest.approx(energy, abs=1e-6)
    assert main(["test", str(trained.path), "--data", str(folder / "b"), "--which", "last", "--head", "dry"]) == 0
    assert "energy" in capsys.readouterr().out


@pytest.mark.parametrize("head", [None, "wett"])
def test_the_branch_must_be_given(head, trained):
    with pytest.raises(ForgefieldError, match="the model has the branches dry, wet"):
        Calculator(trained.path, head=head)


def test_laws_are_checked_of_one_branch(trained, capsys):
    for target in (str(trained.path), str(trained.path.parents[1] / "several.json")):
        assert main(["check", target, "--frames", "1", "--head", "dry"]) == 0, capsys.readouterr().out
        assert main(["check", target]) != 0
        assert "the model has the branches dry, wet" in " ".join(capsys.readouterr().err.split())


def test_a_bare_step_knows_branches(trained):
    step = bare_step(load_config(trained.path.parents[1] / "several.json"))
    assert "branch" in step.first_batch()


def test_the_loss_of_a_mixed_batch_is_that_of_each_branch_on_its_frames(trained):
    config = load_config(trained.path.parents[1] / "several.json")
    task = build_task(config.task, trained.info["model"])
    whole = trained.load_potential("last").train()
    batches = [frames_of(trained, rows) for rows in ([0, 6, 7, 3], [0, 3], [6, 7])]
    losses = [float(task.loss(whole(batch), batch).total.detach()) for batch in batches]
    assert losses[0] == pytest.approx(losses[1] + losses[2], rel=1e-12)
    assert min(losses) > 0


@pytest.mark.slow
@pytest.mark.parametrize("form", ["tangent"])
def test_a_traced_step_equals_an_eager_one_for_any_mixture_of_branches(form, trained):
    config = load_config(trained.path.parents[1] / "several.json")
    task = build_task(config.task, trained.info["model"])
    potential = trained.load_potential("last").train()

    def function(derivative: str) -> StepFunction:
        return StepFunction(potential, task, task.error_metrics(trained.species), derivative=derivative)

    traced, eager = ScriptEngine(function(form)), Engine(function("double"))
    for rows in ([0, 6, 7, 3], [8], [1, 2]):
        assert difference(traced, eager, frames_of(trained, rows)) < 1e-9, rows


def test_an_interrupted_run_resumes_exactly_and_ranks_train_as_one(trained, tmp_path):
    file = trained.path.parents[1] / "several.json"
    for steps in (3, 6):
        train_only(load_config(file, [f"out={tmp_path}", f"++trainer.max_steps={steps}", "training.scheduler.T_max=6"]))
    for name in ("lcurve.out", "checkpoints/last.safetensors"):
        assert (tmp_path / "several" / name).read_bytes() == (trained.path / name).read_bytes(), name
    more = ["++trainer.max_steps=2", "trainer.val_check_interval=2"]
    train_only(load_config(file, [f"out={tmp_path}/one", "data.batch={frames: 2}", *more]))
    words = ["forgefield", "train", str(file), f"out={tmp_path}/two", "data.batch={frames: 1}", *more]
    done = ranks(2, *words, folder=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    one, two = (weights(tmp_path / name / "several") for name in ("one", "two"))
    assert float((one - two).abs().max()) < 1e-9


def test_branches_may_share_a_fitting_network(trained, tmp_path):
    """One network, two biases: energies of the same frame differ by the biases alone."""
    content = json.loads((trained.path.parents[1] / "several.json").read_text())
    content["model"]["shared_dict"]["fitted"] = {"neuron": [6, 6], "seed": 1}
    for model in content["model"]["model_dict"].values():
        model["fitting_net"] = "fitted:0"
    (tmp_path / "shared.json").write_text(json.dumps(content))
    run = train_only(load_config(tmp_path / "shared.json", [f"out={tmp_path}", "++trainer.max_steps=3"]))
    branches = run.info["model"]["branches"]
    assert branches["dry"]["share"] == "wet"
    batch = {key: value for key, value in frames_of(trained, [1]).items() if key != "branch"}
    wet, dry = (load(run, which="last", head=name)(batch)["energy"] for name in ("wet", "dry"))
    difference = np.subtract(branches["dry"]["out_bias"], branches["wet"]["out_bias"]) @ [2, 4]
    assert float(dry - wet) == pytest.approx(difference, abs=1e-10)


def test_aliases_of_branches_are_noted_with_the_name_that_selects_the_branch(trained):
    file = trained.path.parents[1] / "several.json"
    content = json.loads(file.read_text())
    plain = translation(content, file).config
    content["model"]["model_dict"]["dry"]["model_branch_alias"] = ["Default", "Ice"]
    translated = translation(content, file)
    assert translated.config == plain
    assert translated.notes["model.model_dict.dry.model_branch_alias"] == "select this branch by its name: --head dry."


def test_epochs_of_branches_are_one_epoch_of_draws(tmp_path):
    file = several_input(tmp_path, num_epoch_dict={"wet": 2, "dry": 2.5})
    content = json.loads(file.read_text())
    del content["training"]["model_prob"], content["training"]["numb_steps"]
    file.write_text(json.dumps(content))
    config = load_config(file)
    assert config.trainer["max_epochs"] == 1
    for batch in ({"frames": 1}, {"frames": 1, "by_source": True}):
        config = load_config(file, [f"data.batch={batch}".replace(" ", "").replace("'", "").replace("True", "true")])
        data = read_data(config.data, 0, branches=["dry", "wet"])
        order = training_order(config.data, data.train.frames, 0)(np.arange(9), np.ones(9, dtype=np.int64))
        assert np.bincount(order.rows(0)).tolist()[:5] == [2] * 5
        assert len(order.rows(0)) == 2 * 5 + 10


def test_branches_with_one_network_differ_by_their_case(tmp_path):
    shared = ["model.branches={wet:{fitting_net:{neuron:[6],dim_case_embd:2}},dry:{share:wet}}", f"out={tmp_path}/runs"]
    run = api.train(several_input(tmp_path), *shared)
    potential = run.load_potential("last")
    config = load_config(tmp_path / "several.json")
    batch = read_data(config.data, 0, branches=["dry", "wet"]).train.batch([0, 6])
    with torch.no_grad():
        both = potential.eval()(batch)["energy"]
        alone = [load(run, which="last", head=name)(batch)["energy"][i] for i, name in enumerate(("wet", "dry"))]
        torch.testing.assert_close(both, torch.stack(alone), rtol=0, atol=1e-9)
        # Without energies of species, the two differ only by the branch that the network reads.
        bias = run.info["model"]["branches"]["wet"]["out_bias"], run.info["model"]["branches"]["dry"]["out_bias"]
        other = load(run, which="last", head="dry")(batch)["energy"][0]
        counts = torch.bincount(batch["species"][batch["frame"] == 0], minlength=2).double()
        shift = counts @ (torch.tensor(bias[1]) - torch.tensor(bias[0])).double()
    assert abs(float(other - shift - alone[0])) > 1e-4
    path = write_deepmd(load(run, which="last", head="dry"), tmp_path / "dry.yaml")
    assert read_deepmd(path).resolved["fitting_net"]["case"] == 0


# ---- what is refused


@pytest.mark.parametrize(
    ("key", "value", "said"),
    [
        ("model.model_dict.dry.descriptor", "other", "'model.shared_dict' has types, described"),
        ("model.model_dict.dry.descriptor", "described:1", "at level 1; here parts are shared whole"),
        ("model.model_dict.dry.descriptor", {"type": "se_e2_a"}, "is not the one of wet; branches share their descriptor"),
        ("model.model_dict.dry.type_map", ["H", "O"], "branches have one type map"),
        ("model.model_dict.dry.fitting_net", {"type": "dos"}, "branches are energies here"),
        ("model.model_dict.dry.model_branch_alias", "Ice", "model_branch_alias' must be a list of names, not 'Ice'"),
        ("model.shared_dict.more", {}, "'model.shared_dict.more' is used by no branch"),
        ("training.data_dict.damp", {}, "'training.data_dict.damp' is for a branch that 'model.model_dict' does not have"),
        ("training.model_prob", {"wet": 1.0}, "'training.model_prob.dry' is missing"),
        ("training.num_epoch_dict", {"wet": 1, "dry": 2}, "model_prob gives others; keep one"),
        ("loss", {}, "losses are given in 'loss_dict'"),
    ],
)  # fmt: skip
def test_inputs_that_cannot_be_one_model_are_refused(key, value, said, trained):
    file = trained.path.parents[1] / "several.json"
    content: Any = json.loads(file.read_text())
    *sections, name = key.split(".")
    inner = content
    for section in sections:
        inner = inner[section]
    inner[name] = value
    with pytest.raises(ForgefieldError) as error:
        translation(content, file)
    assert said in str(error.value)


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (
            ["++model.branches.dry.fitting_net.neuron=[5]"],
            "fitting networks of branches may differ only in their seeds",
        ),
        (["++model.branches.dry.share=dry"], "it should name a branch with a separate network"),
        (["task.branches.dry=null"], "'task.branches.dry' must be a section with the keys energy"),
        (["~task.branches.dry"], "there is no entry for dry"),
        (["++task.branches.dry.enrgy={}"], "unknown key 'task.branches.dry.enrgy'"),
        (["data.sampling={branches: {wet: 1}}"], "a probability for each of the branches wet, dry"),
        (["++model.branches={wet: {}}"], "has one branch"),
    ],
)
def test_settings_that_do_not_fit_are_refused(overrides, said, trained, tmp_path):
    file = trained.path.parents[1] / "several.json"
    with pytest.raises(ForgefieldError) as error:
        train_only(load_config(file, [f"out={tmp_path}", *overrides]))
    assert said in str(error.value)


def test_shifts_of_branches_are_not_fitted(trained):
    with pytest.raises(ForgefieldError, match=r"model\.shifts is fit, but the model has the branches dry, wet"):
        shifts_of(trained.load_potential("last"))


# ---- there


def deepmd_python() -> str | None:
    return sys.executable if importlib.util.find_spec("deepmd") else os.environ.get("FORGEFIELD_DEEPMD_PYTHON")


ORACLE = """
import json, sys
import numpy as np
import torch
from pathlib import Path
from deepmd.pt.model.model import get_model
from deepmd.pt.train.wrapper import ModelWrapper
from deepmd.pt.utils.multi_task import preprocess_shared_params
torch.set_default_device("cpu")
given = json.loads(Path(sys.argv[1]).read_text())
params, links = preprocess_shared_params(given["model"])
models, frames = {}, {}
for name, model in params["model_dict"].items():
    place = Path(given["training"]["data_dict"][name]["training_data"]["systems"][0])
    arrays = {file.stem: torch.tensor(np.load(file)) for file in (place / "set.000").glob("*.npy")}
    types = np.loadtxt(place / "type.raw", dtype=int)
    n = len(arrays["coord"])
    frames[name] = {"coord": arrays["coord"].view(n, -1, 3), "box": arrays["box"], "atype": torch.tensor(types).repeat(n, 1)}
    sample = frames[name] | {"energy": arrays["energy"].view(n, 1), "find_energy": torch.tensor(1.0)}
    sample["natoms"] = torch.tensor([len(types), len(types), *np.bincount(types)]).repeat(n, 1)
    models[name] = get_model(json.loads(json.dumps(model)))
    models[name].atomic_model.compute_or_load_stat(lambda: [sample], None)
wrapper = ModelWrapper(models, model_params=params)
wrapper.share_params(links, {"wet": 0.5, "dry": 0.5})
results = {}
for name, model in models.items():
    sea = model.atomic_model.descriptor.sea
    results |= {f"{name}_davg": sea.mean[:, 0], f"{name}_dstd": sea.stddev[:, 0]}
    results[f"{name}_bias"] = model.atomic_model.out_bias.ravel()
    results[f"{name}_energy"] = model(**frames[name])["energy"].detach().ravel()
torch.save({"model": wrapper.state_dict()}, sys.argv[2])
np.savez(sys.argv[3], **{key: value.numpy() for key, value in results.items()})
"""


@pytest.mark.skipif(
    deepmd_python() is None, reason="no deepmd-kit; FORGEFIELD_DEEPMD_PYTHON names an interpreter with it"
)
def test_statistics_and_checkpoints_are_those_of_deepmd_kit(trained, tmp_path):
    file, checkpoint, results = (
        trained.path.parents[1] / "several.json",
        tmp_path / "several.pt",
        tmp_path / "found.npz",
    )
    command = [str(deepmd_python()), "-c", ORACLE, str(file), str(checkpoint), str(results)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    there, model = dict(np.load(results)), trained.info["model"]
    assert np.allclose(there["wet_davg"], there["dry_davg"])
    for name, rows in (("wet", range(5)), ("dry", range(5, 9))):
        assert np.allclose(model["descriptor"]["davg"], there[f"{name}_davg"], rtol=1e-9)
        assert np.allclose(model["descriptor"]["dstd"], there[f"{name}_dstd"], rtol=1e-9)
        assert np.allclose(model["branches"][name]["out_bias"], there[f"{name}_bias"], rtol=1e-9)
        found = read_deepmd(checkpoint, head=name)
        again = build_model(found.resolved, precision="float64", seed=0)
        again.load_state_dict(found.state)
        batch = {key: value for key, value in frames_of(trained, list(rows)).items() if key != "branch"}
        assert np.allclose(again.eval()(batch)["energy"].numpy(), there[f"{name}_energy"], rtol=0, atol=1e-10)
    with pytest.raises(ForgefieldError, match="it holds several models \\(wet, dry\\); choose one with --head"):
        read_deepmd(checkpoint)


def test_each_branch_has_uncertainties_of_its_own(tmp_path):
    run = api.train(several_input(tmp_path), f"out={tmp_path}/runs", "data.val=4", "data.split_seed=2")
    batch = frames_of(run, [0])
    stored = {head: load_uncertainty(run, head=head) for head in ("dry", "wet")}
    assert sum(stored[head].about["training_energies"] for head in stored) == 5
    assert sum(stored[head].about["validation_energies"] for head in stored) == 4
    assert not torch.equal(stored["dry"].factor, stored["wet"].factor)
    for head in stored:
        fitted = fit_uncertainty(run, head=head)
        potential = load(run, head=head)
        expected = fitted.evaluate(potential, batch)["energy_uncertainty"]
        assert torch.allclose(stored[head].evaluate(potential, batch)["energy_uncertainty"], expected)
        packaged = Run.open(api.export(run, tmp_path / f"{head}.ff", head=head))
        found = load_uncertainty(packaged).evaluate(packaged.load_potential(), batch)["energy_uncertainty"]
        assert torch.equal(found, expected)
        calculator = Calculator(run, head=head, uncertainty="energy")
        assert "energy_uncertainty" in calculator.implemented_properties
