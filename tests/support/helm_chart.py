"""The chart, rendered by helm from the checkout and read back: objects, containers, the applications' configuration."""

import functools
import importlib.util
import os
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import yaml

ROOT = Path(__file__).parent.parent.parent
CHART = ROOT / "helm" / "holdfast"
HELM = Path(sysconfig.get_path("scripts")) / "helm"
VALUES = ("cpu", "one-gpu", "production")  # each the middle of a file's name
# Random by default.
FIXED = (
    "tenants.firstKey.key=hf-example",
    "monitoring.podMonitor.apiKey.key=hf-metrics",
    "redis.auth.password=example",
)

Object = dict[str, Any]


@dataclass(frozen=True)
class Done:
    """What a helm command printed."""

    status: int
    output: str
    errors: str


@functools.cache
def scratch() -> Path:
    """A folder for helm's own files and for values, removed with the process that made it."""
    folder = tempfile.TemporaryDirectory(prefix="chart-")
    _KEPT.append(folder)
    return Path(folder.name)


_KEPT: list[tempfile.TemporaryDirectory[str]] = []


def helm(*arguments: str) -> Done:
    """Run helm away from whatever the user has configured."""
    home = scratch()
    environment = {**os.environ, "HELM_CACHE_HOME": str(home), "HELM_CONFIG_HOME": str(home)}
    environment.update({"HELM_DATA_HOME": str(home), "KUBECONFIG": os.devnull})
    done = subprocess.run([HELM, *arguments], capture_output=True, text=True, check=False, env=environment)
    return Done(done.returncode, done.stdout, done.stderr)


def template(values: str = "", settings: tuple[str, ...] = (), more: str = "") -> Done:
    """`helm template` with the values file of that name, `--set` settings, and YAML laid over both."""
    files = [f"--values={CHART / f'values-{values}.yaml'}"] if values else []
    if more:
        path = scratch() / f"more-{abs(hash(more))}.yaml"
        path.write_text(more)
        files.append(f"--values={path}")
    sets = [f"--set={each}" for each in (*fixed(values), *settings)]
    return helm("template", "demo", str(CHART), "--namespace=agents", *files, *sets)


def fixed(values: str) -> tuple[str, ...]:
    return () if values == "production" else FIXED


@functools.cache
def render(values: str = "", settings: tuple[str, ...] = (), more: str = "") -> tuple[Object, ...]:
    """The objects that `template` gives; AssertionError with helm's own words when it gives none."""
    done = template(values, settings, more)
    assert done.status == 0, done.errors
    return tuple(sorted(parsed(done.output), key=lambda each: (each["kind"], each["metadata"]["name"])))


def parsed(output: str) -> list[Object]:
    """The objects that helm has printed."""
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    return [each for each in yaml.load_all(output, loader) if each is not None]


def find(objects: tuple[Object, ...], kind: str, name: str = "") -> Object:
    """The only object of `kind`, and of `demo-holdfast` + `name` where that is given."""
    found = [
        each for each in objects if each["kind"] == kind and (not name or each["metadata"]["name"] == FULLNAME + name)
    ]
    assert len(found) == 1, f"{len(found)} of {kind} {name}"
    return found[0]


FULLNAME = "demo-holdfast"


def pod_templates(objects: tuple[Object, ...]) -> Iterator[tuple[str, Object]]:
    """Every pod template with where it stands: head, `worker` and `router` groups, Redis, the test's pod."""
    for each in objects:
        if each["kind"] == "RayService":
            cluster = each["spec"]["rayClusterConfig"]
            yield "head", cluster["headGroupSpec"]["template"]
            for group in cluster["workerGroupSpecs"]:
                kind = group["template"]["metadata"]["labels"]["app.kubernetes.io/component"]
                yield f"{kind} {group['groupName']}", group["template"]
        elif each["kind"] == "StatefulSet":
            yield "redis", each["spec"]["template"]
        elif each["kind"] == "Pod":
            yield "test", {"metadata": each["metadata"], "spec": each["spec"]}


def containers(template: Object) -> list[Object]:
    return [*template["spec"].get("initContainers", []), *template["spec"]["containers"]]


def serve_config(objects: tuple[Object, ...]) -> Object:
    """serveConfigV2, read."""
    return yaml.safe_load(find(objects, "RayService")["spec"]["serveConfigV2"])  # type: ignore[no-any-return]


def load(path: Path) -> ModuleType:
    """The script at `path` as a module; it belongs to no package."""
    spec = importlib.util.spec_from_file_location(f"chart_{path.stem}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look there
    spec.loader.exec_module(module)
    return module
