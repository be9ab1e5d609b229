"""`forgefield data info | convert | sample`, as a user types them: real files, whole results, nothing left by refusals."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path

import ase.io
import numpy as np
import pytest
from PIL import Image

from forgefield.cli import main
from forgefield.data.reading import read_table
from forgefield.data.store.store import HEADER, open_store
from tests.support.helpers import SHARED_DATA, emt_frames, write_emt
from tests.support.warm import Warm

ROOT = Path(__file__).parents[2]
FIELDS = ("positions", "numbers", "cell", "pbc", "energy", "forces", "stress", "weight")


@pytest.fixture
def work(tmp_path, monkeypatch) -> Path:
    folder = tmp_path / "work"
    folder.mkdir()
    monkeypatch.chdir(folder)
    return folder


@pytest.fixture
def source(work) -> Path:
    return write_emt(work / "cu.extxyz", 24)


def done(capsys, *words: str) -> str:
    """What a command that succeeds prints."""
    capsys.readouterr()
    assert main(["data", *words]) == 0, capsys.readouterr().err
    return capsys.readouterr().out


def refused(capsys, *words: str) -> str:
    """The one sentence of a command that fails."""
    capsys.readouterr()
    assert main(["data", *words]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    line = captured.err.strip().splitlines()[0]
    assert line.startswith("error: ")
    return line


def assert_same_frames(one: str, other: str) -> None:
    """Every number of every frame, to the last bit."""
    for before, after in zip(read_table(one), read_table(other), strict=True):
        for name in FIELDS:
            old, new = getattr(before, name), getattr(after, name)
            assert (old is None) == (new is None), name
            assert old is None or np.asarray(old).tobytes() == np.asarray(new).tobytes(), name


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


# ---- convert


def test_from_extxyz_to_a_store_and_back_is_exact(source, capsys):
    printed = done(capsys, "convert", "cu.extxyz", "cu", "--cutoff", "4", "--workers", "1")
    n_atoms = sum(map(len, read_table("cu.extxyz")))
    assert f"wrote cu: 24 frames, {n_atoms} atoms, " in printed
    assert "data.train: cu" in printed
    done(capsys, "convert", "cu", "back.extxyz")
    assert_same_frames("cu.extxyz", "back.extxyz")
    assert_same_frames("cu.extxyz", "cu")
    done(capsys, "convert", "back.extxyz", "cu", "other")  # a file and a store together
    assert len(open_store("other").table()) == 48


def test_ase_reads_what_was_written(source, capsys):
    import ase.io

    done(capsys, "convert", "cu.extxyz", "out.xyz")
    for ours, theirs in zip(ase.io.read("out.xyz", ":"), ase.io.read("cu.extxyz", ":"), strict=True):
        np.testing.assert_array_equal(ours.positions, theirs.positions)
        np.testing.assert_array_equal(ours.get_forces(), theirs.get_forces())
        np.testing.assert_array_equal(ours.get_stress(), theirs.get_stress())
        assert ours.get_potential_energy() == theirs.get_potential_energy()


def test_units_and_labels_are_those_of_the_options(work, capsys):
    frames = emt_frames(3, seed=1)
    for atoms in frames:
        atoms.info["mine"] = atoms.get_potential_energy()
        atoms.calc = None
    import ase.io

    ase.io.write("mine.extxyz", frames, format="extxyz")
    done(capsys, "convert", "mine.extxyz", "mine", "--energy-key", "mine", "--energy-unit", "kcal/mol")
    factor = 4184 / 6.022140857e23 / 1.6021766208e-19
    for atoms, frame in zip(frames, open_store("mine").table(), strict=True):
        assert frame.energy == pytest.approx(atoms.info["mine"] * factor, rel=1e-12)
        assert frame.forces is None


def test_a_store_holds_the_neighbour_lists_that_are_requested(source, capsys):
    done(capsys, "convert", "cu.extxyz", "a", "--cutoff", "3", "--adaptive-cutoff", "4.5")
    done(capsys, "convert", "cu.extxyz", "b", "--cutoff", "3", "--max-neighbours", "6")
    a, b = open_store("a").graph, open_store("b").graph
    assert (a.cutoff, a.adaptive_cutoff, a.max_neighbours) == (3.0, 4.5, None)
    assert (b.cutoff, b.adaptive_cutoff, b.max_neighbours) == (3.0, None, 6)
    assert "neighbour lists of 3 A, growing to 4.5 A" in done(capsys, "info", "a")
    assert "neighbour lists of 3 A, 6 nearest only" in done(capsys, "info", "b")


def test_refusals_of_convert_write_nothing(source, work, capsys):
    (work / "there").mkdir()
    before = contents(work)
    for words, piece in (
        (("cu.extxyz", "there"), "there exists already"),
        (("cu.extxyz", "cu.extxyz"), "cu.extxyz exists already"),
        (("nothing.extxyz", "new"), "nothing.extxyz: there is no such file"),
        (("cu.extxyz", "new.npz"), "'.npz' are read but not written"),
        (("cu.extxyz", "new.cif"), "'.cif' are read but not written"),
        (("cu.extxyz", "no/new.extxyz"), "the folder no does not exist"),
        (("cu.extxyz", "new.extxyz", "--cutoff", "4"), "only a store can"),
        (("cu.extxyz", "new.extxyz", "--workers", "2"), "workers applies to stores"),
        (("cu.extxyz", "new", "--workers", "0"), "workers must be at least 1, not 0"),
        (("cu.extxyz", "new", "--cutoff", "-1"), "positive length"),
        (("cu.extxyz", "new", "--max-neighbours", "5"), "--max-neighbours needs --cutoff"),
        (("cu.extxyz", "new", "--energy-key", "mine"), "no frame of cu.extxyz has that key"),
        (("cu.extxyz", "new.extxyz", "--energy-key", "mine"), "no frame of cu.extxyz has that key"),
        (("cu.extxyz", "new", "--energy-unit", "cal"), "'cal' is not an energy unit"),
    ):
        assert piece in refused(capsys, "convert", *words), words
        assert contents(work) == before, words
        assert sorted(path.name for path in work.iterdir()) == ["cu.extxyz", "there"], words


@pytest.mark.parametrize("workers", ["1", "2"])
def test_a_bad_frame_is_named_and_leaves_nothing(work, capsys, workers):
    text = write_emt(work / "one.extxyz", 20).read_text() * 120
    lines = text.splitlines(keepends=True)
    lines[-1] = lines[-1].replace(lines[-1].split()[2], "nan", 1)
    (work / "bad.extxyz").write_text("".join(lines))
    for target in ("new", *(["new.extxyz"] if workers == "1" else [])):
        more = ["--workers", workers] if target == "new" else []
        message = refused(capsys, "convert", "bad.extxyz", target, *more)
        assert "bad.extxyz, frame 2399" in message
        assert "NaN" in message
        assert sorted(path.name for path in work.iterdir()) == ["bad.extxyz", "one.extxyz"]


def test_folders_of_others_are_not_deleted(source, work, capsys):
    mine = work / "new.partial"
    mine.mkdir()
    (mine / "thesis.tex").write_text("precious")
    assert "new.partial is in the way" in refused(capsys, "convert", "cu.extxyz", "new")
    assert (mine / "thesis.tex").read_text() == "precious"
    assert not (work / "new").exists()


def test_options_that_would_change_nothing_are_refused(source, capsys):
    done(capsys, "convert", "cu.extxyz", "cu")
    for words in (["info", "cu"], ["convert", "cu", "x"], ["sample", "cu", "3"]):
        assert "data.units.energy=Ha does not apply to a store" in refused(capsys, *words, "--energy-unit", "Ha")


# ---- interrupted and parallel conversions


@pytest.fixture(scope="module")
def large(tmp_path_factory) -> Path:
    """A file of 3600 frames, which make several parts."""
    path = write_emt(tmp_path_factory.mktemp("large") / "large.extxyz", 30)
    path.write_text(path.read_text() * 120)
    return path


@pytest.fixture(scope="module")
def whole(large) -> dict[str, bytes]:
    """The store of an uninterrupted conversion by one process."""
    target = large.with_name("whole")
    assert main(["data", "convert", str(large), str(target), "--cutoff", "3.5", "--workers", "1"]) == 0
    assert len(open_store(target).parts) > 2
    return contents(target)


def conversion(large: Path, target: Path, workers: int) -> Warm:
    words = ["convert", str(large), str(target), "--cutoff", "3.5", "--workers", str(workers)]
    return Warm(["forgefield", "data", *words], ROOT, {**os.environ, "OMP_NUM_THREADS": "1"})


def wait_for_a_part(process: Warm, target: Path) -> None:
    """Until one part is finished (its folder is called .partial before) and the next not yet."""
    partial = target.with_name(target.name + ".partial")
    limit = time.monotonic() + 120
    while not list(partial.glob("part-?????/part.json")):
        assert process.poll() is None, process.printed()
        assert time.monotonic() < limit
        assert not target.exists()
        time.sleep(0.005)


@pytest.mark.slow
@pytest.mark.parametrize("workers", [1, 2])
def test_killed_and_run_again_it_is_as_if_nothing_had_happened(large, whole, tmp_path, workers):
    target = tmp_path / "store"
    process = conversion(large, target, workers)
    wait_for_a_part(process, target)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    assert not target.exists()
    finished = {path.parent.name for path in (tmp_path / "store.partial").glob("part-?????/part.json")}
    kept = (tmp_path / "store.partial" / min(finished) / "positions.npy").stat()
    again = conversion(large, target, workers)
    assert again.wait() == 0, again.printed()
    assert contents(target) == whole
    assert (target / min(finished) / "positions.npy").stat().st_ino == kept.st_ino  # it was not written anew
    assert sorted(path.name for path in tmp_path.iterdir() if path.name != "cache") == ["store"]


@pytest.mark.slow
@pytest.mark.parametrize("workers", [1, 2])
def test_after_ctrl_c_the_same_command_resumes(large, whole, tmp_path, workers):
    target = tmp_path / "store"
    process = conversion(large, target, workers)
    wait_for_a_part(process, target)
    os.killpg(process.pid, signal.SIGINT)  # as a terminal sends it: to all processes of the command
    assert process.wait() == 130
    out, err = process.printed()
    assert out == ""
    assert err.splitlines() == [
        f"interrupted: run the same command to resume; finished parts are kept in {target}.partial"
    ]
    assert not target.exists()
    assert main(["data", "convert", str(large), str(target), "--cutoff", "3.5", "--workers", "1"]) == 0
    assert contents(target) == whole


@pytest.mark.slow
def test_any_number_of_processes_writes_the_same_bytes(large, whole, tmp_path):
    process = conversion(large, tmp_path / "store", 2)
    assert process.wait() == 0, process.printed()
    assert contents(tmp_path / "store") == whole


@pytest.mark.slow
def test_what_another_conversion_left_is_not_taken_over(large, tmp_path, capsys):
    target = tmp_path / "store"
    process = conversion(large, target, 1)
    wait_for_a_part(process, target)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    done(capsys, "convert", str(large), str(target), "--workers", "1")  # without neighbour lists
    store = open_store(target)
    assert store.graph is None
    assert not list(target.rglob("edge_source.npy"))
    assert len(store.table()) == 3600


# ---- info


def test_info_describes_a_store(source, capsys):
    done(capsys, "convert", "cu.extxyz", "cu", "--cutoff", "4")
    printed = done(capsys, "info", "cu")
    manifest = json.loads(Path("cu/manifest.json").read_text())
    assert f"in 1 part, neighbour lists of 4 A, matches its hashes; content {manifest['hash']}" in printed
    of_file = done(capsys, "info", "cu.extxyz")
    assert [line.rstrip() for line in printed.splitlines()][1:] == [line.rstrip() for line in of_file.splitlines()]
    for label in ("energy", "forces", "stress"):
        assert any(line.startswith(label) and "24 of 24 frames" in line for line in of_file.splitlines())


def test_info_lists_the_first_sources(work, capsys):
    for number in range(12):
        write_emt(work / f"{number:02d}.extxyz", 2 + number)
    printed = done(capsys, "info", "*.extxyz")
    assert "00.extxyz: 2 frames" in printed
    assert "09.extxyz: 11 frames" in printed
    assert "10.extxyz: 12" not in printed
    assert "and 2 more with 25 frames" in printed


def flip_a_byte(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[HEADER + 11] ^= 1
    path.write_bytes(content)


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-8])


def edit(path: Path) -> None:
    path.write_text(path.read_text().replace('"n_frames": 24', '"n_frames": 23'))


@pytest.mark.parametrize(
    ("file", "damage", "piece"),
    [
        ("part-00000/positions.npy", flip_a_byte, "does not match the hash in the manifest"),
        ("part-00000/edge_source.npy", flip_a_byte, "does not match the hash in the manifest"),
        ("part-00000/forces.npy", cut, "bytes and the manifest says"),
        ("part-00000/energy.npy", Path.unlink, "is missing"),
        ("manifest.json", edit, "does not match its own hash"),
        ("manifest.json", cut, "not valid JSON"),
    ],
    ids=["bit flipped", "bit of a neighbour list flipped", "cut short", "deleted", "manifest edited", "manifest cut"],
)
def test_a_damaged_store_is_refused(source, capsys, file, damage, piece):
    done(capsys, "convert", "cu.extxyz", "cu", "--cutoff", "3")
    damage(Path("cu") / file)
    message = refused(capsys, "info", "cu")
    assert piece in message
    assert file in message
    refused(capsys, "convert", "cu", "out.extxyz")
    assert not Path("out.extxyz").exists()


def test_a_large_store_is_compared_with_its_hashes_by_default(source, capsys, monkeypatch):
    monkeypatch.setattr("forgefield.data.store.store.VERIFIED_BELOW", 0)
    done(capsys, "convert", "cu.extxyz", "cu")
    flip_a_byte(Path("cu/part-00000/positions.npy"))
    assert "does not match the hash" in refused(capsys, "info", "cu")
    assert "not compared with its hashes" in done(capsys, "info", "cu", "--no-verify")


@pytest.mark.parametrize("suffix", ["png", "svg", "pdf"])
def test_info_draws_a_figure(source, capsys, suffix):
    assert f"wrote cu.{suffix}" in done(capsys, "info", "cu.extxyz", "--figure", f"cu.{suffix}")
    content = Path(f"cu.{suffix}").read_bytes()
    if suffix == "svg":
        text = content.decode()
        for words in ("Atoms per frame", "energy, meV/atom", "force, eV/Å", "stress, GPa", "distance, Å"):
            assert words in text
    if suffix == "png":
        image = np.asarray(Image.open("cu.png").convert("L"))
        assert image.shape[0] > 600
        assert image.shape[1] > 1200
        drawn = (image < 250).mean()
        assert 0.02 < drawn < 0.6
        edge = np.concatenate([image[:4].ravel(), image[-4:].ravel(), image[:, :4].ravel(), image[:, -4:].ravel()])
        assert edge.min() == 255  # nothing is cut off


def test_a_figure_shows_only_what_is_there(work, capsys):
    frames = emt_frames(5, seed=0)
    for atoms in frames:
        atoms.calc = None
    import ase.io

    ase.io.write("bare.extxyz", frames, format="extxyz")
    done(capsys, "info", "bare.extxyz", "--figure", "bare.svg")
    text = Path("bare.svg").read_text()
    assert "Atoms per frame" in text
    assert "distance, Å" in text
    assert "eV" not in text
    assert "GPa" not in text


def test_refusals_of_info_write_nothing(source, work, capsys):
    (work / "there.png").write_bytes(b"mine")
    assert "the name of a figure must end in .png" in refused(capsys, "info", "cu.extxyz", "--figure", "cu.jpeg")
    assert "there.png exists already" in refused(capsys, "info", "cu.extxyz", "--figure", "there.png")
    assert "folder no does not exist" in refused(capsys, "info", "cu.extxyz", "--figure", "no/cu.png")
    assert "cutoff must be a positive length in A, not 0" in refused(capsys, "info", "cu.extxyz", "--cutoff", "0")
    assert sorted(path.name for path in work.iterdir()) == ["cu.extxyz", "there.png"]
    assert (work / "there.png").read_bytes() == b"mine"


# ---- sample


def test_sample_takes_frames_as_they_are(source, capsys):
    printed = done(capsys, "sample", "cu.extxyz", "6")
    taken = next(line for line in printed.splitlines() if line.startswith("  cu.extxyz: frames "))
    rows = [int(word) for word in taken.split("frames ")[1].split(", ")]
    assert len(rows) == 6
    assert "6 of 24 frames" in printed
    every = list(read_table("cu.extxyz"))
    for row, frame in zip(rows, read_table("cu-6.extxyz"), strict=True):
        for name in FIELDS:
            np.testing.assert_array_equal(getattr(every[row], name), getattr(frame, name))


def test_sample_into_a_store_keeps_weights_names_and_neighbour_lists(work, capsys):
    text = write_emt(work / "one.extxyz", 8).read_text()
    (work / "two.extxyz").write_text(text.replace(" pbc=", " config_weight=0.25 pbc="))
    done(capsys, "sample", "one.extxyz", "two.extxyz", "9", "-o", "dev", "--cutoff", "3")
    store = open_store("dev")
    frames = list(store.table())
    assert len(frames) == 9
    assert store.graph.cutoff == 3.0
    assert {(frame.source, frame.weight) for frame in frames} == {("one.extxyz", 1.0), ("two.extxyz", 0.25)}
    every = {name: list(read_table(name)) for name in ("one.extxyz", "two.extxyz")}
    for frame in frames:
        assert np.array_equal(every[frame.source][frame.index].positions, frame.positions)


def test_sample_of_more_than_there_is_takes_all(source, capsys):
    assert "24 of 24 frames: all there are" in done(capsys, "sample", "cu.extxyz", "99", "-o", "all.extxyz")
    assert_same_frames("cu.extxyz", "all.extxyz")


def test_refusals_of_sample_write_nothing(source, work, capsys):
    (work / "cu-5.extxyz").write_text("mine")
    assert "cu-5.extxyz exists already" in refused(capsys, "sample", "cu.extxyz", "5")
    assert "the number of frames, 1 or more, not 'many'" in refused(capsys, "sample", "cu.extxyz", "many")
    assert "the number of frames, 1 or more, not '0'" in refused(capsys, "sample", "cu.extxyz", "0")
    assert "only a store can" in refused(capsys, "sample", "cu.extxyz", "4", "--cutoff", "3")
    assert sorted(path.name for path in work.iterdir()) == ["cu-5.extxyz", "cu.extxyz"]
    assert (work / "cu-5.extxyz").read_text() == "mine"


def test_additional_fields_are_named_on_the_command_line(work, capsys):
    frames = emt_frames(3, seed=1)
    for number, atoms in enumerate(frames):
        atoms.info |= {"band_gap": 0.5 * number, "mu": np.arange(3.0)}
        atoms.arrays["charge"] = np.full(len(atoms), 0.25)
    ase.io.write("more.extxyz", frames, format="extxyz")
    words = ("--field", "gap=band_gap", "--field", "charge:atom", "--field", "mu:frame:3")
    text = done(capsys, "info", "more.extxyz", *words)
    assert "0 to 1, 3 of 3 frames" in next(line for line in text.splitlines() if line.startswith("gap"))
    done(capsys, "convert", "more.extxyz", "more.store", *words)
    frame = next(iter(read_table("more.store")))
    assert frame.fields["mu"].tolist() == [0.0, 1.0, 2.0]
    assert frame.fields["charge"].tolist() == [0.25] * len(frame)
    assert "a shape is numbers with x between them" in refused(capsys, "info", "more.extxyz", "--field", "mu:frame:a")
    assert "charge" not in done(capsys, "info", "more.store", "--field", "gap")  # the other fields are left out
    message = refused(capsys, "info", "more.store", "--field", "gap=band_gap")
    assert "data.labels.fields.gap.key=band_gap does not apply to a store" in message


@pytest.mark.parametrize("verb", ["info", "convert", "sample"])
def test_help_has_examples(verb, capsys):
    assert main(["data", verb, "--help"]) == 0
    assert f"forgefield data {verb} " in capsys.readouterr().out.split("examples:")[1]


# ---- real data


@pytest.mark.skipif(not SHARED_DATA.is_dir(), reason="the real data sets are not here")
@pytest.mark.parametrize("name", ["water_dp/data_0", "mlearn/Cu_test.xyz", "3bpa/iso_atoms.xyz", "matsciml_lmdb/lips"])
def test_real_data_survives_the_way_through_a_store_and_a_file(work, capsys, name):
    real = str(SHARED_DATA / name)
    done(capsys, "convert", real, "store", "--workers", "1")
    done(capsys, "convert", "store", "file.extxyz")
    assert_same_frames(real, "store")
    assert_same_frames(real, "file.extxyz")
    done(capsys, "sample", "store", "3", "-o", "few.extxyz")
    assert len(read_table("few.extxyz")) == 3
