"""What a kernel of the convolution computes (`Kind`), and the table of the arguments that all of them have."""

from __future__ import annotations

from dataclasses import dataclass

from forgefield.kernels.core.arguments import ArgumentTable
from forgefield.kernels.core.fields import TANGENT, VALUE

ARGUMENTS = ArgumentTable(
    x="field of features",
    y="(n_edges, n_harmonics), harmonics",
    dy="tangents of y",
    w="(n_rows, n_weights), rows of weights; or a table (n_intervals, 4, n_weights), packed (n_intervals, 3, n_weights)",
    dw="tangents of rows of weights",
    u="(n_edges,), position of an edge in its interval of the table, from -1/2 to 1/2",
    du="tangents of u",
    unit="(n_intervals,), units of a packed table",
    g="field of cotangents of the output",
    out="field of outputs",
    to_x="(n_edges, dim of features), cotangents of features; of one block if `apart`",
    to_w="(n_edges, n_weights), cotangents of weights; of one block if `apart`",
    to_dw="as to_w, of tangents of weights",
    to_y="(n_chunks, n_edges, n_harmonics), cotangents of harmonics; with a table (n_chunks, n_edges, 4), of direction and u",
    source="(n_edges,), source atom of each edge",
    pointers="(n_atoms + 1,), first edge of each atom",
    row="(n_edges,), row of weights of an edge, or its interval in the table",
    n_atoms="number of atoms",
    n_edges="number of edges",
)
"""Arguments of every kernel of the convolution."""


@dataclass(frozen=True)
class Kind:
    """What a kernel computes.

    dual, backward: which of the four passes of a training it is.
        neither: values of the output;
        `backward`: from cotangents of the output's tangents, which are those of a total of the values, the cotangents of
        features, harmonics and weights (the pass of the forces);
        `dual`: tangents of the output;
        both: from cotangents of values and tangents, those of features, weights and tangents of weights.
    table: weights are read from a table of cubic polynomials at the position of each edge; in the pass of the forces that
        position has a cotangent in place of rows of weights.
    packed: the two highest coefficients of the table share a word (`radial/packing.py`).
    still: features have no tangents.
    features: cotangents of features are computed.
    narrow: features, a table that is not packed and what is written for edges are stored in fewer bits than float32, in which
        everything is computed.
    apart: rows that are written for edges belong to the only block of the form.
    shares: number of programs that share the edges of an atom, each of which writes an output of its own.
    """

    dual: bool = False
    backward: bool = False
    table: bool = False
    packed: bool = False
    still: bool = False
    features: bool = True
    narrow: bool = False
    apart: bool = False
    shares: int = 1

    @property
    def name(self) -> str:
        """Name of the kernel."""
        words = [word for word in self.__dataclass_fields__ if getattr(self, word) is True]
        words += [f"shares{self.shares}"] if self.shares > 1 else []
        return "_".join(["convolution", *words])

    @property
    def pass_name(self) -> str:
        """Which of the four passes of a training it is: values, forces, tangents or back."""
        return ("back" if self.backward else "tangents") if self.dual else ("forces" if self.backward else "values")

    @property
    def geometry(self) -> bool:
        """Whether cotangents of harmonics are computed."""
        return self.backward and not self.dual

    @property
    def weights(self) -> bool:
        """Whether cotangents of weights are written for every edge."""
        return self.backward and (self.dual or not self.table)

    @property
    def moves(self) -> bool:
        """Whether tangents of features are read."""
        return self.dual and not self.still

    @property
    def arguments(self) -> tuple[str, ...]:
        """Names of the arguments that the kernel uses; it is launched with any tensor for the others."""
        conditions = {
            "dy": self.dual,
            "dw": self.dual and not self.table,
            "u": self.table,
            "du": self.table and self.dual,
            "unit": self.packed,
            "g": self.backward,
            "out": not self.backward,
            "to_x": self.backward and self.features,
            "to_w": self.weights,
            "to_dw": self.weights and self.dual,
            "to_y": self.geometry,
        }
        return tuple(name for name in ARGUMENTS if conditions.get(name, True))

    @property
    def places(self) -> list[tuple[str, int]]:
        """Outputs by the letter of their accumulators, and the slot of the field that holds them: o values, p tangents."""
        if not self.backward:
            return [("p", TANGENT)] if self.dual else [("o", VALUE)]
        return [("o", VALUE), ("p", TANGENT)] if self.dual else [("o", TANGENT)]
