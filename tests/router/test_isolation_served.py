"""The same over HTTP, with the shipped model: body, headers, usage, status and metrics tell a tenant nothing of what
another one has sent before it, and as much is computed for it.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import httpx
from fake_backend import World, bearer, keyed
from service_backend import ServiceBackend

OWN = ("date", "request-id", "x-request-id", "server-timing")  # of each answer
READ = ("/v1/usage", "/v1/tools/latency", "/v1/cluster/status", "/v1/sessions", "/v1/models")


def body(city: str, tool: str) -> dict[str, Any]:
    parameters = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
    tools = [{"type": "function", "function": {"name": tool, "parameters": parameters}}]
    messages = [
        {"role": "system", "content": f"You know {city} well, and nothing else. " * 6},
        {"role": "user", "content": f"What is the weather in {city}?"},
    ]
    return {"model": "pocket", "messages": messages, "tools": tools, "temperature": 0, "max_tokens": 16}


@contextmanager
def served() -> Iterator[tuple[ServiceBackend, httpx.Client]]:
    backend = ServiceBackend()
    world = World(backend, keyed("victim", "me", exposed=True))
    try:
        with world.served() as address, httpx.Client(base_url=address, timeout=60) as client:
            yield backend, client
    finally:
        backend.stop()


def ask(client: httpx.Client, who: str, asked: dict[str, Any]) -> httpx.Response:
    answer = client.post("/v1/chat/completions", json=asked, headers=bearer(who))
    assert answer.status_code == 200, answer.text
    return answer


def work(backend: ServiceBackend) -> tuple[int, ...]:
    """What was computed until now, by whatever would be spared it."""
    stats, text = backend.service.engine.stats, backend.service.text
    compiled = text._compiler.compiled
    return stats.prompt_computed, stats.prompt_cached, compiled, text.cache.tokenized


def told(found: Any) -> Any:
    """Without what is drawn for each answer, and without times."""
    if isinstance(found, dict):
        drawn = ("id", "created", "system_fingerprint", "uptime_s", "last_used")
        return {k: told(v) for k, v in found.items() if k not in drawn and not k.endswith(("_s", "_ms", "seconds"))}
    return [told(each) for each in found] if isinstance(found, list) else found


def seen(victim: dict[str, Any]) -> list[Any]:
    """All that a tenant can look at around its request, once another one has sent its own twice."""
    mine = body("Paris", "get_weather")
    with served() as (backend, client):
        for _ in range(2):
            ask(client, "victim", victim)
        before = work(backend)
        answer = ask(client, "me", mine)
        found: list[Any] = [tuple(now - then for now, then in zip(work(backend), before, strict=True))]
        found.append({k: v for k, v in answer.headers.items() if k not in OWN})
        found.append(told(answer.json()))
        looks = [client.get(path, headers=bearer("me")) for path in READ]
        found += [(look.status_code, told(look.json())) for look in looks]
        found.append(client.get("/metrics", headers=bearer("me")).status_code)
        assert ask(client, "me", mine).headers["x-holdfast-cache"] == "hit", "its own is found"
    return found


def test_what_another_tenant_has_sent_is_in_nothing_that_a_tenant_sees() -> None:
    after_the_same, after_another = seen(body("Paris", "get_weather")), seen(body("Quito", "cat_feather"))
    for same, another in zip(after_the_same, after_another, strict=True):
        assert same == another
    assert after_the_same[1]["x-holdfast-cache"] == "miss"
    assert after_the_same[2]["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
