"""Ranks that we start ourselves, with real processes: what they are told, how they end, and that none stays behind."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from forgefield.errors import ForgefieldError
from forgefield.parallel.spawn import run_ranks
from tests.support.launching import is_alive, with_default_interrupts

PATIENCE = 100.0
FOREVER = 3600.0
"""Seconds that no test waits for: one that does is ended by its time limit."""
"""Seconds after which a test gives up."""

PARENT = """
import json, os, signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)
from forgefield.parallel.spawn import run_ranks
sys.exit(run_ranks(json.loads(sys.argv[1]), int(sys.argv[2]), environ=os.environ, grace=float(sys.argv[3])))
"""

NOTES = """
import os, signal, sys, time
from pathlib import Path
rank, folder = int(os.environ["RANK"]), Path(sys.argv[1])

def note(word):
    with open(folder / f"rank{rank}", "a") as file:
        file.write(f"{word}\\n")
"""


def rank_script(body: str, folder: Path | None = None) -> list[str]:
    return [sys.executable, "-c", NOTES + body, str(folder or "")]


def notes(folder: Path, rank: int) -> list[str]:
    path = folder / f"rank{rank}"
    return path.read_text().split() if path.exists() else []


def wait_until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < end, "it did not happen"
        time.sleep(0.01)


@pytest.fixture
def parent() -> Iterator[Callable[..., subprocess.Popen[bytes]]]:
    """parent(command, n, grace): a process that runs the ranks."""
    begun: list[subprocess.Popen[bytes]] = []

    def start(command: list[str], n: int, grace: float = 20.0) -> subprocess.Popen[bytes]:
        begun.append(subprocess.Popen([sys.executable, "-c", PARENT, json.dumps(command), str(n), str(grace)]))
        return begun[-1]

    yield start
    for process in begun:
        process.kill()
        process.wait()


def test_each_rank_knows_its_number(tmp_path: Path) -> None:
    body = "import json; (folder / f'{rank}.json').write_text(json.dumps(dict(os.environ)))"
    environ = {**os.environ, "COLOUR": "blue", "RANK": "17", "WORLD_SIZE": "99"}
    environ.pop("OMP_NUM_THREADS", None)
    before = dict(environ)
    assert run_ranks(rank_script(body, tmp_path), 3, environ=environ) == 0
    assert environ == before
    seen = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(3)]
    threads = str(max(1, len(os.sched_getaffinity(0)) // 3))
    for rank, variables in enumerate(seen):
        expected = {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": "3",
            "LOCAL_WORLD_SIZE": "3",
            "MASTER_ADDR": "127.0.0.1",
            "FORGEFIELD_LAUNCHER": "forgefield",
            "OMP_NUM_THREADS": threads,
            "COLOUR": "blue",
        }
        assert {key: variables[key] for key in expected} == expected
    (port,) = {variables["MASTER_PORT"] for variables in seen}
    with socket.create_server(("127.0.0.1", int(port))):
        pass  # it is free


def test_number_of_threads_that_was_set_stays(tmp_path: Path) -> None:
    environ = {**os.environ, "OMP_NUM_THREADS": "5"}
    assert run_ranks(rank_script("note(os.environ['OMP_NUM_THREADS'])", tmp_path), 2, environ=environ) == 0
    assert [notes(tmp_path, rank) for rank in range(2)] == [["5"], ["5"]]


def test_ranks_write_where_the_parent_writes(capfd: pytest.CaptureFixture[str]) -> None:
    body = "print('out', rank); print('err', rank, file=sys.stderr); print(repr(sys.stdin.read()))"
    assert run_ranks(rank_script(body), 2, environ=os.environ) == 0
    out, err = capfd.readouterr()
    assert sorted(out.splitlines()) == ["''", "''", "out 0", "out 1"]
    assert sorted(err.splitlines()) == ["err 0", "err 1"]


@pytest.mark.parametrize(
    ("body", "code"),
    [
        ("", 0),
        ("sys.exit(7)", 7),
        ("sys.exit(3 if rank == 1 else 0)", 3),
        ("time.sleep(0.6 * rank); sys.exit(10 + rank)", 10),
        ("os.kill(os.getpid(), signal.SIGKILL) if rank == 1 else None", 128 + signal.SIGKILL),
        ("os.abort() if rank == 0 else time.sleep(0.6); sys.exit(1)", 128 + signal.SIGABRT),
    ],
    ids=["all-well", "all-the-same", "one", "first-counts", "killed", "aborted"],
)
def test_exit_code_is_that_of_the_rank_that_failed_first(body: str, code: int) -> None:
    assert run_ranks(rank_script(body), 2, environ=os.environ) == code


def test_failure_leaves_the_others_time_to_end_by_themselves(tmp_path: Path) -> None:
    body = """
signal.signal(signal.SIGTERM, lambda *_: note("asked"))
if rank == 1: sys.exit(4)
time.sleep(0.8)
note("done")
sys.exit(5)
"""
    assert run_ranks(rank_script(body, tmp_path), 3, environ=os.environ, grace=FOREVER) == 4
    assert notes(tmp_path, 0) == notes(tmp_path, 2) == ["done"]


def test_rank_that_does_not_notice_a_failure_is_asked_to_end(tmp_path: Path) -> None:
    body = """
def asked(*_):
    note("asked")
    sys.exit(0)
signal.signal(signal.SIGTERM, asked)
note("ready")
if rank == 1:
    while not (folder / "rank0").exists(): time.sleep(0.01)
    sys.exit(4)
time.sleep(3600)
"""
    assert run_ranks(rank_script(body, tmp_path), 2, environ=os.environ, grace=0.5) == 4
    assert notes(tmp_path, 0) == ["ready", "asked"]


def test_rank_that_ignores_being_asked_is_killed_with_what_it_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("forgefield.parallel.spawn.KILL_AFTER", 0.7)
    body = """
signal.signal(signal.SIGTERM, signal.SIG_IGN)
if rank == 1:
    while len((folder / "rank0").read_text().split() if (folder / "rank0").exists() else "") < 2: time.sleep(0.01)
    sys.exit(4)
import subprocess
note(os.getpid())
note(subprocess.Popen(["sleep", "3600"]).pid)
time.sleep(3600)
"""
    assert run_ranks(rank_script(body, tmp_path), 2, environ=os.environ, grace=0.3) == 4
    pids = [int(pid) for pid in notes(tmp_path, 0)]
    assert len(pids) == 2
    wait_until(lambda: not any(map(is_alive, pids)))


@pytest.mark.parametrize("name", ["SIGTERM", "SIGINT", "SIGUSR1", "SIGUSR2"])
def test_signal_is_passed_on_once_to_every_rank(
    parent: Callable[..., subprocess.Popen[bytes]], tmp_path: Path, name: str
) -> None:
    body = f"""
signal.signal(signal.{name}, lambda *_: note("signal"))
note("ready")
while not (folder / "end").exists(): time.sleep(0.02)
"""
    process = parent(rank_script(body, tmp_path), 3)
    wait_until(lambda: all(notes(tmp_path, rank) == ["ready"] for rank in range(3)))
    for times in (1, 2):
        process.send_signal(getattr(signal, name))
        wait_until(lambda n=times: all(len(notes(tmp_path, rank)) > n for rank in range(3)))
    time.sleep(0.2)
    (tmp_path / "end").touch()
    assert process.wait(PATIENCE) == 0
    assert [notes(tmp_path, rank) for rank in range(3)] == [["ready", "signal", "signal"]] * 3


def test_ctrl_c_in_the_terminal_reaches_each_rank_once(tmp_path: Path) -> None:
    body = """
signal.signal(signal.SIGINT, lambda *_: note("signal"))
note("ready")
while not (folder / "end").exists(): time.sleep(0.02)
sys.exit(130)
"""
    command = [sys.executable, "-c", PARENT, json.dumps(rank_script(body, tmp_path)), "2", "20"]
    process = subprocess.Popen(command, start_new_session=True)
    try:
        wait_until(lambda: all(notes(tmp_path, rank) == ["ready"] for rank in range(2)))
        os.killpg(process.pid, signal.SIGINT)  # what a terminal does: to the whole foreground group
        wait_until(lambda: all(len(notes(tmp_path, rank)) > 1 for rank in range(2)))
        time.sleep(0.2)
        (tmp_path / "end").touch()
        assert process.wait(PATIENCE) == 130
    finally:
        process.kill()
        process.wait()
    assert [notes(tmp_path, rank) for rank in range(2)] == [["ready", "signal"]] * 2


def test_signal_handlers_are_as_before_afterwards() -> None:
    names = ("SIGTERM", "SIGINT", "SIGUSR1", "SIGUSR2")
    before = [signal.getsignal(getattr(signal, name)) for name in names]
    assert run_ranks(rank_script("sys.exit(1)"), 2, environ=os.environ) == 1
    with pytest.raises(ForgefieldError):
        run_ranks(["/no/such/program"], 2, environ=os.environ)
    assert [signal.getsignal(getattr(signal, name)) for name in names] == before


def test_ranks_can_be_run_from_any_thread() -> None:
    codes: list[int] = []
    thread = threading.Thread(
        target=lambda: codes.append(run_ranks(rank_script("sys.exit(6)"), 2, environ=os.environ)), daemon=True
    )
    thread.start()
    thread.join(PATIENCE)
    assert codes == [6]


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="only Linux tells a process that its parent died")
def test_parent_killed_leaves_no_rank_running(parent: Callable[..., subprocess.Popen[bytes]], tmp_path: Path) -> None:
    process = parent(rank_script("note(os.getpid()); time.sleep(60)", tmp_path), 3)
    wait_until(lambda: all(notes(tmp_path, rank) for rank in range(3)))
    pids = [int(notes(tmp_path, rank)[0]) for rank in range(3)]
    assert all(map(is_alive, pids))
    process.kill()
    try:
        wait_until(lambda: not any(map(is_alive, pids)))
    finally:
        for pid in pids:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def test_program_that_does_not_exist_is_a_clear_error() -> None:
    with pytest.raises(
        ForgefieldError, match=r"Rank 0 could not be started: /no/such/program: No such file or directory\."
    ):
        run_ranks(["/no/such/program"], 2, environ=os.environ)
    with pytest.raises(ForgefieldError, match="at least one"):
        run_ranks([sys.executable], 0, environ=os.environ)


def test_rank_that_cannot_be_started_takes_those_before_it_along(tmp_path: Path) -> None:
    """The program removes itself as soon as it runs, so that some ranks start and a later one cannot."""
    program = tmp_path / "program"
    program.write_text(f"#!/bin/sh\necho $$ >> {tmp_path}/pids\nrm -f {program}\nexec sleep 60\n")
    program.chmod(0o755)
    with pytest.raises(ForgefieldError, match=r"Rank [1-9]\d* could not be started"):
        run_ranks([str(program)], 1000, environ=os.environ)
    pids = [int(pid) for pid in (tmp_path / "pids").read_text().split()]
    assert pids
    assert not any(map(is_alive, pids))


DISPOSABLE = """
import json, os, sys
from forgefield.cli import main
import forgefield.cli as cli
from forgefield.parallel import spawn
spawn.KILL_AFTER = 0.5
def run(words):
    return spawn.run_ranks(json.loads(sys.argv[1]), 2, environ=os.environ, disposable=True)
cli._dispatch = run
sys.exit(main([]))
"""


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_signal_ends_disposable_ranks_even_if_they_ignore_it(number: int, code: int, tmp_path: Path) -> None:
    """As those of `forgefield bench`, which must not take the end of one for a result and start the next."""
    body = "signal.signal(signal.SIGTERM, signal.SIG_IGN); note(os.getpid()); time.sleep(60)"
    command = [sys.executable, "-c", DISPOSABLE, json.dumps(rank_script(body, tmp_path))]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, preexec_fn=with_default_interrupts)
    wait_until(lambda: all(notes(tmp_path, rank) for rank in range(2)))
    process.send_signal(number)
    _, said = process.communicate(timeout=PATIENCE)
    assert process.returncode == code, said
    assert said.splitlines() == ["stopped by SIGTERM" if number == signal.SIGTERM else "interrupted"]
    assert not any(is_alive(int(notes(tmp_path, rank)[0])) for rank in range(2))


LAUNCHED = """
import os, signal, subprocess, sys, time
if len(sys.argv) > 2:
    from forgefield.processes import stop_with_parent
    if sys.argv[2] == "deaf":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    stop_with_parent(grace=0.5, every=0.05)
    open(sys.argv[1], "w").write(f"{os.getpid()}\\n")
    time.sleep(60)
else:
    subprocess.Popen([sys.executable, "-c", os.environ["SCRIPT"], sys.argv[1], os.environ["KIND"]]).wait()
"""


@pytest.mark.parametrize("kind", ["plain", "deaf"])
def test_a_process_of_a_launcher_that_was_killed_ends_within_seconds(kind: str, tmp_path: Path) -> None:
    file = tmp_path / "pid"
    environ = {**os.environ, "SCRIPT": LAUNCHED, "KIND": kind}
    launcher = subprocess.Popen([sys.executable, "-c", LAUNCHED, str(file)], env=environ)
    wait_until(lambda: file.exists() and file.read_text().endswith("\n"))
    pid = int(file.read_text())
    assert is_alive(pid)
    launcher.kill()
    launcher.wait()
    wait_until(lambda: not is_alive(pid))
