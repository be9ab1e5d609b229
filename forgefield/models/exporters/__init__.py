"""Writers of other programs' model files."""
