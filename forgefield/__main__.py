"""`python -m forgefield` is the same as `forgefield`."""

import os
import sys
from pathlib import Path

# `python -m` puts the current folder first on the search path; in a folder of somebody else, a file called torch.py would be
# imported in place of torch. Modules that a config names are found in the current folder all the same (config/components.py).
_here = Path(__file__).parents[1]
if sys.path and not getattr(sys.flags, "safe_path", False) and sys.path[0] in ("", os.getcwd()) and _here != Path.cwd():
    del sys.path[0]

from forgefield.cli import main  # noqa: E402

sys.exit(main())
