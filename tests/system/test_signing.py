"""Signatures: Ed25519 keys from PEM files, and the errors of other files."""

from pathlib import Path

import pytest

from nano_inference.errors import ConfigError
from nano_inference.system.signing import is_signed, read_key, read_public_key

_KEYS = pytest.importorskip("cryptography.hazmat.primitives.asymmetric.ed25519")
_FORMATS = pytest.importorskip("cryptography.hazmat.primitives.serialization")


def write_keys(folder: Path) -> tuple[Path, Path]:
    """Write a new private key and its public key. Return their paths."""
    key = _KEYS.Ed25519PrivateKey.generate()
    private, public = folder / "key.pem", folder / "public.pem"
    private.write_bytes(
        key.private_bytes(
            _FORMATS.Encoding.PEM, _FORMATS.PrivateFormat.PKCS8, _FORMATS.NoEncryption()
        )
    )
    public.write_bytes(
        key.public_key().public_bytes(
            _FORMATS.Encoding.PEM, _FORMATS.PublicFormat.SubjectPublicKeyInfo
        )
    )
    return private, public


def test_signature_fits_one_key_and_content(tmp_path: Path) -> None:
    private, public = write_keys(tmp_path)
    key = read_key(str(private))
    assert key.public_key == read_public_key(str(public))
    signature = key.sign(b"content")
    assert is_signed(b"content", signature, key.public_key)
    assert not is_signed(b"other", signature, key.public_key)
    assert not is_signed(b"content", signature[:-1], key.public_key)
    assert not is_signed(b"content", signature, b"short")
    (tmp_path / "other").mkdir()
    other, _ = write_keys(tmp_path / "other")
    assert not is_signed(b"content", signature, read_key(str(other)).public_key)


def test_other_files_are_rejected(tmp_path: Path) -> None:
    private, public = write_keys(tmp_path)
    (tmp_path / "text").write_text("secret words")
    for path in (public, tmp_path / "text"):
        with pytest.raises(ConfigError, match="holds no Ed25519 private key") as caught:
            read_key(str(path))
        assert "secret" not in str(caught.value)
    with pytest.raises(ConfigError, match="holds no Ed25519 public key"):
        read_public_key(str(private))
    for read in (read_key, read_public_key):
        with pytest.raises(ConfigError, match="cannot be read"):
            read(str(tmp_path))
