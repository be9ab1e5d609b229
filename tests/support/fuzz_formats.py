"""Every format that Forgefield reads: how a good file of it is made, damaged and read, and what reading must give.

`read` may raise ForgefieldError, and nothing else. Where a format has checksums, whatever is accepted must be what was written
(`exact`); where ASE reads the format, too, the values must be ASE's.
"""

from __future__ import annotations

import io
import json
import lzma
import pickle
import tempfile
import warnings
import zipfile
import zlib
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import ase.io
import ase.io.cube
import ase.io.xsf
import h5py
import lmdb
import numpy as np
import torch
from ase.db import connect

from forgefield.config.loading import load_config
from forgefield.data.frame import Frame
from forgefield.data.readers import frame_count, read_frames, source_files
from forgefield.data.store.convert import convert
from forgefield.errors import ForgefieldError
from forgefield.ldos.data.cube import read_grid_file
from forgefield.ldos.data.grid_writer import writing_grid
from forgefield.ldos.data.info import parse_info, read_info
from forgefield.ldos.data.rows import open_rows
from forgefield.ldos.importer import read_mala
from forgefield.models.building import build_model
from forgefield.models.nequip.importer import read_nequip
from forgefield.models.resolving import resolve_model
from forgefield.runs import Run, create_run_from_model
from forgefield.training.run.checkpoint import DamagedCheckpoint, load_checkpoint, save_checkpoint
from tests.support import mala_archive
from tests.support.fuzz_mutations import mutated
from tests.support.helpers import emt_frames
from tests.support.nequip_checkpoints import checkpoint, trained_elsewhere

N = 3


class Differs(Exception):
    """A damaged file was accepted with values that are not those in it."""


@dataclass
class Format:
    name: str
    make: Callable[[Path], Any]
    """Writes good files into a folder."""
    look: Callable[[Path], Any]
    """Reads the files of a folder; what it returns can be compared with ==."""
    exact: bool = False
    """Has checksums: what is accepted is what was written."""
    oracle: Callable[[Path], Any] | None = None
    """The same by another program."""
    inner: Callable[[bytes, np.random.Generator], bytes] | None = None
    """Changes what is packed inside of a file, checksums included."""
    good: Any = field(default=None, init=False)

    def prepare(self, folder: Path) -> None:
        folder.mkdir(parents=True)
        self.make(folder)
        self.good = self.look(folder)

    def mutate(self, folder: Path, rng: np.random.Generator) -> None:
        files = sorted(path for path in folder.rglob("*") if path.is_file())
        path = files[int(rng.integers(len(files)))]
        change = self.inner if self.inner is not None and rng.random() < 0.5 else mutated
        path.write_bytes(change(path.read_bytes(), rng))

    def read(self, folder: Path) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            found = self.look(folder)
        if self.exact and found != self.good:
            raise Differs("values differ from those that were written")
        if self.oracle is not None:
            self._compare(found, folder)

    def _compare(self, found: Any, folder: Path) -> None:
        assert self.oracle is not None
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                expected = self.oracle(folder)
        except Exception:  # ASE reads less, or fails in its own ways
            return
        if found != expected:
            raise Differs(f"ASE reads other values: {_first_difference(found, expected)}")


def _first_difference(found: Any, expected: Any) -> str:
    if len(found) != len(expected):
        return f"{len(found)} frames, not {len(expected)}"
    return next(f"{a!r:.150} and {b!r:.150}" for a, b in zip(found, expected) if a != b)


# --- frames


def _values(frame: Frame) -> tuple[Any, ...]:
    return (
        frame.numbers.tolist(),
        frame.positions.tolist(),
        frame.cell.tolist(),
        frame.pbc.tolist(),
        frame.energy,
        None if frame.forces is None else frame.forces.tolist(),
    )


def frames_of_folder(folder: Path) -> list[tuple[Any, ...]]:
    """All that is in the one source of a folder."""
    (source,) = (path for path in sorted(folder.iterdir()) if not path.name.startswith(".") and path.suffix != ".lock")
    (file,) = source_files(source)
    count = frame_count(file)
    frames = read_frames(source)
    if count is not None and count != len(frames):
        raise Differs(f"{count} frames are counted and {len(frames)} are read")
    return [_values(frame) for frame in frames]


def structures(folder: Path) -> list[tuple[Any, ...]]:
    return [frame[:4] for frame in frames_of_folder(folder)]


def of_ase(folder: Path, kind: str) -> list[tuple[Any, ...]]:
    (path,) = folder.iterdir()
    return [
        (atoms.numbers.tolist(), atoms.positions.tolist(), atoms.cell.array.tolist(), atoms.pbc.tolist())
        for atoms in ase.io.iread(path, ":", format=kind)
    ]


def write_extxyz(folder: Path) -> None:
    ase.io.write(folder / "a.extxyz", emt_frames(N, 0))


def write_xyz(folder: Path) -> None:
    ase.io.write(folder / "a.xyz", emt_frames(N, 0), format="xyz")


def write_database(folder: Path) -> None:
    with connect(folder / "a.db") as database:
        for atoms in emt_frames(N, 0):
            database.write(atoms)


def arrays() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    positions = np.cumsum(0.5 + rng.random((N, 4, 3)), axis=1)
    columns = {"R": positions, "E": rng.random(N), "F": rng.random((N, 4, 3))}
    return {**columns, "z": np.array([1, 8, 1, 6]), "cell": 9 * np.eye(3), "pbc": np.array([True] * 3)}


def npz(compressed: bool) -> Callable[[Path], None]:
    def write(folder: Path) -> None:
        (np.savez_compressed if compressed else np.savez)(folder / "a.npz", **arrays())

    return write


def write_deepmd(folder: Path) -> None:
    columns, system = arrays(), folder / "system"
    (system / "set.000").mkdir(parents=True)
    (system / "type.raw").write_text("0 1 0 2\n")
    (system / "type_map.raw").write_text("H O C\n")
    np.save(system / "set.000" / "coord.npy", columns["R"].reshape(N, -1))
    np.save(system / "set.000" / "force.npy", columns["F"].reshape(N, -1))
    np.save(system / "set.000" / "energy.npy", columns["E"])
    np.save(system / "set.000" / "box.npy", np.tile(9 * np.eye(3).reshape(-1), (N, 1)))


def write_deepmd_text(folder: Path) -> None:
    columns, system = arrays(), folder / "system"
    system.mkdir()
    (system / "type.raw").write_text("0 1 0 2\n")
    (system / "type_map.raw").write_text("H O C\n")
    for name, values in (("coord", columns["R"]), ("force", columns["F"]), ("energy", columns["E"])):
        np.savetxt(system / f"{name}.raw", values.reshape(N, -1))
    np.savetxt(system / "box.raw", np.tile(9 * np.eye(3).reshape(-1), (N, 1)))


def _write_lmdb(path: Path, values: dict[bytes, bytes]) -> None:
    environment = lmdb.open(str(path), subdir=False, map_size=2**22, lock=False)
    with environment.begin(write=True) as transaction:
        for key, value in values.items():
            transaction.put(key, value)
    environment.close()


def _sample(i: int) -> bytes:
    columns = arrays()
    labels = {"energy": float(columns["E"][i]), "force": torch.tensor(columns["F"][i])}
    return pickle.dumps({"pos": columns["R"][i], "atomic_numbers": columns["z"], "cell": columns["cell"], **labels})


def write_lmdb(folder: Path) -> None:
    _write_lmdb(folder / "a.lmdb", {str(i).encode(): _sample(i) for i in range(N)})


def _row(i: int) -> dict[str, Any]:
    columns = arrays()
    named = {"numbers": columns["z"], "positions": columns["R"][i], "cell": columns["cell"], "pbc": columns["pbc"]}
    named["forces"] = columns["F"][i]
    packed = {k: {"__ndarray__": [v.shape, v.dtype.name, v.reshape(-1).tolist()]} for k, v in named.items()}
    return {**packed, "energy": float(columns["E"][i])}


def write_aselmdb(folder: Path) -> None:
    rows = {str(i + 1).encode(): zlib.compress(json.dumps(_row(i)).encode()) for i in range(N)}
    _write_lmdb(folder / "a.aselmdb", {**rows, b"nextid": zlib.compress(str(N + 1).encode())})


def inner_lmdb(packed: bool) -> Callable[[bytes, np.random.Generator], bytes]:
    """Damages one value and writes a sound LMDB file around it."""

    def change(content: bytes, rng: np.random.Generator) -> bytes:
        rows = [json.dumps(_row(i)).encode() for i in range(N)] if packed else [_sample(i) for i in range(N)]
        at = int(rng.integers(N))
        rows[at] = mutated(rows[at], rng)
        values = {str(i + packed).encode(): zlib.compress(row) if packed else row for i, row in enumerate(rows)}
        if packed:
            values[b"nextid"] = zlib.compress(str(N + 1).encode())
        with tempfile.TemporaryDirectory() as folder:
            _write_lmdb(Path(folder) / "a", values)
            return (Path(folder) / "a").read_bytes()

    return change


def write_hdf5(folder: Path) -> None:
    columns = arrays()
    with h5py.File(folder / "a.h5", "w") as file:
        group = file.create_group("water")
        group["atomic_numbers"], group["energies"] = columns["z"], columns["E"]
        group.create_dataset("positions", data=columns["R"], compression="gzip")
        group.create_dataset("forces", data=columns["F"], chunks=(1, 4, 3), fletcher32=True)
        group["forces"].attrs["units"] = "eV/angstrom"
        group["cell"], group["pbc"] = columns["cell"], columns["pbc"]


def write_hdf5_deepmd(folder: Path) -> None:
    columns = arrays()
    with h5py.File(folder / "a.hdf5", "w") as file:
        group = file.create_group("water")
        group["type.raw"], group["type_map.raw"] = [0, 1, 0, 2], [b"H", b"O", b"C"]
        group["set.000/coord.npy"] = columns["R"].reshape(N, -1)
        group["set.000/energy.npy"] = columns["E"]
        group["set.000/box.npy"] = np.tile(9 * np.eye(3).reshape(-1), (N, 1))


def write_store(folder: Path) -> None:
    np.savez(folder.parent / "store-source.npz", **arrays())
    convert(str(folder.parent / "store-source.npz"), folder / "store")


def inner_zip(content: bytes, rng: np.random.Generator) -> bytes:
    """Damages one member and writes a sound zip file around it."""
    with zipfile.ZipFile(io.BytesIO(content)) as archive:
        members = [(item, archive.read(item)) for item in archive.infolist()]
    at, stream = int(rng.integers(len(members))), io.BytesIO()
    with zipfile.ZipFile(stream, "w") as archive:
        for i, (item, data) in enumerate(members):
            archive.writestr(item.filename, mutated(data, rng) if i == at else data, item.compress_type)
    return stream.getvalue()


# --- grids


def write_cube(folder: Path) -> None:
    with (folder / "a.cube").open("w") as file:
        ase.io.cube.write_cube(file, emt_frames(1, 0)[0], np.random.default_rng(0).random((3, 4, 5)))


def write_xsf(folder: Path) -> None:
    with (folder / "a.xsf").open("w") as file:
        ase.io.xsf.write_xsf(file, emt_frames(1, 0)[:1], np.random.default_rng(0).random((3, 4, 5)))


def _grid(folder: Path) -> list[Any]:
    (path,) = folder.iterdir()
    grid = read_grid_file(path)
    return [grid.values.tolist(), grid.cell.tolist(), grid.numbers.tolist(), grid.positions.tolist()]


def _rows(folder: Path) -> list[Any]:
    (path,) = folder.iterdir()
    rows = open_rows(path)
    if rows.n_rows > 10_000:
        raise Differs(f"{rows.n_rows} rows")
    return [rows.grid_shape, rows.n_columns, rows.read(0, rows.n_rows).tolist()]


def write_rows(folder: Path) -> None:
    np.save(folder / "a.npy", np.random.default_rng(0).random((3, 4, 5, 2)))


def write_openpmd(folder: Path) -> None:
    with h5py.File(folder / "a.h5", "w") as file:
        file.attrs["basePath"], file.attrs["meshesPath"] = "/data/%T/", "meshes/"
        mesh = file.create_group("data/0/meshes/LDOS")
        mesh.attrs["axisLabels"], mesh.attrs["dataOrder"] = [b"x", b"y", b"z"], b"C"
        for level in range(2):
            mesh[str(level)] = np.random.default_rng(level).random((3, 4, 5))
            mesh[str(level)].attrs["unitSI"] = 1.0


def write_openpmd_info(folder: Path) -> None:
    info = parse_info({**mala_archive.INFO, "fermi_energy_dft": 5.0}, "made")
    with writing_grid(folder / "a.h5", (4, 3, 5, 2), np.float32, info=info) as file:
        file.write_planes(0, np.ones((4, 3, 5, 2)))


def write_info(folder: Path) -> None:
    (folder / "a.info.json").write_text(json.dumps({**mala_archive.INFO, "fermi_energy_dft": 5.0}))


def _info(folder: Path) -> list[Any]:
    (path,) = folder.iterdir()
    return [repr(read_info(path).to_json())]


# --- settings, models, checkpoints

CONFIG = """\
name: water
seed: 3
data: {train: a.extxyz, val: 0.1, cutoff: 4.0, batch: {frames: 4}}
model: &m {name: nequip, preset: S, num_layers: 2}
task: {energy: {weight: 1}, forces: {weight: 10, schedule: {kind: sigmoid, to: 1}}}
training: {lr: 0.01, ema: 0.99, precision: float64}
trainer: {max_epochs: 3}
"""
DEEPMD_INPUT = {
    "model": {
        "type_map": ["O", "H"],
        "descriptor": {"type": "se_e2_a", "sel": [46, 92], "rcut": 6.0, "neuron": [5, 10], "axis_neuron": 4, "seed": 1},
        "fitting_net": {"neuron": [10, 10], "resnet_dt": True, "seed": 1},
    },
    "learning_rate": {"type": "exp", "decay_steps": 50, "start_lr": 0.001, "stop_lr": 3.5e-8},
    "loss": {"type": "ener", "start_pref_e": 0.02, "limit_pref_e": 1, "start_pref_f": 1000, "limit_pref_f": 1},
    "training": {"training_data": {"systems": ["data"], "batch_size": 1}, "numb_steps": 100, "seed": 1},
}


def _config(folder: Path) -> list[Any]:
    (path,) = folder.iterdir()
    return [str(load_config(path))]


def write_run(folder: Path) -> None:
    options = {"name": "schnet", "preset": "S", "num_features": 4, "num_layers": 1, "avg_num_neighbours": 5.0}
    options |= {"energy_shifts": {"Cu": 0.0, "Au": 0.0}, "energy_scales": 1.0}
    resolved = resolve_model(options, species=("Cu", "Au"), cutoff=3.0, statistics=None)
    potential = build_model(resolved, precision="float64", seed=0)
    settings: dict[str, Any] = {"resolved": resolved, "potential": potential}
    create_run_from_model(name="run", out=folder, origin="fuzz", precision="float64", **settings)


def _run(folder: Path) -> list[Any]:
    run = Run.open(folder / "run")
    _ = run.config, run.species, run.cutoff, run.graph, run.heads, run.units, run.classes, run.of_points, run.metrics()
    return [{name: value.tolist() for name, value in run.load_model().state_dict().items()}]


def write_checkpoint(folder: Path) -> None:
    content = {"state_dict": {"a": torch.arange(12.0).reshape(3, 4)}, "epoch": 3, "names": ["x", "y"], "rate": 0.5}
    save_checkpoint(folder / "step-3.ckpt", content)


def _checkpoint(folder: Path) -> str:
    try:
        return repr(load_checkpoint(folder / "step-3.ckpt"))
    except DamagedCheckpoint as error:
        raise ForgefieldError(str(error)) from error


def write_mala(folder: Path) -> None:
    rng, sizes = np.random.default_rng(0), [4, 5, 7]
    kinds = (("feature-wise-standard", 4), ("minmax", 7))
    scalers = [mala_archive.scaler(kind, rng.random((9, columns))) for kind, columns in kinds]
    mala_archive.write(folder / "a.zip", mala_archive.layers(sizes), mala_archive.parameters(sizes), scalers)


def write_nequip(folder: Path) -> None:
    torch.save(checkpoint(trained_elsewhere()[1]), folder / "a.ckpt")


PACKAGE = Path(__file__).parents[1] / "models" / "nequip" / "packages" / "nequip_again.nequip.zip.xz"


def write_package(folder: Path) -> None:
    (folder / "a.nequip.zip").write_bytes(lzma.decompress(PACKAGE.read_bytes()))


def _imported(read: Callable[[Path], Any]) -> Callable[[Path], list[Any]]:
    def look(folder: Path) -> list[Any]:
        (path,) = folder.iterdir()
        model = read(path)
        return [repr(model.resolved), {name: value.tolist() for name, value in model.state.items()}]

    return look


FORMATS = {
    kind.name: kind
    for kind in (
        Format("extxyz", write_extxyz, structures, oracle=lambda folder: of_ase(folder, "extxyz")),
        Format("xyz", write_xyz, structures, oracle=lambda folder: of_ase(folder, "extxyz")),
        Format("db", write_database, structures, oracle=lambda folder: of_ase(folder, "db")),
        Format("npz", npz(False), frames_of_folder, inner=inner_zip),
        Format("npz-compressed", npz(True), frames_of_folder, inner=inner_zip),
        Format("deepmd", write_deepmd, frames_of_folder),
        Format("deepmd-text", write_deepmd_text, frames_of_folder),
        Format("lmdb", write_lmdb, frames_of_folder, inner=inner_lmdb(False)),
        Format("aselmdb", write_aselmdb, frames_of_folder, inner=inner_lmdb(True)),
        Format("hdf5", write_hdf5, frames_of_folder),
        Format("hdf5-deepmd", write_hdf5_deepmd, frames_of_folder),
        Format("store", write_store, frames_of_folder, exact=True),
        Format("cube", write_cube, _grid),
        Format("xsf", write_xsf, _grid),
        Format("rows", write_rows, _rows),
        Format("openpmd", write_openpmd, _rows),
        Format("openpmd-info", write_openpmd_info, _info),
        Format("info", write_info, _info),
        Format("config", lambda folder: (folder / "a.yaml").write_text(CONFIG), _config),
        Format("input", lambda folder: (folder / "a.json").write_text(json.dumps(DEEPMD_INPUT, indent=1)), _config),
        Format("run", write_run, _run),
        Format("checkpoint", write_checkpoint, _checkpoint, exact=True),
        Format("mala", write_mala, _imported(read_mala), inner=inner_zip),
        Format("nequip", write_nequip, _imported(read_nequip), inner=inner_zip),
        Format("package", write_package, _imported(read_nequip), inner=inner_zip),
    )
}
