"""What README.md and the pages in docs/ show can be typed: links lead somewhere, files exist, commands and configs are
accepted, and the scripts that print their numbers can be imported.
"""

from __future__ import annotations

import ast
import dataclasses
import importlib
import importlib.util
import re
import shlex
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml

from forgefield.cli import VERBS, Parser
from forgefield.cli.arguments import is_override
from forgefield.config.checking import unknown_key
from forgefield.config.loading import load_config, override_keys
from forgefield.settings import Config

ROOT = Path(__file__).parents[2]
SCRIPTS = sorted([*(ROOT / "benchmarks").glob("*.py"), *(ROOT / "examples").glob("*.py")])
PAGES = sorted([ROOT / "README.md", *(page for page in (ROOT / "docs").rglob("*.md") if "_build" not in page.parts)])
SECTIONS = {field.name for field in dataclasses.fields(Config)}
LAUNCHERS = r"(?:^|[\s;(])(?:torchrun|srun|mpirun|mpiexec|until|OMP_NUM_THREADS=\d+)\b"
PATHS = r"(?<![\w/.])((?:benchmarks|examples|tests|forgefield|docs(?!/_build))/[\w./*-]*\w)"
by_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: "/".join(page.parts[-2:]))


def read(page: Path) -> str:
    return page.read_text(encoding="utf-8")


def blocks(text: str) -> list[str]:
    """Fenced and indented blocks of a page, without their indentation."""
    fenced = re.findall(r"^```\w*\n(.*?)^```", text, flags=re.DOTALL | re.MULTILINE)
    rest = re.sub(r"^```.*?^```", "", text, flags=re.DOTALL | re.MULTILINE)
    indented = re.findall(r"(?:(?<=\n\n)|(?<=\n\n\n))((?: {4}.*\n|\n(?= {4}))+)", rest)
    return fenced + [re.sub(r"^ {4}", "", block, flags=re.MULTILINE) for block in indented]


def lines(text: str) -> list[str]:
    """Lines of the blocks of a page."""
    return [line for block in blocks(text) for line in block.replace("\\\n", " ").splitlines()]


def inline(text: str) -> list[str]:
    """Code within sentences and tables."""
    rest = re.sub(r"^(```.*?^```|    .*?$)", "", text, flags=re.DOTALL | re.MULTILINE)
    return [code.replace("\n", " ") for code in re.findall(r"`([^`]+)`", rest)]


def commands(code: list[str]) -> list[str]:
    """What follows `forgefield`, launchers before it and comments and shell syntax after it left out."""
    found = [re.match(rf"(?:\$ |# )?(?:.*{LAUNCHERS}.*\s)?forgefield (?!import Calculator)(.*)", each) for each in code]
    return [re.split(r"\s+(?:#|&&|>)|; do|;$", match[1])[0].strip() for match in found if match]


def anchors(page: Path) -> set[str]:
    titles = re.findall(r"^#+ (.*)$", read(page), flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


@by_page
def test_links_lead_somewhere(page):
    for link in re.findall(r"\]\(([^)\s]+)\)", read(page)):
        if link.startswith(("http://", "https://", "mailto:")):
            continue
        name, _, anchor = link.partition("#")
        target = (page.parent / name).resolve() if name else page
        assert target.exists(), link
        assert not anchor or anchor in anchors(target), link


@by_page
def test_files_of_the_project_that_are_named_exist(page):
    for name in re.findall(PATHS, read(page)):
        assert "/_build/" in name or list(ROOT.glob(name)), name  # `make docs` writes there


@by_page
def test_logs_that_are_named_without_a_folder_exist(page):
    for name in re.findall(r"`([\w-]+-\d{4}-\d\d-\d\d\.log)`", read(page)):
        assert (ROOT / "benchmarks" / "results" / name).exists(), name


@cache
def parser_of(verb: str) -> Parser:
    parser = Parser(prog=f"forgefield {verb}")
    importlib.import_module(f"forgefield.cli.{VERBS[verb][0]}").add_arguments(parser)
    return parser


def flags_of(parser: Parser, words: list[str]) -> set[str]:
    """Options of a verb, or of the verb within it that `words` names."""
    flags = set(parser._option_string_actions)
    for action in parser._actions:
        if action.choices and not action.option_strings and words and isinstance(action.choices, dict):
            assert words[0] in action.choices, words
            flags |= set(action.choices[words[0]]._option_string_actions)
    return flags


@by_page
def test_commands_are_accepted(page):
    """Verb, options and config keys are known. In blocks, where commands are complete, all arguments are parsed."""
    complete = commands(lines(read(page)))
    for command in complete + commands(inline(read(page))):
        verb, *words = shlex.split(re.sub(r"\\\|\\\|.*|\.\.\.$|\)$", "", command))
        if not re.fullmatch(r"[a-z-]+", verb):
            continue
        assert verb in VERBS, command
        parser = parser_of(verb)
        if command in complete:
            parser.parse([word.replace("RUN", "run") for word in words])
        for word in words:
            assert not re.match(r"--?[a-z]", word) or word.partition("=")[0] in flags_of(parser, words), command
        settings = [word for word in words if is_override(word) and not word.startswith("-") and "..." not in word]
        if verb == "learn":  # its settings are those of the loop, not of a training
            continue
        for key in override_keys([text for text in settings if text.partition("=")[0] != "model"]):
            assert unknown_key(key) is None, command


def configs(block: str) -> list[dict[str, Any]]:
    """The configs of a block: one for each paragraph, or for each line where a section comes twice."""
    found = []
    for text in re.split(r"\n\n(?! )", block):
        sections = re.findall(r"^(\w+):", text, flags=re.MULTILINE)
        if len(sections) > len(set(sections)):
            found += [config for line in re.split(r"\n(?=\w+:)", text) for config in configs(line)]
            continue
        try:
            config = yaml.safe_load(text)
        except yaml.YAMLError:
            continue
        if isinstance(config, dict) and SECTIONS & set(config):
            found.append(config)
    return found


@by_page
def test_configs_are_accepted(page, tmp_path, monkeypatch):
    """Blocks that are YAML with sections of a config load; the data they name need not be here."""
    if page.name == "configure.md":
        pytest.skip("test_docs.py loads its examples")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("SLURM_NTASKS", "4")
    for config in (config for block in blocks(read(page)) for config in configs(block)):
        loaded = dataclasses.asdict(load_config(config))
        assert all(loaded[section] is not None for section in SECTIONS & set(config) if config[section] is not None)


def test_configs_are_found_on_pages():
    """The test above does not pass because it finds nothing."""
    pages_with_configs = [page for page in PAGES if any(configs(block) for block in blocks(read(page)))]
    assert len(pages_with_configs) > 5


@cache
def script_words(script: Path) -> set[str]:
    """All strings in the source of a script, options that it declares among them."""
    nodes = ast.walk(ast.parse(read(script)))
    return {node.value for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, str)}


@by_page
def test_scripts_have_the_options_they_are_shown_with(page):
    for script, words in re.findall(r"((?:benchmarks|examples)/\w+\.py)((?: [^`#\n]+)?)", read(page)):
        declared = script_words(ROOT / script)
        for option in re.findall(r"(?<=[\s\[])--[a-z][\w-]*", words):
            assert {option, option[2:].replace("-", "_")} & {"--help", *declared}, f"{script} {option}"


def require_imports(source: str) -> None:
    """Every name that Python code imports from Forgefield exists."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "forgefield":
            module = importlib.import_module(str(node.module))
            for name in (alias.name for alias in node.names if alias.name != "*"):
                assert hasattr(module, name) or importlib.util.find_spec(f"{node.module}.{name}"), name
        elif isinstance(node, ast.Import):
            for name in (alias.name for alias in node.names if alias.name.split(".")[0] == "forgefield"):
                importlib.import_module(name)


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.name)
def test_scripts_import_names_that_exist(script):
    """Benchmarks and examples are run by hand; this notices when something they use is renamed."""
    require_imports(read(script))


@by_page
def test_python_code_is_valid(page):
    for block in blocks(read(page)):
        if re.search(r"^(from|import) \w", block, flags=re.MULTILINE):
            require_imports(block)
