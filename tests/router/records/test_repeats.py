"""Requests that are equal: what of a repeated answer is its own, and how a request asks for a draw of its own."""

import re
from dataclasses import replace

import pytest
from fake_backend import CALL, CARD, DONE, FORMATS, USAGE, FakeBackend, World, called, chat_body

from holdfast.replicas.requests import Completed, ToolCallDelta
from holdfast.router.tenants import Tenant, TenantDirectory, hash_key

CHAT = "/v1/chat/completions"
TWO = (
    (ToolCallDelta(0, "call_1", "get_weather", "{}", closed=True),),
    (ToolCallDelta(1, "call_2", "get_weather", "{}", closed=True), Completed("tool_calls", USAGE, DONE.timing)),
)
IDS = {
    CHAT: r'"id":"(call_[^"]+)"',
    "/v1/responses": r'"call_id":"([^"]+)"',
    "/v1/messages": r'"type":"tool_use","id":"([^"]+)"',
}


@pytest.mark.parametrize("form", FORMATS, ids=str)
@pytest.mark.parametrize("streams", [(False, False, True), (True, True, False)])
def test_calls_of_a_repeated_answer_have_ids_of_their_own(form, streams):
    """Whole or streamed, and two repeats differ; within one answer an id is the same wherever it stands."""
    world = World(FakeBackend(TWO))
    found = []
    for stream in streams:
        answer = world.call("POST", form.path, json={**form.streamed(), "stream": stream})
        found.append(list(dict.fromkeys(re.findall(IDS[form.path], answer.text))))
    assert len(world.backend.requests) == 1
    assert found[0] == ["call_1", "call_2"]
    assert [len(ids) for ids in found] == [2, 2, 2]
    assert len({each for ids in found for each in ids}) == 6
    assert all(re.fullmatch("call_[0-9a-f]{24}", each) for ids in found[1:] for each in ids)


def test_an_id_keeps_the_form_that_a_template_takes():
    answer = World(FakeBackend(called(ToolCallDelta(0, "a1b2c3d4e", "f", "{}", closed=True)))).chat().json()
    assert answer["choices"][0]["message"]["tool_calls"][0]["id"] == "a1b2c3d4e"
    for before, after in (("a1b2c3d4e", "[0-9a-f]{9}"), ("functions.f:0", r"functions\.f:0")):
        world = World(FakeBackend(called(ToolCallDelta(0, before, "f", "{}", closed=True))))
        world.chat()
        [call] = world.chat().json()["choices"][0]["message"]["tool_calls"]
        assert re.fullmatch(after, call["id"])
        assert call["id"] != "a1b2c3d4e"


def test_a_program_that_goes_on_from_a_repeat_is_told_from_the_first():
    """Both runs got the same reply; by the ids of its calls each goes on with its own."""
    world = World(FakeBackend(CALL))
    for _ in range(2):
        said = world.chat().json()["choices"][0]["message"]
        [call] = said["tool_calls"]
        result = {"role": "tool", "tool_call_id": call["id"], "content": "4"}
        world.chat(messages=[*chat_body()["messages"], {**said, "content": None}, result], seed=1)
    first, *turns = world.backend.requests
    assert len(turns) == 2
    assert turns[0].program_id == first.program_id != turns[1].program_id


def body_of(form, **more):
    return {**form.streamed(), "stream": False, **more}


@pytest.mark.parametrize("form", FORMATS, ids=str)
@pytest.mark.parametrize("asked", [{"body": {"fresh_draw": True}}, {"headers": {"X-Holdfast-Fresh-Draw": "true"}}])
def test_a_fresh_draw_has_a_seed_of_its_own_and_no_answer_of_another(form, asked):
    world = World()
    plain = world.call("POST", form.path, json=body_of(form))
    for _ in range(2):
        fresh = world.call("POST", form.path, json=body_of(form, **asked.get("body", {})), headers=asked.get("headers"))
        assert (fresh.status_code, fresh.headers["x-holdfast-cache"]) == (200, "bypass")
    assert plain.headers["x-holdfast-cache"] == "miss"
    seeds = [request.sampling.seed for request in world.backend.requests]
    assert seeds[0] is None
    assert None not in seeds[1:]
    assert seeds[1] != seeds[2]
    again = world.call("POST", form.path, json=body_of(form))
    assert again.headers["x-holdfast-cache"] == "hit"  # a fresh draw is not kept either


def test_each_choice_of_a_fresh_draw_has_its_own():
    world = World()
    world.chat(n=3, fresh_draw=True)
    world.chat(n=3)
    *fresh, _, _, _ = [request.sampling.seed for request in world.backend.requests]
    assert len({*fresh} - {None}) == 3


def test_a_fresh_draw_keeps_the_seed_that_is_given_and_the_most_likely_tokens():
    world = World()
    world.chat(fresh_draw=True, seed=7)
    world.chat(fresh_draw=True, temperature=0)
    assert [request.sampling.seed for request in world.backend.requests] == [7, None]


def test_completions_take_it_and_a_wrong_word_is_refused_by_name():
    world = World()
    answer = world.call("POST", "/v1/completions", json={"model": "pocket", "prompt": "x", "fresh_draw": True})
    assert answer.status_code == 200
    assert world.backend.requests[0].sampling.seed is not None
    wrong = world.call("POST", CHAT, json=chat_body(), headers={"x-holdfast-fresh-draw": "perhaps"})
    assert (wrong.status_code, wrong.json()["error"]["param"]) == (400, "x-holdfast-fresh-draw")
    wrong = world.chat(fresh_draw="yes")
    assert (wrong.status_code, wrong.json()["error"]["param"]) == (400, "fresh_draw")


@pytest.mark.parametrize(
    ("body", "told"), [({}, "prompt-seed"), ({"temperature": 0}, None), ({"seed": 3}, None), ({"top_p": 0}, None)]
)
def test_a_repeated_draw_says_why_it_is_the_same(body, told):
    world = World()
    first, again = world.chat(**body), world.chat(**body, stream=True)
    assert "x-holdfast-repeat" not in first.headers
    assert (again.headers["x-holdfast-cache"], again.headers.get("x-holdfast-repeat")) == ("hit", told)


@pytest.mark.parametrize("of", ["tenant", "engine"])
@pytest.mark.parametrize("form", FORMATS, ids=str)
def test_without_prompt_seeds_every_sampled_answer_is_a_fresh_one(form, of):
    tenant = Tenant("acme", (hash_key("k"),), prompt_seed=of != "tenant")
    world = World(tenants=TenantDirectory([tenant]))
    world.backend.cards = (replace(CARD, prompt_seed=of != "engine"),)

    def results(**more):
        headers = {"authorization": "Bearer k"}
        answers = [world.call("POST", form.path, json=body_of(form, **more), headers=headers) for _ in range(2)]
        return [answer.headers["x-holdfast-cache"] for answer in answers]

    assert results() == ["bypass", "bypass"]
    assert len({request.sampling.seed for request in world.backend.requests} - {None}) == 2
    assert results(temperature=0) == ["miss", "hit"]  # nothing is drawn


def test_without_prompt_seeds_an_answer_of_a_seed_is_cached():
    world = World()
    world.backend.cards = (replace(CARD, prompt_seed=False),)
    asked = ({"seed": 3}, {"seed": 3}, {"n": 2})
    assert [world.chat(**body).headers["x-holdfast-cache"] for body in asked] == ["miss", "hit", "bypass"]
    assert len({request.sampling.seed for request in world.backend.requests} - {None}) == 3


def test_no_store_keeps_nothing_and_no_cache_keeps_the_new_answer():
    world = World()
    for control, result in (("no-store", "bypass"), ("", "miss"), ("no-cache", "bypass"), ("", "hit")):
        answer = world.call("POST", CHAT, json=chat_body(), headers={"cache-control": control})
        assert answer.headers["x-holdfast-cache"] == result
    assert len(world.backend.requests) == 3
