"""Ports of loopback for servers that are told a number."""

import random
import socket

_PORTS = range(20_000, 32_000)
"""Below those that the system gives to connections: between the choice and the start it gives away none of them."""


def free_port() -> int:
    """Return a port of loopback on which nobody listens at the moment."""
    for port in random.SystemRandom().sample(_PORTS, 200):
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port
    raise OSError(f"none of 200 ports from {_PORTS.start} to {_PORTS.stop} of 127.0.0.1 is free")
