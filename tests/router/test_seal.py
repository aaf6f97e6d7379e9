"""Stored answers encrypted: opaque, bound to their place, and readable while their key is there."""

import base64
import secrets

import pytest
from fake_backend import World

from holdfast.replicas.errors import ConfigError
from holdfast.router.config import RouterConfig
from holdfast.router.seal import Seal
from holdfast.router.store import MemoryStore


def key_file(folder, *keys):
    path = folder / "keys"
    path.write_text("\n".join(base64.b64encode(key).decode() for key in keys) + "\n")
    return path


def test_what_is_closed_opens_under_its_name_only(tmp_path):
    seal = Seal(key_file(tmp_path, secrets.token_bytes(32)))
    closed = seal.close("cache/acme/1", b"secret answer")
    assert b"secret" not in closed
    assert seal.close("cache/acme/1", b"secret answer") != closed
    assert seal.open("cache/acme/1", closed) == b"secret answer"
    for name, value in (("cache/other/1", closed), ("cache/acme/1", closed[:-1]), ("cache/acme/1", b"")):
        with pytest.raises(ValueError, match="not encrypted"):
            seal.open(name, value)


def test_a_new_key_is_put_in_front(tmp_path):
    old, new = secrets.token_bytes(32), secrets.token_bytes(32)
    closed = Seal(key_file(tmp_path, old)).close("k", b"value")
    assert Seal(key_file(tmp_path, new, old)).open("k", closed) == b"value"
    with pytest.raises(ValueError, match="not encrypted"):
        Seal(key_file(tmp_path, new)).open("k", closed)


@pytest.mark.parametrize("text", ["", "not base64!", base64.b64encode(b"short").decode()])
def test_a_file_without_keys_is_refused(tmp_path, text):
    (tmp_path / "keys").write_text(text)
    for path in (tmp_path / "keys", tmp_path / "none"):
        with pytest.raises(ConfigError) as caught:
            Seal(path)
        assert caught.value.field == "router.cache_key_file"


def test_the_store_has_no_answer_that_could_be_read(tmp_path):
    path = key_file(tmp_path, secrets.token_bytes(32))
    store = MemoryStore(100, 2**20)

    world = World(config=RouterConfig(cache_key_file=str(path)), store=store)
    assert world.chat().headers["x-holdfast-cache"] == "miss"
    values = [entry[0] for key, entry in store._values._entries.items() if key.startswith("cache/")]
    assert values
    assert not any(b"Hello" in value for value in values)
    again = World(config=RouterConfig(cache_key_file=str(path)), store=store)  # a router that remembers nothing itself
    assert again.chat().headers["x-holdfast-cache"] == "hit"
    other = World(config=RouterConfig(), store=store)
    assert other.chat().headers["x-holdfast-cache"] == "miss"


def test_an_answer_of_another_key_is_as_good_as_none(tmp_path):
    store = MemoryStore(100, 2**20)
    for _ in range(2):
        path = key_file(tmp_path, secrets.token_bytes(32))
        world = World(config=RouterConfig(cache_key_file=str(path)), store=store)
        assert world.chat().headers["x-holdfast-cache"] == "miss"
