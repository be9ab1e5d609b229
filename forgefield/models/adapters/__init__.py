"""Models of other libraries as ours: PyTorch Geometric's, those called like MACE or like ASE, and ASE calculators."""
