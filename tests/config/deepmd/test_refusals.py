"""DeePMD-kit inputs that cannot be what they say: every refusal names the file, the key and what would be right."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from forgefield.config.deepmd import translate
from forgefield.config.loading import load_config
from forgefield.errors import ForgefieldError
from tests.support.deepmd_inputs import DPA3, changed

SINGLE = {"model.descriptor.precision": "float32", "model.fitting_net.precision": "float32"}
REFUSED: list[tuple[dict[str, Any], str, str]] = [
    # misspelt
    ({"training.numb_step_s": 1}, "training.numb_step_s", "Did you mean 'numb_steps'?"),
    ({"models": {}}, "models", "Did you mean 'model'?"),
    ({"learning_rate.decay_step": 1}, "learning_rate.decay_step", "Did you mean 'decay_steps'?"),
    ({"model.descriptor.rcut_smoth": 1}, "model.descriptor.rcut_smoth", "Did you mean 'rcut_smth'?"),
    ({"model.fitting_net.neurons": [1]}, "model.fitting_net.neurons", "Did you mean 'neuron'?"),
    ({"loss.start_pref": 1}, "loss.start_pref", "Did you mean 'start_pref_"),
    ({"training.training_data.batchsize": 1}, "training.training_data.batchsize", "Did you mean 'batch_size'?"),
    (
        {"training.validation_data.xyz": 1},
        "training.validation_data.xyz",
        "DeePMD-kit's 'training.validation_data' has",
    ),
    ({"validating.validation_frequency": 1}, "validating.validation_frequency", "Did you mean 'validation_freq'?"),
    ({"model.descriptor.type": "se_e2_b"}, "model.descriptor.type", "Did you mean 'se_e2_"),
    ({"learning_rate.type": "exponential"}, "learning_rate.type", "exp, cosine, wsd"),
    # keys of another kind of schedule, descriptor
    ({"learning_rate.type": "cosine"}, "learning_rate.decay_steps", "unknown key"),
    ({"model.descriptor.attn": 3}, "model.descriptor.attn", "unknown key"),
    # missing
    ({"learning_rate": ...}, "learning_rate", "missing"),
    ({"learning_rate.start_lr": ...}, "learning_rate.start_lr", "missing"),
    ({"model.type_map": ..., "model.descriptor.sel": "auto"}, "model.type_map", "missing"),
    ({"model.descriptor": ...}, "model.descriptor", "missing"),
    ({"model.fitting_net": ...}, "model.fitting_net", "missing"),
    ({"model.descriptor.type": ...}, "model.descriptor.type", "missing"),
    ({"training.numb_steps": ...}, "training.numb_steps", "are both missing"),
    ({"training.training_data": ...}, "training.training_data", "missing"),
    ({"training.training_data.systems": ...}, "training.training_data.systems", "missing"),
    # two at once
    ({"training.numb_epoch": 2}, "training.numb_epoch", "keep one"),
    ({"training.stop_batch": 2}, "training.stop_batch", "two names of one key"),
    ({"learning_rate.stop_lr_ratio": 0.1}, "learning_rate.stop_lr_ratio", "keep one"),
    ({"learning_rate.warmup_steps": 1, "learning_rate.warmup_ratio": 0.1}, "learning_rate.warmup_ratio", "keep one"),
    ({"training.warmup_steps": 1, "learning_rate.warmup_steps": 1}, "learning_rate.warmup_steps", "keep one"),
    ({"training.systems": ["a"]}, "training.systems", "keep one"),
    ({"loss.use_huber": True, "loss.loss_func": "mae"}, "loss.use_huber", "keep one"),
    # values
    ({"training.numb_steps": 0}, "training.numb_steps", "must be a whole number of at least 1, not 0"),
    ({"training.numb_steps": 1.5}, "training.numb_steps", "a whole number"),
    ({"training.numb_steps": "many"}, "training.numb_steps", "a whole number"),
    ({"training.numb_steps": True}, "training.numb_steps", "a whole number"),
    ({"learning_rate.start_lr": 0}, "learning_rate.start_lr", "a positive number"),
    ({"learning_rate.stop_lr": 1}, "learning_rate.stop_lr", "between 0 and 0.001"),
    ({"learning_rate.decay_rate": 2}, "learning_rate.decay_rate", "above 0 and at most 1"),
    ({"learning_rate.warmup_steps": 10**9}, "learning_rate.warmup_steps", "less than the 100000 steps"),
    ({"learning_rate.scale_by_worker": "cube"}, "learning_rate.scale_by_worker", "linear, sqrt or none"),
    ({"loss.start_pref_e": -1}, "loss.start_pref_e", "at least 0"),
    ({"loss.huber_delta": [1, 2]}, "loss.huber_delta", "three of them"),
    ({"loss.loss_func": "l3"}, "loss.loss_func", "mse, mae"),
    ({"model.descriptor.rcut": -1}, "model.descriptor.rcut", "a positive number"),
    ({"model.descriptor.precision": "float16"}, "model.descriptor.precision", "float64 or float32"),
    ({"model.descriptor.sel": "auto:0.5"}, "model.descriptor.sel", "auto:FACTOR"),
    ({"model.type_map": ["O", "O"]}, "model.type_map", "different"),
    (
        {"model.type_map": ["O", "D1"], "model.descriptor": {"type": "se_atten", "use_econf_tebd": True}},
        "model.descriptor.use_econf_tebd",
        "reads the element of each type",
    ),
    ({"model.preset_out_bias": {"energy": [None, 1]}}, "model.preset_out_bias.energy", "each of the 2 types"),
    ({"training.training_data.batch_size": 0}, "training.training_data.batch_size", "positive whole number"),
    ({"training.training_data.batch_size": "auto:x"}, "training.training_data.batch_size", "auto:N"),
    ({"training.training_data.sys_probs": [0.9, 0.9]}, "training.training_data.sys_probs", "add up to 1.8"),
    ({"training.training_data.auto_prob": "by_size"}, "training.training_data.auto_prob", "prob_uniform"),
    ({"training.training_data.systems": 3}, "training.training_data.systems", "a folder"),
    ({"training.ema_decay": 1}, "training.ema_decay", "below 1"),
    ({"training": []}, "training", "a section"),
    ({"optimizer": {"adam_beta1": 1}}, "optimizer.adam_beta1", "below 1"),
    # without a counterpart here
    ({"model.model_dict": {}}, "model.model_dict", "a model for each of several branches"),
    ({"loss_dict": {}}, "loss_dict", "belongs to several models"),
    ({"training.data_dict": {}}, "training.data_dict", "belongs to several models"),
    ({"training.model_prob": {"a": 1}}, "training.model_prob", "belongs to several models"),
    ({"nvnmd": {}}, "nvnmd", "TensorFlow"),
    ({"model.type": "linear_ener"}, "model.type", "model.models does not list them"),
    ({"model.type": "DPA4"}, "model.type", "an architecture that is not available here; `dp --pt train`"),
    (
        {"model.type_embedding": {}, "model.descriptor": {"type": "se_e3"}},
        "model.type_embedding",
        "the descriptor se_e3, which",
    ),
    (
        {"model.descriptor.type": "se_a_ebd_v2"},
        "model.type_embedding",
        "is missing; the descriptor se_a_ebd_v2 reads it",
    ),
    ({"model.spin": {}}, "model.spin.use_spin", "missing"),
    ({"model.descriptor.type": "dpa4"}, "model.descriptor.type", "not supported"),
    ({"model.descriptor": {"type": "dpa3"}}, "model.descriptor.repflow", "is missing"),
    (
        {"model.descriptor": DPA3, "model.descriptor.repflow.e_sel": 1.5},
        "model.descriptor.repflow.e_sel",
        "auto:FACTOR",
    ),
    (
        {"model.descriptor": DPA3, "model.descriptor.add_chg_spin_ebd": True},
        "model.descriptor.add_chg_spin_ebd",
        "charge and spin",
    ),
    (
        {"model.descriptor": {"type": "dpa2", "repinit": {"rcut": 6}}},
        "model.descriptor.repinit.rcut_smth",
        "is missing",
    ),
    ({"model.fitting_net.type": "dipole", "loss": ...}, "loss.pref", "is missing"),
    ({"model.fitting_net.type": "property", "loss": ...}, "model.fitting_net.property_name", "is missing"),
    ({"model.fitting_net.type": "population"}, "model.fitting_net.type", "not supported"),
    ({"model.smin_alpha": 0.1}, "model.smin_alpha", "only with 'model.use_srtab'"),
    ({"model.use_srtab": "tab.txt"}, "model.smin_alpha", "needs it"),
    ({"model.bridging_method": "ZBL"}, "model.bridging_method", "model.zbl"),
    ({"optimizer": {"type": "LKF"}}, "optimizer.type", "Adam and AdamW"),
    ({"loss.start_pref_ae": 1}, "loss.start_pref_ae", "not trained"),
    ({"loss.limit_pref_pf": 1}, "loss.limit_pref_pf", "species_weights"),
    ({"loss.start_pref_h": 1}, "loss.start_pref_h", "second derivatives"),
    ({"loss.relative_f": 1.0}, "loss.relative_f", "not divided"),
    ({"loss.f_use_norm": True, "loss.loss_func": "mae"}, "loss.f_use_norm", "by component"),
    ({"loss.enable_atom_ener_coeff": True}, "loss.enable_atom_ener_coeff", "plain sums"),
    ({"loss.type": "ener_spin"}, "loss.type", "no section 'spin'"),
    ({"loss.type": "tensor"}, "loss.type", "'model.fitting_net.type' is ener"),
    (
        {"loss": {"start_pref_e": 0, "limit_pref_e": 0, "start_pref_f": 0, "limit_pref_f": 0}},
        "loss.start_pref_e",
        "nothing",
    ),
    ({"training.zero_stage": 2}, "training.zero_stage", "not divided"),
    ({"training.acc_freq": 2}, "training.acc_freq", "training.accumulate"),
    ({"training.change_bias_after_training": True}, "training.change_bias_after_training", "not fitted again"),
    ({"training.enable_tf32": True}, "training.enable_tf32", "float32"),
    ({"training.mixed_precision": {}}, "training.mixed_precision", "float32"),
    (
        {**SINGLE, "training.mixed_precision": {"output_prec": "float16"}},
        "training.mixed_precision.output_prec",
        "float64",
    ),
    ({"training.training_data.min_pair_dist": 0.5}, "training.training_data.min_pair_dist", "take them out"),
    ({"training.numb_steps": ..., "training.numb_epoch": 1.5}, "training.numb_epoch", "numb_steps"),
    (
        {"training.numb_steps": ..., "training.numb_epoch": 2, "training.training_data.auto_prob": "prob_uniform"},
        "training.numb_epoch",
        "numb_steps",
    ),
    ({"validating.max_best_ckpt": 3}, "validating.max_best_ckpt", "one best model"),
    ({"validating.tf32_infer": True}, "validating.tf32_infer", "precision of the weights"),
    (
        {"validating.full_validation": True, "validating.validation_metric": "V:MAE"},
        "validating.validation_metric",
        "virial is not trained",
    ),
    (
        {"validating.full_validation": True, "validating.validation_metric": "E:R2"},
        "validating.validation_metric",
        "E:MAE",
    ),
]


@pytest.mark.parametrize(("changes", "key", "said"), REFUSED, ids=[f"{i}-{case[1]}" for i, case in enumerate(REFUSED)])
def test_refusals_name_file_key_and_reason(changes: dict[str, Any], key: str, said: str) -> None:
    with pytest.raises(ForgefieldError) as error:
        translate(changed(changes), Path("folder/input.json"))
    message = str(error.value)
    assert message.startswith("folder/input.json: ")
    assert f"'{key}'" in message
    assert said in message
    assert "\n" not in message


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('{"model": {"type_map": ["O"]},\n "training": {,}}', "input.json, line 2: this is not valid JSON"),
        ('{"model": {"type_map": ["O"]}, "training": {"seed": 1, "seed": 2}}', "'seed' is given twice"),
        ('{"systems": ["a"], "use_smooth": true}', "is not an input of DeePMD-kit"),
        ("[]", "is not an input of DeePMD-kit"),
    ],
)
def test_files_that_are_not_inputs(text: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("input.json").write_text(text)
    with pytest.raises(ForgefieldError) as error:
        load_config("input.json")
    assert said in str(error.value)


ODD = ([], {}, [[]], "", "odd", -1, 0, 0.5, float("nan"), float("inf"), True, None, [1, "a"], {"a": 1}, 10**400)
KEYS = [
    *("model", "learning_rate", "loss", "training", "optimizer", "validating", "loss_dict", "nvnmd"),
    *(f"model.{key}" for key in ("type_map", "type", "descriptor", "fitting_net", "use_srtab", "preset_out_bias")),
    *(f"model.descriptor.{key}" for key in ("type", "rcut", "sel", "neuron", "precision", "seed")),
    *(f"model.fitting_net.{key}" for key in ("type", "neuron", "precision", "numb_fparam", "dim_case_embd")),
    *(
        f"learning_rate.{key}"
        for key in ("type", "start_lr", "stop_lr", "decay_steps", "warmup_ratio", "scale_by_worker")
    ),
    *(f"loss.{key}" for key in ("type", "start_pref_e", "limit_pref_f", "loss_func", "huber_delta", "relative_f")),
    *(
        f"training.{key}"
        for key in ("numb_steps", "numb_epoch", "seed", "disp_freq", "disp_file", "save_freq", "systems")
    ),
    *(f"training.{key}" for key in ("training_data", "validation_data", "mixed_precision", "opt_type", "warmup_steps")),
    *(f"training.training_data.{key}" for key in ("systems", "batch_size", "auto_prob", "sys_probs", "rglob_patterns")),
    *(f"optimizer.{key}" for key in ("type", "adam_beta1", "weight_decay")),
    *(f"validating.{key}" for key in ("full_validation", "validation_metric", "full_val_start")),
]


@pytest.mark.parametrize("key", KEYS)
def test_whatever_a_key_holds_it_is_taken_or_refused_in_one_sentence(key: str) -> None:
    sentences = []
    for value in ODD:
        for more in (
            {},
            {"validating.full_validation": True},
            {"training.training_data": ..., "training.systems": ["a"]},
        ):
            try:
                content = changed({**more, key: value})
            except (KeyError, TypeError, AttributeError):
                continue  # the section is not there to put it in
            try:
                translate(content, Path("input.json"))
            except ForgefieldError as error:
                sentences.append(str(error))
    assert sentences
    assert all(sentence.startswith("input.json: ") and "\n" not in sentence for sentence in sentences)
