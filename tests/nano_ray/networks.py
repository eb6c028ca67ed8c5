"""Two networks on one Linux machine, with a router that can drop all packets. Needs root."""

import os
import shutil
import signal
import subprocess
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress

NEAR, FAR = "10.199.47.2", "10.199.48.2"


class Networks:
    """Two network namespaces with a router between them.

    Attributes:
        near, far: Names of the namespaces. Each looks like one machine.
    """

    def __init__(self) -> None:
        mark = uuid.uuid4().hex[:6]
        self.near, self.far, self._middle = f"near-{mark}", f"far-{mark}", f"mid-{mark}"

    def make(self) -> None:
        """Create the namespaces, each with an address and a route to the other."""
        _ip("netns", "add", self._middle)
        for name, address in ((self.near, NEAR), (self.far, FAR)):
            gateway = address.rpartition(".")[0] + ".1"
            _ip("netns", "add", name)
            _ip(
                "link",
                "add",
                "cable",
                "netns",
                name,
                "type",
                "veth",
                "peer",
                name,
                "netns",
                self._middle,
            )
            for where, device, its in ((name, "cable", address), (self._middle, name, gateway)):
                _ip("-n", where, "addr", "add", f"{its}/24", "dev", device)
                _ip("-n", where, "link", "set", device, "up")
            _ip("-n", name, "link", "set", "lo", "up")
            _ip("-n", name, "route", "add", "default", "via", gateway)
        self._pass_on("1")

    def cut(self) -> None:
        """Drop all packets silently: both cables stay plugged in."""
        self._pass_on("0")

    def mend(self) -> None:
        """Restore the connection between the networks."""
        self._pass_on("1")

    def remove(self) -> None:
        """Remove the networks and kill all processes in them."""
        for name in (self.near, self.far, self._middle):
            listed = subprocess.run(["ip", "netns", "pids", name], capture_output=True, text=True)
            for pid in map(int, listed.stdout.split()):
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            subprocess.run(["ip", "netns", "del", name], capture_output=True)

    def _pass_on(self, word: str) -> None:
        _ip(
            "netns",
            "exec",
            self._middle,
            "sh",
            "-c",
            f"echo {word} > /proc/sys/net/ipv4/ip_forward",
        )


def inside(namespace: str, command: Sequence[str]) -> list[str]:
    """Return the command line that runs a command in a namespace."""
    return ["ip", "netns", "exec", namespace, *command]


@contextmanager
def two_networks() -> Iterator[Networks]:
    """Create the networks and remove them at the end. Raise `OSError` if that is not possible."""
    networks = Networks()
    if os.geteuid() or not shutil.which("ip"):
        raise OSError("network namespaces need root and `ip`.")
    try:
        try:
            networks.make()
        except subprocess.CalledProcessError as problem:
            raise OSError(f"network namespaces cannot be made: {problem.stderr}") from problem
        yield networks
    finally:
        networks.remove()


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True, text=True)
