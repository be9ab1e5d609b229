"""Trained models in torch-sim: `forgefield.torchsim.Model(run)`. Needs torch-sim: `pip install 'forgefield[torchsim]'`."""

from forgefield.inference.torchsim import Model

__all__ = ["Model"]
