"""Settings of data in a whole training: what they do is done, and said."""

from __future__ import annotations

from tests.support.helpers import tiny_config
from tests.support.train_many import train_only

QUICK = {"max_epochs": 1, "enable_progress_bar": False, "accelerator": "cpu"}


def test_lazy_data_trains_as_data_in_memory(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("FORGEFIELD_CACHE", str(tmp_path / "cache"))
    runs = []
    for name, lazy in (("memory", False), ("disk", True)):
        config = tiny_config(tmp_path, data={"lazy": lazy, "labels": {"stress": "none"}}, trainer=QUICK)
        runs.append(train_only({**config, "name": name}).path)
    assert "on disk, neighbour lists read from the store" in capsys.readouterr().out
    for file in ("metrics.csv", "checkpoints/best.safetensors"):
        assert (runs[0] / file).read_bytes() == (runs[1] / file).read_bytes()


def test_a_run_begun_in_memory_continues_from_disk(tmp_path, monkeypatch):
    monkeypatch.setenv("FORGEFIELD_CACHE", str(tmp_path / "cache"))
    train_only(tiny_config(tmp_path, trainer=QUICK))
    longer = tiny_config(tmp_path, data={"lazy": True}, trainer={**QUICK, "max_epochs": 2})
    straight = train_only({**tiny_config(tmp_path, trainer={**QUICK, "max_epochs": 2}), "name": "straight"})
    assert (train_only(longer).path / "metrics.csv").read_bytes() == (straight.path / "metrics.csv").read_bytes()


def test_draws_and_frames_left_out_are_in_the_summary(tmp_path, capsys):
    data = {"batch": {"atoms": 7, "oversized": "skip"}, "sampling": {"rule": "uniform", "frames": 6}, "workers": 1}
    train_only(tiny_config(tmp_path, data=data, trainer=QUICK))
    said = " ".join(capsys.readouterr().out.split())
    assert "6 draws per epoch: frames.extxyz 100.0 %" in said
    assert "frames exceed data.batch (oversized: skip)" in said
    assert "by a thread, up to 2 batches" in said
