"""The application as a Serve config file names it: `import_path: holdfast.cluster.serve_config:application`.

For clusters that somebody else starts, as KubeRay does: Ray, Redis and the process environment are there already. The
configuration is the one of `holdfast serve`, given in `args`; what is secret comes in files, so that neither the config
file nor Serve's own status shows it. What each replica is given (GPUs, place, scaling) is the file's `deployments`.
"""

import time
from collections.abc import Callable
from dataclasses import replace
from hashlib import sha256
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlsplit, urlunsplit

import yaml
from pydantic import BaseModel, ConfigDict
from ray import serve

from holdfast.cluster import application as graph
from holdfast.cluster import config_file
from holdfast.cluster.config import Settings, check_tenants
from holdfast.replicas.errors import ConfigError
from holdfast.router.tenants import Tenant

MOUNT_S = 300.0  # Kubernetes brings a changed Secret into a pod a minute or two after it says so to others


class Arguments(BaseModel):
    """`args` of the application in a Serve config file."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    config: dict[str, Any] = {}  # as in the file of `holdfast serve --config`
    tenants_file: Path | None = None  # YAML with the `tenants` of a configuration, and nothing else
    redis_password_file: Path | None = None  # goes into `redis.url`
    tenants_digest: str = ""  # sha256 (hex) of that file, stripped: an older one is waited for
    generation: str = ""  # any text; Serve builds the application again when it changes


def application(arguments: Arguments) -> serve.Application:
    """What Serve deploys. Raises ConfigError naming the field, which ends the deployment with that message."""
    found = settings(arguments)
    return graph.build(found, found.redis.url, gpus=0)


def settings(arguments: Arguments) -> Settings:
    """The configuration with what stands in files, checked for a cluster of several machines. Raises ConfigError."""
    found = config_file.parse(yaml.safe_dump(arguments.config))
    if arguments.tenants_file is not None:
        await_digest(arguments.tenants_file, arguments.tenants_digest)
        found = replace(found, tenants=_tenants(found, arguments.tenants_file))
    if not found.redis.url:
        raise ConfigError("a cluster of several machines needs a Redis that all of them reach", "redis.url")
    if arguments.redis_password_file is not None:
        url = with_password(found.redis.url, _text(arguments.redis_password_file, "redis_password_file"))
        found = replace(found, redis=replace(found.redis, url=url))
    check_tenants(found)
    return found


def await_digest(
    path: Path,
    digest: str,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> None:
    """Return once the text at `path` has `digest` (any, where it is empty). Raises ConfigError when it never does."""
    deadline = clock() + MOUNT_S
    while digest and sha256(_text(path, "tenants_file").encode()).hexdigest() != digest:
        if clock() >= deadline:
            raise ConfigError(f"{path} is not the file that this application was deployed with", "tenants_file")
        sleep(1.0)


def with_password(url: str, password: str) -> str:
    """`url` with the password in it, and its user if it names one."""
    parts = urlsplit(url)
    user, _, host = parts.netloc.rpartition("@")
    return urlunsplit(parts._replace(netloc=f"{user.partition(':')[0]}:{quote(password, safe='')}@{host}"))


def _tenants(found: Settings, path: Path) -> tuple[Tenant, ...]:
    read = config_file.read(path)
    if found.tenants or read != Settings(tenants=read.tenants):
        raise ConfigError(f"tenants stand in {path}, and nothing else does", "tenants")
    return read.tenants


def _text(path: Path, field: str) -> str:
    try:
        return path.read_text().strip()
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}", field) from error
