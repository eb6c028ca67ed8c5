"""Addresses of trainers, "tcp://host:port"."""

from urllib.parse import urlsplit

from nano_inference.errors import WeightUpdateError

Address = tuple[str, int]


def parse_address(address: str) -> Address:
    """Return (host, port) of "tcp://host:port". Raises `WeightUpdateError`."""
    try:
        parts = urlsplit(address)
        host, port = parts.hostname, parts.port
    except (ValueError, TypeError, AttributeError):
        host, port, parts = None, None, None
    if parts is None or parts.scheme != "tcp" or not host or port is None or parts.path:
        raise WeightUpdateError(f"address={address!r} must be tcp://host:port.")
    check_host(host)
    return host, port


def check_host(host: str) -> None:
    """Raise `WeightUpdateError` for text that cannot be a host name or address."""
    try:
        fits = (
            0 < len(host.encode("idna")) <= 255
            and host.isprintable()
            and not set(host) & set(" /?#@%\\")
        )
    except UnicodeError:
        fits = False
    if not fits:
        raise WeightUpdateError(f"{host!r:.80} must be a host name or an IP address.")


def url_of(address: Address) -> str:
    """Return the text that `parse_address` reads."""
    host = f"[{address[0]}]" if ":" in address[0] else address[0]
    return f"tcp://{host}:{address[1]}"
