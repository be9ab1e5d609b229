"""Which engine runs: what the config says, what the device allows, what a measurement finds; and that a wrong one is refused."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from forgefield.config.loading import compose_config
from forgefield.errors import ForgefieldError
from forgefield.training.engines.choose import Choice, Circumstances, build, measure_and_choose, start, wanted, why_not
from forgefield.training.engines.engine import Engine
from forgefield.training.engines.size_plan import SizePlan
from forgefield.training.engines.sparing import SparingEngine, halves, is_memory_error
from forgefield.training.engines.step import Differentiated
from forgefield.training.engines.verify import require_equal, require_equal_evaluation
from tests.models.structures import make_potential
from tests.training.engines.cases import difference, labelled, step_function
