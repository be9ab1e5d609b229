"""The `forgefield` command: fast to start, plain about mistakes."""

import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

import forgefield
from forgefield import cli
from forgefield.errors import ForgefieldError

ROOT = Path(__file__).parents[2]
PRESENT = [verb for verb, (module, _) in cli.VERBS.items() if (ROOT / "forgefield" / "cli" / f"{module}.py").exists()]
HEAVY = ("torch", "lightning", "matplotlib", "scipy", "pandas", "hydra", "rich")


def test_overview_has_one_line_per_verb_and_examples(capsys):
    assert cli.main(["--help"]) == 0
    shown = capsys.readouterr().out
    for verb, (_, text) in cli.VERBS.items():
        assert f"  {verb:<{max(map(len, cli.VERBS))}}  {text}\n" in shown
    assert "forgefield train water.yaml training.lr=3e-3 ++trainer.max_epochs=200" in shown
    assert cli.main([]) == 0
    assert capsys.readouterr().out == shown


def test_every_verb_of_the_table_has_its_module():
    assert list(cli.VERBS) == PRESENT


@pytest.mark.parametrize("words", [["--help"], ["--version"], *([verb, "--help"] for verb in PRESENT)], ids=" ".join)
def test_help_imports_nothing_heavy(words):
    assert output_without_heavy_imports(words)


@pytest.fixture(scope="module")
def stored_runs(tmp_path_factory):
    """A folder of runs that an earlier version wrote."""
    folder = tmp_path_factory.mktemp("stored")
    with tarfile.open(ROOT / "tests" / "fixtures" / "edition_1.tar.gz") as archive:
        archive.extractall(folder, filter="data")
    return folder / "runs"


@pytest.mark.parametrize("verb", ["runs", "compare", "completion"])
def test_tables_and_completion_import_nothing_heavy(stored_runs, verb):
    runs = sorted(str(path.parent) for path in stored_runs.glob("*/run.json"))[:2]
    assert len(runs) == 2
    shown = output_without_heavy_imports(
        {"runs": ["runs", str(stored_runs)], "compare": ["compare", *runs], "completion": ["completion", "bash"]}[verb]
    )
    assert verb == "completion" or all(Path(run).name in shown for run in runs)


def output_without_heavy_imports(words):
    """What a command prints; it must not have imported a heavy package."""
    code = (
        "import sys\nfrom forgefield.cli import main\n"
        f"code = main({words!r})\n"
        f"print([name for name in {HEAVY!r} if name in sys.modules], file=sys.stderr)\nsys.exit(code)"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stderr.strip() == "[]"
    return done.stdout


def test_unknown_verbs_and_options_name_the_nearest(capsys):
    assert cli.main(["trian"]) == 2
    assert capsys.readouterr().err == "error: unknown verb 'trian'. Did you mean 'train'?\n"
    assert cli.main(["--versoin"]) == 2
    assert "unknown option '--versoin'" in capsys.readouterr().err
    assert cli.main(["train", "--frsh"]) == 2
    assert "unrecognized arguments: --frsh. Did you mean '--fresh'?" in capsys.readouterr().err


def test_version_is_the_same_everywhere(capsys):
    assert cli.main(["--version"]) == 0
    assert capsys.readouterr().out == f"forgefield {forgefield.__version__}\n"
    pyproject = (ROOT / "pyproject.toml").read_text()
    assert f'version = "{forgefield.__version__}"' in pyproject or "forgefield._version.__version__" in pyproject


@pytest.fixture
def failing_verb(monkeypatch):
    """The verb `report`, made to raise what it is given."""
    from forgefield.cli import report

    def install(error):
        def run(args):
            raise error

        monkeypatch.setattr(report, "run", run)

    return install


def test_mendable_errors_are_one_line_and_code_2(failing_verb, capsys):
    failing_verb(ForgefieldError("my.yaml: something is wrong."))
    assert cli.main(["report", "run"]) == 2
    assert capsys.readouterr().err == "error: my.yaml: something is wrong.\n"


def test_debug_shows_where_it_was_raised(failing_verb):
    failing_verb(ForgefieldError("x"))
    with pytest.raises(ForgefieldError):
        cli.main(["report", "run", "--debug"])


def test_an_interrupt_is_code_130(failing_verb):
    failing_verb(KeyboardInterrupt())
    assert cli.main(["report", "run"]) == 130


def test_forgefield_errors_are_not_hidden(failing_verb):
    failing_verb(ZeroDivisionError("a bug"))
    with pytest.raises(ZeroDivisionError):
        cli.main(["report", "run"])


def test_python_api_is_lazy_and_complete():
    code = "import sys, forgefield; print('torch' in sys.modules, forgefield.__version__, sorted(forgefield.__all__))"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.startswith(f"False {forgefield.__version__}")
    assert set(forgefield.__all__) <= set(dir(forgefield))
    with pytest.raises(AttributeError, match="no attribute 'trian'"):
        forgefield.trian  # noqa: B018


def test_public_names_are_those_of_the_api():
    api = pytest.importorskip("forgefield.api")
    for name in ("Calculator", "load", "load_run", "run_exists", "train"):
        assert getattr(forgefield, name) is getattr(api, name)


@pytest.mark.parametrize(
    ("words", "missing"),
    [
        (["test"], "RUN"),
        (["predict"], "RUN, FILE, -o/--out"),
        (["predict", "water", "new.xyz"], "-o/--out"),
        (["predict", "-oout.xyz", "water"], "FILE"),
        (["import"], "PROGRAM, FILE"),
        (["select", "water", "--number=3"], "POOL, -o/--out"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else value,
)
def test_missing_arguments_are_named_as_in_the_usage(words, missing, capsys):
    assert cli.main(words) == 2
    message, usage = capsys.readouterr().err.split("\n", 1)
    assert message == f"error: the following arguments are required: {missing}."
    for name in missing.split(", "):
        assert name.split("/")[0] in usage
        assert f"[{name.split('/')[0]}" not in usage


IN_PYTHON = {
    "runs": ["list_runs"],
    "init": ["propose_config"],
    "data": ["inspect_data", "convert_data", "sample_data"],
    "convert-config": ["convert_input"],
    "import": ["import_model"],
}
"""Functions for verbs that have another name in Python."""
WITHOUT_FUNCTION = ("bench", "lammps", "completion")


@pytest.mark.parametrize("verb", [verb for verb in cli.VERBS if verb not in WITHOUT_FUNCTION])
def test_every_verb_is_a_documented_function(verb):
    page = (ROOT / "docs" / "reference" / "python.md").read_text()
    for name in IN_PYTHON.get(verb, [verb]):
        assert name in forgefield.__all__
        function = getattr(forgefield, name)
        assert callable(function)
        assert f"autofunction:: forgefield.api.{name}\n" in page
