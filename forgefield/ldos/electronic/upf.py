"""Pseudopotential files (UPF, versions 1 and 2): the valence charge, functional and core density that total energies need."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from forgefield.errors import ForgefieldError

_PBE_NAMES = (["PBE"], ["SLA", "PW", "PBX", "PBC"], ["SLA", "PW", "PBE", "PBE"])


@dataclass(frozen=True)
class Pseudopotential:
    """Valence charge and, where the file has one, the core density of the nonlinear core correction."""

    element: str
    valence: float
    functional: str
    radii: Tensor
    """(mesh,) Bohr"""
    steps: Tensor
    """(mesh,) Bohr: dr/di, for integrals over the mesh"""
    core_density: Tensor | None
    """(mesh,) 1/Bohr^3"""
    path: Path

    @property
    def is_pbe(self) -> bool:
        """Whether it was made for the functional of Perdew, Burke and Ernzerhof."""
        words = re.split(r"[\s+-]+", self.functional.strip().upper())
        return words[:4] in _PBE_NAMES  # files of version 1 have the short name as a fifth word


def read_upf(path: str | Path) -> Pseudopotential:
    """Read a UPF file. It is searched for its sections, not parsed as XML, which many such files are not."""
    path = Path(path)
    try:
        text = path.read_text(encoding="utf-8", errors="replace")
    except OSError as error:
        raise ForgefieldError(f"{path}: this pseudopotential cannot be read ({error.strerror or error})") from None
    header = _section(text, "PP_HEADER", path)
    fields = _attributes(header) if "z_valence" in header else _first_version_header(header)
    try:
        element, functional = fields["element"].strip(), fields["functional"].strip()
        valence = float(_fortran(fields["z_valence"]))
        corrected = fields["core_correction"].strip().strip(".").lower() in ("t", "true")
    except (KeyError, ValueError) as error:
        raise ForgefieldError(f"{path}: the header of this pseudopotential lacks {error}") from None
    radii, steps = _numbers(text, "PP_R", path), _numbers(text, "PP_RAB", path)
    core = _numbers(text, "PP_NLCC", path) if corrected else None
    if steps.shape != radii.shape or (core is not None and core.shape != radii.shape):
        raise ForgefieldError(f"{path}: PP_R, PP_RAB and PP_NLCC must be of one length; the file is damaged")
    return Pseudopotential(element, valence, functional, radii, steps, core, path)


def read_pseudopotentials(
    folder: str | Path, elements: Iterable[str], names: Mapping[str, str] | None = None
) -> dict[str, Pseudopotential]:
    """The pseudopotentials of some elements in a folder.

    names: file of each element, as a calculation recorded them; for others it is the one UPF file named after the element
    (`Be.pbe-n-rrkjus_psl.1.0.0.UPF`, `al_pbe.upf`).
    """
    folder = Path(folder)
    pseudopotentials = {}
    for element in sorted(set(elements)):
        path = folder / Path(names[element]).name if names and element in names else _file_of(folder, element)
        if not path.is_file():
            raise ForgefieldError(f"the pseudopotential {path.name} of {element} is not in {folder}")
        pseudopotentials[element] = read_upf(path)
        if pseudopotentials[element].element != element:
            raise ForgefieldError(
                f"{path} is a pseudopotential of {pseudopotentials[element].element}, not of {element}"
            )
    return pseudopotentials


def _file_of(folder: Path, element: str) -> Path:
    files = sorted(folder.iterdir()) if folder.is_dir() else []
    candidates = [path for path in files if path.suffix.lower() == ".upf" and _named_after(path.name, element)]
    if not candidates:
        raise ForgefieldError(
            f"no pseudopotential of {element} in {folder}: a file such as {element}.pbe.UPF is needed"
        )
    if len(candidates) > 1:
        listed = ", ".join(path.name for path in candidates)
        raise ForgefieldError(
            f"{folder} contains several pseudopotentials of {element} ({listed}); specify which one to use"
        )
    return candidates[0]


def _named_after(name: str, element: str) -> bool:
    """Whether the letters a file name begins with are those of the element."""
    letters = re.match(r"[A-Za-z]*", name)
    return letters is not None and letters.group().lower() == element.lower()


def _section(text: str, tag: str, path: Path) -> str:
    """Text between <tag ...> and </tag>, or the attributes of <tag .../>."""
    match = re.search(rf"<{tag}(\s[^>]*?)?(/>|>(.*?)</{tag}>)", text, re.DOTALL)
    if match is None:
        raise ForgefieldError(
            f"{path}: there is no <{tag}> section; a pseudopotential in UPF format, version 1 or 2, is needed"
        )
    return (match.group(1) or "") + "\n" + (match.group(3) or "")


def _attributes(header: str) -> dict[str, str]:
    return {name: value for name, _, value in re.findall(r"(\w+)\s*=\s*(['\"])(.*?)\2", header, re.DOTALL)}


def _first_version_header(header: str) -> dict[str, str]:
    """Version 1 has a value and its description on each line."""
    fields = {}
    for line in header.splitlines():
        words, lowered = line.split(), line.lower()
        if "z valence" in lowered:
            fields["z_valence"] = words[0]
        elif lowered.rstrip().endswith("element"):
            fields["element"] = words[0]
        elif "nonlinear core correction" in lowered:
            fields["core_correction"] = words[0]
        elif "exchange-correlation" in lowered:
            fields["functional"] = line[: lowered.index("exchange-correlation")]
    return fields


def _numbers(text: str, tag: str, path: Path) -> Tensor:
    body = _section(text, tag, path).split("\n", 1)[1]
    try:
        return torch.tensor([float(_fortran(word)) for word in body.split()], dtype=torch.float64)
    except ValueError as error:
        raise ForgefieldError(f"{path}: <{tag}> contains something that is not a number ({error})") from None


def _fortran(word: str) -> str:
    """`1.0D-3` and `1.0-100` as Python reads them."""
    return re.sub(r"(?<=\d)([+-]\d+)$", r"e\1", word.replace("D", "e").replace("d", "e"))
