"""Connects the processes of a job: a rendezvous at the address of rank 0, a new key for this attempt, and the watch.

`connect` is called once per process, before any other work, so that all ranks are notified of an error on any of them.
"""

from __future__ import annotations

import os
import secrets
import socket
import struct
import time
from collections.abc import Callable
from datetime import timedelta

import torch
import torch.distributed as dist

from forgefield.errors import ForgefieldError
from forgefield.parallel.launch import Launch
from forgefield.parallel.ranks import Ranks, single_process
from forgefield.parallel.watch import start_watch
from forgefield.parallel.watch_thread import Loss
from forgefield.processes import usable_cores

RENDEZVOUS_MINUTES = 10
"""How long the first ranks wait for the last one to start."""


def connect(launch: Launch, *, on_loss: Callable[[Ranks, Loss], None]) -> Ranks:
    """Connect to the other processes. on_loss(ranks, loss): called in a separate thread when another rank is lost."""
    if launch.world_size == 1:
        return single_process(launch)
    _set_environment(launch)
    try:
        store, _, _ = next(
            dist.rendezvous("env://", launch.rank, launch.world_size, timeout=timedelta(minutes=RENDEZVOUS_MINUTES))
        )
        store = dist.PrefixStore(f"forgefield/{_fresh_token(launch, store)}", store)
        backend = backends(shared_gpus=_share_gpus(launch, store))
        dist.init_process_group(
            backend, store=store, rank=launch.rank, world_size=launch.world_size, timeout=timedelta(minutes=30)
        )
    except (RuntimeError, ValueError) as error:
        reason = str(error).splitlines()[0]
        raise ForgefieldError(
            f"Rank {launch.rank} could not connect to the other {launch.world_size - 1} processes at {launch.master_address}:"
            f"{launch.master_port} ({reason}). Check that all of them started, that this node can reach that address and that "
            "the port is free; MASTER_ADDR and MASTER_PORT select another one."
        ) from error
    host = socket.gethostname()
    ranks = Ranks(launch, hosts=[host], backend=backend)
    ranks.hosts = ranks.all_gather(host)
    ranks.watch = start_watch(
        rank=launch.rank,
        world_size=launch.world_size,
        host=host,
        address=launch.master_address,
        store=store,
        on_loss=lambda loss: on_loss(ranks, loss),
        on_line=lambda rank, text: ranks.on_line(rank, text) if ranks.on_line is not None else None,
    )
    return ranks


def _fresh_token(launch: Launch, store: dist.Store) -> str:
    """A key that the processes of this attempt agree on.

    An agent that restarts processes provides the same store again, in which entries of dead processes must not be read. Every
    rank sends a random token, to which no earlier answer can exist, and rank 0 answers until all have confirmed.
    """
    own_token = secrets.token_hex(8)
    if launch.launcher != "torchrun":
        return "0"
    if launch.rank > 0:
        store.set(f"forgefield/request/{launch.rank}", own_token)
        token = store.get(f"forgefield/answer/{launch.rank}/{own_token}").decode()
        store.set(f"forgefield/confirmed/{launch.rank}/{token}", "yes")
        return token
    deadline = time.monotonic() + 60 * RENDEZVOUS_MINUTES
    missing, answered = set(range(1, launch.world_size)), dict[int, str]()
    while missing:
        for rank in sorted(missing):
            if not store.check([f"forgefield/request/{rank}"]):
                continue
            token = store.get(f"forgefield/request/{rank}").decode()
            if answered.get(rank) != token:
                answered[rank] = token
                store.set(f"forgefield/answer/{rank}/{token}", own_token)
            if store.check([f"forgefield/confirmed/{rank}/{own_token}"]):
                missing.discard(rank)
        if missing and time.monotonic() > deadline:
            raise RuntimeError(f"ranks {sorted(missing)[:8]} did not connect")
        if missing:
            time.sleep(0.02)
    return own_token


def backends(*, shared_gpus: bool = False) -> str:
    """The backend of `torch.distributed`, by kind of device where there are several. NCCL needs a GPU for each process."""
    if torch.cuda.is_available() and dist.is_nccl_available() and not shared_gpus:
        return "cpu:gloo,cuda:nccl"
    if torch.xpu.is_available() and dist.is_xccl_available():
        return "cpu:gloo,xpu:xccl"
    return "gloo"


def gpu_index(launch: Launch) -> int:
    """Index of the GPU of this process among those visible to it; 0 where the launcher assigns each process one GPU."""
    return launch.local_rank % max(torch.cuda.device_count(), 1)


def _share_gpus(launch: Launch, store: dist.Store) -> bool:
    """Whether any two processes of a node have the same GPU, compared through the store; the same result on all ranks."""
    uuid = ""
    if torch.cuda.is_available():
        uuid = str(torch.cuda.get_device_properties(gpu_index(launch)).uuid)
    prefix = f"gpu/{socket.gethostname()}"
    store.set(f"{prefix}/{launch.local_rank}", uuid)
    uuids = [store.get(f"{prefix}/{local_rank}").decode() for local_rank in range(launch.local_size)]
    store.add("sharing", int(uuid != "" and uuids.count(uuid) > 1))
    if store.add("compared", 1) == launch.world_size:
        store.set("result", str(store.add("sharing", 0)))
    return store.get("result") != b"0"


def usable_threads(launch: Launch) -> int:
    """Default number of threads of this process: its share of the cores it may run on."""
    cores = usable_cores()
    bound_by_launcher = cores < (os.cpu_count() or 1)
    return max(1, cores if bound_by_launcher else cores // launch.local_size)


def _set_environment(launch: Launch) -> None:
    """Set the variables that torch and Lightning read to what was detected."""
    os.environ.update(
        MASTER_ADDR=launch.master_address,
        MASTER_PORT=str(launch.master_port),
        RANK=str(launch.rank),
        WORLD_SIZE=str(launch.world_size),
        LOCAL_RANK=str(launch.local_rank),
        LOCAL_WORLD_SIZE=str(launch.local_size),
    )
    if "GLOO_SOCKET_IFNAME" not in os.environ:
        interface = interface_towards(launch.master_address)
        if interface == "lo" and launch.n_nodes > 1:
            # On the node of rank 0, whose name resolves to loopback: use the interface of the default route.
            interface = interface_towards("192.0.2.1")
        if interface is not None:
            os.environ["GLOO_SOCKET_IFNAME"] = interface
    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(usable_threads(launch))


def interface_towards(address: str) -> str | None:
    """Name of the network interface through which `address` is reached; None if unknown.

    By default gloo listens on the interface of the host name, on many systems the loopback interface, where ranks of other
    nodes cannot reach it.
    """
    try:
        import fcntl

        family, _, _, _, target = socket.getaddrinfo(address, 9, socket.AF_INET, socket.SOCK_DGRAM)[0]
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect(target)  # sends nothing: only the route of a datagram socket is determined
            local_address = probe.getsockname()[0]
            for _, name in socket.if_nameindex():
                try:
                    request = struct.pack("256s", name.encode()[:15])
                    reply = fcntl.ioctl(probe.fileno(), 0x8915, request)  # SIOCGIFADDR
                except OSError:
                    continue
                if socket.inet_ntoa(reply[20:24]) == local_address:
                    return name
    except (OSError, ImportError):
        return None
    return None
