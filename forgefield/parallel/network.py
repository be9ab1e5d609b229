"""Ports and network interfaces of this machine."""

from __future__ import annotations

import socket
import struct


def free_port() -> int:
    """A port of this machine that nobody listens on at the moment."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def interface_towards(address: str) -> str | None:
    """Name of the network interface from which that address is reached.

    Left alone, gloo listens where the machine's own name points to, which on many systems is the loopback interface: then
    ranks of other nodes never find it.
    """
    try:
        import fcntl

        family, _, _, _, target = socket.getaddrinfo(address, 9, socket.AF_INET, socket.SOCK_DGRAM)[0]
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect(target)  # sends nothing: a datagram socket only learns its route
            own = probe.getsockname()[0]
            for _, name in socket.if_nameindex():
                try:
                    request = struct.pack("256s", name.encode()[:15])
                    found = fcntl.ioctl(probe.fileno(), 0x8915, request)  # SIOCGIFADDR
                except OSError:
                    continue
                if socket.inet_ntoa(found[20:24]) == own:
                    return name
    except (OSError, ImportError):
        return None
    return None
