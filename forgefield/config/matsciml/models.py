"""Encoders of Open MatSciML as Forgefield's models: their sizes."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from forgefield.config.matsciml.script import Made, Name, Unknown

if TYPE_CHECKING:
    from forgefield.config.matsciml.translation import ScriptSection

SIZES: dict[str, tuple[dict[str, Any], dict[str, str]]] = {
    "SchNetWrap": (
        {"name": "schnet", "num_features": 128, "num_filters": 128, "num_layers": 6, "num_gaussians": 50},
        {
            "hidden_channels": "num_features",
            "num_filters": "num_filters",
            "num_interactions": "num_layers",
            "num_gaussians": "num_gaussians",
        },
    ),
    "SchNet": ({"name": "schnet"}, {"hidden_feats": "layers"}),
    "EGNN": ({"name": "egnn"}, {"hidden_dim": "num_features", "num_conv": "num_layers"}),
    "PLEGNNBackbone": ({"name": "egnn"}, {"embed_feat_dims": "layers", "embed_use_attention": "attention"}),
    "CGCNN": (
        {"name": "cgcnn"},
        {
            "atom_embedding_size": "num_features",
            "num_graph_conv_layers": "num_layers",
            "num_gaussians": "num_gaussians",
        },
    ),
    "TensorNet": (
        {
            "name": "tensornet",
            "num_features": 64,
            "num_layers": 2,
            "num_rbf": 32,
            "self_loops": False,
            "envelope": "cosine",
        },
        {"units": "num_features", "nblocks": "num_layers", "num_layers": "num_layers", "num_rbf": "num_rbf"},
    ),
    "M3GNet": (
        {"name": "m3gnet", "num_features": 64, "num_layers": 3, "max_n": 3, "max_l": 3},
        {
            "units": "num_features",
            "nblocks": "num_layers",
            "n_blocks": "num_layers",
            "max_n": "max_n",
            "max_l": "max_l",
            "threebody_cutoff": "three_body_cutoff",
        },
    ),
}
"""Forgefield's options by MatSciML's defaults, and the names of options that change them. `layers` is a list of widths."""
CUTOFFS = ("cutoff", "r_max", "cutoff_radius")
OTHERS = {
    "MACEWrapper": "set model: {name: mace, ...}, whose options have MACE's names",
    "MACE": "set model: {name: mace, ...}, whose options have MACE's names",
}


def translate_encoder(section: ScriptSection, file: Path) -> tuple[dict[str, Any], float | None]:
    """The section `model` of the encoder that a task has, and its cutoff, A, if it has one."""
    made, options = section.take("encoder"), section.take("encoder_kwargs") or {}
    encoder = section.take("encoder_class", made)
    if isinstance(encoder, Made):
        options = dict(encoder.options)
    name = encoder.name if isinstance(encoder, Made) else encoder.text if isinstance(encoder, Name) else str(encoder)
    if name not in SIZES:
        advice = OTHERS.get(name, f"the encoders with a counterpart are {', '.join(SIZES)}")
        raise section.refused("encoder_class", f"is {name}, which is not translated; {advice}")
    defaults, names = SIZES[name]
    model, cutoff, unused = dict(defaults), None, []
    for key, value in options.items():
        if isinstance(value, (Unknown, Made, Name)):
            unused.append(key)
        elif key in CUTOFFS:
            cutoff = float(value)
        elif names.get(key) == "layers":
            model |= {"num_features": int(value[0]), "num_layers": len(value)}
        elif key in names:
            model[names[key]] = value
        else:
            unused.append(key)
    if unused:
        section.notes[section.path("encoder_kwargs")] = (
            f"{', '.join(unused)}: model {model['name']} has no such option, or determines it."
        )
    return model, cutoff
