"""Evaluates an exported model with mace-torch, in an environment that has it:

    TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD=1 python tests/support/mace_loads.py exported.model reference.npz

Prints the largest differences of energies (eV), forces (eV/A) and stress (eV/A^3) from those of the file of a reference.
"""

import json
import sys

import numpy as np
import torch
from mace_references import batch_of, structures


def main(path, reference):
    model = torch.load(path, weights_only=False)
    stored = np.load(reference)
    options = json.loads(str(stored["options"]))
    dtype = next(model.parameters()).dtype
    assert torch.get_default_dtype() == torch.float32, "loading must leave the default precision as it was"
    torch.set_default_dtype(
        dtype
    )  # as mace-torch's calculator does; its repulsion is computed in the default precision
    batch = batch_of(structures(), options["r_max"])
    batch["head"] = torch.tensor([0, len(options.get("heads", [None])) - 1])
    out = model(
        {key: value.to(dtype) if value.is_floating_point() else value for key, value in batch.items()},
        compute_stress=True,
    )
    for key in ("energy", "forces", "stress"):
        print(key, float(np.abs(out[key].detach().numpy() - stored[key]).max()), dtype)


if __name__ == "__main__":
    main(*sys.argv[1:])
