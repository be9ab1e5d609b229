"""The repformer block of DPA-2 (Zhang et al., npj Comput. Mater. 10, 293, 2024): layers that pass messages between neighbours.

Every atom has features g1, every neighbour of it features g2 and a vector h2, in slots (`near.py`). A layer updates all three
from each other; the names of its parts are those of the options. All switches are zero in empty slots. Where DeePMD-kit's empty
slots have an effect, in divisors and in the denominators of smooth attention, it is added in closed form.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor, nn

from forgefield.config.option import option
from forgefield.models.deeppot.attention import SHIFT, layer_norm, softmax
from forgefield.models.deeppot.near import Near
from forgefield.models.deeppot.networks import activation_function
from forgefield.models.edges import EdgeContext
from forgefield.ops import products
from forgefield.ops.graph import cut, gather, join

STYLES = ("res_avg", "res_incr", "res_residual")
INITIAL = ("norm", "const")
LEAST_NEIGHBOURS = 1e-4
"""Added to numbers of neighbours before dividing by them, where attention is not smooth; DeePMD-kit's."""


@dataclass
class RepformerOptions:
    """Options of the layers of DPA-2."""

    rcut: float | None = None
    """Cutoff of the messages, A, below `data.cutoff`."""
    rcut_smth: float = option(0.5, at_least=0, unit="A")
    """Where their switch begins, A."""
    nsel: int | str | None = None
    """Neighbours within it for which DeePMD-kit reserves slots; left out or `auto`: none."""
    nlayers: int = option(3, at_least=1)
    """Number of layers."""
    g1_dim: int = option(128, at_least=1)
    """Features of an atom."""
    g2_dim: int = option(16, at_least=1)
    """Features of a pair."""
    axis_neuron: int = option(4, at_least=1)
    """Columns that the others are combined with in invariant products."""
    direct_dist: bool = False
    """Pairs start from their distance and vector, not from those divided by powers of the distance."""
    update_g1_has_conv: bool = True
    """Update atoms by a convolution over neighbours."""
    update_g1_has_drrd: bool = True
    """Update atoms by invariant products of neighbours' features."""
    update_g1_has_grrg: bool = True
    """Update atoms by invariant products of pairs' features."""
    update_g1_has_attn: bool = True
    """Update atoms by attention to their neighbours."""
    update_g2_has_g1g1: bool = True
    """Update pairs by the product of both atoms' features."""
    update_g2_has_attn: bool = True
    """Update pairs by attention between the neighbours of an atom."""
    update_h2: bool = False
    """Update vectors by that attention."""
    attn1_hidden: int = option(64, at_least=1)
    """Length of queries and keys of the attention to neighbours."""
    attn1_nhead: int = option(4, at_least=1)
    """Its heads."""
    attn2_hidden: int = option(16, at_least=1)
    """Length of queries and keys of the attention between neighbours."""
    attn2_nhead: int = option(4, at_least=1)
    """Its heads."""
    attn2_has_gate: bool = False
    """Multiply its products of queries and keys with those of vectors."""
    activation_function: str = "tanh"
    """Of all layers."""
    update_style: str = option("res_avg", choices=STYLES)
    """Features are the mean with their updates (`res_avg`), or the updates are added, with a common factor (`res_incr`) or with
    trained ones (`res_residual`)."""
    update_residual: float = 0.001
    """Initial size of the trained factors."""
    update_residual_init: str = option("norm", choices=INITIAL)
    """Draw them, or start with a constant."""
    set_davg_zero: bool = True
    """Divide by deviations without subtracting means."""
    trainable_ln: bool = True
    """Train scale and shift of the layer normalisations."""
    use_sqrt_nnei: bool = True
    """Divide sums over neighbours by the root of their number, not by their number."""
    g1_out_conv: bool = True
    """The convolution is an update of its own, not an input of a layer."""
    g1_out_mlp: bool = True
    """Atoms have an update from their features alone, and do not enter that layer."""
    ln_eps: float | None = option(None, above=0)
    """Added to variances in layer normalisations; default 1e-5."""
    davg: list[list[float]] | None = None
    """Mean of the rows, by species of the centre, 1/A. From the training data."""
    dstd: list[list[float]] | None = None
    """Deviation of the rows, by species of the centre, 1/A. From the training data."""
    neighbour_norm: float | None = None
    """Number of neighbours in divisors. Default: `nsel`, or without it the mean in the training data."""
    max_neighbours: int | None = option(None, at_least=1)
    """Neighbours for which traced and captured steps have slots. Default: from the training data, a tenth more than needed."""


@dataclass(frozen=True)
class Make:
    """How weights are made."""

    trainable: bool
    dtype: torch.dtype
    generator: torch.Generator

    def normal(self, *shape: int) -> Tensor:
        return torch.randn(shape, generator=self.generator, dtype=torch.float64)

    def parameter(self, values: Tensor, trainable: bool = True) -> nn.Parameter:
        return nn.Parameter(values.to(self.dtype), requires_grad=trainable and self.trainable)


class Affine(nn.Module):
    """x w + b, or x w."""

    b: Tensor | None

    def __init__(self, n_in: int, n_out: int, make: Make, *, bias: bool = True) -> None:
        super().__init__()
        self.w = make.parameter(make.normal(n_in, n_out) / math.sqrt(n_in + n_out))
        self.b = make.parameter(make.normal(n_out)) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        """(n, n_in) -> (n, n_out)."""
        if self.b is None:
            return products.product(x, self.w)
        return products.add_product(self.b, x, self.w)


class Norm(nn.Module):
    """Layer normalisation."""

    def __init__(self, dim: int, eps: float, make: Make, *, trainable: bool) -> None:
        super().__init__()
        self.eps = eps
        self.scale = make.parameter(torch.ones(dim), trainable)
        self.shift = make.parameter(torch.zeros(dim), trainable)

    def forward(self, x: Tensor) -> Tensor:
        return layer_norm(x, self.scale, self.shift, self.eps)


@dataclass(frozen=True)
class Surroundings:
    """What all layers have in common.

    near: neighbours. switch: (n_atoms, width, 1); without `smooth`, one for neighbours and zero in empty slots. norm: a number,
    or (n_atoms, 1, 1): that of neighbours, in divisors; root_norm: its root. n_slots: of an atom, in the denominators of smooth
    attention.
    """

    near: Near
    switch: Tensor
    smooth: bool
    norm: Tensor | float
    root_norm: Tensor | float
    n_slots: float
    edges: EdgeContext

    def spread(self, rows: Tensor) -> Tensor:
        """(n_atoms * width, c) -> (n_atoms, width, c)."""
        return rows.view(self.near.n_atoms, self.near.width, -1)

    @property
    def empty(self) -> Tensor:
        """(n_atoms, width): zero for neighbours, a large negative number in empty slots."""
        lowest = torch.finfo(self.switch.dtype).min / 4
        return (~self.near.taken).to(self.switch.dtype) * lowest

    def weights(self, logits: Tensor, switches: Tensor, empty: Tensor) -> Tensor:
        """Attention (..., width) over the last axis from products of queries and keys.

        switches: factors of the result, and of the logits of a smooth attention. empty: added to the logits of another.
        """
        if not self.smooth:
            return softmax(logits + empty) * switches
        weights = softmax(logits * switches + switches * SHIFT)
        missing = self.n_slots - self.near.width
        if missing:
            # The last slot is empty, so its weight is one over the sum over all slots.
            last = weights.narrow(-1, weights.shape[-1] - 1, 1)
            weights = weights * (1 - last * -missing).reciprocal()
        return weights * switches


class PairAttention(nn.Module):
    """Attention maps between the neighbours of an atom."""

    def __init__(self, options: RepformerOptions, make: Make) -> None:
        super().__init__()
        self.hidden, self.heads, self.gated = options.attn2_hidden, options.attn2_nhead, options.attn2_has_gate
        self.queries_keys = Affine(options.g2_dim, 2 * self.hidden * self.heads, make, bias=False)

    def forward(self, g2: Tensor, h2: Tensor, around: Surroundings) -> Tensor:
        """(n_atoms, heads, width, width). g2: (n_atoms * width, c); h2: (n_atoms, width, 3)."""
        n, width = around.near.taken.shape
        both = self.queries_keys(g2).view(n, width, self.hidden, 2 * self.heads).permute(0, 3, 1, 2)
        query, key = (part.flatten(0, 1) for part in cut(both, [self.heads, self.heads], 1))
        logits = torch.bmm(query, key.transpose(1, 2)).view(n, self.heads, width, width) / self.hidden**0.5
        cosines = torch.bmm(h2, h2.transpose(1, 2)).unsqueeze(1)
        if self.gated:
            logits = logits * cosines
        switches = torch.bmm(around.switch, around.switch.transpose(1, 2)).unsqueeze(1)
        weights = around.weights(logits, switches, around.empty.view(n, 1, 1, width))
        maps: Tensor = weights * (cosines / 3.0**0.5)
        return maps


class AttendPairs(nn.Module):
    """Features of pairs, by attention maps."""

    def __init__(self, dim: int, heads: int, make: Make) -> None:
        super().__init__()
        self.dim, self.heads = dim, heads
        self.values = Affine(dim, dim * heads, make, bias=False)
        self.head_map = Affine(dim * heads, dim, make)

    def forward(self, maps: Tensor, g2: Tensor) -> Tensor:
        """(n_atoms * width, dim)."""
        n, _, width, _ = maps.shape
        values = self.values(g2).view(n, width, self.dim, self.heads).permute(0, 3, 1, 2).reshape(-1, width, self.dim)
        attended = torch.bmm(maps.flatten(0, 1), values).view(n, self.heads, width, self.dim)
        result: Tensor = self.head_map(attended.permute(0, 2, 3, 1).reshape(n * width, self.dim * self.heads))
        return result


class AttendVectors(nn.Module):
    """Vectors of pairs, by attention maps."""

    def __init__(self, heads: int, make: Make) -> None:
        super().__init__()
        self.head_map = Affine(heads, 1, make, bias=False)

    def forward(self, maps: Tensor, h2: Tensor) -> Tensor:
        """(n_atoms, width, 3)."""
        joint = (maps * self.head_map.w.view(1, -1, 1, 1)).sum(1)
        return torch.bmm(joint, h2)


class LocalAttention(nn.Module):
    """Attention of atoms to their neighbours."""

    def __init__(self, options: RepformerOptions, make: Make) -> None:
        super().__init__()
        dim, self.hidden, self.heads = options.g1_dim, options.attn1_hidden, options.attn1_nhead
        self.dim = dim
        self.queries = Affine(dim, self.hidden * self.heads, make, bias=False)
        self.keys_values = Affine(dim, (self.hidden + dim) * self.heads, make, bias=False)
        self.head_map = Affine(dim * self.heads, dim, make)

    def forward(self, g1: Tensor, everywhere: Tensor, around: Surroundings) -> Tensor:
        """(n_atoms, dim). g1, everywhere: (n_atoms, dim) of centres and of neighbours."""
        near = around.near
        n, width = near.taken.shape
        # Keys and values depend on the neighbour alone, so they are computed once for each atom.
        rows = gather(self.keys_values(everywhere), near.by_source).view(n, width, self.hidden + self.dim, self.heads)
        key, value = cut(rows.permute(0, 3, 1, 2), [self.hidden, self.dim], 3)
        query = self.queries(g1).view(n, self.hidden, self.heads).permute(0, 2, 1).reshape(-1, self.hidden, 1)
        logits = torch.bmm(key.reshape(-1, width, self.hidden), query).view(n, self.heads, width) / self.hidden**0.5
        switches = around.switch.transpose(1, 2)
        weights = around.weights(logits, switches, around.empty.unsqueeze(1)).view(-1, 1, width)
        attended = torch.bmm(weights, value.reshape(-1, width, self.dim)).view(n, self.heads * self.dim)
        result: Tensor = self.head_map(attended)
        return result


class RepformerLayer(nn.Module):
    """One layer. last: whether it updates atoms only."""

    linear2: Affine | None

    def __init__(self, options: RepformerOptions, make: Make, *, last: bool) -> None:
        super().__init__()
        self.options = options
        self.activate = activation_function(options.activation_function)
        g1, g2, eps = options.g1_dim, options.g2_dim, options.ln_eps or 1e-5
        self.has_products = options.update_g2_has_g1g1 and not last
        self.has_attention, self.has_vectors = options.update_g2_has_attn and not last, options.update_h2 and not last
        n_in = 0 if options.g1_out_mlp else g1
        n_in += options.axis_neuron * (g2 * options.update_g1_has_grrg + g1 * options.update_g1_has_drrd)
        n_in += g2 if options.update_g1_has_conv and not options.g1_out_conv else 0
        self.linear1 = Affine(n_in, g1, make)
        self.linear2 = None if last else Affine(g2, g2, make)
        self.g1_self_mlp = Affine(g1, g1, make) if options.g1_out_mlp else None
        self.proj_g1g2 = None
        if options.update_g1_has_conv:
            self.proj_g1g2 = Affine(*((g2, g1) if options.g1_out_conv else (g1, g2)), make, bias=False)
        self.proj_g1g1g2 = Affine(g1, g2, make, bias=False) if self.has_products else None
        maps = self.has_attention or self.has_vectors
        self.attn2g_map = PairAttention(options, make) if maps else None
        self.attn2_mh_apply = AttendPairs(g2, options.attn2_nhead, make) if self.has_attention else None
        self.attn2_lm = Norm(g2, eps, make, trainable=options.trainable_ln) if self.has_attention else None
        self.attn2_ev_apply = AttendVectors(options.attn2_nhead, make) if self.has_vectors else None
        self.loc_attn = LocalAttention(options, make) if options.update_g1_has_attn else None
        n_g1 = (
            1 + options.g1_out_mlp + (options.update_g1_has_conv and options.g1_out_conv) + options.update_g1_has_attn
        )
        n_g2 = 0 if last else 1 + self.has_products + self.has_attention
        has_factors = options.update_style == "res_residual"
        self.g1_residual = self._factors(g1, n_g1 * has_factors, make)
        self.g2_residual = self._factors(g2, n_g2 * has_factors, make)
        self.h2_residual = self._factors(1, self.has_vectors * has_factors, make)

    def _factors(self, dim: int, number: int, make: Make) -> nn.ParameterList:
        options = self.options
        drawn = [
            make.normal(dim) if options.update_residual_init == "norm" else torch.ones(dim, dtype=torch.float64)
            for _ in range(number)
        ]
        return nn.ParameterList(make.parameter(options.update_residual * values) for values in drawn)

    def forward(self, g1: Tensor, g2: Tensor, h2: Tensor, around: Surroundings) -> tuple[Tensor, Tensor, Tensor]:
        """g1: (n_atoms, c1); g2: (n_atoms * width, c2); h2: (n_atoms, width, 3)."""
        options, near = self.options, around.near
        everywhere = around.edges.fill_ghosts(g1)
        switch = around.switch.reshape(-1, 1)
        faded: Tensor | None = None
        if options.update_g1_has_conv or options.update_g1_has_drrd or self.has_products:
            faded = gather(everywhere, near.by_source) * switch
        inputs = [] if options.g1_out_mlp else [g1]
        updates = []
        if self.g1_self_mlp is not None:
            updates.append(self.activate(self.g1_self_mlp(g1)))
        if self.proj_g1g2 is not None and faded is not None:
            if options.g1_out_conv:
                convolved = around.spread(self.proj_g1g2(g2) * faded).sum(1)
                updates.append(convolved / _flat(around.norm))
            else:
                projected = gather(self.proj_g1g2(everywhere), near.by_source) * switch
                inputs.append(around.spread(g2 * projected).sum(1) / _flat(around.norm))
        if options.update_g1_has_grrg:
            inputs.append(invariants(around.spread(g2 * switch), h2, around, options))
        if options.update_g1_has_drrd and faded is not None:
            inputs.append(invariants(around.spread(faded), h2, around, options))
        updates.append(self.activate(self.linear1(join(inputs, 1))))
        new_g2, new_h2 = self._update_pairs(g1, faded, g2, h2, around)
        if self.loc_attn is not None:
            updates.append(self.loc_attn(g1, everywhere, around))
        return self._combine(g1, updates, self.g1_residual), new_g2, new_h2

    def _update_pairs(
        self, g1: Tensor, faded: Tensor | None, g2: Tensor, h2: Tensor, around: Surroundings
    ) -> tuple[Tensor, Tensor]:
        """Features and vectors of pairs. faded: (n_atoms * width, c1) features of neighbours times their switches."""
        if self.linear2 is None:
            return g2, h2
        updates = [self.activate(self.linear2(g2))]
        if self.proj_g1g1g2 is not None and faded is not None:
            updates.append(self.proj_g1g1g2((around.spread(faded) * g1.unsqueeze(1)).flatten(0, 1)))
        of_vectors = []
        if self.attn2g_map is not None:
            maps = self.attn2g_map(g2, h2, around)
            if self.attn2_mh_apply is not None and self.attn2_lm is not None:
                updates.append(self.attn2_lm(self.attn2_mh_apply(maps, g2)))
            if self.attn2_ev_apply is not None:
                of_vectors.append(self.attn2_ev_apply(maps, h2))
        return self._combine(g2, updates, self.g2_residual), self._combine(h2, of_vectors, self.h2_residual)

    def _combine(self, old: Tensor, updates: Sequence[Tensor], factors: nn.ParameterList) -> Tensor:
        if self.options.update_style == "res_residual":
            for update, factor in zip(updates, factors, strict=True):
                old = old + factor * update
            return old
        if not updates:
            return old
        total = updates[0]
        for update in updates[1:]:
            total = total + update
        if self.options.update_style == "res_incr":
            return old + total / math.sqrt(len(updates))
        return (old + total) / math.sqrt(len(updates) + 1)


def _flat(norm: Tensor | float) -> Tensor | float:
    return norm.squeeze(2) if isinstance(norm, Tensor) else norm


def vector_sums(features: Tensor, h2: Tensor, around: Surroundings, options: RepformerOptions) -> Tensor:
    """(n_atoms, 3, c): sum over neighbours of vector (x) features (n_atoms, width, c), which are zero in empty slots."""
    sums = torch.bmm(h2.transpose(1, 2), features)
    return sums / (around.root_norm if options.use_sqrt_nnei else around.norm)


def invariants(features: Tensor, h2: Tensor, around: Surroundings, options: RepformerOptions) -> Tensor:
    """(n_atoms, axis_neuron * c): scalar products of the columns of `vector_sums`."""
    sums = vector_sums(features, h2, around, options)
    return torch.bmm(sums[:, :, : options.axis_neuron].transpose(1, 2), sums).flatten(1) / 3.0


class Repformer(nn.Module):
    """All layers."""

    layers: list[RepformerLayer]

    def __init__(self, options: RepformerOptions, make: Make, *, smooth: bool, cutoff: float) -> None:
        super().__init__()
        assert options.neighbour_norm is not None
        self.options, self.smooth, self.cutoff = options, smooth, cutoff
        self.activate = activation_function(options.activation_function)
        self.g2_embd = Affine(1, options.g2_dim, make)
        numbers = range(options.nlayers)
        layers = nn.ModuleList(RepformerLayer(options, make, last=i == options.nlayers - 1) for i in numbers)
        self.layers = cast(list[RepformerLayer], layers)

    def forward(
        self, g1: Tensor, scalars: Tensor, vectors: Tensor, switch: Tensor, near: Near, edges: EdgeContext
    ) -> tuple[Tensor, Tensor]:
        """Features (n_atoms, g1_dim) and rotation (n_atoms, g2_dim, 3).

        g1: (n_atoms, g1_dim). Of slots: scalars (n_atoms * width, 1), vectors (n_atoms * width, 3), switch (n_atoms * width,).
        """
        around = self._around(switch, near, edges)
        g1, g2 = self.activate(g1), self.activate(self.g2_embd(scalars))
        h2 = around.spread(vectors)
        for layer in self.layers:
            g1, g2, h2 = layer(g1, g2, h2, around)
        faded = around.spread(g2) * around.switch
        return g1, vector_sums(faded, h2, around, self.options).transpose(1, 2)

    def _around(self, switch: Tensor, near: Near, edges: EdgeContext) -> Surroundings:
        norm = float(self.options.neighbour_norm or 1.0)
        spread = switch.view(near.n_atoms, near.width, 1)
        if self.smooth:
            return Surroundings(near, spread, True, norm, math.sqrt(norm), norm, edges)
        taken = near.taken.to(switch.dtype)
        number = taken.sum(1).view(-1, 1, 1)
        least = torch.full_like(number, LEAST_NEIGHBOURS)
        return Surroundings(near, taken.unsqueeze(2), False, number + least, number.sqrt() + least, norm, edges)
