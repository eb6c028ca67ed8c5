"""Links to files, which open without a key for a while: the client's downloads send none."""

import hmac
import secrets
import time
from hashlib import sha256

from nano_training_service.errors import Refused

LIFETIME = 3600  # seconds


class Links:
    """Signs paths with a secret that lives as long as the service."""

    def __init__(self) -> None:
        self._secret = secrets.token_bytes(32)

    def sign(self, path: str) -> tuple[str, int]:
        """The query that opens a path, and until when, in seconds since the epoch."""
        expires = int(time.time()) + LIFETIME
        return f"expires={expires}&signature={self._signature(path, expires)}", expires

    def require(self, path: str, expires: int, signature: str) -> None:
        """Raises `Refused` 403 for a query that does not open this path, or no more."""
        right = self._signature(path, expires)
        if not hmac.compare_digest(right.encode(), signature.encode()) or expires < time.time():
            raise Refused("this link does not open the file, or no longer; ask for a new one.", 403)

    def _signature(self, path: str, expires: int) -> str:
        return hmac.new(self._secret, f"{expires} {path}".encode(), sha256).hexdigest()
