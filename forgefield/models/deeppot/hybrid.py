"""The descriptor `hybrid`: the numbers of several descriptors of one atom, one after the other.

Each part has its own options and may have a shorter cutoff (`rcut`); it sees the neighbours within its cutoff only. If any of
them distinguishes species itself, one fitting network is used for all species.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn

from forgefield.errors import ForgefieldError
from forgefield.models.deeppot.descriptor import Descriptor, DescriptorStatistics
from forgefield.models.deeppot.options import AnyDescriptorOptions, descriptor_part
from forgefield.models.edges import Batch, EdgeContext, edge_vectors
from forgefield.ops.graph import join


@dataclass
class HybridOptions(AnyDescriptorOptions):
    """Several descriptors, one after the other."""

    type: str = "hybrid"
    list: list[dict[str, Any]] = field(default_factory=list)
    """The descriptors, each with its type and options, and with `rcut`, its cutoff, A, if it is below `data.cutoff`."""

    def __post_init__(self) -> None:
        if not self.list:
            raise ForgefieldError("model.descriptor.list is empty; it should list the descriptors of the hybrid.")
        for number, section in enumerate(self.list):
            if not isinstance(section, Mapping) or not isinstance(section.get("type"), str):
                raise ForgefieldError(
                    f"model.descriptor.list[{number}] must be a section with a type, such as {{type: se_e2_a}}."
                )
            _part(self, number)


class Part(NamedTuple):
    """Class, options and cutoff, A, of one of the descriptors."""

    descriptor: type[Descriptor[Any]]
    options: AnyDescriptorOptions
    cutoff: float


def _part(options: HybridOptions, number: int) -> tuple[type[Descriptor[Any]], AnyDescriptorOptions]:
    section = {key: value for key, value in options.list[number].items() if key != "rcut"}
    return descriptor_part(section, where=f"model.descriptor.list[{number}]")


def parts_of(options: HybridOptions, cutoff: float) -> list[Part]:
    """The descriptors. cutoff: of the neighbour lists, A."""
    cutoffs = [section.get("rcut") for section in options.list]
    for number, value in enumerate(cutoffs):
        is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
        if value is not None and not (is_number and 0 < value <= cutoff):
            raise ForgefieldError(
                f"model.descriptor.list[{number}].rcut is {value!r}; it must be a positive number of at most "
                f"data.cutoff={cutoff:g}."
            )
    return [
        Part(*_part(options, number), cutoff if value is None else float(value)) for number, value in enumerate(cutoffs)
    ]


def within(batch: Mapping[str, Tensor], cutoff: float) -> dict[str, Tensor]:
    """The batch with the edges up to a cutoff, A."""
    near = torch.linalg.vector_norm(edge_vectors(batch), dim=1) < cutoff
    others = {key: value for key, value in batch.items() if key != "edge_reverse"}
    return others | {"edge_index": batch["edge_index"][:, near], "edge_shift": batch["edge_shift"][near]}


class HybridStatistics:
    """Statistics of every descriptor of a hybrid.

    parts: statistics and cutoff, A, of each. cutoff: of the neighbour lists, A.
    """

    def __init__(self, parts: Sequence[tuple[DescriptorStatistics, float]], cutoff: float) -> None:
        self.parts, self.cutoff = parts, cutoff

    def add(self, batch: Mapping[str, Tensor]) -> None:
        for statistics, cutoff in self.parts:
            statistics.add(batch if cutoff >= self.cutoff else within(batch, cutoff))

    def result(self) -> dict[str, Any]:
        return {"parts": [statistics.result() for statistics, _ in self.parts]}


class Hybrid(Descriptor[HybridOptions]):
    """Concatenation of descriptors."""

    Options = HybridOptions
    parts: list[Descriptor[Any]]

    def __init__(
        self,
        options: HybridOptions,
        *,
        species: Sequence[str],
        cutoff: float,
        dtype: torch.dtype,
        generator: torch.Generator,
    ) -> None:
        super().__init__(options, species=species, cutoff=cutoff, dtype=dtype, generator=generator)
        modules = [
            part_class(part, species=species, cutoff=part_cutoff, dtype=dtype, generator=generator)
            for part_class, part, part_cutoff in parts_of(options, cutoff)
        ]
        self.parts = cast("list[Descriptor[Any]]", nn.ModuleList(modules))
        self.dim_out = sum(part.dim_out for part in modules)
        self.dim_rotation = sum(part.dim_rotation for part in modules)
        self.mixed_types = any(part.mixed_types for part in modules)
        self.inputs = {name: kind for part in modules for name, kind in part.inputs.items()}
        self.optional_inputs = tuple(
            name for name in self.inputs if all(name in p.optional_inputs for p in modules if name in p.inputs)
        )
        kinds = {part.ghost_atoms for part in modules}
        self.ghost_atoms = None if None in kinds else "exchange" if "exchange" in kinds else "local"

    @classmethod
    def statistics(
        cls,
        options: HybridOptions,
        *,
        species: tuple[str, ...],
        cutoff: float,
        pair_exclude_types: Sequence[Sequence[int]],
    ) -> HybridStatistics:
        parts = [
            (
                part_class.statistics(part, species=species, cutoff=rcut, pair_exclude_types=pair_exclude_types),
                rcut,
            )
            for part_class, part, rcut in parts_of(options, cutoff)
        ]
        return HybridStatistics(parts, cutoff)

    @classmethod
    def complete(
        cls, options: HybridOptions, *, species: tuple[str, ...], cutoff: float, statistics: Mapping[str, Any]
    ) -> HybridOptions:
        """Options with those of every part completed."""
        parts = parts_of(options, cutoff)
        measured = (statistics.get("environment") or {}).get("parts") or [{}] * len(parts)
        sections = []
        for (part_class, part, rcut), environment in zip(parts, measured, strict=True):
            known = {**statistics, "environment": environment}
            completed = part_class.complete(part, species=species, cutoff=rcut, statistics=known)
            sections.append({**asdict(completed), "rcut": rcut})
        return HybridOptions(list=sections)

    @classmethod
    def refuses_species(cls, options: HybridOptions, n_old: int, n_all: int) -> str | None:
        refusals = (
            part_class.refuses_species(part, n_old, n_all) for part_class, part, _ in parts_of(options, math.inf)
        )
        return next((refusal for refusal in refusals if refusal is not None), None)

    @classmethod
    def extended(cls, options: HybridOptions, n_old: int, measured: Mapping[str, Any]) -> HybridOptions:
        parts = zip(parts_of(options, math.inf), measured["parts"], strict=True)
        return HybridOptions(
            list=[
                {**asdict(part_class.extended(part, n_old, of_part)), "rcut": rcut}
                for (part_class, part, rcut), of_part in parts
            ]
        )

    def forward(self, batch: Batch, edges: EdgeContext, mask: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        described, rotations, lengths = [], [], None
        for part in self.parts:
            seen = mask
            if part.cutoff < self.cutoff:
                lengths = torch.linalg.vector_norm(edges.vectors.detach(), dim=1) if lengths is None else lengths
                near = (lengths < part.cutoff).to(lengths.dtype)
                seen = near if mask is None else mask * near
            numbers, rotation = part(batch, edges, seen)
            described.append(numbers)
            if rotation is not None:
                rotations.append(rotation)
        dtype = _widest([numbers.dtype for numbers in described])
        rotation = join([rows.to(dtype) for rows in rotations], 1) if rotations else None
        return join([numbers.to(dtype) for numbers in described], 1), rotation


def _widest(dtypes: Sequence[torch.dtype]) -> torch.dtype:
    return max(dtypes, key=lambda dtype: torch.finfo(dtype).bits)
