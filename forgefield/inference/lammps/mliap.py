"""Models for `pair_style mliap unified FILE.pt` of LAMMPS builds with ML-IAP and Kokkos.

LAMMPS reads the file with `torch.load(weights_only=False)`, which can execute code; the file written here contains the name of
one function of this module and two arguments: the model's options as JSON and its weights in the safetensors format.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

import safetensors.torch
import torch
from torch import Tensor

from forgefield.config.trust import NO_CODE
from forgefield.errors import ForgefieldError
from forgefield.files import written_atomically
from forgefield.inference.lammps.evaluator import Evaluator, Exchange, Share, require_supported
from forgefield.models.building import build_model
from forgefield.models.resolving import single_branch
from forgefield.runs import Run


class MliapData(Protocol):
    """What LAMMPS passes to `compute_forces`: attributes of its `MLIAPDataPy`, arrays of numpy or, on a GPU, of cupy.

    elems: (ntotal,) indices into `element_types`. pair_i, pair_j: (npairs,) centre and neighbour. rij: (npairs, 3) from the
    centre to the neighbour, A. eatoms: (nlistatoms,) to be set, eV.
    """

    nlocal: int
    ntotal: int
    nlistatoms: int
    npairs: int
    elems: Any
    pair_i: Any
    pair_j: Any
    rij: Any
    eatoms: Any
    energy: Any

    def update_pair_forces(self, slopes: Any) -> None: ...

    def forward_exchange(self, source: Tensor, target: Tensor, width: int) -> None: ...

    def reverse_exchange(self, source: Tensor, target: Tensor, width: int) -> None: ...


class MliapModel:
    """The object that LAMMPS calls. Attributes with a fixed name are part of its interface.

    options: resolved options of the model. weights: its state. precision: of the weights, `float32` or `float64`.
    """

    def __init__(self, options: Mapping[str, Any], weights: Mapping[str, Tensor], precision: str) -> None:
        self._stored = (
            json.dumps({"options": dict(options), "precision": precision}),
            safetensors.torch.save(dict(weights)),
        )
        potential = build_model(dict(options), precision=precision, seed=0, trust=NO_CODE)
        potential.load_state_dict(dict(weights))
        self.evaluator = Evaluator(potential)
        self.interface = None
        self.element_types = list(potential.type_names or potential.species)
        self.ndescriptors = 1
        self.nparams = 1
        self.rcutfac = potential.cutoff / 2  # LAMMPS adds the radii of both elements, which are this number

    def __reduce__(self) -> tuple[Any, tuple[str, bytes]]:
        return read_model, self._stored

    def compute_descriptors(self, data: MliapData) -> None:
        """Not needed: `compute_forces` does everything."""

    def compute_gradients(self, data: MliapData) -> None:
        """Not needed: `compute_forces` does everything."""

    def compute_forces(self, data: MliapData) -> None:
        """Set energies of atoms and the derivatives of the energy in the pair vectors."""
        exchanges = hasattr(data, "forward_exchange")
        if self.evaluator.widths and not exchanges:
            raise ForgefieldError(
                "this model exchanges features of ghost atoms between its layers, for which LAMMPS has to be built with Kokkos "
                "(March 2025 or newer) and started with -k on -sf kk; or use pair_style forgefield."
            )
        vectors = torch.as_tensor(data.rij).reshape(-1, 3)
        if vectors.device != self.evaluator.device:
            self.evaluator = Evaluator(self.evaluator.potential.to(vectors.device))
        destination = torch.as_tensor(data.pair_i).long()
        source = torch.as_tensor(data.pair_j).long()
        order = None
        if bool((destination[1:] < destination[:-1]).any()):
            order = torch.argsort(destination, stable=True)
            destination, source, vectors = destination[order], source[order], vectors[order]
        share = Share(data.nlocal, torch.as_tensor(data.elems).long()[: data.ntotal], source, destination, vectors)
        exchange: Exchange | None = MliapExchange(data) if exchanges else None
        energies, slopes, _ = self.evaluator.evaluate(share, exchange)
        if order is not None:
            slopes = torch.empty_like(slopes).index_copy_(0, order, slopes)
        if vectors.is_cuda:
            torch.cuda.synchronize(vectors.device)  # LAMMPS reads on a stream of its own
        self._store(data, energies, slopes, on_kokkos=exchanges)

    def _store(self, data: MliapData, energies: Tensor, slopes: Tensor, *, on_kokkos: bool) -> None:
        if on_kokkos:
            torch.as_tensor(data.eatoms)[: data.nlocal].copy_(energies)
        else:
            data.eatoms = energies.numpy()
        data.energy = float(energies.sum())
        if data.npairs:
            data.update_pair_forces(slopes if slopes.is_cuda else slopes.contiguous().numpy())


class MliapExchange:
    """Exchange through ML-IAP, whose buffers hold all atoms of a process."""

    def __init__(self, data: MliapData) -> None:
        self.data = data

    def forward(self, rows: Tensor, n_atoms: int) -> Tensor:
        source = rows.new_zeros(n_atoms, rows.shape[1])
        source[: rows.shape[0]] = rows.detach()
        filled = torch.zeros_like(source)
        self.data.forward_exchange(source, filled, rows.shape[1])
        filled[: rows.shape[0]] = rows.detach()
        return filled

    def reverse(self, rows: Tensor, n_local: int) -> Tensor:
        source = rows.detach().contiguous()
        summed = torch.zeros_like(source)
        self.data.reverse_exchange(source, summed, rows.shape[1])
        return summed[:n_local].contiguous()


def read_model(description: str, weights: bytes) -> MliapModel:
    """The model of a file; called by `torch.load`."""
    content = json.loads(description)
    return MliapModel(content["options"], safetensors.torch.load(weights), content["precision"])


def write_mliap(run: Run, path: str | os.PathLike[str], *, which: str = "best", head: str | None = None) -> Path:
    """Write the model of a run as a file for `pair_style mliap unified`; returns its path."""
    run.require_single_model("exported to ML-IAP")
    potential = run.load_potential(which, head=head)
    require_supported(potential)
    if potential.interface.ghost_atoms is None:
        raise ForgefieldError(
            "this model does not support ghost atoms, which ML-IAP has also on one process; use pair_style forgefield there."
        )
    options = run.info["model"] if head is None else single_branch(run.info["model"], None, head)[0]
    state = {name: tensor.detach().cpu().contiguous() for name, tensor in potential.state_dict().items()}
    precision = str(potential.interface.weight_dtype() or torch.float64).removeprefix("torch.")
    model = MliapModel(options, state, precision)
    target = Path(path)
    with written_atomically(target) as partial:
        torch.save(model, partial, pickle_protocol=4)  # which stores bytes as they are
    return target
