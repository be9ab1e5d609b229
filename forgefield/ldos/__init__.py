"""Machine learning of electronic structure on real-space grids, from files to energies.

- `data`: snapshots of DFT calculations. Each grid point is a sample: a row of descriptors and a row of targets, the local
  density of states (LDOS) at a grid of energies, or the density. `data.finding` finds the files of a config, `data.table` joins
  snapshots to one table of points, `data.loader` and `data.stream` read batches from memory or from disk.
- `descriptors`: bispectrum components or Gaussian densities of the atoms around each grid point, from a structure.
- `model`: the network from descriptors to LDOS, with the scaling of inputs and outputs.
- `loss`, `training`: the loss at points and on complete snapshots, and how it is minimised.
- `electronic`: physics of an LDOS. Integrated over space it is the density of states, over energy (with Fermi
  occupations) the density; with the Hartree, exchange-correlation and Ewald energies of the density, the total free energy.
- `observables`, `evaluation`: energies, densities and densities of states of snapshots, and their errors.
- `inference`: predictions for new structures, as files or as an ASE calculator.
- `importer`, `report`: models of MALA, and the sections of `report.html` on LDOS runs.

Generic packages do not import this one: `forgefield.kinds` lists what it provides for samples of the kind `points`.
"""
