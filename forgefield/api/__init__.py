"""The functions that `import forgefield` offers: one for each verb of the command line, and what loads models and runs."""

from __future__ import annotations

from forgefield.api.models import export, import_mala, import_model, load, load_run
from forgefield.api.predictions import predict, test
from forgefield.api.training import example_config, train, train_example, train_with_outcome, tune
from forgefield.api.trust import check, evaluate, learn, md, relax, select, uncertainty
from forgefield.config.converting import convert_input
from forgefield.data.conversion import convert_data, sample_data
from forgefield.data.inspection.show import inspect_data
from forgefield.data.starter import propose_config
from forgefield.inference.ase import Calculator
from forgefield.inference.ensemble import Ensemble
from forgefield.ldos.options import ElectronOptions
from forgefield.report.live.verbs import compare, list_runs, watch
from forgefield.report.notebook import report
from forgefield.runs import Run, run_exists

__all__ = [
    "Calculator",
    "ElectronOptions",
    "Ensemble",
    "Run",
    "check",
    "compare",
    "convert_data",
    "convert_input",
    "evaluate",
    "example_config",
    "export",
    "import_mala",
    "import_model",
    "inspect_data",
    "learn",
    "list_runs",
    "load",
    "load_run",
    "md",
    "predict",
    "propose_config",
    "relax",
    "report",
    "run_exists",
    "sample_data",
    "select",
    "test",
    "train",
    "train_example",
    "train_with_outcome",
    "tune",
    "uncertainty",
    "watch",
]
