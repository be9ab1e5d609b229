"""Configs of other programs as Forgefield configs with comments."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from forgefield.config.deepmd import is_deepmd_input, read_input, translation
from forgefield.config.deepmd.translation import COMMENTS as DEEPMD_COMMENTS
from forgefield.config.loading import load_config
from forgefield.config.matsciml import COMMENTS as MATSCIML_COMMENTS
from forgefield.config.matsciml import is_matsciml_script, matsciml_translation
from forgefield.config.nequip import is_nequip_config, nequip_translation
from forgefield.config.nequip.translation import COMMENTS as NEQUIP_COMMENTS
from forgefield.config.template import require_config_path, write_config, yaml_with_comments
from forgefield.errors import ForgefieldError

_MACE = {"r_max", "train_file", "E0s", "max_num_epochs"}
"""Keys that a config of MACE has at its top."""


def convert_input(
    file: Path, out: Path | None = None, *, overwrite: bool = False, species: Sequence[str] | None = None
) -> str:
    """The config of an input of DeePMD-kit, NequIP, Allegro or Open MatSciML as commented YAML, written to `out` if that is a
    path.

    Relative paths remain as they are if they are valid for the config, and become absolute otherwise. species: elements of the
    atom types of an input of DeePMD-kit, in their order, if their names do not tell them.
    """
    if out is not None:
        require_config_path(out, overwrite=overwrite)
    is_script, sets = is_matsciml_script(file), ["train", "val"]
    content = {} if is_script else read_input(file)
    if is_script:
        translated, comments = matsciml_translation(file), MATSCIML_COMMENTS
        sets.append("test")
        kind = "a script of Open MatSciML"
    elif is_nequip_config(content):
        translated, comments = nequip_translation(content, file), NEQUIP_COMMENTS
        sets.append("test")
        kind = "a config of NequIP"
    elif is_deepmd_input(content):
        translated, comments = translation(content, file, species), DEEPMD_COMMENTS
        kind = "an input of DeePMD-kit"
    elif isinstance(content, Mapping) and _MACE & set(content):
        raise ForgefieldError(
            f"{file} is a config of MACE, which is not converted; write one for its data with `forgefield init "
            f"{content.get('train_file') or 'TRAIN_FILE'}` and set `model: {{name: mace}}` (the page 'Coming from MACE' lists "
            "the options)."
        )
    else:
        raise ForgefieldError(
            f"{file} is not an input of DeePMD-kit, which has the sections 'training' and 'model' with a type_map, nor of "
            "NequIP, which has 'data', 'trainer' and 'training_module', nor a script that names matsciml."
        )
    checked = load_config(file, [f"data.species=[{','.join(species)}]"] if species else [])
    values = translated.config
    folders = {path.absolute().parent for path in (file, out or file)} | {Path.cwd()}
    if len(folders) > 1:
        paths = {name: getattr(checked.data, name) for name in sets}
        values = {**values, "data": {**values["data"], **paths}}
    header = [f"The run of {file.name}, {kind}; written by `forgefield convert-config`."]
    if translated.notes:
        header.append("Keys that do not correspond to a setting:")
        header += [f"  {key}: {text}" for key, text in translated.notes.items()]
    text = yaml_with_comments(values, header="\n".join(header), notes=comments)
    if out is not None:
        write_config(out, text)
    return text
