"""Configs of NequIP and Allegro: the same training as a Forgefield config."""

from forgefield.config.nequip.translation import convert_nequip, is_nequip_config, nequip_translation

__all__ = ["convert_nequip", "is_nequip_config", "nequip_translation"]
