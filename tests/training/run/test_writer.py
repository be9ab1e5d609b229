"""Files are written in the background: in order, as they were when they were submitted, and errors are not lost."""

from __future__ import annotations

import threading

import pytest
import torch
from torch import nn

from forgefield.errors import ForgefieldError
from forgefield.training.run import writer as writer_module
from forgefield.training.run.writer import BackgroundWriter, Snapshot


def test_writes_in_order_in_a_thread_and_replaces_what_was_not_started():
    written: list[str] = []
    started, go_on = threading.Event(), threading.Event()

    def first() -> None:
        started.set()
        assert go_on.wait(60)
        assert threading.current_thread() is not threading.main_thread()
        written.append("first")

    with BackgroundWriter() as writer:
        writer.submit("first", first)
        assert started.wait(60)
        assert writer.is_busy
        writer.submit("best", lambda: written.append("old best"))
        writer.submit("step 2", lambda: written.append("step 2"))
        writer.submit("best", lambda: written.append("new best"))
        assert written == []
        go_on.set()
        writer.wait()
        assert written == ["first", "new best", "step 2"]
        writer.submit("last", lambda: written.append("last"))
    assert written[-1] == "last"  # the end of the block waits


def test_the_first_error_ends_writing_and_is_raised_at_the_next_occasion():
    written: list[str] = []

    def fail() -> None:
        raise ForgefieldError("no space")

    go_on = threading.Event()
    with pytest.raises(ForgefieldError, match="no space"), BackgroundWriter() as writer:
        writer.submit("wait", lambda: go_on.wait(60) and None)
        writer.submit("fails", fail)
        writer.submit("later", lambda: written.append("later"))
        writer.raise_error()  # nothing yet
        go_on.set()
        for action in (writer.wait, writer.raise_error, lambda: writer.submit("more", lambda: written.append("more"))):
            with pytest.raises(ForgefieldError, match="no space"):
                action()
    assert written == []


def test_an_error_of_the_training_is_reported_before_one_of_the_writer():
    def fail() -> None:
        raise ForgefieldError("no space")

    with pytest.raises(KeyError), BackgroundWriter() as writer:
        writer.submit("fails", fail)
        raise KeyError("the training")


def test_a_snapshot_does_not_follow_its_content():
    module = nn.BatchNorm1d(3)
    content = {
        "state": module.state_dict(),
        "list": [torch.arange(3), (torch.ones(2), "text", None)],
        "transposed": torch.arange(6.0).view(2, 3).t(),
        "same": module.weight,
        "empty": torch.empty(0, 2),
        "counts": {"done": 1},
    }
    snapshot = Snapshot(content)
    with torch.no_grad():
        module.weight.add_(1)
        module.running_mean.add_(1)
    content["list"][0].zero_()
    content["counts"]["done"] = 2
    copy = snapshot.content()
    assert torch.equal(copy["state"]["weight"], torch.ones(3))
    assert torch.equal(copy["same"], torch.ones(3))
    assert not copy["same"].requires_grad
    assert torch.equal(copy["state"]["running_mean"], torch.zeros(3))
    assert copy["state"]._metadata == content["state"]._metadata
    assert torch.equal(copy["list"][0], torch.arange(3))
    assert torch.equal(copy["list"][1][0], torch.ones(2))
    assert copy["list"][1][1:] == ("text", None)
    assert torch.equal(copy["transposed"], content["transposed"])
    assert copy["transposed"].stride() == content["transposed"].stride()
    assert copy["empty"].shape == (0, 2)
    assert copy["counts"] == {"done": 1}


@pytest.mark.parametrize(("limit", "sizes"), [(2**26, [4]), (100, [3, 1]), (1, [1, 1, 1, 1])])
def test_tensors_of_a_gpu_are_gathered_in_groups_of_limited_size(limit, sizes, monkeypatch):
    """The same functions, without a GPU."""
    monkeypatch.setattr(writer_module, "GATHERED_BYTES", limit)
    tensors = [torch.randn(5, 4), torch.randn(3), torch.ones(()), torch.randn(30)]
    copies = [writer_module._Copy(tensor) for tensor in tensors]
    groups = list(writer_module._groups(copies))
    assert [len(group) for group in groups] == sizes
    for group in groups:
        writer_module._start_transfer(group, pinned=False)
    for copy, tensor in zip(copies, tensors):
        assert torch.equal(copy.resolved(), tensor)
        assert copy.resolved().untyped_storage().nbytes() == tensor.nbytes
