"""Commands import only what Lightning needs of torchmetrics; programs still get all of it."""

import subprocess
import sys


def test_lightning_loads_two_classes_and_the_rest_is_loaded_when_it_is_used():
    script = (
        "import sys\n"
        "from forgefield.deferred_imports import defer_torchmetrics\n"
        "defer_torchmetrics()\n"
        "import lightning\n"
        "assert 'scipy.signal' not in sys.modules and 'torchmetrics.functional' not in sys.modules\n"
        "import torchmetrics\n"
        "from torchmetrics import MeanMetric, Metric\n"
        "assert issubclass(MeanMetric, Metric) and float(MeanMetric()(2.0)) == 2.0\n"
        "assert torchmetrics.functional.mean_absolute_error is not None and not hasattr(torchmetrics, 'nothing')\n"
        "from lightning.pytorch.core import module\n"
        "assert module.Metric is Metric\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
