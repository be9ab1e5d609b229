"""Hyperparameter search over any value of a config, with Optuna: `forgefield tune`."""
