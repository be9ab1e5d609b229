"""Options are declared once: their limits are checked, and pages of the reference are made from the declarations."""

import argparse
import dataclasses
import importlib.util
import re
from pathlib import Path

import pytest

from forgefield.bench.options import BenchOptions
from forgefield.cli import VERBS
from forgefield.cli.arguments import add_option, selected
from forgefield.config.option import Limits, class_doc, field_docs, limits_of, option
from forgefield.config.reference import flag_help, option_help, options_of, reference, sections
from forgefield.config.typed import field_types, section_class
from forgefield.data.options import DataOptions, UnitOptions
from forgefield.errors import ForgefieldError
from forgefield.ldos.descriptor_options import DescriptorOptions
from forgefield.tasks.options import TaskOptions
from forgefield.training.options import TrainingOptions
from forgefield.tuning.options import TuneOptions

DOCS = Path(__file__).parents[2] / "docs"
SECTIONS = {section.cls for section in sections()}


def generator():
    spec = importlib.util.spec_from_file_location("generate", DOCS / "generate.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("page", ["options.md", "model-options.md", "commands.md"])
def test_generated_pages_are_up_to_date(page):
    written = (DOCS / "reference" / page).read_text(encoding="utf-8")
    assert written == generator().PAGES[page](), "run `make reference`"


def test_the_page_of_commands_has_every_verb_and_option():
    page = (DOCS / "reference" / "commands.md").read_text(encoding="utf-8")
    for verb in VERBS:
        assert f"## forgefield {verb}\n" in page
    assert "| `--finetune RUN` |" in page
    assert "### forgefield data info\n" in page


def test_every_option_of_a_model_is_described():
    page = (DOCS / "reference" / "model-options.md").read_text(encoding="utf-8")
    assert "| `num_layers` | integer, default `4`, at least 1 |" in page
    described = re.findall(r"^\| `(\w+)` \| [^|]* \| (.*) \|$", page, flags=re.MULTILINE)
    assert len(described) > 100
    assert {name for name, text in described if not text} <= {"type"}


def test_the_page_names_every_option_of_every_section():
    assert len(SECTIONS) > 20
    text = reference()
    for cls in SECTIONS - {TaskOptions}:
        for name in field_types(cls):
            assert f"| `{name}` |" in text, (cls, name)


def test_every_default_is_within_its_limits():
    for cls in SECTIONS:
        for field in dataclasses.fields(cls):
            limits, default = limits_of(field), getattr(cls(), field.name)
            if limits.choices and default is not None:
                assert {*default} <= {*limits.choices} if isinstance(default, list) else default in limits.choices
            if limits.has_bounds and default is not None:
                assert limits.allows(default), field.name


def test_every_option_but_the_names_of_labels_is_described():
    labels = ("energy", "forces", "stress", "virial", "length")
    for cls in SECTIONS:
        docs = field_docs(cls)
        for name, kind in field_types(cls).items():
            inner = section_class(kind)
            assert name in docs or (inner is not None and class_doc(inner)) or name in labels, (cls, name)


def test_help_in_a_terminal_is_made_from_the_same_declarations():
    overview = option_help()
    for section in sections():
        assert section.title in overview
    assert "training.lr  (number; default 0.01; a positive number)\n    Learning rate.\n" in option_help("training")
    assert option_help("data.cutoff").startswith("data.cutoff  (number or null; default 5.0; a positive number; A)\n")
    assert "task.forces " in option_help("task")
    assert "task.ldos " in option_help("task")
    with pytest.raises(
        ForgefieldError, match=r"'training\.lrr' is not a section or an option.* Did you mean 'training\.lr'"
    ):
        option_help("training.lrr")


@pytest.mark.parametrize(
    ("limits", "allowed", "refused", "text"),
    [
        ({"above": 0}, (1e-9, float("inf")), (0, -1, float("nan")), "a positive number"),
        ({"at_least": 256, "at_most": 32767}, (256, 32767), (255, 32768), "between 256 and 32767"),
        ({"above": 0, "at_most": 1}, (0.5, 1), (0, 1.1), "above 0 and at most 1"),
        ({"at_least": 0, "below": float("inf")}, (0, 1e300), (-1, float("inf")), "at least 0"),
    ],
)
def test_limits_allow_what_they_describe(limits, allowed, refused, text):
    declared = Limits(**limits)
    assert [declared.allows(number) for number in (*allowed, *refused)] == [True] * len(allowed) + [False] * len(
        refused
    )
    assert declared.describe() == text


def test_an_option_is_a_field_with_a_default():
    @dataclasses.dataclass
    class Options:
        size: int = option(3, above=0, unit="A")

    assert Options() == Options(size=3)
    assert limits_of(dataclasses.fields(Options)[0]).unit == "A"


@dataclasses.dataclass
class OfManyTypes:
    flag: bool = False
    choice: bool | str | None = None
    table: list[list[float]] | None = None
    switches: bool | list[bool] = False
    names: str | list[str] | None = None
    weights: float | dict[str, float] = 1.0
    mixed: list[int | str] = dataclasses.field(default_factory=list)


def test_types_read_as_plain_english():
    assert [entry.type for entry in options_of(OfManyTypes)] == [
        "true or false",
        "true, false, text or null",
        "list of lists of numbers or null",
        "true, false or list of booleans",
        "text, list of text or null",
        "number or mapping",
        "list of integers or text",
    ]


def test_the_help_of_a_flag_is_made_from_the_declaration():
    assert flag_help(DataOptions, "cutoff") == "cutoff radius of the neighbour list, A (default: 5.0)"
    assert flag_help(UnitOptions, "forces") == "unit of the forces (default: energy / length)"
    assert flag_help(TuneOptions, "trials", default="tune.trials").endswith("ended early (default: tune.trials)")
    engines = ", ".join(limits_of(next(f for f in dataclasses.fields(TrainingOptions) if f.name == "engine")).choices)
    assert (
        flag_help(BenchOptions, "engines") == f"engines to measure: {engines} (default: all that run on this machine)"
    )
    assert (
        flag_help(BenchOptions, "ranks").partition("(")[2].startswith("default: 1, 2, 4, ... up to the number of GPUs")
    )


def test_flags_have_the_type_and_the_choices_of_their_options(capsys):
    parser = argparse.ArgumentParser()
    for name in ("type", "twojmax", "cutoff", "switch"):
        add_option(parser, f"--{name}", DescriptorOptions, name)
    args = parser.parse_args(["--twojmax", "4", "--cutoff", "3", "--switch"])
    assert (args.type, args.twojmax, args.cutoff, args.switch) == (None, 4, 3.0, True)
    assert isinstance(args.cutoff, float)
    assert selected(args, "type", "twojmax") == {"twojmax": 4}
    with pytest.raises(SystemExit):
        parser.parse_args(["--type", "sphere"])
    assert "choose from" in capsys.readouterr().err
