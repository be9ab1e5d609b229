"""Options of heads: the section `model.heads` of a config, its checks, and the complete options of each head."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field

from forgefield.config.nearest import did_you_mean
from forgefield.errors import ForgefieldError

ACTIVATIONS = ("silu", "mish", "gelu", "ssp", "tanh")
NORMS = ("none", "layer")
CHOSEN = ("hidden", "activation", "norm", "residual", "dropout")
"""Options that a config may set."""
SHAPES = {"vector": (3,), "symmetric": (3, 3), "tensor": (3, 3)}
"""Kinds of equivariant values, and the shape of one."""


@dataclass
class HeadOptions:
    """A head. The options in `CHOSEN` can be set by the user (`model.heads.NAME`); the others follow from task and data."""

    hidden: list[int] = field(default_factory=lambda: [64])
    """Widths of its hidden layers."""
    activation: str = "silu"
    """Between layers: silu, mish, gelu, ssp or tanh."""
    norm: str = "none"
    """Of hidden layers, before their activation: none, or layer (mean zero and variance one over the values of an atom)."""
    residual: bool = False
    """Add the input of a hidden layer to its output, from the second one on; all need the same width."""
    dropout: float = 0.0
    """Fraction of the values of hidden layers that is dropped in training, drawn for every frame, epoch and layer."""
    per: str = "frame"
    """What has a value: frame or atom."""
    shape: list[int] = field(default_factory=list)
    """Of one value."""
    unit: str = ""
    """Of the values, as text."""
    reduce: str = "mean"
    """How the value of a frame is computed from its atoms: sum or mean of their values; max or attention: the last layer reads
    the maximum of each feature over the atoms, or their mean with learnt weights."""
    kind: str = "values"
    """How values transform under rotations: values (invariant), vector, symmetric or tensor (equivariant, 3 x 3)."""
    net_zero: bool = False
    """Vectors of atoms: their mean over a frame is subtracted, so that their sum is zero."""
    neighbours: float = 1.0
    """Vectors and tensors: mean number of neighbours of an atom; sums over neighbours are divided by its square root."""
    shift: list[list[float]] | None = None
    """(n_species, size of a value): added to the values of atoms. Default: zero."""
    scale: float = 1.0
    """Factor of the network's output."""
    classes: list[float] | None = None
    """Labels of the classes of a classifier, whose outputs are logits, one for each. Default: none, the output is a value."""

    @property
    def output_shape(self) -> list[int]:
        """Of the output for one frame or atom."""
        return self.shape if self.classes is None else [len(self.classes)]

    @property
    def per_atom_errors(self) -> bool:
        """Whether errors of frames are also measured per atom."""
        return False

    @property
    def uncounted(self) -> tuple[int, ...]:
        """Indices of the species whose atoms have no value."""
        return ()


def check_heads(section: object) -> dict[str, dict[str, object]]:
    """The section `model.heads` as plain dicts; raises for anything that is wrong in it."""
    section = {} if section is None else section
    if not isinstance(section, Mapping):
        raise ForgefieldError(f"model.heads must be a mapping such as {{band_gap: {{hidden: [64]}}}}, not {section!r}.")
    return {str(name): _check_head(str(name), options) for name, options in section.items()}


def _check_head(name: str, section: object) -> dict[str, object]:
    """The section `model.heads.NAME` as a plain dict; raises for anything that is wrong in it."""
    where = f"model.heads.{name}"
    section = {} if section is None else section
    if not isinstance(section, Mapping):
        raise ForgefieldError(f"{where} must be a section with the keys {', '.join(CHOSEN)}, not {section!r}.")
    for key in section:
        if key not in CHOSEN:
            raise ForgefieldError(f"{where}.{key} is not an option of a head.{did_you_mean(str(key), CHOSEN)}")
    hidden = section.get("hidden", [])
    if not isinstance(hidden, list) or not all(
        isinstance(n, int) and not isinstance(n, bool) and n > 0 for n in hidden
    ):
        raise ForgefieldError(f"{where}.hidden must be a list of widths, such as [64, 64], not {hidden!r}.")
    for key, choices in (("activation", ACTIVATIONS), ("norm", NORMS)):
        if key in section and section[key] not in choices:
            raise ForgefieldError(f"{where}.{key} is {section[key]!r}; choose one of {', '.join(choices)}.")
    _check_layers(where, section, hidden)
    return dict(section)


def _check_layers(where: str, section: Mapping[str, object], hidden: Sequence[int]) -> None:
    residual, dropout = section.get("residual", False), section.get("dropout", 0.0)
    if not isinstance(residual, bool):
        raise ForgefieldError(f"{where}.residual must be true or false, not {residual!r}.")
    if residual and (len(hidden) < 2 or len(set(hidden)) > 1):
        raise ForgefieldError(
            f"{where}.residual needs at least two hidden layers of one width, such as {where}.hidden=[64, 64]; "
            f"hidden is {hidden or HeadOptions().hidden}."
        )
    if isinstance(dropout, bool) or not isinstance(dropout, (int, float)) or not 0 <= dropout < 1:
        raise ForgefieldError(f"{where}.dropout must be at least 0 and below 1, not {dropout!r}.")
    without = [name for name in ("norm", "dropout") if section.get(name) not in (None, "none", 0, 0.0)]
    if section.get("hidden") == [] and without:
        raise ForgefieldError(f"{where}.{without[0]} is for hidden layers, and {where}.hidden is empty.")


def head_options(resolved: Mapping[str, Mapping[str, object]]) -> dict[str, HeadOptions]:
    """Resolved options of several heads, by name in alphabetical order."""
    return {name: _options(resolved[name]) for name in sorted(resolved)}


def complete_heads(section: object, targets: Mapping[str, Mapping[str, object]]) -> dict[str, dict[str, object]]:
    """Complete options of every head. section: `model.heads`. targets: options that follow from task and data, by name."""
    checked = check_heads(section)
    for name in checked:
        if name not in targets:
            hint = f"its additional targets are {', '.join(targets)}" if targets else "it has no additional targets"
            raise ForgefieldError(f"model.heads.{name}: the task has no target of that name; {hint}.")
        if checked[name].get("dropout") and targets[name].get("kind", "values") != "values":
            raise ForgefieldError(
                f"model.heads.{name}.dropout does not apply: {name} is a {targets[name]['kind']}, whose network works on "
                "pairs of atoms."
            )
    return {name: asdict(_options({**targets[name], **checked.get(name, {})})) for name in sorted(targets)}


def _options(values: Mapping[str, object]) -> HeadOptions:
    build: type = HeadOptions
    options: HeadOptions = build(**values)
    return options
