"""Transformations of a structure, and how its outputs follow: rotations, translations, permutations, copies, images."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, replace

import numpy as np

from forgefield.checks.probe import boxed, edited, molecule
from forgefield.data.frame import Frame


@dataclass(frozen=True)
class Transformed:
    """A transformed frame.

    rotation: (3, 3), of vectors and tensors; None: they are unchanged. atoms: for each atom of `frame`, the index of the
    same atom in the original; None: the same index. copies: number of copies of the original that `frame` consists of.
    """

    frame: Frame
    rotation: np.ndarray | None = None
    atoms: np.ndarray | None = None
    copies: int = 1

    def rotated(self, value: np.ndarray, rank: int) -> np.ndarray:
        """`value` of the original, of which the last `rank` axes are Cartesian, in the transformed frame."""
        if self.rotation is None or rank == 0:
            return value
        return value @ self.rotation.T if rank == 1 else self.rotation @ value @ self.rotation.T

    def of_atoms(self, values: np.ndarray) -> np.ndarray:
        """Values of the atoms of the original, (n_atoms, ...), for the atoms of the transformed frame."""
        return values if self.atoms is None else values[self.atoms]


@dataclass(frozen=True)
class Symmetry:
    """A law: the outputs of a transformed frame follow from those of the frame.

    note: the law for energy, forces and stress. outputs_note: for extra outputs. periodic: whether it needs periodic frames.
    """

    name: str
    transform: Callable[[Frame, np.random.Generator], Transformed]
    note: str
    outputs_note: str
    periodic: bool = False

    def apply(self, frame: Frame, random: np.random.Generator, vectors: Collection[str] = ()) -> Transformed:
        """The transformed frame, with the values of its atoms. vectors: names of those that are vectors."""
        transformed = self.transform(frame, random)
        fields = dict(frame.fields)
        for name in frame.per_atom & fields.keys():
            fields[name] = transformed.rotated(transformed.of_atoms(fields[name]), int(name in vectors))
        return replace(transformed, frame=replace(transformed.frame, fields=fields))

    def frame(self, frame: Frame, cutoff: float) -> Frame:
        """The frame to transform: with periodic boundaries if the law needs them."""
        return in_a_cell(frame, cutoff) if self.periodic else frame


def random_orthogonal(random: np.random.Generator, determinant: int) -> np.ndarray:
    """A uniformly distributed rotation (determinant +1) or rotation with a reflection (-1), (3, 3)."""
    q, r = np.linalg.qr(random.standard_normal((3, 3)))
    q *= np.sign(np.diag(r))
    return q if np.sign(np.linalg.det(q)) == determinant else -q


def in_a_cell(frame: Frame, cutoff: float) -> Frame:
    """The frame if it is periodic, otherwise its atoms in a periodic box."""
    if frame.pbc.any():
        return edited(frame)
    return boxed(molecule(frame.numbers, frame.positions), cutoff)


def mixed_batch(frames: list[Frame], random: np.random.Generator) -> tuple[list[Frame], np.ndarray]:
    """The frames, displaced copies of them and an isolated atom in random order, and where each frame is, (n_frames,)."""
    displaced = [edited(f, positions=f.positions + 0.05 * random.standard_normal(f.positions.shape)) for f in frames]
    batch = [*frames, *displaced, molecule(frames[0].numbers[:1], np.zeros((1, 3)))]
    order = random.permutation(len(batch))
    return [batch[i] for i in order], np.argsort(order)[: len(frames)]


def _rotated(frame: Frame, random: np.random.Generator, determinant: int = +1) -> Transformed:
    q = random_orthogonal(random, determinant)
    return Transformed(edited(frame, positions=frame.positions @ q.T, cell=frame.cell @ q.T), rotation=q)


def _reflected(frame: Frame, random: np.random.Generator) -> Transformed:
    return _rotated(frame, random, -1)


def _translated(frame: Frame, random: np.random.Generator) -> Transformed:
    return Transformed(edited(frame, positions=frame.positions + random.uniform(-5, 5, size=3)))


def _permuted(frame: Frame, random: np.random.Generator) -> Transformed:
    order = random.permutation(len(frame))
    return Transformed(edited(frame, positions=frame.positions[order], numbers=frame.numbers[order]), atoms=order)


def _doubled(frame: Frame, random: np.random.Generator) -> Transformed:
    """The cell doubled along a random periodic axis."""
    axis = int(random.choice(np.flatnonzero(frame.pbc)))
    cell = frame.cell.copy()
    cell[axis] *= 2
    positions = np.concatenate([frame.positions, frame.positions + frame.cell[axis]])
    doubled = edited(frame, positions=positions, numbers=np.concatenate([frame.numbers] * 2), cell=cell)
    return Transformed(doubled, atoms=np.tile(np.arange(len(frame)), 2), copies=2)


def _wrapped(frame: Frame, random: np.random.Generator) -> Transformed:
    """Each atom replaced by a random periodic image."""
    images = random.integers(-2, 3, size=frame.positions.shape) * frame.pbc
    return Transformed(edited(frame, positions=frame.positions + images @ frame.cell))


_UNCHANGED = "nothing changes when all atoms are translated"
_IMAGES = "nothing changes when atoms are replaced by periodic images"
ROTATION = Symmetry(
    "rotation",
    _rotated,
    "energy is invariant, forces and stress are equivariant",
    "outputs are invariant or equivariant, as declared",
)
REFLECTION = Symmetry("reflection", _reflected, "the same for improper rotations", "the same for improper rotations")
TRANSLATION = Symmetry("translation", _translated, _UNCHANGED, _UNCHANGED)
PERMUTATION = Symmetry(
    "permutation", _permuted, "forces are reordered with the atoms", "values of atoms are reordered with the atoms"
)
SUPERCELL = Symmetry(
    "supercell",
    _doubled,
    "a doubled cell has twice the energy and the same forces",
    "extensive outputs of a doubled cell double, others do not change",
    periodic=True,
)
WRAPPING = Symmetry("wrapping", _wrapped, _IMAGES, _IMAGES, periodic=True)
