"""Tenants in a file: a change of it comes into force, a fault in it does not."""

import asyncio
import logging
from pathlib import Path

import pytest
from waiting import until_async

from holdfast.cluster.tenants import TenantsWatch, tenants_in
from holdfast.replicas.errors import ConfigError
from holdfast.router.protocol.errors import RefusedError
from holdfast.router.tenants import Caller, TenantDirectory, hash_key


def text(*names: str) -> str:
    return "tenants:\n" + "".join(f"  - {{name: {name}, key_hashes: ['{hash_key(name)}']}}\n" for name in names)


def replace(path: Path, content: str) -> None:
    """Change a file in one step, so that nobody reads half of it or an empty one."""
    written = path.with_suffix(".new")
    written.write_text(content)
    written.replace(path)


def called(directory: TenantDirectory, key: str) -> str:
    return directory.authenticate(Caller(f"Bearer {key}", "203.0.113.9", None, None)).tenant.name


WRONG = (
    "tenants: [",
    "tenants: []",
    text("c", "c"),
    "server: {}",
    "tenants: &all [*all]",  # without end
    "? !!str [a]\n: 1",  # a key that cannot be one
)


def test_a_changed_file_comes_into_force_and_a_broken_one_changes_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "tenants.yaml"
    path.write_text(text("a"))
    directory = TenantDirectory(tenants_in(path), exposed=True)

    def faults() -> int:
        return sum(record.levelno == logging.ERROR for record in caplog.records)

    async def scenario() -> None:
        watch = TenantsWatch(path, directory, 0.001)
        try:
            replace(path, text("a", "b"))
            await until_async(lambda: len(directory.tenants) == 2)
            for number, wrong in enumerate(WRONG, 1):
                replace(path, wrong)
                await until_async(lambda n=number: faults() == n)  # type: ignore[misc]
                assert called(directory, "b") == "b"
            path.unlink()
            await until_async(lambda: faults() == len(WRONG) + 1)
            replace(path, text("c"))
            await until_async(lambda: directory.tenants[0].name == "c")
            assert faults() == len(WRONG) + 1, "each is told once"
        finally:
            await watch.close()

    asyncio.run(scenario())
    assert called(directory, "c") == "c"
    with pytest.raises(RefusedError, match="Incorrect API key"):
        called(directory, "a")


@pytest.mark.parametrize("wrong", ["", "tenants: []", "engine: {}", text("a") + "engine: {page_size: 8}"])
def test_a_file_of_tenants_holds_some_and_nothing_else(tmp_path: Path, wrong: str) -> None:
    path = tmp_path / "tenants.yaml"
    path.write_text(wrong)
    with pytest.raises(ConfigError, match="nothing else") as caught:
        tenants_in(path)
    assert caught.value.field == "tenants"
