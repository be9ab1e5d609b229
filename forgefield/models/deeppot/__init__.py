"""Deep Potential models: descriptors of DeePMD-kit's family on edge lists, and their fitting networks."""
