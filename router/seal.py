"""Stored answers encrypted, so that who reads Redis or its disk reads nothing: AES-256-GCM by `cryptography`.

A key file has one key a line, 32 bytes in base64: the first encrypts, all of them decrypt, so a new key is put in front
and the old one taken out once what it encrypted has expired. Without a file nothing of this is imported.
"""

import base64
import binascii
import secrets
from pathlib import Path

from holdfast.replicas.errors import ConfigError

KEY = 32  # bytes
NONCE = 12


class Seal:
    """Raises ConfigError for a file without keys, or where `cryptography` is missing."""

    def __init__(self, key_file: Path) -> None:
        try:
            from cryptography.exceptions import InvalidTag
            from cryptography.hazmat.primitives.ciphers.aead import AESGCM
        except ImportError as error:
            raise ConfigError("encryption needs the package cryptography", "router.cache_key_file") from error
        self._keys = [AESGCM(key) for key in _keys(key_file)]
        self._invalid = InvalidTag

    def close(self, name: str, value: bytes) -> bytes:
        """`value` encrypted. It opens under this `name` only."""
        nonce = secrets.token_bytes(NONCE)
        return nonce + self._keys[0].encrypt(nonce, value, name.encode())

    def open(self, name: str, sealed: bytes) -> bytes:
        """What was closed under `name`. Raises ValueError where it was not, or by a key that is no longer there."""
        for key in self._keys:
            try:
                return key.decrypt(sealed[:NONCE], sealed[NONCE:], name.encode())
            except (self._invalid, ValueError):  # ValueError: shorter than a nonce
                continue
        raise ValueError("not encrypted by any of the keys")


def _keys(path: Path) -> list[bytes]:
    try:
        keys = [base64.b64decode(line, validate=True) for line in path.read_text().split()]
    except (OSError, binascii.Error, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read keys from {path}: {error}", "router.cache_key_file") from error
    if not keys or any(len(key) != KEY for key in keys):
        raise ConfigError(f"{path} must have keys of {KEY} bytes in base64, one a line", "router.cache_key_file")
    return keys
