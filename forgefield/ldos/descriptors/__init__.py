"""Descriptors of the atoms around any point of space: SNAP bispectrum and Gaussian densities, in batched PyTorch."""

from forgefield.ldos.descriptor_options import DescriptorOptions
from forgefield.ldos.descriptors.grid import GridDescriptors, make_descriptors, require_fitting

__all__ = ["DescriptorOptions", "GridDescriptors", "make_descriptors", "require_fitting"]
