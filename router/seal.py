"""Encryption of stored answers, and of items that clients keep: AES-256-GCM by `cryptography`.

    Seal      values in Redis, where a key file is configured: whoever reads Redis or its disk reads nothing
    ItemSeal  `encrypted_content`, always: what a client keeps for its tenant is read and accepted for that tenant alone

A key file has one key a line, 32 bytes in base64: the first encrypts, all of them decrypt, so a new key is put in front
and the old one taken out once what it encrypted has expired.
"""

import base64
import binascii
import hashlib
import secrets
from collections.abc import Sequence
from pathlib import Path

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from holdfast.replicas.errors import ConfigError
from holdfast.router.store import Store

KEY = 32  # bytes
NONCE = 12
OPAQUE = "hf1."
ITEM_KEY = "items/key"  # where the store has it
ITEM_KEY_S = 400 * 86400.0  # for which it is there after its last use
MOST_KEYS = 4


class Seal:
    """By the keys of a file, or by `keys`. Raises ConfigError for a file without keys."""

    def __init__(self, key_file: Path | None = None, keys: Sequence[bytes] = ()) -> None:
        self._keys = [AESGCM(key) for key in (keys if key_file is None else _keys(key_file))]

    def close(self, name: str, value: bytes) -> bytes:
        """`value` encrypted. It opens under this `name` only."""
        nonce = secrets.token_bytes(NONCE)
        return nonce + self._keys[0].encrypt(nonce, value, name.encode())

    def open(self, name: str, sealed: bytes) -> bytes:
        """What was closed under `name`. Raises ValueError where it was not, or by a key that is no longer there."""
        for key in self._keys:
            try:
                return key.decrypt(sealed[:NONCE], sealed[NONCE:], name.encode())
            except (InvalidTag, ValueError):  # ValueError: shorter than a nonce
                continue
        raise ValueError("not encrypted by any of the keys")


class AnotherTenantsError(ValueError):
    """What is to be opened was sealed for another tenant."""


class ItemSeal:
    """Seals what a client of a tenant keeps and sends back: `hf1.SEALED.TENANT`, the last a digest of its name.

    By the first key of `router.cache_key_file`. Without a file by a key that the routers make once and share in the
    store; while that cannot be reached, by the key that this process knows. A store that has lost the key gets it back
    from a router that knows it.
    """

    def __init__(self, store: Store, key_file: str) -> None:
        self._store = store
        self._fixed = Seal(Path(key_file)) if key_file else None
        self._keys = [secrets.token_bytes(KEY)]  # the first seals; the others this process has sealed with before

    async def prepare(self) -> None:
        """Call this before `close` and `open`: the routers agree on a key."""
        if self._fixed is not None:
            return
        [shared] = await self._store.renew([ITEM_KEY], ITEM_KEY_S)
        if shared is None:
            await self._store.grow(ITEM_KEY, self._keys[0], ITEM_KEY_S, ITEM_KEY, KEY, None)
            shared = await self._store.get(ITEM_KEY)
        if shared is not None and shared != self._keys[0]:
            self._keys = [shared, *(key for key in self._keys if key != shared)][:MOST_KEYS]

    def close(self, tenant: str, text: str) -> str:
        sealed = self._seal.close(f"items/{tenant}", text.encode())
        return f"{OPAQUE}{base64.b64encode(sealed).decode()}.{_tag(tenant)}"

    def open(self, tenant: str, given: str) -> str | None:
        """What was sealed for this tenant. None where nobody here can read it: another server's, or its key is gone.

        Raises AnotherTenantsError.
        """
        if not given.startswith(OPAQUE):
            return None
        sealed, _, owner = given.removeprefix(OPAQUE).partition(".")
        if owner and owner != _tag(tenant):
            raise AnotherTenantsError("sealed for another tenant")
        try:
            return self._seal.open(f"items/{tenant}", base64.b64decode(sealed, validate=True)).decode()
        except ValueError:  # not base64, not ours, or by a key that is gone
            return None

    @property
    def _seal(self) -> Seal:
        return self._fixed or Seal(keys=self._keys)


def _tag(tenant: str) -> str:
    return hashlib.blake2b(tenant.encode(), digest_size=8).hexdigest()


def _keys(path: Path) -> list[bytes]:
    try:
        keys = [base64.b64decode(line, validate=True) for line in path.read_text().split()]
    except (OSError, binascii.Error, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read keys from {path}: {error}", "router.cache_key_file") from error
    if not keys or any(len(key) != KEY for key in keys):
        raise ConfigError(f"{path} must have keys of {KEY} bytes in base64, one a line", "router.cache_key_file")
    return keys
