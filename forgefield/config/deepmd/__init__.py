"""DeePMD-kit's input files: the same training as a Forgefield config."""

from forgefield.config.deepmd.translation import (
    Translation,
    is_deepmd_input,
    read_input,
    translate,
    translation,
)

__all__ = ["Translation", "is_deepmd_input", "read_input", "translate", "translation"]
