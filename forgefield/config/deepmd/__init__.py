"""DeePMD-kit's input files: the same training as a Forgefield config."""

from forgefield.config.deepmd.translation import (
    Translation,
    convert_input,
    is_deepmd_input,
    read_input,
    translate,
    translation,
)

__all__ = ["Translation", "convert_input", "is_deepmd_input", "read_input", "translate", "translation"]
