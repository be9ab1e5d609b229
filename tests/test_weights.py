"""Trained weights are what was written, or they are refused."""

from __future__ import annotations

import errno
import json
import os
import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from forgefield.api import Calculator, predict
from forgefield.errors import ForgefieldError
from forgefield.files import read_bytes, remove_leftovers, temporary_name, written_atomically
from forgefield.report.folder import read_run
from forgefield.weights import digest, read_weights, write_weights
from tests.support.helpers import tiny_config
from tests.support.train_many import train_only

STATE = {"b": torch.arange(6.0).reshape(2, 3), "a": torch.tensor(3, dtype=torch.int64), "c": torch.ones(2).bfloat16()}


def test_weights_come_back_with_what_was_noted(tmp_path):
    write_weights(tmp_path / "a.safetensors", STATE, {"step": 7})
    stored = read_weights(tmp_path / "a.safetensors")
    assert stored.about["step"] == 7
    assert stored.sha256 == digest(STATE) == digest(dict(reversed(STATE.items())))
    assert all(torch.equal(stored.state[name], tensor) for name, tensor in STATE.items())


def test_every_flipped_bit_of_the_tensors_is_noticed(tmp_path):
    path = tmp_path / "a.safetensors"
    write_weights(path, STATE, {})
    content = path.read_bytes()
    first = 8 + int.from_bytes(content[:8], "little")
    for place in range(first, len(content)):
        changed = bytearray(content)
        changed[place] ^= 1 << (place % 8)
        path.write_bytes(changed)
        with pytest.raises(ForgefieldError, match="do not match the checksum"):
            read_weights(path)


def test_names_shapes_and_types_are_part_of_the_checksum():
    values = torch.arange(6.0)
    variants = [{"a": values}, {"b": values}, {"a": values.reshape(2, 3)}, {"a": values.view(torch.int32)}]
    assert len({digest(state) for state in variants}) == len(variants)


def test_weights_of_earlier_versions_are_loaded(tmp_path):
    save_file(STATE, tmp_path / "a.safetensors", metadata={"about": json.dumps({"step": 3})})
    assert read_weights(tmp_path / "a.safetensors").about["step"] == 3
    save_file(STATE, tmp_path / "b.safetensors", metadata={"origin": "elsewhere"})
    assert read_weights(tmp_path / "b.safetensors").sha256 == digest(STATE)


def test_a_run_with_damaged_weights_is_not_used(tmp_path):
    config = tiny_config(tmp_path)
    run = train_only(config, "trainer.max_epochs=1")
    path = run.weights_path("best")
    content = bytearray(path.read_bytes())
    content[-5] ^= 0x10
    path.write_bytes(content)
    message = "best.safetensors is damaged"
    with pytest.raises(ForgefieldError, match=message):
        Calculator(run.path)
    with pytest.raises(ForgefieldError, match=message):
        predict(run, config["data"]["train"], tmp_path / "out.extxyz")
    with pytest.raises(ForgefieldError, match=message):
        train_only({**config, "name": "other", "model": {"from": str(run.path)}})


class Failing(type(Path())):
    """A path whose first reads fail as those of a disk do."""

    failures = 0

    def read_bytes(self) -> bytes:
        type(self).failures -= 1
        if type(self).failures >= 0:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return super().read_bytes()


def test_an_error_of_the_disk_that_passes_does_not_count(tmp_path, monkeypatch):
    (tmp_path / "a").write_bytes(b"content")
    monkeypatch.setattr(Failing, "failures", 2)
    assert read_bytes(Failing(tmp_path / "a")) == b"content"
    monkeypatch.setattr(Failing, "failures", 9)
    with pytest.raises(ForgefieldError, match="Input/output error"):
        read_bytes(Failing(tmp_path / "a"))


def test_temporary_files_of_processes_that_are_gone_are_removed(tmp_path):
    code = f"""
import os, signal
from pathlib import Path
from forgefield.files import written_atomically
with written_atomically(Path({str(tmp_path / "a.json")!r})) as partial:
    partial.write_text("half")
    os.kill(os.getpid(), signal.SIGKILL)
"""
    subprocess.run([sys.executable, "-c", code], check=False)
    (left,) = tmp_path.iterdir()
    ours = temporary_name(tmp_path / "b.npz")
    elsewhere = tmp_path / left.name.replace(socket.gethostname().replace("-", "_").replace(".", "_"), "other_host")
    of_user = tmp_path / ".notes.partial-1.txt.bak.d"
    for path in (ours, elsewhere, of_user):
        path.write_text("")
    assert remove_leftovers(tmp_path) == [left]
    assert set(tmp_path.iterdir()) == {ours, elsewhere, of_user}
    os.utime(elsewhere, (0, 0))
    assert remove_leftovers(tmp_path) == [elsewhere]
    assert remove_leftovers(tmp_path / "missing") == []


def test_writing_a_file_removes_what_a_crash_left_of_it_and_nothing_else(tmp_path):
    """Predictions are written to folders of the user, which no run looks after."""
    code = f"""
import os, signal
from pathlib import Path
from forgefield.files import temporary_name
for name in ("a.xyz", "b.xyz", "a.json", "a"):
    temporary_name(Path({str(tmp_path)!r}) / name).write_text("half")
folder = temporary_name(Path({str(tmp_path)!r}) / "folder")
folder.mkdir()
(folder / "file").write_text("half")
os.kill(os.getpid(), signal.SIGKILL)
"""
    subprocess.run([sys.executable, "-c", code], check=False)
    assert len(list(tmp_path.iterdir())) == 5
    with written_atomically(tmp_path / "a.xyz") as partial:
        partial.write_text("whole")

    def names() -> list[str]:
        return sorted(re.sub(r"-\w+-\d+", "", path.name) for path in tmp_path.iterdir())

    assert names() == [".a.partial", ".a.partial.json", ".b.partial.xyz", ".folder.partial", "a.xyz"]
    remove_leftovers(tmp_path, of=tmp_path / "folder")
    remove_leftovers(tmp_path, of=tmp_path / "a")
    assert names() == [".a.partial.json", ".b.partial.xyz", "a.xyz"]


def test_the_layout_in_memory_is_not_part_of_the_checksum():
    matrix = torch.arange(12.0).reshape(3, 4)
    assert digest({"a": matrix.T.contiguous()}) == digest({"a": matrix.T})


def test_a_report_leaves_out_test_results_of_earlier_weights(tmp_path):
    (tmp_path / "run" / "checkpoints").mkdir(parents=True)
    write_weights(tmp_path / "run" / "checkpoints" / "best.safetensors", STATE, {})
    results = {"weights": "best", "weights_sha256": digest(STATE), "errors": {"energy_mae": 1.0}}
    path = tmp_path / "run" / "test.json"
    path.write_text(json.dumps(results))
    assert read_run(tmp_path / "run").tests == {"test": results}
    path.write_text(json.dumps(results | {"weights_sha256": digest({"a": STATE["a"]})}))
    run = read_run(tmp_path / "run")
    assert run.tests == {}
    assert any(note.file == "test.json" and "earlier weights" in note.problem for note in run.notes)
