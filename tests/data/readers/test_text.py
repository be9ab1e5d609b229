"""Text files that say something wrong are refused with file, frame, line and reason; what is read is what ASE reads."""

from __future__ import annotations

import ase.io
import numpy as np
import pytest

from forgefield.data.options import DataOptions
from forgefield.data.readers import chunks, read_frames, source_files
from forgefield.data.splits import resolve_splits
from forgefield.errors import ForgefieldError

HEADER = 'Lattice="4 0 0 0 4 0 0 0 4" Properties=species:S:1:pos:R:3:forces:R:3 energy=1 pbc="T T T"'
ROWS = ["Cu 0 0 0 1 2 3", "Cu 1 0 0 4 5 6", "Cu 0 1 0 7 8 9"]


def text_of(rows=ROWS, header=HEADER, count="3") -> str:
    return "\n".join([count, header, *rows]) + "\n"


def refusal(tmp_path, content: str | bytes, name="a.xyz") -> str:
    path = tmp_path / name
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    with pytest.raises(ForgefieldError) as error:
        read_frames(path)
    message = str(error.value)
    assert message.startswith(str(path))
    assert "\n" not in message
    return message


def test_a_line_too_long_followed_by_one_too_short_is_refused(tmp_path):
    """The number of words of the frame is right, and values would be shifted."""
    message = refusal(tmp_path, text_of(["Cu 0 0 0 1 2 3 4", "Cu 1 0 0 4 5", ROWS[2]]))
    assert "frame 0: line 3 has 8 columns instead of 7" in message
    second = text_of() + text_of([ROWS[0], "Cu 1 0 0 4 5", "Cu 0 1 0 7 8 9 9"])
    assert "frame 1: line 9 has 6 columns instead of 7" in refusal(tmp_path, second)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (text_of(["29.7 0 0 0"] * 3, "Properties=Z:R:1:pos:R:3"), "frame 0: 29.7 in column 'Z' (atom 0) is not an atomic"),
        (text_of(["29.7 0 0 0"] * 3, "Properties=Z:I:1:pos:R:3"), "line 3: '29.7' in column 'Z' is not an integer"),
        (text_of(["29.7 0 0 0"] * 3, "Properties=numbers:R:1:pos:R:3"), "29.7 in column 'numbers'"),
        (text_of(["29.7 0 0 0"] * 3, "Properties=species:S:1:pos:R:3"), "'29.7' is not a chemical element"),
        (text_of(["nan 0 0 0"] * 3, "Properties=Z:R:1:pos:R:3"), "nan in column 'Z'"),
        (text_of(["1e9 0 0 0"] * 3, "Properties=Z:R:1:pos:R:3"), "is not an atomic number"),
        (text_of(["9" * 40 + " 0 0 0"] * 3, "Properties=Z:I:1:pos:R:3"), "is not an integer"),
        (text_of(["Cu 8 0 0 0"] * 3, "Properties=species:S:1:Z:I:1:pos:R:3"), "columns of elements disagree: atom 0 is 8"),
        (text_of(header=HEADER + " energy=2"), "line 2: energy is given twice, as '1' and as '2'"),
        (text_of(header=HEADER + " pbc=F"), "line 2: pbc is given twice"),
        (text_of(header=HEADER.replace("pos:R:3", "forces:R:3")), "names the column 'forces' twice"),
        (text_of(["C\0 0 0 0 1 2 3", *ROWS[1:]]), "line 3 contains a NUL byte"),
        (text_of(header=HEADER + " name=a\0b"), "line 2 contains a NUL byte"),
        (text_of([ROWS[0], "Cu 1 0 1_0 4 5 6", ROWS[2]]), "line 4: '1_0' in column 'pos' is not a number"),
        (text_of([ROWS[0], "Cu 1 0 \u0663 4 5 6", ROWS[2]]), "line 4: '\u0663' in column 'pos' is not a number"),
        (text_of(["Cu 1_0 0 0 0"] * 3, "Properties=species:S:1:tag:I:1:pos:R:3"), "line 3: '1_0' in column 'tag'"),
        (text_of(["Cu maybe 0 0 0"] * 3, "Properties=species:S:1:a:L:1:pos:R:3"), "line 3: 'maybe' in column 'a' is not T"),
        (text_of(header=HEADER.replace("energy=1", "energy=1_0")), "energy='1_0' is not a number"),
        (text_of(header=HEADER.replace("energy=1", 'energy="1_0 2"')), "is not a number"),
        (text_of(header=HEADER.replace('"T T T"', "nan")), "pbc must be three of T and F"),
        (text_of(header=HEADER.replace('"T T T"', "inf")), "pbc must be three of T and F"),
        (text_of(header=HEADER.replace('"T T T"', "0.5")), "pbc must be three of T and F"),
        (text_of(header=HEADER.replace('"T T T"', '"1 0 2"')), "must be three of T and F"),
        (text_of(header=HEADER.replace('"T T T"', '[{"a":1},1,1]')), "must be three of T and F"),
        (text_of(header=HEADER.replace('pbc="T T T"', "pbc")), "line 2: pbc has no value"),
        (text_of(header=HEADER.replace("forces:R:3", "forces:R:\u00b2")), "is not a list of name:kind:columns"),
        (text_of(header=HEADER.replace("forces:R:3", "forces:R:0")), "is not a list of name:kind:columns"),
        (text_of(header=HEADER.replace("forces:R:3", ":R:3")), "is not a list of name:kind:columns"),
        (text_of(["\u00b2 0 0 0 1 2 3", *ROWS[1:]]), "'\u00b2' is not a chemical element"),
        (text_of(["\u017f 0 0 0 1 2 3", *ROWS[1:]]), "'\u017f' is not a chemical element"),
        (text_of(["999 0 0 0 1 2 3", *ROWS[1:]]), "'999' is not a chemical element"),
        (text_of(count="\u00b2"), "line 1 should hold its number of atoms"),
        (text_of(count="0_3"), "line 1 should hold its number of atoms"),
        (text_of(count="9" * 30), "line 1 should hold its number of atoms"),
        (text_of(count="9" * 9000), "line 1 should hold its number of atoms"),
        (text_of(count="99999999999999"), "announces 99999999999999 atoms, and the file has only"),
        (text_of(header=HEADER + ' name="x'), "line 2: the value of name begins with \" which is never closed"),
        (text_of(header="'" + HEADER), "line 2: a quote, bracket or = stands where none is expected"),
        (text_of(header=HEADER.replace("Properties", "Prop{erties")), "line 2: a quote, bracket or ="),
        (text_of(header=HEADER.replace("forces:R", "forces[:R")), "line 2: a quote, bracket or ="),
        (text_of(header=HEADER.replace('pbc="T T T"', "pbc==T")), "pbc"),
        (text_of(count="\r3"), "line 1 should hold its number of atoms"),
        (text_of(header=HEADER.replace("forces:R:3", "forces:S:3")), "forces"),
        (text_of().encode("utf-16"), "line 1 should hold its number of atoms"),
        (text_of().encode("utf-8-sig"), "byte order mark"),
        (text_of(header=HEADER + " name=Universit\u00e4t").encode("latin-1"), "line 2 is not UTF-8 text"),
        (text_of().replace("\n", "\r"), "line 1 should hold its number of atoms"),
        (text_of([ROWS[0].replace("1 2", "1\r2"), *ROWS[1:]]), "line 3 contains a carriage return"),
    ],
)  # fmt: skip
def test_wrong_extended_xyz_is_refused(tmp_path, content, message):
    assert message in refusal(tmp_path, content)
    chunks(source_files(tmp_path / "a.xyz")[0], 1)  # counting frames never fails: who reads them says what is wrong


def test_a_deeply_nested_value_is_text(tmp_path):
    (tmp_path / "a.xyz").write_text(text_of(header=HEADER + ' deep="_JSON ' + "[" * 50_000 + "]" * 50_000 + '"'))
    assert read_frames(tmp_path / "a.xyz")[0].energy == 1


@pytest.mark.parametrize(
    "content",
    [
        text_of(),
        text_of().replace("\n", "\r\n"),
        text_of(["29.0 0 0 0"] * 3, "Properties=Z:R:1:pos:R:3"),
        text_of(["29 0 0 0"] * 3, "Properties=Z:I:1:pos:R:3"),
        text_of(["29 0 0 0"] * 3, "Properties=numbers:I:1:pos:R:3"),
        text_of(["Cu 29 0 0 0"] * 3, "Properties=species:S:1:Z:I:1:pos:R:3"),
        text_of(["CU 0 0 0", "cu 1 0 0", "Cu 0 0 1"], "Properties=species:S:1:pos:R:3 energy=2 energy=2"),
        text_of(["Cu 0 0 0 T 3", "Cu 1 0 0 F 4", "Cu 0 0 1 T 5"], "Properties=species:S:1:pos:R:3:a:L:1:b:I:1"),
        text_of(header=HEADER + " place=Universit\u00e4t"),
        text_of(header=HEADER.replace('"T T T"', '"1 0 1"')),
        text_of(["Cu\t0\t0 0 1 2 3 ", *ROWS[1:]]),
        text_of(["Cu 0 0 0 extra", "Cu 1 0 0", "Cu 2 0 0 more words"], "a comment"),
    ],
)  # fmt: skip
def test_what_is_read_is_what_ase_reads(tmp_path, content):
    path = tmp_path / "a.xyz"
    path.write_bytes(content.encode())
    (frame,), (atoms,) = read_frames(path), ase.io.read(path, ":", format="extxyz")
    np.testing.assert_array_equal(frame.numbers, atoms.numbers)
    np.testing.assert_array_equal(frame.positions, atoms.positions)
    np.testing.assert_array_equal(frame.cell, atoms.cell[:])
    np.testing.assert_array_equal(frame.pbc, atoms.pbc)
    results = {} if atoms.calc is None else atoms.calc.results
    assert frame.energy == results.get("energy")
    if "forces" in results:
        np.testing.assert_array_equal(frame.forces, results["forces"])
    else:
        assert frame.forces is None


@pytest.mark.parametrize(
    "comment",
    [
        "frame 0 energy -76.126 Ha, optimised",
        "energy",
        "energy: -76.126",
        "stress energy forces virial weight",
        "step=3 energy -76.126",
        " i =        5, time =        2.500, E =       -17.1646447508",
        "5'-AMP, conformer 3, E = -17.16",
    ],
)
def test_words_of_a_comment_are_not_labels(tmp_path, comment):
    (tmp_path / "a.xyz").write_text(f"1\n{comment}\nHe 0 0 0\n")
    (frame,) = read_frames(tmp_path / "a.xyz")
    assert (frame.energy, frame.forces, frame.stress, frame.weight) == (None, None, None, 1.0)


def system(folder, **files: bytes):
    folder.mkdir()
    content = {
        "type.raw": b"0 1\n",
        "type_map.raw": b"O\nH\n",
        "coord.raw": b"0 0 0 0 0 1\n" * 3,
        "box.raw": b"9 0 0 0 9 0 0 0 9\n" * 3,
        "energy.raw": b"1\n2\n3\n",
    }
    content.update({name.replace("_raw", ".raw"): data for name, data in files.items()})
    for name, data in content.items():
        (folder / name).write_bytes(data)
    return folder


def test_deepmd_text_with_windows_line_ends_is_read(tmp_path):
    folder = system(tmp_path / "a", type_raw=b"0\r\n1\r\n", type_map_raw=b"O\r\nH\r\n", energy_raw=b"1\r\n2\r\n3\r\n")
    assert [frame.energy for frame in read_frames(folder)] == [1, 2, 3]
    assert read_frames(folder)[0].numbers.tolist() == [8, 1]


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({"type_raw": b"0\n\xff1\n"}, "type.raw: line 2 is not UTF-8 text"),
        ({"type_raw": b"0\0 1\n"}, "type.raw: line 1 contains a NUL byte"),
        ({"type_raw": "0 1".encode("utf-16")}, "type.raw: line 1 is not UTF-8 text"),
        ({"type_map_raw": b"O \xe9\n"}, "type_map.raw: line 1 is not UTF-8 text"),
        ({"type_map_raw": b"O\0 H\n"}, "type_map.raw: line 1 contains a NUL byte"),
        ({"type_raw": b"0 0_1\n"}, "type.raw should hold one integer for each atom, not '0_1'"),
        ({"type_raw": "0 \u0661\n".encode()}, "type.raw should hold one integer for each atom, not '\u0661'"),
        ({"type_raw": "0 \u00b2\n".encode()}, "type.raw should hold one integer for each atom, not '\u00b2'"),
        ({"type_raw": b"0 " + b"9" * 30}, "type.raw should hold one integer for each atom"),
        ({"type_raw": b"0 1.0\n"}, "type.raw should hold one integer for each atom, not '1.0'"),
        ({"energy_raw": b"1\n1_0\n3\n"}, "energy.raw: row 2: b'1_0' is not a number"),
        ({"coord_raw": b"0 0 0 0 0 1\n0 0 0 0 0 \xff\n0 0 0 0 0 1\n"}, "coord.raw: row 2: b'\\xff' is not a number"),
    ],
)  # fmt: skip
def test_wrong_deepmd_text_is_refused(tmp_path, files, message):
    folder = system(tmp_path / "a", **files)
    with pytest.raises(ForgefieldError) as error:
        read_frames(folder)
    assert message in str(error.value)
    assert str(folder) in str(error.value)


@pytest.mark.parametrize("indices", ["0:1_0", b"0 1 1_0", "0 1 \u00b2".encode(), b"0 \xff", b"9" * 30])
def test_frame_numbers_of_a_split_are_read_strictly(tmp_path, indices):
    (tmp_path / "a.xyz").write_text(text_of() * 11)
    if isinstance(indices, bytes):
        (tmp_path / "rows.txt").write_bytes(indices)
        indices = str(tmp_path / "rows.txt")
    with pytest.raises(ForgefieldError, match="should|is not UTF-8"):
        resolve_splits(DataOptions(train=str(tmp_path / "a.xyz"), val={"indices": indices}), seed=0)
