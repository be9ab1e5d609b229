"""Simulations with LAMMPS: `pair_style forgefield` on any number of MPI processes, and models for ML-IAP.

`evaluator.py` computes energies and their derivatives on one process's share of a structure; `pair_style.py` and `mliap.py`
connect it to LAMMPS, `build.py` compiles the plugin, `session.py` runs input files, `compare.py` compares one process with
several.
"""
