"""`python -m forgefield` is the same as `forgefield`."""

import sys

from forgefield.cli import main

sys.exit(main())
