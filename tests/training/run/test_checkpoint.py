"""Law 8: checkpoints are whole or absent, verified when read, and load without executing anything."""

from __future__ import annotations

import errno
import os
import pickle
import subprocess
from pathlib import Path

import pytest
import torch

from forgefield.api import train
from forgefield.errors import ForgefieldError
from forgefield.files import write_atomically
from forgefield.training.run.checkpoint import (
    DamagedCheckpoint,
    UnreadableCheckpoint,
    checkpoint_path,
    find_resume_point,
    list_checkpoints,
    load_checkpoint,
    save_checkpoint,
)
from tests.support.helpers import tiny_config
from tests.support.train_many import train_only


def test_round_trip(tmp_path):
    content = {"weights": torch.randn(5), "step": 3, "nested": [{"a": 1.5}, "text", None, True]}
    save_checkpoint(tmp_path / "a.ckpt", content)
    loaded = load_checkpoint(tmp_path / "a.ckpt")
    assert torch.equal(loaded["weights"], content["weights"])
    assert loaded["nested"] == content["nested"]
    assert [path.name for path in tmp_path.iterdir()] == ["a.ckpt"]


@pytest.mark.parametrize("damage", ["flip a bit", "cut off", "empty", "text"])
def test_any_damage_is_noticed(damage, tmp_path):
    path = tmp_path / "a.ckpt"
    save_checkpoint(path, {"weights": torch.randn(4000)})
    content = bytearray(path.read_bytes())
    if damage == "flip a bit":
        content[len(content) // 2] ^= 1
    path.write_bytes({"cut off": content[:-100], "empty": b"", "text": b"not a checkpoint"}.get(damage, content))
    with pytest.raises(DamagedCheckpoint):
        load_checkpoint(path)


class Malicious:
    def __reduce__(self):
        return (os.system, ("touch executed",))


def test_code_in_a_checkpoint_is_not_executed(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    torch.save({"weights": Malicious()}, tmp_path / "a.ckpt")
    (tmp_path / "b.ckpt").write_bytes(pickle.dumps(Malicious()))
    for name in ("a.ckpt", "b.ckpt"):
        with pytest.raises((DamagedCheckpoint, UnreadableCheckpoint)):
            load_checkpoint(tmp_path / name)
    assert not (tmp_path / "executed").exists()


def test_damaged_checkpoint_falls_back_to_the_previous_one_with_a_message(tmp_path, capsys):
    config = tiny_config(
        tmp_path, training={"lr": 0.01, "ema": 0.9, "tensorboard": 0, "checkpoint": {"keep": 3, "every_epochs": 1}}
    )
    run = train_only(config)
    newest, previous = list_checkpoints(run.checkpoints)[:2]
    newest.write_bytes(newest.read_bytes()[:-50])
    capsys.readouterr()
    train_only(config, "trainer.max_epochs=4")
    said = capsys.readouterr().out
    assert f"Checkpoint {newest.name} is damaged" in said
    assert f"at step {int(previous.stem.split('-')[1])}" in said
    assert newest.with_suffix(".damaged").exists()


def test_all_damaged_is_an_error_not_a_silent_new_start(tmp_path):
    for step in (1, 2):
        checkpoint_path(tmp_path, step).write_bytes(b"broken")
    for _ in range(2):  # also when asked again
        with pytest.raises(ForgefieldError, match="None of the 2 checkpoints"):
            find_resume_point(tmp_path, lambda text: None)


@pytest.fixture
def small_disk(tmp_path):
    """A real file system of 256 kB; only root can make one."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", str(folder)]
    if os.geteuid() != 0 or subprocess.run(mount, capture_output=True).returncode != 0:
        pytest.skip("needs the right to mount a file system")
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True)


def test_a_full_disk_leaves_the_old_checkpoint_with_a_helpful_message(small_disk: Path):
    path = checkpoint_path(small_disk, 1)
    save_checkpoint(path, {"weights": torch.randn(1000)})
    with pytest.raises(ForgefieldError, match=r"No space left on device.*untouched"):
        save_checkpoint(checkpoint_path(small_disk, 2), {"weights": torch.randn(200_000)})
    assert [p.name for p in small_disk.iterdir()] == [path.name]
    load_checkpoint(path)


def test_training_on_a_disk_that_fills_up_keeps_its_last_good_checkpoint(small_disk: Path, tmp_path):
    config = tiny_config(tmp_path)
    config["out"] = str(small_disk)
    config["training"]["checkpoint"] = {"every_steps": 1, "keep": 1000}
    config["trainer"]["max_epochs"] = 1000
    with pytest.raises(ForgefieldError, match="No space left on device"):
        train(config)
    for path in list_checkpoints(small_disk / "tiny" / "checkpoints"):
        load_checkpoint(path)


def test_no_permission_is_one_sentence(small_disk: Path, tmp_path):
    subprocess.run(["mount", "-o", "remount,ro", str(small_disk)], check=True)
    with pytest.raises(ForgefieldError, match=r"Cannot write to the run folder .*out=FOLDER"):
        train({**tiny_config(tmp_path), "out": str(small_disk)})
    with pytest.raises(ForgefieldError, match="Could not write"):
        write_atomically(small_disk / "file", b"x")


@pytest.mark.parametrize("failures", [2, 100])
def test_a_disk_that_cannot_be_read_is_not_a_damaged_checkpoint(failures, tmp_path, monkeypatch):
    """The file is a good one, and stays where it is."""
    for step in (1, 2):
        save_checkpoint(checkpoint_path(tmp_path, step), RESTARTABLE | {"global_step": step})
    read, left = Path.read_bytes, [failures]

    def failing(path: Path) -> bytes:
        left[0] -= 1
        if left[0] >= 0:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return read(path)

    monkeypatch.setattr(Path, "read_bytes", failing)
    if failures == 2:  # it passes
        restart = find_resume_point(tmp_path, print)
        assert restart is not None
        assert restart.step == 2
    else:
        with pytest.raises(ForgefieldError, match="Input/output error .*The file was not changed"):
            find_resume_point(tmp_path, print)
    assert len(list_checkpoints(tmp_path)) == 2
    assert not list(tmp_path.glob("*.damaged"))


def test_a_checkpoint_of_another_version_is_not_a_damaged_one(tmp_path):
    save_checkpoint(checkpoint_path(tmp_path, 1), RESTARTABLE)
    save_checkpoint(checkpoint_path(tmp_path, 2), {"global_step": 2})
    with pytest.raises(ForgefieldError, match="step-00000002.ckpt is undamaged but cannot be loaded"):
        find_resume_point(tmp_path, print)
    assert len(list_checkpoints(tmp_path)) == 2


RESTARTABLE = {
    "global_step": 1,
    "loops": {"fit_loop": {"epoch_progress": {"current": {"processed": 0}}}},
    "callbacks": {"metrics_log": {"rows": 0}},
    "forgefield_position": {"sample": 0, "world_size": 1},
}
