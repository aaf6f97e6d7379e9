"""Whether an object is valid, by Kubernetes' own schemas and those of the operators, with unknown fields refused."""

import functools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
from kubernetes_validate.utils import schema_contents
from referencing import Registry, Resource

VERSIONS = ("1.28", "1.37")  # the oldest that the chart says it runs on, and the newest known here
CRDS = Path(__file__).parent.parent / "helm" / "crds"


def problems(obj: dict[str, Any], version: str = VERSIONS[-1]) -> list[str]:
    """What is wrong with `obj`, one line each; empty: it is valid."""
    validator = _of_crd(obj["apiVersion"], obj["kind"]) or _of_kubernetes(obj["apiVersion"], obj["kind"], version)
    return [f"{error.json_path}: {error.message[:300]}" for error in _leaves(validator.iter_errors(obj))]


def _leaves(errors: Any) -> Iterator[jsonschema.ValidationError]:
    for error in errors:
        if error.context:
            yield from _leaves(error.context)
        else:
            yield error


@functools.cache
def _of_kubernetes(api_version: str, kind: str, version: str) -> Any:
    folder = f"kubernetes-json-schema/v{version}.0-local-strict"
    group, _, last = api_version.rpartition("/")
    name = "-".join(part for part in (kind.lower(), group.partition(".")[0], last) if part)
    schema = Resource.from_contents(schema_contents(f"{folder}/{name}.json", version))
    registry = _definitions(folder, version) @ Registry()
    return jsonschema.Draft202012Validator(schema.contents, registry=registry)


@functools.cache
def _definitions(folder: str, version: str) -> Any:
    return Resource.from_contents(schema_contents(f"{folder}/_definitions.json", version))


@functools.cache
def _of_crd(api_version: str, kind: str) -> Any:
    path = CRDS / f"{kind.lower()}.json"
    if not path.exists():
        return None
    crd = json.loads(path.read_text())
    assert (crd["apiVersion"], crd["kind"]) == (api_version, kind)
    schema = closed(crd["schema"])
    schema["properties"]["metadata"] = {"type": "object"}  # Kubernetes' own, in every kind alike
    return jsonschema.Draft202012Validator(schema)


def closed(node: Any) -> Any:
    """`node` with every object refusing fields that it does not name, as `kubectl apply --validate=strict` does."""
    if isinstance(node, list):
        return [closed(each) for each in node]
    if not isinstance(node, dict):
        return node
    inner = {key: closed(value) for key, value in node.items()}
    named = isinstance(node.get("properties"), dict) and node.get("type") == "object"
    if named and "additionalProperties" not in node and not node.get("x-kubernetes-preserve-unknown-fields"):
        inner["additionalProperties"] = False
    return inner
