"""Training scripts of Open MatSciML as Forgefield configs. Scripts are parsed, never executed."""

from forgefield.config.matsciml.script import is_matsciml_script
from forgefield.config.matsciml.translation import COMMENTS, matsciml_translation

__all__ = ["COMMENTS", "is_matsciml_script", "matsciml_translation"]
