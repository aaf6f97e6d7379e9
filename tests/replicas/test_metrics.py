"""The list of a replica's metrics, their exposition, and their help texts."""

import re
from dataclasses import fields, is_dataclass
from types import SimpleNamespace as Namespace

from engine_world import service_of
from prometheus_client import CollectorRegistry
from prometheus_client.exposition import generate_latest
from prometheus_client.parser import text_string_to_metric_families

from holdfast.replicas.config import EngineConfig
from holdfast.replicas.kv.cache import KVCache
from holdfast.replicas.metrics import ALL, MetricKind, process_usage
from holdfast.replicas.reports import EngineCollector
from holdfast.replicas.stats import EngineStats, Occupancy
from holdfast.router import metric_list as router
from holdfast.router.config import RouterConfig

EVERY = (*ALL, *router.ALL)
SECTIONS = {"engine": EngineConfig(), "router": RouterConfig()}


def exposed():
    stats, cache, registry = EngineStats(steps=3), KVCache(12, 5), CollectorRegistry()
    stats.step_times.observe(0.003)
    stats.served_s["acme"] = 1.0
    for tenant, pages in (("acme", 3), ("beta", 2), ("gamma", 1)):
        cache.tree.tenants.took(tenant, pages)
    engine = Namespace(
        stats=stats, cache=cache, config=Namespace(page_size=5), occupancy=lambda: Occupancy(1, 2, 3, 60, 10, 20, 30)
    )
    registry.register(EngineCollector(service_of(engine), "r"))
    return {family.name: family for family in text_string_to_metric_families(generate_latest(registry).decode())}


def test_exactly_the_listed_metrics_are_exposed():
    found = exposed()
    assert {each.name.removesuffix("_total") for each in ALL} == set(found)
    for each in ALL:
        family = found[each.name.removesuffix("_total")]
        assert family.type == each.kind
        for sample in family.samples:
            assert sample.labels.keys() - {"le"} == {"model", "replica", *each.labels}


def test_values_are_those_of_the_engine():
    found = exposed()
    cells = {sample.labels["state"]: sample.value for sample in found["holdfast_cells"].samples}
    assert cells == {"free": 10, "tree": 20, "held": 30}
    cells = {each.labels["tenant"]: each.value for each in found["holdfast_tenant_cells"].samples}
    assert cells == {"acme": 15, "other": 15}
    steps = {
        (s.name.rpartition("_")[2], s.labels.get("le")): s.value
        for s in found["holdfast_step_duration_seconds"].samples
    }
    assert steps["bucket", "0.002"] == 0
    assert steps["bucket", "0.005"] == steps["bucket", "+Inf"] == steps["count", None] == 1
    assert steps["sum", None] == 0.003


def test_metrics_are_named_and_explained():
    assert len({metric.name for metric in EVERY}) == len(EVERY)
    for metric in EVERY:
        name = metric.name
        assert re.fullmatch(r"holdfast_[a-z_]+", name)
        assert name.endswith("_total") == (metric.kind is MetricKind.COUNTER), name
        assert bool(metric.buckets) == (metric.kind is MetricKind.HISTOGRAM), name
        assert list(metric.buckets) == sorted(set(metric.buckets)), name
        assert metric.help[0].isupper() or metric.help[0].isdigit(), name
        assert metric.advice, name
        assert not metric.help.endswith("."), name
        assert not metric.advice.endswith("."), name
        without_bound = {"program", "request", "key", "user", "tool", "session"} & set(metric.labels)
        assert not without_bound, name


def test_names_in_help_texts_exist():
    names = {each.name for each in EVERY}
    for word in (word for each in EVERY for word in re.findall(r"`([\w.]+)`", f"{each.help} {each.advice}")):
        assert word in names or not word.startswith("holdfast_")
        section, _, rest = word.partition(".")
        if rest and section in SECTIONS:
            value = SECTIONS[section]
            for part in rest.split("."):
                assert is_dataclass(value)
                assert part in {field.name for field in fields(value)}, word
                value = getattr(value, part)


def test_process_usage_grows():
    before = process_usage()
    sum(i * i for i in range(200_000))
    after = process_usage()
    assert after.cpu_s > before.cpu_s
    assert after.started == before.started > 1e9
    assert after.memory > 2**20
