"""A run folder says which process trains it, and that process saves a checkpoint, or stops, on request."""

import json
import os
import signal
import subprocess
import sys

import pytest
from lightning.pytorch.callbacks import Callback

from forgefield.errors import ForgefieldError
from forgefield.processes import is_alive, this_process
from forgefield.runs import Run
from forgefield.training.run.checkpoint import list_checkpoints
from forgefield.training.run.owner import OWNER, read_owner, send_request, training_process
from tests.support.helpers import tiny_config
from tests.support.resuming import END, assert_same_run
from tests.support.train_many import train_only

NO_CHECKPOINTS = {"checkpoint": {"every_epochs": None, "keep": 9}}


class Requests(Callback):
    """Sends the request `checkpoint` to its own run at the end of step 2, and notes what the run folder says."""

    seen: list[int] = []

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        if trainer.global_step == 2:
            owner = send_request(type(self).path, "checkpoint")
            self.seen.append(owner.process["pid"])


@pytest.fixture(scope="module")
def straight(tmp_path_factory):
    folder = tmp_path_factory.mktemp("straight")
    return train_only(tiny_config(folder, training=NO_CHECKPOINTS, callbacks=[END])).path


def test_a_checkpoint_on_request_changes_nothing_and_resumes_exactly(straight, tmp_path, monkeypatch):
    config = tiny_config(tmp_path, training=NO_CHECKPOINTS, callbacks=[END])
    monkeypatch.setenv("END_AT", "3")
    monkeypatch.setenv("END_HOW", "usr2")
    path = train_only(config).path
    assert_same_run(straight, path)
    last, requested = list_checkpoints(path / "checkpoints")
    assert requested.name == "step-00000003.ckpt"
    assert "A checkpoint was requested: step 3 is saved." in (path / "log.txt").read_text()
    last.unlink()
    Run(path).write_info(status="running")  # as if it had been killed after step 3
    monkeypatch.setenv("END_AT", "-1")
    train_only(config)
    assert_same_run(straight, path)


def test_with_accumulation_a_requested_checkpoint_waits_for_the_step(tmp_path, monkeypatch):
    config = tiny_config(tmp_path, training={**NO_CHECKPOINTS, "accumulate": 2}, callbacks=[END])
    monkeypatch.setenv("END_AT", "1")
    monkeypatch.setenv("END_HOW", "usr2")
    names = [path.name for path in list_checkpoints(train_only(config).path / "checkpoints")]
    assert names[-1] == "step-00000001.ckpt"


def test_the_process_that_trains_is_recorded_while_it_trains(tmp_path, monkeypatch):
    config = tiny_config(tmp_path, training=NO_CHECKPOINTS, callbacks=[f"{__name__}.Requests"])
    monkeypatch.setattr(Requests, "path", tmp_path / "runs" / "tiny", raising=False)
    Requests.seen.clear()
    path = train_only(config).path
    assert Requests.seen == [os.getpid()]
    assert [p.name for p in list_checkpoints(path / "checkpoints")][-1] == "step-00000002.ckpt"
    assert read_owner(path) is None
    with pytest.raises(ForgefieldError, match="is not being trained"):
        send_request(path, "stop")


def test_a_process_that_was_killed_does_not_train(tmp_path):
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    with training_process(tmp_path, hears_signals=True):
        record = json.loads((tmp_path / OWNER).read_text())
    born = _born(process.pid)
    (tmp_path / OWNER).write_text(json.dumps({**record, "pid": process.pid, "born": born}))
    assert read_owner(tmp_path).process["pid"] == process.pid
    process.kill()
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    assert read_owner(tmp_path) is None, "nobody has waited for it yet"
    process.wait()
    assert read_owner(tmp_path) is None


def _born(pid):
    with open(f"/proc/{pid}/stat") as file:
        return file.read().rpartition(")")[2].split()[19]


def test_a_process_id_that_was_reused_gets_no_signal(tmp_path):
    """A run folder from elsewhere, or one left behind before a restart of the machine."""
    this = {**this_process(), "hears_signals": True}
    for wrong in ({"born": "1"}, {"born": None}, {"pid": -1}, {"pid": 0}, {"pid": "many"}, {"host": None, "pid": None}):
        (tmp_path / OWNER).write_text(json.dumps(this | wrong))
        assert read_owner(tmp_path) is None, wrong
    (tmp_path / OWNER).write_text(json.dumps(this)[:20])
    assert read_owner(tmp_path) is None


def test_processes_of_other_machines_and_threads_get_no_signal(tmp_path):
    this = {**this_process(), "hears_signals": True}
    for change, message in (({"host": "node7 pid:[1]"}, "on node7"), ({"hears_signals": False}, "does not accept")):
        (tmp_path / OWNER).write_text(json.dumps(this | change))
        with pytest.raises(ForgefieldError, match=message):
            send_request(tmp_path, "stop")


def test_a_zombie_is_not_alive():
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    identity = {**this_process(), "pid": process.pid, "born": _born(process.pid)}
    assert is_alive(identity)
    process.send_signal(signal.SIGKILL)
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    assert not is_alive(identity)
    process.wait()
