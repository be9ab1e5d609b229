"""Configs of NequIP and Allegro: the same training as a Forgefield config."""

from forgefield.config.nequip.translation import is_nequip_config, nequip_translation

__all__ = ["is_nequip_config", "nequip_translation"]
