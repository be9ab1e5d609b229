"""Law 5, no option is ignored: every refusal names the place, the key and what would be right."""

import pytest

from forgefield.config.loading import load_config
from forgefield.errors import ForgefieldError

DATA = "data: {train: a.xyz}\n"


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("training:\n  lrr: 1", "my.yaml, line 2: unknown key 'training.lrr'. Did you mean 'training.lr'?"),
        ("trainig: {lr: 1}", "my.yaml, line 1: unknown key 'trainig'. Did you mean 'training'?"),
        (
            "task:\n  energy:\n    weigth: 1",
            "my.yaml, line 3: unknown key 'task.energy.weigth'. Did you mean 'task.energy.weight'?",
        ),
        ("data:\n  batch_size: 4", "my.yaml, line 2: unknown key 'data.batch_size'. Did you mean 'data.batch.frames'?"),
        ("training: {cutoff: 4}", "my.yaml, line 1: unknown key 'training.cutoff'. Did you mean 'data.cutoff'?"),
        (
            "training: {max_epochs: 4}",
            "my.yaml, line 1: unknown key 'training.max_epochs'. Did you mean 'trainer.max_epochs'?",
        ),
        (
            "trainer:\n  max_epoch: 4",
            "my.yaml, line 2: unknown key 'trainer.max_epoch'. Did you mean 'trainer.max_epochs'?",
        ),
        (
            "data: {batch: {zzzz: 1}}",
            "my.yaml, line 1: unknown key 'data.batch.zzzz'. 'data.batch' has: frames, atoms, edges, points, oversized, "
            "bound, by_source.",
        ),
        ("data: {neighbors: vesin}", "unknown key 'data.neighbors'. Did you mean 'data.neighbours'?"),
        ("hydra: {run: {dir: x}}", "my.yaml, line 1: 'hydra' settings have no effect in Forgefield; leave them out."),
    ],
)
def test_unknown_keys_in_a_file(refused, text, sentence):
    assert sentence in refused(text)


def test_an_unused_variable_is_an_unknown_key(refused):
    message = refused(DATA + "efective_batch: 32\n")
    assert message.startswith("my.yaml, line 2: unknown key 'efective_batch'.")
    assert "${efective_batch}" in message


def test_a_mapping_is_not_a_variable(refused):
    assert "unknown key 'dat'. Did you mean 'data'?" in refused("dat: {cutoff: 3}\nseed: ${dat.cutoff}\n")


@pytest.mark.parametrize(
    ("override", "sentence"),
    [
        ("training.lrr=1", "command line ('training.lrr=1'): unknown key 'training.lrr'. Did you mean 'training.lr'?"),
        ("+training.lrr=1", "command line ('+training.lrr=1'): unknown key 'training.lrr'."),
        ("++trainer.num_node=2", "unknown key 'trainer.num_node'. Did you mean 'trainer.num_nodes'?"),
        ("effective_btch=3", "unknown key 'effective_btch'. Did you mean 'effective_batch'?"),
        ("hydra.run.dir=x", "command line ('hydra.run.dir=x'): unknown key 'hydra.run.dir'."),
        ("data.cutoff.x=1", "unknown key 'data.cutoff.x'. 'data.cutoff' has no keys below it."),
        ("training.lr=fast", "command line ('training.lr=fast'): 'training.lr' must be a number, not 'fast'."),
        (
            "data.batch=8",
            "'data.batch' must be a section with the keys frames, atoms, edges, points, oversized, bound, by_source, not 8.",
        ),
        ("training.lr=1,2", "command line: 'training.lr=1,2' gives several values, and one run takes one"),
        ("data.train=(", "command line: 'data.train=(' cannot be read as key=value"),
        ("just_a_word", "command line: 'just_a_word' cannot be read as key=value"),
        ("~training.ema", "the config does not give 'training.ema', so there is nothing to remove"),
        ("+seed=1", "command line ('+seed=1'): Could not append to config. An item is already at 'seed'."),
        (
            "model=big",
            "command line ('model=big'): 'model' must be a section, not 'big'. Did you mean 'model.name=big'?",
        ),
        ("task.forces.weight=3", "the config has no 'task' section, so the data decides what is trained"),
        ("data.train=", "command line ('data.train='): 'data.train' must be the name of a file, folder or pattern"),
    ],
)
def test_errors_of_overrides_name_the_command_line(refused, override, sentence):
    message = refused(DATA + "effective_batch: 4\nseed: ${effective_batch}\n", override)
    assert sentence in message
    assert message.startswith("command line")


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("training: {lr: fast}", "my.yaml, line 1: 'training.lr' must be a number, not 'fast'."),
        ("training: {accumulate: 2.5}", "'training.accumulate' must be a whole number, not 2.5."),
        ("data: {shuffle: maybe}", "'data.shuffle' must be true or false, not 'maybe'."),
        ("data: {species: Cu}", "'data.species' must be a list such as [H, O] or null, not 'Cu'."),
        ("data: {species: [[H]]}", "'data.species' must be a list such as [H, O] or null, not [['H']]."),
        ("data: {cutoff: null}", "'data.cutoff' must be a number, not null."),
        ("training: 3", "'training' must be a section with the keys lr, scale_lr, optimizer,"),
        ("task: {energy: true}", "'task.energy' must be a section with the keys weight, loss,"),
        (
            "task: {forces: {species_weights: 3}}",
            "'task.forces.species_weights' must be a mapping such as {H: 1.0, O: 2.0}",
        ),
        ("name: {a: 1}", "'name' must be text or null, not {'a': 1}."),
    ],
)
def test_errors_of_wrong_types_name_the_expected_type(refused, text, sentence):
    assert sentence in refused(text)


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        (
            "training: {precision: float16}",
            "'training.precision' must be float64, float32, tf32, bf16-mixed, fp16-mixed or a schedule, not 'float16'.",
        ),
        (
            "training: {engine: fast}",
            "'training.engine' must be auto, eager, compile, graphs, script or null, not 'fast'.",
        ),
        ("training: {tensorboard: 3}", "'training.tensorboard' must be 0, 1 or 2, not 3."),
        (
            "data: {neighbours: matscpy}",
            "'data.neighbours' must be auto, vesin, matscipy or device, not 'matscpy'. Did you mean",
        ),
        (
            "task: {forces: {loss: hubber}}",
            "must be mse, mae, rmse, huber or an import path, not 'hubber'. Did you mean 'huber'?",
        ),
        (
            "data: {reference_energies: fitt}",
            "must be auto, isolated, fit, mean, none or {species: energy}, not 'fitt'. Did you mean 'fit'?",
        ),
        ("data: {reference_energies: {H: high}}", "'data.reference_energies.H' must be an energy in eV, not 'high'."),
        ("training: {lr: 0}", "'training.lr' must be a positive number, not 0.0."),
        ("data: {cutoff: -5}", "'data.cutoff' must be a positive number, not -5.0."),
        ("training: {kernels: {knots: 40000}}", "'training.kernels.knots' must be between 256 and 32767, not 40000."),
        ("training: {kernels: {knots: 512}, derivative: double}", "which training.derivative=double does not use"),
        ("training: {kernels: {radial: exact, knots: 512}}", "training.kernels.radial=exact makes none"),
        ("training: {kernels: {storage: bf16}}", "'training.kernels.storage' must be float32 or bfloat16, not 'bf16'."),
        ("training: {kernels: {storage: bfloat16}, engine: compile}", "which training.engine=compile does not use"),
        ("training: {kernels: {storage: bfloat16}, precision: float64}", "would round what training.precision=float64"),
        ("training: {lr: .nan}", "'training.lr' must be a positive number, not nan."),
        ("training: {ema: 1.0}", "'training.ema' must be a number between 0 and 1, or null for no average, not 1.0."),
        ("data: {val: -3}", "'data.val' must be a share of train (0.1), a number of frames (50) or a file, not -3."),
        ("data: {val: 2.5}", "'data.val' must be a share below 1, or a whole number of frames, not 2.5."),
        ("data: {test: {index: a}}", "'data.test' must be a share, a number, a file, or {indices: file-or-list}"),
        ("data: {species: [H, H]}", "'data.species' must be a list of different chemical symbols"),
        (
            "name: a/b",
            "'name' must be the name of a folder, without slashes ('out' is the folder that contains it), not 'a/b'.",
        ),
        ("task: {}", "'task' trains nothing; set at least one of energy, forces, stress, virial, denoise."),
        ("task: {energy: null}", "'task' trains nothing"),
        ("task: {energy: {weight: -1}}", "'task.energy.weight' must be a finite number, zero or larger, not -1.0."),
        ("model: {preset: S}", "'model' needs a name, for example model: {name: nequip, preset: S}."),
        ("model: nequip", "'model' must be a section, not 'nequip'. Did you mean 'model.name=nequip'?"),
        ("model: {name: 3}", "'model' needs a name"),
        ("training: {optimizer: {lr: 1}}", "'training.optimizer' must be a name, or a mapping such as {name: adamw,"),
        ("callbacks: [{patience: 3}]", "'callbacks.0' must be an import path, or {name: import.path, argument: value}"),
        ("callbacks: my.Callback", "'callbacks' must be a list, not 'my.Callback'."),
        ("training: [1]", "'training' must be a section with the keys lr, scale_lr, optimizer,"),
        ("callbacks: {name: my.Callback}", "'callbacks' must be a list, not {'name': 'my.Callback'}."),
        ("trainer: [1]", "'trainer' must be a section with arguments of lightning.Trainer"),
    ],
)
def test_values_without_meaning(refused, text, sentence):
    message = refused(text)
    assert sentence in message
    assert message.startswith("my.yaml, line 1: ")


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("forces: {per_atom: true}", "'task.forces.per_atom' does not apply to forces. Did you mean 'task.energy."),
        ("stress: {per_atom: false}", "'task.stress.per_atom' does not apply to stress."),
        ("energy: {species_weights: {H: 1}}", "'task.energy.species_weights' does not apply to energy. Did you mean"),
        ("energy: {huber_delta: 0.1}", "'task.energy.huber_delta' applies to loss huber only"),
        ("energy: {per_atom: half}", "'task.energy.per_atom' must be true, false or root, not 'half'"),
        ("forces: {schedule: {kind: liner, to: 1}}", "Did you mean 'linear'"),
        ("forces: {schedule: {kind: lr, to: 1, end: 5}}", "'task.forces.schedule.end' does not apply to kind lr"),
        (
            "forces: {schedule: {to: -1}}",
            "'task.forces.schedule.to' must be a finite number, zero or larger, not -1",
        ),
        ("forces: {schedule: {to: [1, 2]}}", "must be one number (lists are for kind step)"),
        ("forces: {schedule: {kind: step, at: [5, 3], to: [1, 2]}}", "ascending positive integers"),
        ("forces: {schedule: {kind: step, at: [3], to: [1, 2]}}", "one value for each of the 1 positions"),
        ("forces: {schedule: {to: 1, begin: 5, end: 5}}", "larger than task.forces.schedule.begin"),
    ],
)
def test_settings_of_a_target_that_do_not_apply(refused, text, sentence):
    assert sentence in refused(f"task:\n  {text}")


def test_inapplicable_settings_are_refused_in_mappings_and_overrides_too(refused):
    with pytest.raises(ForgefieldError, match=r"task\.forces\.per_atom' does not apply"):
        load_config({"task": {"forces": {"per_atom": False}}})
    assert "does not apply" in refused("task: {forces: {}}", "task.forces={per_atom: true}")


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("data: [1, 2\nseed: 3", "my.yaml, line 2: this is not valid YAML: expected ',' or ']', but got ':'."),
        ("data:\n\ttrain: a", "my.yaml, line 2: this is not valid YAML: found character '\\t'"),
        ("seed: a: b", "my.yaml, line 1: this is not valid YAML: mapping values are not allowed here. Check the"),
        ("training:\n  lr: 1\n  lr: 2", "my.yaml, line 3: 'training.lr' is given twice, first in line 2."),
        ("data: {}\nseed: 1\ndata: {}", "my.yaml, line 3: 'data' is given twice, first in line 1."),
        ("", "my.yaml is empty; `forgefield init DATA` writes a config to start from."),
        ("# only a comment\n", "my.yaml is empty"),
        ("- 1\n- 2", "my.yaml: a config must be a mapping of sections (data: ..., training: ...), not a sequence."),
        ("just words", "not a scalar."),
        ("? [a, b]\n: 1", "my.yaml, line 1: a key must be a word, not a sequence."),
    ],
)
def test_files_that_are_not_configs(refused, text, sentence):
    assert sentence in refused(text)


def test_files_that_are_not_there(folder):
    (folder / "water.yaml").write_text(DATA)
    (folder / "input.json").write_text("{}")
    (folder / "binary.yaml").write_bytes(b"\xff\xfe\x00")
    cases = {
        "watr.yaml": r"config file watr\.yaml not found\. Did you mean 'water\.yaml'\?",
        "nowhere/water.yaml": r"nowhere/water\.yaml not found: there is no folder nowhere",
        "input.json": r"input\.json is not an input of DeePMD-kit, .* and a config of Forgefield is YAML",
        "gone.json": r"config file gone\.json not found",
        "binary.yaml": "is not a text file in UTF-8",
        ".": "is a folder, not a config file",
    }
    for path, pattern in cases.items():
        with pytest.raises(ForgefieldError, match=pattern):
            load_config(path)


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        (
            "seed: ${sed}",
            "my.yaml, line 1: 'seed' refers to 'sed', which the config does not have (did you mean 'seed'?)",
        ),
        (
            "seed: ${oc.env:FORGEFIELD_NOT_SET}",
            "'seed' needs the environment variable 'FORGEFIELD_NOT_SET', which is not",
        ),
        ("seed: ${int_dv:4,2}", "'seed' uses the unknown resolver 'int_dv' (did you mean 'int_div'?)"),
        ("seed: ${int_div:4.5,2}", "my.yaml, line 1: 'seed' cannot be resolved: "),
        ("seed: ${seed}", "'seed' cannot be resolved: Recursive interpolation"),
        ("seed: ???", "'seed' is ???, a value that must be given."),
        ("seed: ${", "my.yaml: "),
    ],
)
def test_interpolations_that_lead_nowhere(refused, text, sentence):
    assert sentence in refused(text)


def test_division_of_fractions_is_an_error(refused):
    assert "int_div takes whole numbers, not 4.5" in refused("seed: ${int_div:4.5,2}")


def test_errors_in_files_of_a_defaults_list_name_that_file(refused, folder):
    (folder / "training").mkdir()
    (folder / "training" / "slow.yaml").write_text("ema: 0.5\nlrr: 1\n")
    (folder / "training" / "twice.yaml").write_text("lr: 1\nlr: 2\n")
    text = "defaults: [{training: slow}, _self_]\ndata: {train: a.xyz}\n"
    assert "slow.yaml, line 2: unknown key 'training.lrr'. Did you mean 'training.lr'?" in refused(text)
    assert "twice.yaml, line 2: 'lr' is given twice" in refused(text.replace("slow", "twice"))
    assert "Could not find 'training/fast'" in refused(text.replace("slow", "fast"))


def test_a_value_left_open_by_one_file_may_come_from_another_or_from_an_override(load, refused, folder):
    (folder / "base.yaml").write_text("seed: ???\n")
    assert load("defaults: [base, _self_]\nseed: 3\n").seed == 3
    assert load("seed: ???\n", "seed=4").seed == 4
    assert "base.yaml, line 1: 'seed' is ???, a value that must be given." in refused("defaults: [base]\nname: x\n")


def test_the_file_that_counts_is_the_one_named(refused, folder):
    (folder / "base.yaml").write_text("training: {lr: slow}\n")
    text = "defaults: [base, _self_]\nname: x\ntraining: {lr: fast}\n"
    assert refused(text).startswith("my.yaml, line 3: 'training.lr' must be a number, not 'fast'")
    assert refused(text.replace("[base, _self_]", "[_self_, base]")).startswith(f"{folder / 'base.yaml'}, line 1:")
