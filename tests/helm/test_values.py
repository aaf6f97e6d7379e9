"""Values: typing errors are found, impossible combinations say what to do, and versions agree with the project's."""

import json
import re
import tomllib

import pytest
import yaml
from helm_chart import CHART, ROOT, template

from helm.build import schema


def chart() -> dict[str, object]:
    return yaml.safe_load((CHART / "Chart.yaml").read_text())  # type: ignore[no-any-return]


MISTYPED = """
imag: {}
image: {variant: tpu}
models: {main: {gpu: 1, worker: {resource: {}}, config: {logging: {fromat: json}}}}
modelDefaults: {source: {type: s3}, config: {placement: {patience: 1}}}
redis: {external: {address: 'redis://user:password@host:6379'}}
monitoring:
  podMonitor: {enable: true}
  rules: {alerts: {HoldfastNoReplicas: {for: 1m}, HoldfastMetricsMissing: {threshold: 1}}}
httpRoute: {timeout: 1 hour}
config: {engin: {}, engine: {page_sise: 16, page_size: '16', order: fifo, retention: {policy: best}}}
"""
FAULTS = (
    *("(root): Additional property imag", "image.variant: ", "redis.external.address: ", "httpRoute.timeout: "),
    *("models.main: Additional property gpu", "models.main.worker: Additional property resource"),
    *("models.main.config.logging: Additional property fromat", "modelDefaults.source.type: "),
    *("modelDefaults.config.placement: Additional property patience", "config: Additional property engin"),
    *("monitoring.podMonitor: Additional property enable", "config.engine: Additional property page_sise"),
    *("monitoring.rules.alerts: Additional property HoldfastNoReplicas", "config.engine.page_size: "),
    *("monitoring.rules.alerts.HoldfastMetricsMissing: Additional property threshold", "config.engine.order: "),
    "config.engine.retention.policy: ",
)


def test_every_typing_error_is_found() -> None:
    done = template(more=MISTYPED)
    assert done.status != 0
    assert [fault for fault in FAULTS if f"\n- {fault}" not in done.errors] == []


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ("models: {main: null}", "models"),
        ("redis: {enabled: false}", "redis.external.address"),
        ("tenants: {firstKey: {enabled: false}}", "nobody is served"),
        ("tenants: {existingSecret: t}", "firstKey.enabled"),
        ("httpRoute: {enabled: true}", "parentRefs"),
        ("ingress: {enabled: true}", "ingress.hosts"),
        ("upgrade: {strategy: NewClusterWithIncrementalUpgrade}", "gatewayClassName"),
        ("upgrade: {strategy: NewClusterWithIncrementalUpgrade, gatewayClassName: g}", "autoscaling"),
        ("models: {main: {source: {type: hub}}}", "models.main.source.hub.repository"),
        ("models: {main: {source: {type: init}}}", "models.main.source.init"),
        ("models: {main: {source: {type: pvc}}}", "existingClaim"),
        ("models: {Main: {}}", "lower-case"),
        ("models: {main-routers: {}}", "main-routers"),
        ("models: {main: {source: {type: image}}}", "models.main.source.image.reference"),
        ("modelDefaults: {volume: {type: hostPath}}", "models.main.volume.hostPath"),
        ("config: {engine: {device: cpu}}", "engine.device is cpu, and gpus is 1"),
        ("config: {engine: {device: auto}}", "engine.device is auto, and gpus is 1"),
        ("modelDefaults: {gpus: 0, config: {engine: {device: cuda}}}", "engine.device is cuda, and gpus is 0"),
        ("models: {a: {routePrefix: /x}, b: {routePrefix: /x}}", "same routePrefix"),
        ("modelDefaults: {autoscaling: {enabled: true, minReplicas: 9}}", "minReplicas"),
        ("config: {tenants: [{name: a}]}", "config"),
        ("config: {redis: {url: redis://x}}", "redis.url"),
        ("modelDefaults: {config: {server: {port: 1}}}", "modelDefaults.config"),
        ("models: {main: {config: {redis: {url: redis://x}}}}", "models.main.config"),
        ("models: {main: {config: {server: {host: h}}}}", "models.main.config"),
        ("models: {main: {config: {tenants: [{name: a}]}}}", "models.main.config"),
        ("tenants: {list: [{name: first}]}", '"first"'),
        ("tenants: {list: [{name: metrics}]}\nmonitoring: {podMonitor: {enabled: true}}", '"metrics"'),
    ],
)
def test_what_cannot_work_says_what_to_do(more: str, said: str) -> None:
    done = template(more=more)
    assert done.status != 0
    assert said in done.errors


def test_versions_are_the_projects() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    pinned = dict(line.split("==") for line in (ROOT / "constraints.txt").read_text().split())
    values = yaml.safe_load((CHART / "values.yaml").read_text())
    assert chart()["appVersion"] == project["version"]
    assert values["rayVersion"] == pinned["ray"]


def test_the_chart_needs_no_other() -> None:
    """So that helm renders and checks it in a bare checkout."""
    assert "dependencies" not in chart()
    assert not (CHART / "charts").exists()


def test_the_schema_is_what_the_code_makes() -> None:
    assert (CHART / "values.schema.json").read_text() == schema.schema(), "run `make chart`"


def test_the_schema_knows_every_value_and_no_other() -> None:
    """But for what Holdfast or Kubernetes checks: there it says no more than the kind of thing."""
    schema = json.loads((CHART / "values.schema.json").read_text())

    def differences(node: object, known: dict[str, object], path: str) -> list[str]:
        if "$ref" in known:
            known = schema["$defs"][str(known["$ref"]).rpartition("/")[2]]
        if not isinstance(node, dict) or "properties" not in known:
            return []
        properties: dict[str, dict[str, object]] = known["properties"]  # type: ignore[assignment]
        assert known["additionalProperties"] is False, path
        found = [f"{path}.{key}" for key in node.keys() ^ properties.keys()]
        return found + [
            each for key in node for each in differences(node[key], properties.get(key, {}), f"{path}.{key}")
        ]

    found = differences(yaml.safe_load((CHART / "values.yaml").read_text()), schema, "")
    optional = {".global"}
    optional |= {
        each for each in found if each.startswith((".config.", ".modelDefaults.config.", ".monitoring.rules.alerts."))
    }
    peers = {each for each in found if re.fullmatch(r"\.networkPolicy\.(operator|prometheus)\.ipBlock", each)}
    assert set(found) - optional - peers - {each for each in found if "resources.limits" in each} == set()


def test_images_come_from_public_places_or_a_placeholder() -> None:
    values = yaml.safe_load((CHART / "values.yaml").read_text())
    assert values["image"]["repository"].startswith("registry.example.com/")
    assert values["redis"]["image"]["repository"].startswith("docker.io/library/")
