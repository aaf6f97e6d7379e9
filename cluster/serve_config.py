"""The application as a Serve config file names it: `import_path: holdfast.cluster.serve_config:application`.

For clusters that KubeRay or another tool starts: Ray, Redis and the process environment already exist. `args` has the
configuration of `holdfast serve`. Secrets come in files, so that neither the config file nor Serve's status shows them.
The file's `deployments` give each replica its GPUs, node and scaling.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel, ConfigDict
from ray import serve

from holdfast.cluster import application as graph
from holdfast.cluster import config_file, doctor
from holdfast.cluster.config import Settings, check_tenants
from holdfast.cluster.tenants import tenants_in
from holdfast.replicas.errors import ConfigError
from holdfast.router.records import RedisAddress

STARTS = 3  # failed starts of an engine before its deployment fails: another machine may do better


class Arguments(BaseModel):
    """`args` of the application in a Serve config file."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    config: dict[str, Any] = {}  # as in the file of `holdfast serve --config`
    # Trap: Serve replaces every replica when a value here changes, so values that change often stand in files.
    tenants_file: Path | None = None  # YAML with the `tenants` of a configuration, and nothing else
    redis_password_file: Path | None = None  # of the Redis at `redis.url`


def application(arguments: Arguments) -> serve.Application:
    """The application that Serve deploys. A ConfigError ends the deployment with its message."""
    loaded = settings(arguments)
    ca_file = Path(loaded.redis.ca_file) if loaded.redis.ca_file else None
    address = RedisAddress(loaded.redis.url, arguments.redis_password_file, ca_file)
    return graph.build(loaded, address, gpus=0, starts=STARTS, tenants_file=arguments.tenants_file)


def settings(arguments: Arguments) -> Settings:
    """The configuration with the tenants file, checked for a cluster of several machines. Raises ConfigError."""
    loaded = config_file.parse(yaml.safe_dump(arguments.config))
    if arguments.tenants_file is not None:
        if loaded.tenants:
            raise ConfigError(f"tenants must be in {arguments.tenants_file} only", "tenants")
        loaded = replace(loaded, tenants=tenants_in(arguments.tenants_file))
    if not loaded.redis.url:
        raise ConfigError("a cluster of several machines needs a Redis that all of them reach", "redis.url")
    if arguments.redis_password_file is not None:
        _readable(arguments.redis_password_file, "redis_password_file")
    if loaded.redis.ca_file:
        _readable(Path(loaded.redis.ca_file), "redis.ca_file")
    check_tenants(loaded)
    doctor.check_policies(loaded.engine)
    return loaded


def _readable(path: Path, field: str) -> None:
    try:
        path.read_text()
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}", field) from error
