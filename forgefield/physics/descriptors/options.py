"""What descriptors of grid points are made of: the section `data.points.descriptors` of a config, checked where configs are.

The names and defaults are those with which MALA calls LAMMPS' `sna/grid`, so that files made there can be told from
their settings alone.
"""

from __future__ import annotations

from forgefield.config.point_checks import DescriptorOptions

__all__ = ["DescriptorOptions"]
