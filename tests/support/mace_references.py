"""Writes the reference numbers of tests/models/mace: models of mace-torch 0.3.16 with several options, and what they predict.

Run with the Python of an environment that holds mace-torch 0.3.16 (which pins e3nn 0.4.4), from the root of the repository:

    TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD=1 python tests/support/mace_references.py tests/fixtures/mace

With cuequivariance on the path, models with `use_reduced_cg` get its reduced basis: the case `reduced` is written then, and all
others without it. Each case is an npz file: `weight/NAME` (the state dict; coupling tensors only for `reduced`),
`gradient/NAME` (of 0.1 sum (E - energy_target)^2 + sum (F - forces_target)^2), structures, energies (eV),
forces (eV/A), stress (eV/A^3), and `options`, a JSON text of the constructor's arguments. Everything is float64.
"""

import json
import lzma
import sys
from pathlib import Path

import ase.build
import numpy as np
import torch
from e3nn import o3
from mace import modules
from mace.data.neighborhood import get_neighborhood

BASE = {
    "model": "ScaleShiftMACE", "r_max": 4.0, "num_bessel": 5, "num_polynomial_cutoff": 5, "max_ell": 2,
    "interaction_cls_first": "RealAgnosticResidualInteractionBlock",
    "interaction_cls": "RealAgnosticResidualInteractionBlock", "num_interactions": 2, "hidden_irreps": "4x0e+4x1o",
    "MLP_irreps": "3x0e", "avg_num_neighbors": 7.3, "correlation": 3, "gate": "silu", "use_reduced_cg": False,
    "radial_MLP": [6, 5], "atomic_inter_scale": 0.7, "atomic_inter_shift": 0.11, "readout_cls": "NonLinearReadoutBlock",
}  # fmt: skip
CASES = {
    "residual": {"max_ell": 3},
    "plain": {
        "model": "MACE", "interaction_cls_first": "RealAgnosticInteractionBlock", "hidden_irreps": "6x0e",
        "radial_type": "gaussian", "gate": "tanh", "correlation": 2, "pair_repulsion": True,
    },
    "density": {
        "interaction_cls_first": "RealAgnosticDensityInteractionBlock",
        "interaction_cls": "RealAgnosticDensityResidualInteractionBlock", "hidden_irreps": "4x0e+4x1o+4x2e",
        "radial_type": "gaussian", "distance_transform": "Agnesi", "pair_repulsion": True, "correlation": 2,
        "heads": ["pbe", "scan"], "atomic_inter_scale": [0.7, 1.3], "atomic_inter_shift": [0.1, -0.2],
    },
    "nonlinear": {
        "interaction_cls_first": "RealAgnosticResidualNonLinearInteractionBlock",
        "interaction_cls": "RealAgnosticResidualNonLinearInteractionBlock", "apply_cutoff": False,
        "distance_transform": "Soft", "edge_irreps": "3x0e+2x1o", "use_edge_irreps_first": True,
        "use_agnostic_product": True, "use_last_readout_only": True, "readout_cls": "NonLinearBiasReadoutBlock",
        "correlation": 2, "heads": ["a", "b"], "atomic_inter_scale": [0.7, 1.3], "atomic_inter_shift": [0.1, -0.2],
    },
    "chebyshev": {"radial_type": "chebyshev", "distance_transform": "Agnesi", "correlation": 2, "max_ell": 1},
    "single": {"num_interactions": 1, "correlation": 1, "gate": "abs", "distance_transform": "Agnesi"},
    "parity": {
        "hidden_irreps": "4x0e+4x0o+4x1e+4x1o", "num_interactions": 3, "correlation": [3, 2, 1],
        "gate": "None",
    },
    "four": {"max_ell": 1, "correlation": 4, "hidden_irreps": "4x0e+4x1o", "keep_last_layer_irreps": True},
    "reduced": {"use_reduced_cg": True},
}  # fmt: skip
FILES = ("residual", "density", "nonlinear", "reduced")
"""Cases of which the whole module is stored, as `mace_run_train` does."""
NUMBERS = [1, 6, 8]


def structures():
    """A molecule and a crystal, and the head of each."""
    rng = np.random.default_rng(3)
    molecule = ase.build.molecule("CH3CH2OH")
    crystal = ase.build.bulk("CO", "rocksalt", a=3.9).repeat((2, 1, 1))
    crystal.numbers = [6, 8, 8, 1]
    for atoms in (molecule, crystal):
        atoms.rattle(0.1, rng=rng)
    crystal.set_cell(crystal.cell[:] @ (np.eye(3) + 0.05 * rng.normal(size=(3, 3))), scale_atoms=True)
    return [molecule, crystal]


def batch_of(frames, r_max):
    rows = {"positions": [], "numbers": [], "edge_index": [], "shifts": [], "unit_shifts": [], "cell": [], "batch": []}
    start = 0
    for number, atoms in enumerate(frames):
        edges, shifts, unit_shifts, cell = get_neighborhood(atoms.positions, r_max, list(atoms.pbc), atoms.cell[:])
        if not atoms.pbc.any():
            cell = np.zeros((3, 3))
        rows["positions"].append(atoms.positions)
        rows["numbers"].append(atoms.numbers)
        rows["edge_index"].append(edges.astype(np.int64) + start)
        rows["shifts"].append(shifts)
        rows["unit_shifts"].append(unit_shifts.astype(float))
        rows["cell"].append(cell)
        rows["batch"].append(np.full(len(atoms), number))
        start += len(atoms)
    joined = {key: np.concatenate(value, axis=1 if key == "edge_index" else 0) for key, value in rows.items()}
    sizes = np.cumsum([0, *(len(atoms) for atoms in frames)])
    one_hot = np.stack([joined["numbers"] == number for number in NUMBERS], 1).astype(float)
    tensors = {key: torch.tensor(joined[key]) for key in ("positions", "edge_index", "shifts", "unit_shifts", "batch")}
    cell = torch.tensor(joined["cell"])
    return {**tensors, "cell": cell, "node_attrs": torch.tensor(one_hot), "ptr": torch.tensor(sizes), "head": None}


def build(options):
    arguments = dict(options)
    kind = getattr(modules, arguments.pop("model"))
    for key in ("interaction_cls", "interaction_cls_first"):
        arguments[key] = modules.interaction_classes[arguments[key]]
    arguments["readout_cls"] = modules.readout_classes[arguments["readout_cls"]]
    arguments["gate"] = modules.gate_dict[arguments["gate"]]
    for key in ("hidden_irreps", "MLP_irreps", "edge_irreps"):
        if arguments.get(key):
            arguments[key] = o3.Irreps(arguments[key])
    heads = len(arguments.get("heads", [None]))
    energies = np.array([[-1.2, -3.4, -5.6], [-1.1, -3.3, -5.9]])[:heads]
    if kind is modules.MACE:
        del arguments["atomic_inter_scale"], arguments["atomic_inter_shift"]
    torch.manual_seed(11)
    model = kind(
        num_elements=len(NUMBERS),
        atomic_numbers=NUMBERS,
        atomic_energies=energies if heads > 1 else energies[0],
        **arguments,
    )
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith(("bias", "beta")):  # they start at zero
                parameter.add_(0.3 * torch.randn_like(parameter))
            elif "embedding.weight" in name and "interactions" in name:  # drawn so small that they would not be seen
                parameter.mul_(300)
            elif name.endswith("alpha"):
                parameter.mul_(0.3)
    return model


def reference(name, options):
    model = build(options)
    frames = structures()
    batch = batch_of(frames, options["r_max"])
    heads = len(options.get("heads", [None]))
    batch["head"] = torch.tensor([0, heads - 1])
    out = model(batch, training=True, compute_stress=True)
    rng = np.random.default_rng(5)
    targets = {"energy_target": rng.normal(size=2), "forces_target": rng.normal(size=(len(batch["positions"]), 3))}
    loss = 0.1 * (out["energy"] - torch.tensor(targets["energy_target"])).square().sum()
    loss = loss + (out["forces"] - torch.tensor(targets["forces_target"])).square().sum()
    loss.backward()
    stored = {f"weight/{key}": value.numpy() for key, value in model.state_dict().items() if _is_stored(name, key)}
    for key, parameter in model.named_parameters():
        if parameter.grad is not None:
            stored[f"gradient/{key}"] = parameter.grad.numpy()
    for number, atoms in enumerate(frames):
        stored |= {
            f"frame{number}/{key}": value for key, value in (("positions", atoms.positions), ("numbers", atoms.numbers))
        }
        stored |= {f"frame{number}/cell": atoms.cell[:], f"frame{number}/pbc": atoms.pbc}
    for key in ("energy", "forces", "stress", "node_energy"):
        stored[key] = out[key].detach().numpy()
    stored |= targets | {"loss": loss.detach().numpy(), "options": np.array(json.dumps(options))}
    return model, stored


def _is_stored(case, key):
    if "U_matrix" in key:
        return case == "reduced"
    return (
        not key.startswith("pair_repulsion_fn.covalent") and "_compiled" not in key and not key.endswith("output_mask")
    )


def main(folder):
    torch.set_default_dtype(torch.float64)
    folder = Path(folder)
    has_cue = "cuequivariance" in sys.modules
    for name, changes in CASES.items():
        if (name == "reduced") != has_cue:
            continue
        options = BASE | changes
        model, stored = reference(name, options)
        np.savez_compressed(folder / f"{name}.npz", **stored)
        if name in FILES:
            path = folder / f"{name}.model"
            model.zero_grad(set_to_none=True)
            torch.save(model, path)
            path.with_suffix(".model.xz").write_bytes(lzma.compress(path.read_bytes(), preset=9))
            path.unlink()
        print(name, stored["energy"], float(stored["loss"]))


if __name__ == "__main__":
    main(sys.argv[1])
