"""The router's list against what a whole router exposes."""

import asyncio

from fake_backend import World
from prometheus_client.parser import text_string_to_metric_families

from holdfast.router.dispatch.dispatch_queue import QueueStats
from holdfast.router.endpoints.metrics_endpoints import watch_line, watch_redis
from holdfast.router.metric_list import ALL
from holdfast.router.records.store import RedisInfo


class Answering:
    async def info(self):
        return RedisInfo(1, 2, 3, 4, 5)


def test_every_metric_of_the_list_is_exposed_as_it_says_and_no_other():
    world = World()
    metrics = world.metrics
    watch_line(metrics, QueueStats)
    watch_redis(metrics, Answering())
    text = asyncio.run(metrics.exposition())
    found = {family.name: family for family in text_string_to_metric_families(text)}
    assert {metric.name.removesuffix("_total") for metric in ALL} == set(found)
    for metric in ALL:
        assert found[metric.name.removesuffix("_total")].type == metric.kind


def test_samples_have_the_labels_of_the_list():
    world = World()
    world.chat()
    labels = {metric.name.removesuffix("_total"): set(metric.labels) for metric in ALL}
    for family in world.registry.collect():
        for sample in family.samples:
            assert sample.labels.keys() - {"le"} == labels[family.name], sample
