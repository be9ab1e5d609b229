"""How far a model can be trusted: uncertainties, and which structures to compute next."""
