"""Names and units of the errors of observables; can be imported without PyTorch."""

OBSERVABLE_UNITS = {
    "band_energy": "meV/atom",
    "band_energy_actual_fe": "meV/atom",
    "total_energy": "meV/atom",
    "total_energy_actual_fe": "meV/atom",
    "fermi_energy": "meV",
    "density": "%",
    "dos": "%",
    "electrons": "%",
}
"""Units of the errors of each observable.

band_energy, total_energy: of a snapshot, prediction and reference each with its own Fermi energy (or both with that of DFT).
band_energy_actual_fe, total_energy_actual_fe: the prediction with the Fermi energy of the reference, as in MALA.
density: mean over points of |error| / density. dos: sum over levels of |error| over the sum of the DOS. electrons: of the
number of electrons at the Fermi energy of the reference.
"""
