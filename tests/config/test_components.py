"""Import paths and signatures of a user's own components."""

import inspect
import sys

import pytest

from forgefield.config.components import _import, also_look_in, check_signature, user_module_folder
from forgefield.config.loading import load_config
from forgefield.config.trust import CONFIG
from forgefield.errors import ForgefieldError


def import_path(path, folders=()):
    return _import(path, where="model.name", trust=CONFIG, folders=folders)


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    known = set(sys.modules)
    yield tmp_path
    for name in set(sys.modules) - known:
        del sys.modules[name]


def test_installed_names_and_nested_attributes_are_found():
    assert import_path("inspect.Signature.empty") is inspect.Signature.empty
    assert import_path("collections.abc.Mapping").__name__ == "Mapping"


def test_a_file_in_the_working_directory_is_found_and_the_search_path_is_left_as_it_was(here):
    (here / "my_own_net.py").write_text("class Net:\n    width = 3\n")
    before = list(sys.path)
    assert import_path("my_own_net.Net").width == 3
    assert sys.path == before


def test_a_file_in_a_requested_folder_is_imported(here):
    folder = here / "configs"
    folder.mkdir()
    (folder / "beside_config.py").write_text("loss = 7\n")
    assert import_path("beside_config.loss", folders=[folder]) == 7


def test_a_file_next_to_the_config_is_found_once_the_config_is_loaded(here):
    folder = here / "configs"
    folder.mkdir()
    (folder / "near_config.py").write_text("loss = 7\n")
    (folder / "a.yaml").write_text("data: {train: a.xyz}\n")
    with pytest.raises(ForgefieldError, match="no module 'near_config'"):
        import_path("near_config.loss")
    load_config("configs/a.yaml")
    before = list(sys.path)
    assert import_path("near_config.loss") == 7
    assert sys.path == before
    with pytest.raises(ForgefieldError, match=r"in .* or .*configs.*Did you mean 'near_config'\?"):
        import_path("near_cofnig.loss")


def test_the_working_directory_comes_before_the_folder_of_the_config(here):
    for place, value in ((here, 1), (here / "configs", 2)):
        place.mkdir(exist_ok=True)
        (place / "in_both_places.py").write_text(f"value = {value}\n")
    also_look_in(here / "configs")
    assert import_path("in_both_places.value") == 1


def test_a_module_of_the_same_name_in_another_folder_is_not_taken_for_the_one_that_is_meant(here):
    for name in ("first", "second"):
        (here / name).mkdir()
        (here / name / "same_name.py").write_text(f"value = '{name}'\n")
    assert import_path("same_name.value", folders=["first"]) == "first"
    assert import_path("same_name.value", folders=["first"]) == "first"
    with pytest.raises(ForgefieldError, match=r"second/same_name\.py is meant, but .* from .*first/same_name\.py"):
        import_path("same_name.value", folders=["second"])


def test_the_folder_of_a_user_module_or_package(here):
    (here / "own_single.py").write_text("x = 1\n")
    (here / "own_package").mkdir()
    (here / "own_package" / "__init__.py").write_text("")
    (here / "own_package" / "part.py").write_text("x = 1\n")
    for path in ("own_single.x", "own_package.part.x"):
        import_path(path)
        assert user_module_folder(path) == here
    assert user_module_folder("inspect.Signature") is None
    assert user_module_folder("sys.path") is None


def test_missing_module_names_the_nearest_file(here):
    (here / "my_model_x.py").write_text("")
    with pytest.raises(ForgefieldError, match=r"no module 'my_modle_x'.*Did you mean 'my_model_x'\?"):
        import_path("my_modle_x.Net")


def test_missing_attribute_names_the_nearest(here):
    (here / "my_nets.py").write_text("class Network: pass\n")
    with pytest.raises(ForgefieldError, match=r"my_nets has no 'Netwrk'\. Did you mean 'Network'\?"):
        import_path("my_nets.Netwrk")


def test_missing_submodule_is_a_missing_attribute():
    with pytest.raises(ForgefieldError, match=r"collections has no 'abd'\. Did you mean 'abc'\?"):
        import_path("collections.abd.Mapping")


def test_errors_inside_the_users_file_are_reported(here):
    (here / "needs_more.py").write_text("import not_there_at_all\n")
    (here / "broken_file.py").write_text("def f(:\n")
    with pytest.raises(ForgefieldError, match="needs the missing module 'not_there_at_all'"):
        import_path("needs_more.Net")
    with pytest.raises(ForgefieldError, match="importing broken_file failed: SyntaxError"):
        import_path("broken_file.Net")


@pytest.mark.parametrize("bad", ["nequip", "", "a..b", "a/b.C", "my-model.Net"])
def test_what_is_not_an_import_path_is_refused(bad):
    with pytest.raises(ForgefieldError, match="is not an import path"):
        import_path(bad)


def callee(width, *, depth=2, positions=None):
    return width, depth, positions


def test_unknown_option_names_file_section_and_nearest():
    with pytest.raises(ForgefieldError) as caught:
        check_signature(callee, {"width": 1, "dept": 2}, where="model", file="my.yaml")
    assert str(caught.value) == (
        "my.yaml: unknown key 'model.dept': callee has no option 'dept'. Did you mean 'depth'?"
    )


def test_far_off_option_lists_what_there_is():
    with pytest.raises(ForgefieldError, match="It takes: width, depth, positions"):
        check_signature(callee, {"zzzzzz": 2}, where="model")


def test_what_forgefield_passes_itself_cannot_be_set():
    with pytest.raises(ForgefieldError, match=r"'model.positions' is set by Forgefield itself"):
        check_signature(callee, {"positions": 2}, where="model", supplied=("positions",))


def test_valid_options_and_open_signatures_pass():
    check_signature(callee, {"width": 1, "depth": 3}, where="model")
    check_signature(lambda **anything: None, {"whatever": 1}, where="model")
    with pytest.raises(ForgefieldError, match="whatever"):
        check_signature(callee, {"width": 1, "whatever": 1}, where="model")
