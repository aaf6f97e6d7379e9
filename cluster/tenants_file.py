"""Tenants in a file of their own, for clusters of several machines: read at the start, and again when it changes.

So a tenant or key comes and goes without a replica being replaced. Kubernetes brings a changed Secret into a pod within
a minute or two.
"""

import asyncio
import logging
from pathlib import Path

from holdfast.cluster import config_file
from holdfast.cluster.config import Settings
from holdfast.replicas.errors import ConfigError
from holdfast.router.tenants import Tenant, TenantDirectory

log = logging.getLogger(__name__)

INTERVAL_S = 5.0


def tenants_in(path: Path) -> tuple[Tenant, ...]:
    """The tenants in the YAML file at `path`, which holds nothing else. Raises ConfigError."""
    read = config_file.read(path)
    if not read.tenants or read != Settings(tenants=read.tenants):
        raise ConfigError(f"{path} must hold `tenants`, and nothing else", "tenants")
    return read.tenants


class TenantsWatch:
    """Puts the tenants of a file into a directory, now and after each change. While there is a fault in the file, of
    whatever kind, the tenants stay who they were.

    Create it on the event loop that it is to run on.
    """

    def __init__(self, path: Path, directory: TenantDirectory, interval_s: float = INTERVAL_S) -> None:
        self._path = path
        self._directory = directory
        self._interval_s = interval_s
        self._text = ""
        self._fault = ""
        self._task = asyncio.get_running_loop().create_task(self._watch())

    async def close(self) -> None:
        self._task.cancel()
        await asyncio.wait({self._task})

    async def _watch(self) -> None:
        while True:
            try:
                await self._look()
                self._fault = ""
            except Exception as error:  # the supervisor of the watch: the file was written by others
                fault = error.message if isinstance(error, ConfigError) else f"cannot read {self._path}: {error!r}"
                if fault != self._fault:
                    log.error("the tenants stay as they were: %s", fault)
                self._fault = fault
            await asyncio.sleep(self._interval_s)

    async def _look(self) -> None:
        text = await asyncio.to_thread(config_file.read_text, self._path)
        if text == self._text:
            return
        found = await asyncio.to_thread(tenants_in, self._path)
        if found != self._directory.configured:
            self._directory.replace(found)
            log.warning("%s has changed: there are %d tenants now", self._path, len(found))
        self._text = text
