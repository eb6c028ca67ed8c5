"""Ed25519 signatures (RFC 8032) with the package `cryptography`, the extra `receipts`."""

from importlib import import_module
from pathlib import Path
from typing import Any

from nano_inference.errors import ConfigError
from nano_inference.system.regular_files import open_regular

_MOST = 2**16  # bytes of a key's file


class SigningKey:
    """Private key.

    Attributes:
        public_key: The public key, 32 bytes.
    """

    def __init__(self, private: Any) -> None:
        self._private = private
        self.public_key: bytes = private.public_key().public_bytes_raw()

    def sign(self, content: bytes) -> bytes:
        """Return the signature of some bytes, 64 bytes."""
        return self._private.sign(content)


def read_key(path: str) -> SigningKey:
    """Read a private key from a PEM file without a password. Raises `ConfigError`."""
    keys, serialization = _modules()
    content = _content(path)
    private: Any
    try:
        private = serialization.load_pem_private_key(content, password=None)
    except (TypeError, ValueError):  # their messages may quote the key
        private = None
    if not isinstance(private, keys.Ed25519PrivateKey):
        raise ConfigError(
            f"{path} holds no Ed25519 private key without a password; make one with "
            "`openssl genpkey -algorithm ed25519 -out key.pem`."
        )
    return SigningKey(private)


def read_public_key(path: str) -> bytes:
    """Return the 32 bytes of the public key in a PEM file. Raises `ConfigError`."""
    keys, serialization = _modules()
    content = _content(path)
    public: Any
    try:
        public = serialization.load_pem_public_key(content)
    except ValueError:
        public = None
    if not isinstance(public, keys.Ed25519PublicKey):
        raise ConfigError(
            f"{path} holds no Ed25519 public key; make it with "
            "`openssl pkey -in key.pem -pubout -out public.pem`."
        )
    return public.public_bytes_raw()


def is_signed(content: bytes, signature: bytes, public_key: bytes) -> bool:
    """Return True if a signature of these bytes is valid under a public key. Raises `ConfigError`
    without `cryptography`.
    """
    keys, _ = _modules()
    invalid = import_module("cryptography.exceptions").InvalidSignature
    try:
        keys.Ed25519PublicKey.from_public_bytes(public_key).verify(signature, content)
    except (invalid, ValueError):
        return False
    return True


def _content(path: str) -> bytes:
    try:
        with open_regular(Path(path)) as file:
            return file.read(_MOST)
    except OSError as problem:
        raise ConfigError(f"{path} cannot be read: {problem.strerror or problem}.") from problem


def _modules() -> tuple[Any, Any]:
    primitives = "cryptography.hazmat.primitives"
    try:
        ed25519 = import_module(f"{primitives}.asymmetric.ed25519")
        serialization = import_module(f"{primitives}.serialization")
    except ImportError as problem:
        raise ConfigError(
            "signatures need the package cryptography; install it with "
            "`pip install 'nano-inference[receipts]'`."
        ) from problem
    return ed25519, serialization
