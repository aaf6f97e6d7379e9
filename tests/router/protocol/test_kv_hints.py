"""`kv_hints`: what is read of them, what is refused by name, and with the shipped model what they change and do not."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from fake_backend import FakeBackend, World, chat_body
from kv_audit import check_cache
from service_backend import ServiceBackend

from holdfast.replicas.config import EngineConfig, RetentionConfig
from holdfast.replicas.kv.tags import Hint, Label
from holdfast.router.config import RouterConfig
from holdfast.router.protocol.kv_hints import MAX_ACTIONS, MAX_DIRECTIVES, MAX_DURATION_S

pytestmark = pytest.mark.anyio

CHAT = "/v1/chat/completions"
MESSAGES: Any = [
    {"role": "system", "content": "You are brief."},
    {"role": "user", "content": "Rain?"},
    {"role": "user", "content": "Snow?"},
]


def action(*directives: Any, **more: Any) -> dict[str, Any]:
    payload = {"directives": list(directives)}
    given = {"action_id": "a", "action_type": "kv.retain", "action_version": "1.0", "payload": payload}
    return given | more


def envelope(*actions: Any, **more: Any) -> dict[str, Any]:
    return {"protocol_version": "0.1", "message_id": "m", "actions": list(actions)} | more


def ask(hints: Any, path: str = CHAT, **more: Any) -> Any:
    world = World(FakeBackend())
    body = chat_body(messages=MESSAGES) if "chat" in path else {"model": "pocket", "prompt": "hi"}
    answer = world.call("POST", path, json=body | {"kv_hints": hints} | more)
    return answer, world.backend.requests


USER = {"messages": [1, 3], "tag": "user_query"}


@pytest.mark.parametrize(
    ("directive", "hint"),
    [
        ({"messages": [0, 1], "tag": "system_prompt"}, Hint("messages", Label("system_prompt", 80), 0, 1)),
        (USER | {"priority": 90, "duration": 7.5}, Hint("messages", Label("user_query", 90, 7.5), 1, 3)),
        ({"start": 4, "end": 9, "priority": 1}, Hint("tokens", Label(priority=1), 4, 9)),
        ({"end": None, "start": 4, "priority": 100, "duration": None}, Hint("tokens", Label(priority=100), 4)),
        ({"priority": 0}, Hint("tokens", Label(priority=-1))),
        ({"covers_output": True, "tag": "response"}, Hint("reply", Label("response", -1))),
    ],
)
def test_what_a_directive_says(directive: Any, hint: Hint) -> None:
    answer, (request,) = ask(envelope(action(directive)))
    assert answer.status_code == 200
    assert request.hints == (hint,)


def test_others_actions_are_passed_over_and_tokens_may_be_named_in_a_plain_prompt() -> None:
    other = action(action_type="kv.prefetch", action_version="7", payload={"anything": [1]})
    answer, (request,) = ask(envelope(other), "/v1/completions")
    assert answer.status_code == 200
    assert request.hints == ()
    answer, (request,) = ask(envelope(other, action({"start": 0, "end": 5, "priority": 3})), "/v1/completions")
    assert request.hints == (Hint("tokens", Label(priority=3), 0, 5),)


INSIDE = "kv_hints.actions.0.payload.directives"


@pytest.mark.parametrize(
    ("hints", "field"),
    [
        (5, "kv_hints"),
        ({"protocol_version": "0.1", "actions": []}, "kv_hints.message_id"),
        (envelope(extra=1), "kv_hints.extra"),
        (envelope(*[action()] * (MAX_ACTIONS + 1)), "kv_hints.actions"),
        (envelope(action(action_version="2.0")), "kv_hints.actions.0.action_version"),
        (envelope(action(payload={})), INSIDE),
        (envelope(action(payload={"directives": [], "scope": "other"})), "kv_hints.actions.0.payload.scope"),
        (envelope(action(*[{"priority": 100}] * (MAX_DIRECTIVES + 1))), INSIDE),
        (envelope(*[action(*[{"priority": 100}] * 100)] * 2), "kv_hints.actions.1.payload.directives"),
        (envelope(action({"messages": [0, 1]})), f"{INSIDE}.0"),
        (envelope(action({"messages": [0, 1], "tag": "gold"})), f"{INSIDE}.0.tag"),
        (envelope(action({"priority": 101})), f"{INSIDE}.0.priority"),
        (envelope(action({"priority": -1})), f"{INSIDE}.0.priority"),
        (envelope(action({"priority": True})), f"{INSIDE}.0.priority"),
        (envelope(action({"priority": 1, "duration": -0.1})), f"{INSIDE}.0.duration"),
        (envelope(action({"priority": 1, "duration": 2 * MAX_DURATION_S})), f"{INSIDE}.0.duration"),
        (envelope(action({"priority": 1, "messages": [-1, 1]})), f"{INSIDE}.0.messages.0"),
        (envelope(action({"priority": 1, "messages": [1, 1]})), f"{INSIDE}.0"),
        (envelope(action({"priority": 1, "messages": [0, 1, 2]})), f"{INSIDE}.0.messages"),
        (envelope(action({"priority": 1, "messages": [0, 4]})), "kv_hints"),
        (envelope(action({"priority": 1, "start": -1})), f"{INSIDE}.0.start"),
        (envelope(action({"priority": 1, "start": 5, "end": 5})), f"{INSIDE}.0"),
        (envelope(action({"priority": 1, "start": 5, "messages": [0, 1]})), f"{INSIDE}.0"),
        (envelope(action({"priority": 1}, {"priority": 1, "why": ""})), f"{INSIDE}.1.why"),
    ],
)
def test_what_makes_no_sense_is_refused_by_name(hints: Any, field: str) -> None:
    answer, requests = ask(hints)
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["param"] == field
    assert not requests


def test_messages_of_a_prompt_without_any_are_refused() -> None:
    answer, _ = ask(envelope(action({"priority": 1, "messages": [0, 1]})), "/v1/completions")
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "kv_hints")


OTHERS: dict[str, dict[str, Any]] = {  # three messages each
    "/v1/responses": {"instructions": "You are brief.", "input": MESSAGES[1:]},
    "/v1/messages": {"system": "You are brief.", "messages": MESSAGES[1:], "max_tokens": 9},
}


@pytest.mark.parametrize("path", OTHERS)
def test_they_say_the_same_in_every_format(path: str) -> None:
    world = World(FakeBackend(), config=RouterConfig(response_cache=False))
    plain = {"model": "pocket", **OTHERS[path]}
    hints = envelope(action({"messages": [0, 1], "tag": "system_prompt"}, {"covers_output": True, "priority": 7}))
    answers = world.calls([("POST", path, {"json": plain | {"kv_hints": each}}) for each in (hints, None)])
    assert [each.status_code for each in answers] == [200, 200]
    hinted, unhinted = world.backend.requests
    assert hinted.hints == (Hint("messages", Label("system_prompt", 80), 0, 1), Hint("reply", Label(priority=7)))
    assert (unhinted.hints, unhinted.prompt) == ((), hinted.prompt)
    for wrong in (action({"priority": 1, "messages": [0, 4]}), action({"priority": 101})):
        refused = world.call("POST", path, json=plain | {"kv_hints": envelope(wrong)})
        assert (refused.status_code, "kv_hints" in refused.json()["error"]["message"]) == (400, True)
    assert len(world.backend.requests) == 2


def test_hints_are_no_part_of_what_decides_an_answer() -> None:
    world = World(FakeBackend())
    for hints in (None, envelope(action({"priority": 9})), envelope()):
        answer = world.call("POST", CHAT, json=chat_body(temperature=0) | {"kv_hints": hints})
        assert answer.status_code == 200
    assert len(world.backend.requests) == 1


# ---- with the shipped model ----

# Nothing stays pinned between turns: what is pinned stands in no tier.
CONFIG: Any = {
    "cells": 1024,
    "threads": 1,
    "dtype": "float32",
    "context_length": 512,
    "retention": RetentionConfig(policy="none"),
}
SMALL = EngineConfig(**CONFIG)
ABUSE: dict[str, Any] = {
    "nothing": None,
    "as many as there may be": envelope(
        action(*[{"start": 3 * n, "end": 3 * n + 7, "priority": 1 + n % 100} for n in range(MAX_DIRECTIVES)])
    ),
    "beyond the end": envelope(action({"start": 10**9, "priority": 100}, {"start": 0, "end": 10**12, "priority": 7})),
}


def messages(number: int, agent: int) -> Any:
    return [
        {"role": "system", "content": f"You are agent {agent}. " + "Be brief. " * 20},
        {"role": "user", "content": f"{number}: is it raining in Oslo today? " * 3},
    ]


@asynccontextmanager
async def engine(config: EngineConfig) -> AsyncIterator[tuple[Any, Any]]:
    """A new engine, and what posts a body to the router before it. Its books are looked at in the end."""
    backend = ServiceBackend(config)
    async with World(backend, config=RouterConfig(response_cache=False)).client() as client:

        async def post(path: str, **body: Any) -> Any:
            answer = await client.post(path, json=chat_body(**body))
            assert answer.status_code == 200, answer.text
            return answer.json()

        yield backend, post
    await backend.service.close()
    check_cache(backend.service.engine.cache)


async def served(config: EngineConfig, hints: Any) -> tuple[list[str], Any]:
    """What twelve short conversations of two turns answer, in a cache that is too small for them; and their engine."""
    more = [{"role": "assistant", "content": "It is."}, {"role": "user", "content": "And tomorrow?"}]
    told: list[str] = []
    async with engine(config) as (backend, post):
        for said in ([], more):
            for number in range(12):
                body: Any = {"messages": messages(number, number % 3) + said, "program_id": f"p{number}"}
                body |= {"max_tokens": 4, "temperature": 0, "kv_hints": hints}
                told.append((await post(CHAT, **body))["choices"][0]["message"]["content"])
    return told, backend.service.engine


async def test_no_hint_changes_an_answer_or_breaks_the_books() -> None:
    plain, off = await served(EngineConfig(**{**CONFIG, "without": ("kv_tags",)}), None)
    assert sum(off.stats.evicted_by_tag.values()) == off.stats.evicted_by_tag["other"] > 0
    for name, hints in ABUSE.items():
        told, engine = await served(SMALL, hints)
        assert told == plain, name
        raised = engine.occupancy().cells_raised
        assert raised <= SMALL.cells // 2, name
        assert sum(engine.stats.hits_by_tag.values()) > 0
        if hints is None:
            by_tag = engine.stats.evicted_by_tag
            assert by_tag["user_query"] > 0
            assert engine.stats.hits_by_tag["system_prompt"] > off.stats.hits_by_tag["system_prompt"] == 0
            assert raised > 0


@pytest.mark.parametrize("hints", [None, envelope(action({"messages": [0, 2], "priority": 90, "duration": 600}))])
async def test_a_prefill_tags_what_is_cached_anew_between_two_turns(hints: Any) -> None:
    """What it names outlives others that were used later; without hints only the handle's own time protects it."""
    async with engine(SMALL) as (_, post):
        first: Any = {"messages": messages(0, 0), "program_id": "p0"}
        await post(CHAT, **first, max_tokens=8)
        await post("/v1/prefills", **first, keep_s=0.001, kv_hints=hints)
        for number in range(1, 13):
            await post(CHAT, messages=messages(number, number), program_id=f"p{number}", max_tokens=8)
        usage = (await post(CHAT, **first, max_tokens=8))["usage"]
    kept = usage["prompt_tokens_details"]["cached_tokens"] / usage["prompt_tokens"]
    assert kept > 0.9 if hints else kept < 0.5
