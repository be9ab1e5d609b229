"""Adapters for models of other libraries: PyTorch Geometric's, those with the interface of MACE or ASE, and ASE calculators."""
