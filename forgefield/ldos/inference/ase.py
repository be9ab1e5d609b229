"""An LDOS run as an ASE calculator: the free energy of a structure at an electronic temperature, and its contributions."""

from __future__ import annotations

import os
from collections.abc import Sequence

import numpy as np
import torch
from ase import Atoms
from ase.calculators.calculator import Calculator as AseCalculator
from ase.calculators.calculator import all_changes

from forgefield.errors import ForgefieldError
from forgefield.ldos.inference.electrons import ElectronModel
from forgefield.runs import Run


class LDOSCalculator(AseCalculator):
    """The calculator that `forgefield.Calculator(run, temperature=...)` returns for an LDOS run.

    Arguments: temperature: of the electrons, K; the others are those of `ElectronModel`.

    Results: energy and free_energy, the free energy of electrons and ions, eV; band_energy, fermi_energy, entropy (-TS), eV;
    dos (levels,), 1/eV, at dos_energies (levels,), eV; density (nx, ny, nz), 1/A^3. There are no forces.
    """

    name = "forgefield-ldos"
    implemented_properties = [
        "energy", "free_energy", "band_energy", "fermi_energy", "entropy", "dos", "dos_energies", "density"
    ]  # fmt: skip
    ignored_changes = {"initial_charges", "initial_magmoms"}

    def __init__(
        self,
        run: str | os.PathLike[str] | Run,
        *,
        temperature: float | None = None,
        which: str = "best",
        device: str | torch.device = "cpu",
        grid: Sequence[int] | None = None,
        spacing: float | None = None,
        pseudopotentials: str | os.PathLike[str] | None = None,
        electrons: float | None = None,
        trust_code: bool = False,
    ) -> None:
        AseCalculator.__init__(self)
        self.temperature = temperature
        self.model = ElectronModel(
            run,
            which=which,
            device=device,
            grid=grid,
            spacing=spacing,
            pseudopotentials=pseudopotentials,
            electrons=electrons,
            trust_code=trust_code,
        )
        if self.model.network.energies is None:
            raise ForgefieldError(
                f"Run {self.model.run.name} predicts a density, not an LDOS, so it has no energy; forgefield predict writes "
                "the density."
            )

    def calculate(
        self,
        atoms: Atoms | None = None,
        properties: Sequence[str] = ("energy",),
        system_changes: Sequence[str] = all_changes,
    ) -> None:
        AseCalculator.calculate(self, atoms, list(properties), list(system_changes))
        prediction = self.model(self.atoms, self.temperature)
        assert prediction.dos is not None
        assert prediction.energies is not None
        self.results = {
            "band_energy": prediction.band_energy,
            "fermi_energy": prediction.fermi_energy,
            "entropy": prediction.entropy,
            "dos": prediction.dos.cpu().numpy(),
            "dos_energies": prediction.energies.energies().numpy(),
            "density": np.asarray(prediction.density.cpu()),
        }
        if prediction.free_energy is not None:
            self.results |= {"energy": prediction.free_energy, "free_energy": prediction.free_energy}
        elif {"energy", "free_energy"} & set(properties):
            raise ForgefieldError(
                f"The free energy is not available: {prediction.missing}; set the folder of pseudopotentials "
                "(pseudopotentials=...). "
                "calc.get_property('band_energy', atoms) does not need it."
            )
