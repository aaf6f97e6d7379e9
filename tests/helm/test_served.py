"""What the chart renders serves: its serveConfigV2 under Ray, asked by its own `helm test`."""

import json
import os
import random
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest
from helm_chart import CHART, ROOT, containers, find, pod_templates, render
from waiting import until

from holdfast.cluster import environment, serve_private
from holdfast.router.tenants import hash_key

# A Redis that is not there: serving goes on without it.
SETTINGS = (
    "redis.enabled=false",
    "redis.external.address=redis://127.0.0.1:1",
    "models.other.routePrefix=/other",
    "models.other.autoscaling.enabled=true",
    "models.other.routers=2",
    "monitoring.podMonitor.enabled=true",
)
KEY = "hf-example"
pytestmark = pytest.mark.skipif(
    not os.environ.get("HOLDFAST_TEST_SERVED"), reason="takes a minute: asked for by HOLDFAST_TEST_SERVED=1"
)


@dataclass(frozen=True)
class Cluster:
    """Base URLs of the API and of what HAProxy says of itself; the file of tenants."""

    api: str
    proxy: str
    tenants: Path


@pytest.fixture(scope="module")
def served(cluster: Cluster) -> str:
    return cluster.api


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    """A cluster with the two models of the rendered configuration, both of them the shipped one."""
    with tempfile.TemporaryDirectory(prefix="hf-", dir="/tmp") as folder:  # names of sockets must be short
        yield from serve(Path(folder))


def serve(folder: Path) -> Iterator[Cluster]:
    objects = render("cpu", SETTINGS)
    service = find(objects, "RayService")["spec"]
    free = environment.internal_ports(random.Random())
    text = service["serveConfigV2"].replace("/etc/holdfast", str(folder)).replace("8000", str(free.replica_last))
    (folder / "serve.yaml").write_text(text)
    for kind, secret, file in (("tenants", "-tenants", "tenants.yaml"), ("redis", "-redis", "password")):
        (folder / kind).mkdir()
        data = find(objects, "Secret", secret)
        (folder / kind / file).write_text(data.get("stringData", data.get("data", {})).get(file, "x"))
    resources = {"CPU": 4}
    for group in service["rayClusterConfig"]["workerGroupSpecs"]:
        pods = group["replicas"]
        resources |= {name: int(amount) * pods for name, amount in group["resources"].items() if name != "CPU"}
    process = subprocess.Popen(
        [
            sys.executable,
            str(ROOT / "tests" / "support" / "serve_rendered.py"),
            str(folder / "serve.yaml"),
            json.dumps(resources),
        ],
        cwd=folder,
        env=process_environment(objects, free, folder),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        said = []
        for line in process.stdout:
            said.append(line)
            if line == "serving\n":
                break
        assert [line.split()[1] for line in said[:-1]] == ["RUNNING", "RUNNING"], said
        tenants = folder / "tenants" / "tenants.yaml"
        yield Cluster(f"http://127.0.0.1:{free.replica_last}", f"http://127.0.0.1:{free.metrics}", tenants)
    finally:
        process.stdin.close()  # which ends it
        assert process.wait(60) == 0


def process_environment(objects: tuple[dict[str, object], ...], free: object, folder: Path) -> dict[str, str]:
    """Of a worker's container, with ports and folders of this machine, which others use, too."""
    (folder / serve_private.TOKEN).write_text("t" * 64)
    local = serve_private.variables(free, folder)  # type: ignore[arg-type]
    kept = {key: value for key, value in os.environ.items() if not key.startswith("RAY_")}
    template = dict(pod_templates(objects))["worker main"]  # type: ignore[arg-type]
    pod = {each["name"]: each["value"] for each in containers(template)[-1]["env"] if "value" in each}
    return kept | dict(local) | pod | {"HOME": str(folder), "PYTHONSAFEPATH": "1"}


def test_the_chart_s_own_test_passes(served: str, tmp_path: Path) -> None:
    (tmp_path / "key").write_text(KEY)
    command = [sys.executable, str(CHART / "files" / "smoke.py"), str(tmp_path / "key"), f"{served}/main"]
    done = subprocess.run([*command, f"{served}/other"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("get_weather({") == 2


def test_without_a_key_nobody_is_served(served: str) -> None:
    assert httpx.get(f"{served}/main/v1/models", trust_env=False).status_code == 401


def test_the_readiness_probe_s_path_answers(served: str) -> None:
    template = dict(pod_templates(render("cpu")))["worker main"]
    path = containers(template)[-1]["readinessProbe"]["httpGet"]["path"]
    assert httpx.get(served + path, trust_env=False).status_code == 200


def test_the_monitored_paths_answer(served: str) -> None:
    (endpoint, other) = find(render("cpu", SETTINGS), "PodMonitor", "-routers")["spec"]["podMetricsEndpoints"]
    assert other["path"] == "/other/metrics"
    for key, status in ((KEY, 403), ("hf-metrics", 200)):
        headers = {"Authorization": f"Bearer {key}"}
        answer = httpx.get(served + endpoint["path"], headers=headers, trust_env=False)
        assert answer.status_code == status
    assert "holdfast_requests_total" in answer.text


def test_any_router_tells_of_all_and_each_process_is_found_below_its_prefix(served: str) -> None:
    headers = {"Authorization": "Bearer hf-metrics"}
    with httpx.Client(base_url=served, headers=headers, trust_env=False) as http:
        targets = http.get("/other/metrics/targets").json()
        processes = {each["labels"]["instance"]: each["labels"] for each in targets}
        assert sorted(each["process"] for each in processes.values()) == ["replica", "router", "router"]
        for each in processes.values():
            assert each["__metrics_path__"].startswith("/other/metrics/processes/")
            assert each["instance"] in http.get(each["__metrics_path__"]).text
        for _ in range(4):  # whichever of the two answers
            text = http.get("/other/metrics").text
            assert {name for name in processes if name not in text} == set()
            assert text.count("# TYPE holdfast_requests_in_flight ") == 1


def test_the_proxy_has_metrics(cluster: Cluster) -> None:
    assert "haproxy_" in httpx.get(f"{cluster.proxy}/metrics", trust_env=False).text


def test_models_have_the_names_of_their_configuration(served: str) -> None:
    headers = {"Authorization": f"Bearer {KEY}"}
    found = httpx.get(f"{served}/other/v1/models", headers=headers, trust_env=False).json()
    assert [each["id"] for each in found["data"]] == ["pocket"]


def test_a_new_key_is_let_in_and_nothing_is_replaced(cluster: Cluster) -> None:
    headers = {"Authorization": "Bearer hf-metrics"}
    with httpx.Client(base_url=cluster.api, trust_env=False) as http:

        def statuses(key: str) -> set[int]:
            """Of both models, several times, for one has two routers."""
            asked = {"Authorization": f"Bearer {key}"}
            return {http.get(f"/{name}/v1/models", headers=asked).status_code for name in ("main", "other") * 4}

        def processes() -> list[str]:
            told = (http.get(f"/{name}/metrics/targets", headers=headers).json() for name in ("main", "other"))
            return sorted(each["labels"]["instance"] for targets in told for each in targets)

        before = processes()
        assert statuses("hf-new") == {401}
        text = cluster.tenants.read_text()
        cluster.tenants.write_text(f"{text}\n  - {{name: new, key_hashes: ['{hash_key('hf-new')}']}}\n")
        until(lambda: statuses("hf-new") == {200}, every_s=0.2)
        assert statuses(KEY) == {200}
        assert processes() == before
