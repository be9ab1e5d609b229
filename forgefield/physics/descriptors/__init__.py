"""Descriptors of the surroundings of any point of space: SNAP bispectrum and Gaussian densities, in batched torch."""

from forgefield.physics.descriptors.grid import GridDescriptors, make_descriptors, require_fitting
from forgefield.physics.descriptors.options import DescriptorOptions

__all__ = ["DescriptorOptions", "GridDescriptors", "make_descriptors", "require_fitting"]
