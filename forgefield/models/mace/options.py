"""Hyperparameters of MACE: their meaning, the presets, and how what is not given is filled in from the data."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from forgefield.config.option import option
from forgefield.errors import ForgefieldError
from forgefield.models.options import check_per_species, check_values, default_scale, from_statistics
from forgefield.ops.convolution_plan import Block

INTERACTIONS = ("plain", "residual", "density", "density_residual", "nonlinear")
"""Forms of a layer; see `MACEOptions.interaction`."""
GATES = ("silu", "tanh", "abs", None)
LARGEST_L = 8
"""Highest degree of harmonics whose couplings mace-torch and Forgefield are known to agree on."""


@dataclass
class MACEOptions:
    """Hyperparameters of MACE. Numbers left `None` are filled in from the statistics of the training data."""

    hidden_irreps: str = "128x0e + 128x1o"
    """Features that atoms pass on: the same number of channels for each degree (l) and parity (e, o), 0e first. 128x0e is fast,
    1o and 2e are more accurate."""
    num_interactions: int = option(2, at_least=1)
    """Layers: each lets an atom see one cutoff further."""
    max_ell: int = option(3, at_least=0, at_most=LARGEST_L)
    """Highest degree of the harmonics of edges."""
    correlation: int | list[int] = option(3, at_least=1, at_most=4)
    """Degree of the polynomials of each layer, that is the number of neighbours whose positions a term depends on; one number,
    or one for each layer."""
    interaction_first: str = option("residual", choices=INTERACTIONS)
    """Form of the first layer, see interaction. With plain and density, an atom without neighbours has exactly its energy
    shift."""
    interaction: str = option("residual", choices=INTERACTIONS)
    """Form of the other layers: plain, a map by species after the sum over neighbours; residual, old features are mapped by
    species and added to the new ones; density and density_residual, sums are divided by a learnt density instead of the mean
    number of neighbours; nonlinear, with gates, and radial weights that depend on the species."""
    edge_irreps: str | None = None
    """Features that neighbours send. Default: hidden_irreps."""
    use_edge_irreps_first: bool = False
    """Also in the first layer, its scalars."""
    radial_type: str = option("bessel", choices=("bessel", "gaussian", "chebyshev"))
    """Radial basis."""
    num_bessel: int = option(8, at_least=1)
    """Radial basis functions, of any type."""
    num_polynomial_cutoff: int = option(5, at_least=2)
    """Exponent of the envelope; smaller decays earlier."""
    apply_cutoff: bool = True
    """Multiply the basis by the envelope; without, radial weights are multiplied by it."""
    distance_transform: str | None = option(None, choices=("Agnesi", "Soft", None))
    """Transform distances by the covalent radii of both atoms before the basis is computed."""
    radial_mlp: list[int] = option([64, 64, 64], at_least=1)
    """Neurons in each hidden layer of the network that computes radial weights."""
    use_reduced_cg: bool = True
    """One weight for each independent polynomial. Without, one for each sequence of couplings; more weights for the same
    functions."""
    use_agnostic_product: bool = False
    """The same weights of polynomials for all species."""
    mlp_irreps: str = "16x0e"
    """Neurons of the last layer's readout."""
    gate: str | None = option("silu", choices=GATES)
    """Their activation: silu, tanh, abs or null."""
    readout_bias: bool = False
    """Readout of the last layer with biases and one more hidden layer."""
    use_last_readout_only: bool = False
    """Read energies from the last layer alone."""
    keep_last_layer_irreps: bool = False
    """The last layer has features of all degrees, which energies do not depend on."""
    pair_repulsion: bool = False
    """Add the ZBL repulsion of nuclei closer than the sum of their covalent radii."""
    branches: list[str] | None = None
    """Names of several energies, for data of different reference methods (heads in mace-torch). Default: one energy."""
    avg_num_neighbours: float | None = option(None, above=0)
    """Mean number of neighbours; sums over edges are divided by it."""
    energy_scales: float | dict[str, float] | None = None
    """Energy unit of the readouts, eV, one or one for each branch. Default: root mean square of the forces, times A."""
    energy_shifts: float | dict[str, Any] | None = None
    """Energy of the isolated atom, eV, one or per species; with branches one of these for each. Default: the reference
    energies."""


def _preset(channels: int, max_l: int) -> dict[str, Any]:
    irreps = " + ".join(f"{channels}x{l}{'eo'[l % 2]}" for l in range(max_l + 1))
    return {"hidden_irreps": irreps, "num_bessel": 10, "num_polynomial_cutoff": 5, "max_ell": 3, "correlation": 3}


PRESETS: dict[str, dict[str, Any]] = {"SMALL": _preset(128, 0), "MEDIUM": _preset(128, 1), "LARGE": _preset(128, 2)}
"""Sizes of the MACE-MP-0 foundation models (small, medium, large)."""


def parse_irreps(text: str, where: str) -> tuple[Block, ...]:
    """Blocks of irreps written like `128x0e + 128x1o`. where: the option, for messages."""
    blocks = []
    for part in text.replace(" ", "").split("+"):
        match = re.fullmatch(r"(?:(\d+)x)?(\d+)([eo])", part)
        if match is None:
            raise ForgefieldError(f"{where} is '{text}'; it must be a sum of irreps such as 128x0e + 128x1o.")
        blocks.append(Block(int(match[1] or 1), int(match[2]), 1 if match[3] == "e" else -1))
    kinds = [(block.l, block.p) for block in blocks]
    if len(set(kinds)) < len(kinds) or any(block.mul < 1 for block in blocks):
        raise ForgefieldError(f"{where} is '{text}'; each irrep may occur once, with at least one channel.")
    return tuple(blocks)


def hidden_blocks(options: MACEOptions) -> tuple[Block, ...]:
    """Blocks of `hidden_irreps`, checked."""
    blocks = parse_irreps(options.hidden_irreps, "model.hidden_irreps")
    if (blocks[0].l, blocks[0].p) != (0, 1) or len({block.mul for block in blocks}) > 1:
        raise ForgefieldError(
            f"model.hidden_irreps is '{options.hidden_irreps}'; it must begin with 0e and have the same number of channels for "
            "each irrep."
        )
    return blocks


def sent_blocks(options: MACEOptions, *, first: bool) -> tuple[Block, ...]:
    """What neighbours send in the first layer or in the others."""
    hidden = hidden_blocks(options)
    edges = None if options.edge_irreps is None else parse_irreps(options.edge_irreps, "model.edge_irreps")
    kinds = {(block.l, block.p) for block in hidden}
    for block in edges or ():
        if (block.l, block.p) not in kinds:
            raise ForgefieldError(
                f"model.edge_irreps is '{options.edge_irreps}'; every irrep must be one of "
                f"model.hidden_irreps={options.hidden_irreps}."
            )
    if not first:
        return hidden if edges is None else edges
    if edges is None or not options.use_edge_irreps_first:
        return hidden[:1]
    scalars = tuple(block for block in edges if (block.l, block.p) == (0, 1))
    if not scalars:
        raise ForgefieldError("model.edge_irreps has no 0e, which model.use_edge_irreps_first needs.")
    return scalars


def correlations(options: MACEOptions) -> list[int]:
    """Of each layer."""
    values = options.correlation
    values = [values] * options.num_interactions if isinstance(values, int) else list(values)
    if len(values) != options.num_interactions or not all(1 <= value <= 4 for value in values):
        raise ForgefieldError(
            f"model.correlation is {options.correlation}; it must be a number from 1 to 4, or one for each of the "
            f"{options.num_interactions} layers (model.num_interactions)."
        )
    return values


def readout_width(options: MACEOptions) -> int:
    """Neurons of the last layer's readout, of one head."""
    blocks = parse_irreps(options.mlp_irreps, "model.mlp_irreps")
    if len(blocks) != 1 or (blocks[0].l, blocks[0].p) != (0, 1):
        raise ForgefieldError(
            f"model.mlp_irreps is '{options.mlp_irreps}'; energies are read by scalars, such as 16x0e."
        )
    return blocks[0].mul


def branch_names(options: MACEOptions) -> tuple[str, ...]:
    """Names of the branches; empty for one energy."""
    names = tuple(options.branches or ())
    for name in names:
        if not re.fullmatch(r"[A-Za-z0-9_-]+", name) or names.count(name) > 1:
            raise ForgefieldError(f"model.branches contains '{name}'; names are letters, digits, - and _, each once.")
    return names if len(names) > 1 else ()


def check(options: MACEOptions) -> None:
    """Raise for options that are wrong whatever the data."""
    check_values(options)
    for first in (True, False):
        sent_blocks(options, first=first)
    correlations(options)
    readout_width(options)
    branch_names(options)
    both = any(block.l == 0 and block.p == -1 for block in hidden_blocks(options))
    if both and "nonlinear" in (options.interaction, options.interaction_first):
        raise ForgefieldError("model.hidden_irreps has 0o, which the nonlinear interaction does not support.")
    if options.num_interactions == 1 and (options.readout_bias or options.use_last_readout_only):
        raise ForgefieldError(
            "model.num_interactions is 1: its readout is linear, without biases (model.readout_bias)."
        )
    if options.radial_type == "gaussian" and options.num_bessel < 2:
        raise ForgefieldError("model.num_bessel is 1; a basis of Gaussians needs at least 2.")


def complete_options(options: MACEOptions, species: tuple[str, ...], statistics: Mapping[str, Any]) -> MACEOptions:
    """See `MACE.complete`."""
    check(options)
    branches = branch_names(options)
    filled: dict[str, Any] = {"branches": list(branches) or None}
    if options.avg_num_neighbours is None:
        mean = from_statistics(statistics, "mean_neighbours", "avg_num_neighbours")
        filled["avg_num_neighbours"] = mean if mean > 0 else 1.0
    scales = default_scale(statistics) if options.energy_scales is None else options.energy_scales
    check_per_species("model.energy_scales", scales, branches, positive=True)
    filled["energy_scales"] = dict.fromkeys(branches, scales) if branches and not isinstance(scales, dict) else scales
    filled["energy_shifts"] = _complete_shifts(options, species, branches, statistics)
    return dataclasses.replace(options, **filled)


def _complete_shifts(
    options: MACEOptions, species: tuple[str, ...], branches: tuple[str, ...], statistics: Mapping[str, Any]
) -> dict[str, Any]:
    """Energy of each species, with branches one such mapping for each."""
    given = options.energy_shifts
    if not branches:
        if given is None:
            given = from_statistics(statistics, "reference_energies", "energy_shifts")
        return _by_species("model.energy_shifts", given, species)
    measured = statistics.get("branch_shifts") or {}
    if not isinstance(given, Mapping) or not set(given) <= set(branches):
        given = {} if given is None else dict.fromkeys(branches, given)
    shifts = {}
    for branch in branches:
        values = given.get(branch, measured.get(branch))
        if values is None:
            values = from_statistics(statistics, "reference_energies", f"energy_shifts.{branch}")
        shifts[branch] = _by_species(f"model.energy_shifts.{branch}", values, species)
    return shifts


def _by_species(key: str, values: Any, species: tuple[str, ...]) -> dict[str, float]:
    check_per_species(key, values, species, positive=False)
    if isinstance(values, Mapping):
        return {symbol: float(values[symbol]) for symbol in species}
    return dict.fromkeys(species, float(values))
