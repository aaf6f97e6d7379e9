"""Makes the schemas in `crds/` from published CustomResourceDefinitions. Run by hand when those change:

    python tests/helm/trim_crds.py FOLDER_OF_YAML_FILES

What is kept: the newest served version's structure, types, enums and required fields. What goes: descriptions, and
every repetition, by naming each larger subtree once under `definitions` (a RayService holds nearly the same pod
template several times).
"""

import hashlib
import json
import sys
from pathlib import Path
from typing import Any

import yaml

HERE = Path(__file__).parent / "crds"
KINDS = {
    "ray.io_rayservices.yaml": "rayservice",
    "monitoring.coreos.com_podmonitors.yaml": "podmonitor",
    "monitoring.coreos.com_prometheusrules.yaml": "prometheusrule",
    "gateway.networking.k8s.io_httproutes.yaml": "httproute",
}
SHARED_FROM = 160  # characters of JSON from which a repeated subtree is worth a name
KEPT = {
    "type", "properties", "items", "required", "enum", "additionalProperties", "anyOf", "oneOf", "allOf", "not",
    "pattern", "minimum", "maximum", "minLength", "maxLength", "minItems", "maxItems", "nullable",
    "x-kubernetes-preserve-unknown-fields", "x-kubernetes-int-or-string", "x-kubernetes-embedded-resource",
}  # fmt: skip


def trimmed(node: Any) -> Any:
    """A schema with the keywords that say what is valid, and no others."""
    if not isinstance(node, dict):
        return node
    kept = {key: value for key, value in node.items() if key in KEPT}
    for key in ("anyOf", "oneOf", "allOf"):
        if key in kept:
            kept[key] = [trimmed(each) for each in kept[key]]
    for key in ("items", "not", "additionalProperties"):
        if key in kept:
            kept[key] = trimmed(kept[key])
    if "properties" in kept:
        kept["properties"] = {name: trimmed(each) for name, each in kept["properties"].items()}
    return kept


def shared(schema: dict[str, Any]) -> dict[str, Any]:
    """`schema` with each subtree that occurs twice written once, under `definitions`."""
    seen: dict[str, int] = {}

    def count(node: Any) -> None:
        if isinstance(node, dict):
            text = json.dumps(node, sort_keys=True)
            if len(text) >= SHARED_FROM and "type" in node:
                seen[text] = seen.get(text, 0) + 1
                if seen[text] > 1:
                    return
            for each in node.values():
                count(each)
        elif isinstance(node, list):
            for each in node:
                count(each)

    count(schema)
    definitions: dict[str, Any] = {}

    def place(node: Any) -> Any:
        if isinstance(node, dict):
            text = json.dumps(node, sort_keys=True)
            inner = {key: place(each) for key, each in node.items()}
            if seen.get(text, 0) < 2:
                return inner
            name = hashlib.sha256(text.encode()).hexdigest()[:8]
            definitions[name] = inner
            return {"$ref": f"#/definitions/{name}"}
        return [place(each) for each in node] if isinstance(node, list) else node

    return {**place(schema), "definitions": definitions}


def schema_of(path: Path) -> str:
    """What is kept of the definition at `path`, as the text of a file in `crds/`."""
    crd = yaml.load(path.read_text(), getattr(yaml, "CSafeLoader", yaml.SafeLoader))
    version = next(each for each in crd["spec"]["versions"] if each["storage"])
    schema = trimmed(version["schema"]["openAPIV3Schema"])
    schema["properties"].pop("status", None)
    api = f"{crd['spec']['group']}/{version['name']}"
    result = {"apiVersion": api, "kind": crd["spec"]["names"]["kind"], "schema": shared(schema)}
    return json.dumps(result, sort_keys=True, separators=(",", ":")) + "\n"


def main(folder: Path) -> None:
    for source, kind in KINDS.items():
        (HERE / f"{kind}.json").write_text(schema_of(folder / source))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
