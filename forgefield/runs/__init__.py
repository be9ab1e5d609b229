"""Runs: folders that contain a training, and packages with a trained model."""

from forgefield.runs.create import create_run_from_import, create_run_from_model
from forgefield.runs.members import joined_states
from forgefield.runs.package import PACKAGE, PACKAGE_KEY, UNCERTAINTY_TENSORS, PackagedRun
from forgefield.runs.record import MEMBERS, RUN_JSON, SCALES, OmittedOptions, RunInfo, versions
from forgefield.runs.run import PACKAGE_SUFFIX, UNCERTAINTY, WEIGHTS, Run, build_from_options, run_exists

__all__ = [
    "MEMBERS",
    "PACKAGE",
    "PACKAGE_KEY",
    "PACKAGE_SUFFIX",
    "RUN_JSON",
    "SCALES",
    "UNCERTAINTY",
    "UNCERTAINTY_TENSORS",
    "WEIGHTS",
    "OmittedOptions",
    "PackagedRun",
    "Run",
    "RunInfo",
    "build_from_options",
    "create_run_from_import",
    "create_run_from_model",
    "joined_states",
    "run_exists",
    "versions",
]
