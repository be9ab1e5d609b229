"""Objects of pymatgen, emmet, PyTorch Geometric, DGL and munch in pickled samples, read as plain data.

None of these libraries is imported, and nothing that the pickle names is called: of an object there is only the state that
the pickle stores, and of that state only the values of the sample are kept. A structure of pymatgen becomes what its
`as_dict` returns (lattice, sites, species), a graph a dictionary of its values.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from forgefield.untrusted.safe_pickle import Inert, Maker, RefusedPickle, safe_loads

_OPAQUE_MODULES = ("pymatgen.", "emmet.", "monty.", "torch_geometric.", "torch_sparse.", "dgl.")
"""Other classes of these libraries are accepted as well; what is in their objects is left out."""


def load_sample(data: bytes) -> Any:
    """As `safe_loads`, for samples that may hold objects of these libraries."""
    return safe_loads(data, objects=_OBJECTS)


class _Text(Inert):
    """A member of an enumeration, as its value."""

    __slots__ = ()

    def plain(self) -> str:
        if len(self.args) != 1 or not isinstance(self.args[0], str):
            raise RefusedPickle("it holds a member of an enumeration without a value")
        return self.args[0]


class _Opaque(Inert):
    """An object that Forgefield does not need: its fields or its text, where it has these, or nothing."""

    __slots__ = ()

    def plain(self) -> Any:
        if self.state is None and len(self.args) == 1 and isinstance(self.args[0], str):
            return self.args[0]
        values = self.state.get("__dict__") if isinstance(self.state, dict) else None
        return values if isinstance(values, dict) else None


class _Structure(Inert):
    __slots__ = ()

    def plain(self) -> dict[str, Any]:
        return {"lattice": self.values["_lattice"], "sites": list(self.values["_sites"])}


class _Lattice(Inert):
    __slots__ = ()

    def plain(self) -> dict[str, Any]:
        return {"matrix": self.values["_matrix"], "pbc": self.values.get("_pbc", (True, True, True))}


class _Site(Inert):
    __slots__ = ()

    def plain(self) -> dict[str, Any]:
        properties = self.values.get("properties", self.values.get("_properties"))
        return {
            "species": self.values["_species"],
            "abc": self.values["_frac_coords"],
            "properties": properties or {},
        }


class _Composition(Inert):
    __slots__ = ()

    def plain(self) -> list[dict[str, Any]]:
        return [{"element": element, "occu": amount} for element, amount in dict.items(self.values["_data"])]


class _Species(Inert):
    """An element with an oxidation state, of which the element is kept."""

    __slots__ = ()

    def plain(self) -> Any:
        return self.values["_el"]


class _Graph(Inert):
    """A graph of PyTorch Geometric: version 1 stores values as attributes, version 2 in a storage."""

    __slots__ = ()

    def plain(self) -> Any:
        storage = self.values.get("_store")
        return self.values if storage is None else storage.values["_mapping"]


class _DglGraph(Inert):
    __slots__ = ()

    def plain(self) -> dict[str, Any]:
        frames = self.values["_node_frames"]
        if len(frames) != 1:
            raise RefusedPickle(f"it holds a DGL graph with {len(frames)} types of nodes instead of one")
        return {"ndata": frames[0]}


class _DglFrame(Inert):
    __slots__ = ()

    def plain(self) -> Any:
        return self.values["_columns"]


class _DglColumn(Inert):
    __slots__ = ()

    def plain(self) -> Any:
        storage, rows = self.values["storage"], self.values.get("index")
        if rows is None:
            return storage
        if not isinstance(rows, np.ndarray) or not isinstance(storage, np.ndarray) or len(rows) > len(storage):
            raise RefusedPickle("it holds a part of a DGL graph; store it by dgl.DGLGraph.clone()")
        return storage[rows]


class _Munch(dict[Any, Any]):
    """A dictionary whose items are attributes as well."""

    def __setstate__(self, state: object) -> None:
        if isinstance(state, dict):
            self.update(state)


def _opaque(*_: object) -> _Opaque:
    return _Opaque()


def _attribute(owner: object, name: object) -> Maker:
    """The schemes of DGL's columns name a method of theirs; nothing else may name an attribute."""
    if not isinstance(owner, type) or not issubclass(owner, _Opaque):
        raise RefusedPickle("it names builtins.getattr, which could run code or is not plain data")
    return Maker(_opaque)


_CLASSES: dict[str, Any] = {
    "pymatgen.core.structure.Structure": _Structure,
    "pymatgen.core.structure.IStructure": _Structure,
    "pymatgen.core.lattice.Lattice": _Lattice,
    "pymatgen.core.sites.PeriodicSite": _Site,
    "pymatgen.core.composition.Composition": _Composition,
    "pymatgen.core.periodic_table.Element": _Text,
    "pymatgen.core.periodic_table.Species": _Species,
    "pymatgen.core.periodic_table.Specie": _Species,
    "torch_geometric.data.data.Data": _Graph,
    "dgl.heterograph.DGLGraph": _DglGraph,
    "dgl.heterograph.DGLHeteroGraph": _DglGraph,
    "dgl.frame.Frame": _DglFrame,
    "dgl.frame.Column": _DglColumn,
    "munch.Munch": _Munch,
    "munch.DefaultMunch": _Munch,
    "builtins.bytearray": Maker(_opaque),
    "builtins.getattr": Maker(_attribute),
}


class _Objects(dict[str, Any]):
    """The classes above, and opaque ones for the other names of these libraries."""

    def __contains__(self, origin: object) -> bool:
        return super().__contains__(origin) or str(origin).startswith(_OPAQUE_MODULES)

    def __missing__(self, origin: str) -> type[_Opaque]:
        return _Opaque


_OBJECTS = _Objects(_CLASSES)
