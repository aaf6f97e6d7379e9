"""Tools: what is declared of a function, and what a model is told of each call, whatever happens."""

import asyncio
import json
import threading
from collections.abc import Callable
from typing import Annotated, Any, Literal

import jsonschema
import pydantic
import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.loadgen.conversation import WrittenCall
from holdfast.loadgen.toolbox import Outcome, Toolbox, tool_of
from holdfast.replicas.errors import ConfigError


class Place(pydantic.BaseModel):
    city: str
    floor: int = 0


async def book(
    place: Place,
    nights: Annotated[int, pydantic.Field(ge=1)] = 1,
    kind: Literal["single", "double"] = "single",
    schema: str | None = None,
) -> dict[str, Any]:
    """Book a room.

    It can be cancelled.

    Args:
        place: where it is,
            on which floor
        nights (int): how many

    Returns:
        A number.
    """
    return {"city": place.city, "nights": nights, "kind": kind, "schema": schema}


def toolbox(*functions: Callable[..., Any], **limits: Any) -> Toolbox:
    tools = Toolbox()
    for function in functions:
        tools.tool(**limits)(function)
    return tools


def run(tools: Toolbox, name: str, arguments: object) -> Outcome:
    text = arguments if isinstance(arguments, str) else json.dumps(arguments)
    return asyncio.run(tools.run(WrittenCall("c", name, text)))


def wrong(outcome: Outcome) -> str:
    assert not outcome.ok
    return str(json.loads(outcome.content)["error"])


def test_a_tool_is_declared_as_its_signature_and_docstring_say() -> None:
    function = tool_of(book).schema["function"]
    assert function["name"] == "book"
    assert function["description"] == "Book a room.\n\nIt can be cancelled."
    parameters = function["parameters"]
    jsonschema.Draft202012Validator.check_schema(parameters)
    assert parameters["required"] == ["place"]
    properties = parameters["properties"]
    assert properties["place"]["description"] == "where it is, on which floor"
    assert properties["nights"] == {"default": 1, "description": "how many", "minimum": 1, "type": "integer"}
    assert properties["kind"]["enum"] == ["single", "double"]
    assert "schema" in properties
    jsonschema.validate({"place": {"city": "Oslo"}}, parameters)
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate({"place": {"city": "Oslo"}, "more": 1}, parameters)


def test_a_decorated_function_stays_callable_and_its_limits_are_kept() -> None:
    tools = Toolbox()

    @tools.tool(name="second", timeout_s=2.0, retries=3)
    def two() -> str:
        return "2"

    assert two() == "2"
    assert [tool["function"]["name"] for tool in tools.declared] == list(tools.tools) == ["second"]
    assert tools.tools["second"].longest_s == pytest.approx(4 * 2.0 + 0.1 + 0.2 + 0.4)


def test_functions_that_no_model_can_call_are_refused_by_the_parameter() -> None:
    def many(*args: int) -> None: ...

    def positional(x: int, /) -> None: ...

    def odd(x: asyncio.Lock) -> None: ...

    tools = Toolbox()
    for function, field in ((many, "args"), (positional, "x"), (odd, "odd")):
        with pytest.raises(ConfigError) as refused:
            tools.tool(function)
        assert refused.value.field == field
    for limits in ({"name": "no name"}, {"timeout_s": 0}, {"retries": -1}):
        with pytest.raises(ConfigError) as refused:
            tools.tool(**limits)(book)  # type: ignore[call-overload]
        assert refused.value.field in limits
    tools.tool(book)
    with pytest.raises(ConfigError):
        tools.tool(book)


def test_arguments_come_as_they_are_declared() -> None:
    tools = toolbox(book)
    assert wrong(run(tools, "cook", {})) == "there is no tool 'cook'; there are: book"
    outcome = run(tools, "book", {"place": {"city": "Oslo"}, "nights": "2", "schema": "s"})
    assert json.loads(outcome.content) == {"city": "Oslo", "nights": 2, "kind": "single", "schema": "s"}
    assert outcome.message == {"role": "tool", "tool_call_id": "c", "content": outcome.content}


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ({}, "place: Missing required argument"),
        ({"place": {"city": "Oslo"}, "nights": 0}, "nights: Input should be greater than or equal to 1"),
        ({"place": {}}, "place.city: Field required"),
        ({"place": {"city": "a"}, "nigths": 1}, "nigths: Unexpected keyword argument"),
        ("{", "not a JSON object: {"),
        ("[1]", "not a JSON object: [1]"),
        ("[" * 100_000, "not a JSON object: [["),
    ],
)
def test_the_model_is_told_what_is_wrong_with_its_arguments(arguments: object, told: str) -> None:
    outcome = run(toolbox(book), "book", arguments)
    assert told in wrong(outcome)
    assert outcome.tries == 0
    assert len(outcome.content) < 1000


@given(st.text())
def test_any_text_for_arguments_has_a_result(arguments: str) -> None:
    assert wrong(run(toolbox(book), "book", arguments))


@pytest.mark.parametrize("plain", [False, True])
@pytest.mark.parametrize("failures", [0, 2, 3])
def test_a_tool_that_fails_is_tried_again_and_then_told(plain: bool, failures: int) -> None:
    tried = []

    def work() -> str:
        tried.append(0)
        if len(tried) <= failures:
            raise OSError("no network")
        return "done"

    async def awaited() -> str:
        return work()

    tools = toolbox(work if plain else awaited, name="work", retries=2, backoff_s=0.001)
    outcome = run(tools, "work", {})
    assert outcome.tries == len(tried) == min(failures + 1, 3)
    if failures == 3:
        assert wrong(outcome) == "OSError: no network"
    else:
        assert (outcome.ok, outcome.content) == (True, "done")


def test_every_try_has_its_time() -> None:
    begun = []

    async def work() -> None:
        begun.append(0)
        await asyncio.Event().wait()

    tools = toolbox(work, timeout_s=0.01, retries=1, backoff_s=0.001)
    assert wrong(run(tools, "work", {})) == "work took longer than 0.01 s"
    assert len(begun) == 2


def test_a_tool_that_is_not_async_holds_nothing_up() -> None:
    meanwhile = threading.Event()

    async def both() -> Outcome:
        call = asyncio.create_task(tools.run(WrittenCall("c", "wait", "{}")))
        await asyncio.sleep(0)
        meanwhile.set()
        return await call

    def wait() -> bool:
        return meanwhile.wait(60)

    tools = toolbox(wait)
    assert asyncio.run(both()).content == "true"


def test_a_cancelled_call_is_not_tried_again_and_one_that_cancels_itself_has_failed() -> None:
    tried, began = [], asyncio.Event()

    async def work(itself: bool) -> None:
        tried.append(itself)
        began.set()
        if itself:
            raise asyncio.CancelledError
        await asyncio.Event().wait()

    async def cancelled() -> None:
        task = asyncio.create_task(tools.run(WrittenCall("c", "work", '{"itself": false}')))
        await began.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    tools = toolbox(work, retries=1, backoff_s=0.0)
    asyncio.run(cancelled())
    assert wrong(run(tools, "work", {"itself": True})) == "work was cancelled"
    assert tried == [False, True, True]


def test_results_are_text_that_can_be_sent() -> None:
    def odd() -> str:
        return "half \ud800 a pair"

    def things() -> Any:
        return {"place": Place(city="Oslo"), "set": {1}, "other": asyncio}

    tools = toolbox(odd, things)
    assert run(tools, "odd", {}).content == "half ? a pair"
    assert json.loads(run(tools, "things", {}).content)["place"] == {"city": "Oslo", "floor": 0}
