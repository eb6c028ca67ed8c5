"""Addresses of this machine."""

import os
import socket

_OUTSIDE = ("192.0.2.1", 9)  # documentation address (RFC 5737); nothing is sent to it


def get_ip() -> str:
    """Return the address at which other machines reach this one: `VLLM_HOST_IP`, otherwise that of
    the default route, otherwise the loopback address.
    """
    if host := os.environ.get("VLLM_HOST_IP"):
        return host
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(_OUTSIDE)  # chooses a route, without a packet
            return probe.getsockname()[0]
        except OSError:
            return "127.0.0.1"


def get_open_port() -> int:
    """Return a free port of this machine."""
    with socket.create_server(("", 0)) as listener:
        return listener.getsockname()[1]
