"""Signed links to files. The client's downloads send no API key, so a link needs none."""

import hmac
import secrets
import time
from hashlib import sha256

from nano_training_service.errors import Refused

LIFETIME = 3600  # seconds


class Links:
    """Signer of paths. Its secret lives as long as the service."""

    def __init__(self) -> None:
        self._secret = secrets.token_bytes(32)

    def sign(self, path: str) -> tuple[str, int]:
        """Return the query that opens a path, and its expiry in seconds since the epoch."""
        expires = int(time.time()) + LIFETIME
        return f"expires={expires}&signature={self._signature(path, expires)}", expires

    def require(self, path: str, expires: int, signature: str) -> None:
        """Raise `Refused` 403 if the signature is wrong for this path or has expired."""
        right = self._signature(path, expires)
        if not hmac.compare_digest(right.encode(), signature.encode()) or expires < time.time():
            raise Refused("this link is invalid or has expired; request a new one.", 403)

    def _signature(self, path: str, expires: int) -> str:
        return hmac.new(self._secret, f"{expires} {path}".encode(), sha256).hexdigest()
