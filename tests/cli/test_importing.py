"""Imports of a command: without the garbage collector, and only the first time."""

import subprocess
import sys

import pytest

CODE = """
import gc
from forgefield.cli.importing import for_good

def frozen():
    with for_good():
        assert not gc.isenabled()
        import decimal, sqlite3
    assert gc.isenabled()
    return gc.get_freeze_count()

before, first = gc.get_freeze_count(), frozen()
kept = [[] for _ in range(1000)]
print(before < first, frozen() == first)
try:
    with for_good():
        import there_is_no_such_module
except ImportError:
    print(gc.isenabled(), gc.get_freeze_count() == first)
gc.disable()
with for_good():
    pass
print(gc.isenabled())
"""


@pytest.mark.parametrize(
    ("called", "freezes"), [("bin/forgefield", True), ("forgefield/__main__.py", True), ("a.py", False)]
)
def test_the_collector_rests_meanwhile_and_never_looks_at_what_a_command_imported(called, freezes):
    code = f"import sys; sys.argv = [{called!r}]{CODE}"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == [str(freezes), "True", "True", "True", "False"]
