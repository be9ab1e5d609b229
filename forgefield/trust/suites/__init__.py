"""Physical evaluations: properties of crystals, molecules and liquids, computed the same way with the model and a reference."""
