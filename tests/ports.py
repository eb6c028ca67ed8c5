"""Ports for what is told of one before it listens there."""

import socket
from contextlib import suppress
from random import SystemRandom

# Below those that Linux gives to who asks for any: another test's server could get one of these
# before the process that it was looked for has come to listen.
OURS = range(20_000, 32_000)


def free_port() -> int:
    """A port of 127.0.0.1 that nobody has now."""
    while True:
        port = SystemRandom().choice(OURS)  # a seeded one would be the same in each process
        with suppress(OSError), socket.socket() as probe:
            probe.bind(("127.0.0.1", port))
            return port
