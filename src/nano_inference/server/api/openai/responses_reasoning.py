"""Reasoning that clients send back as `encrypted_content`: its text with a signature, so that only
text of this server is accepted. The text is encoded, not secret: the same item shows it.
"""

import base64
import binascii
import hashlib
import hmac
import secrets

_PREFIX = "nano1."  # format of the rest: base64 of the signature and the text
_SIZE = hashlib.sha256().digest_size


class Seal:
    """Signature of reasoning.

    Args:
        key: Secret of the servers that accept each other's reasoning. None: of this process only.
    """

    def __init__(self, key: str | None = None) -> None:
        self._key = (
            secrets.token_bytes(32) if key is None else hashlib.sha256(key.encode()).digest()
        )

    def close(self, text: str, owner: str) -> str:
        """Return a text with its signature. `owner` is the client that may send it back."""
        data = text.encode()
        return _PREFIX + base64.urlsafe_b64encode(self._mac(data, owner) + data).decode()

    def open(self, sealed: str, owner: str) -> str | None:
        """Return the text. None: it is damaged, or was not sealed here for this client."""
        if not sealed.startswith(_PREFIX):
            return None
        try:
            raw = base64.b64decode(sealed[len(_PREFIX) :].encode(), b"-_", validate=True)
        except (binascii.Error, UnicodeEncodeError):
            return None
        mac, data = raw[:_SIZE], raw[_SIZE:]
        return data.decode() if hmac.compare_digest(mac, self._mac(data, owner)) else None

    def _mac(self, data: bytes, owner: str) -> bytes:
        who = owner.encode()
        return hmac.digest(self._key, len(who).to_bytes(4, "big") + who + data, "sha256")
