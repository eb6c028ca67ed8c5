"""Names of machines: who can reach an address, and whether a `Host` header is one that only an
address would have.
"""

import ipaddress
import socket


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach it."""
    if not host:
        return False
    try:
        return ipaddress.ip_address(host.partition("%")[0]).is_loopback
    except ValueError:
        pass
    try:
        found = {entry[4][0] for entry in socket.getaddrinfo(host, None)}
    except OSError:
        return False
    return bool(found) and all(
        ipaddress.ip_address(str(each).partition("%")[0]).is_loopback for each in found
    )


def host_name(header: str) -> str:
    """The name in a `Host` header, in lower case, without port and brackets."""
    name = header.strip().lower()
    if name.startswith("["):
        return name[1:].partition("]")[0]
    return name.partition(":")[0]


def is_address(name: str) -> bool:
    """Whether it is an IP address or `localhost`: no name that the owner of a web site can point
    here.
    """
    if name == "localhost":
        return True
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True
