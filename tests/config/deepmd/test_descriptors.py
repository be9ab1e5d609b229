"""Descriptors of DeePMD-kit's inputs and what they become."""

from __future__ import annotations

import pytest

from tests.support.deepmd_inputs import DPA3, both, translated


def test_se_atten_keeps_its_options_and_the_oldest_names() -> None:
    options = {"type": "dpa1", "sel": 120, "rcut": 5.0, "attn_layer": 0, "stripped_type_embedding": True}
    found = translated({"model.descriptor": {**options, "smooth_type_embdding": True}})
    assert found["model"]["descriptor"] == {
        "type": "se_atten",
        "sel": 120,
        "attn_layer": 0,
        "smooth_type_embedding": True,
        "tebd_input_mode": "strip",
    }
    assert found["data"]["cutoff"] == 5.0


def test_the_section_repflow_becomes_part_of_the_descriptor() -> None:
    result = both({"model.descriptor": DPA3})
    assert result.config["model"]["descriptor"] == {
        "type": "dpa3",
        "activation_function": "silut:10.0",
        "e_rcut_smth": 5.3,
        "a_rcut": 4.0,
        "a_rcut_smth": 3.5,
        "n_dim": 128,
        "edge_init_use_dist": True,
        "e_sel": 120,
        "a_sel": 30,
    }
    assert result.config["data"]["cutoff"] == 6.0
    assert "no effect" in result.notes["model.descriptor.repflow.optim_update"]
    assert "nearest 30" in result.notes["model.descriptor.repflow.a_sel"]


def test_the_blocks_of_dpa2_keep_their_options() -> None:
    first = {"rcut": 6.0, "rcut_smth": 0.5, "nsel": "auto", "use_three_body": True}
    layers = {"rcut": 4.0, "rcut_smth": 3.5, "nsel": 40, "update_style": "res_residual", "nlayers": 6}
    section = {"type": "dpa2", "repinit": first, "repformer": layers, "repformer_add_type_ebd_to_seq": True}
    found = translated({"model.descriptor": section})
    assert found["model"]["descriptor"] == {
        "type": "dpa2",
        "add_tebd_to_repinit_out": True,
        "repinit": {"rcut_smth": 0.5, "use_three_body": True, "three_body_sel": 40},
        "repformer": layers,
    }
    assert found["data"]["cutoff"] == 6.0


@pytest.mark.parametrize(("kind", "mode"), [("se_e2_a", "concat"), ("se_a_ebd_v2", "strip")])
def test_a_type_embedding_is_that_of_se_atten_without_attention(kind: str, mode: str) -> None:
    """`se_e2_a` that reads numbers of the types; any network of a list of types is a table of numbers."""
    descriptor = {"type": kind, "sel": [46, 92], "rcut": 6.0, "neuron": [2, 4], "type_one_side": True}
    plain = translated({"model.descriptor": descriptor, "model.type_embedding": {"neuron": [3, 5], "seed": 1}})
    attention = {**descriptor, "type": "se_atten", "attn_layer": 0, "tebd_dim": 5, "set_davg_zero": False}
    expected = translated({"model.descriptor": {**attention, "tebd_input_mode": mode}})
    assert plain["model"] == expected["model"]


def test_parts_of_a_hybrid_keep_their_cutoffs() -> None:
    parts = [{"type": "se_a", "sel": "auto", "rcut": 4.0}, {"type": "se_e2_r", "sel": [46, 92], "rcut": 6.0}]
    config = translated({"model.descriptor": {"type": "hybrid", "list": parts}})
    assert config["data"]["cutoff"] == 6.0
    short, long = config["model"]["descriptor"].pop("list")
    assert (short, long) == ({"type": "se_e2_a", "rcut": 4.0}, {"type": "se_e2_r", "sel": [46, 92], "rcut": 6.0})
    assert config["training"]["precision"] == "float64"
    parts[0]["precision"] = "float32"
    config = translated({"model.descriptor": {"type": "hybrid", "list": parts}})
    sections = [*config["model"]["descriptor"]["list"], config["model"]["fitting_net"]]
    assert [section["precision"] for section in sections] == ["float32", "float64", "float64"]
