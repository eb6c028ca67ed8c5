"""Free ports for servers whose port must be known before they listen."""

import socket
from contextlib import suppress
from random import SystemRandom

# Below Linux's ephemeral range: another test's server could take such a port before the intended
# process listens.
OURS = range(20_000, 32_000)


def free_port() -> int:
    """Return a port of 127.0.0.1 that is free now."""
    while True:
        port = SystemRandom().choice(OURS)  # seeded ports would collide
        with suppress(OSError), socket.socket() as probe:
            probe.bind(("127.0.0.1", port))
            return port
