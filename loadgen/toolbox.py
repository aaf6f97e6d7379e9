"""Typed tools: Python functions as an OpenAI client declares them, and the calls of a model run as they ask for.

    tools = Toolbox()

    @tools.tool(timeout_s=10, retries=2)
    async def get_weather(city: str, days: int = 1) -> dict[str, float]:
        \"\"\"Weather of a city.

        Args:
            city: its name in English
        \"\"\"

A tool's schema follows its signature and docstring. A failed call (arguments that do not fit, a tool that raises or
takes too long) gets an error as its result, for the model to read. `orchestrator` decides when a call runs.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import logging
import re
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import wraps
from typing import Any, TypeVar, overload

import pydantic
from pydantic.json_schema import GenerateJsonSchema
from pydantic_core import ArgsKwargs, to_json

from holdfast.loadgen.conversation import WrittenCall
from holdfast.loadgen.program import Json
from holdfast.replicas.errors import ConfigError

log = logging.getLogger(__name__)

Function = TypeVar("Function", bound=Callable[..., Any])

TIMEOUT_S = 60.0
_NAME = re.compile(r"[a-zA-Z0-9_-]{1,64}")
_SHOWN = 500  # characters of an error that the model gets


@dataclass(frozen=True, slots=True)
class Outcome:
    """The result of a call; where not `ok`, `content` is the error. Times are `perf_counter`'s."""

    call: WrittenCall
    content: str
    ok: bool
    tries: int
    started: float
    ended: float

    @property
    def message(self) -> Json:
        """The message with the result."""
        return {"role": "tool", "tool_call_id": self.call.call_id, "content": self.content}


@dataclass(frozen=True, slots=True)
class Tool:
    """A function that a model may call; `schema` is the tool as an OpenAI client declares it.

    A try that raises, or takes `timeout_s`, is repeated up to `retries` times, after `backoff_s` and then twice as long
    each time. A function that is not async runs on a thread, which cannot be ended: it goes on after a timeout.
    """

    name: str
    schema: Json
    function: Callable[..., Any]
    arguments: pydantic.TypeAdapter[dict[str, Any]]
    timeout_s: float = TIMEOUT_S
    retries: int = 0
    backoff_s: float = 0.1

    @property
    def longest_s(self) -> float:
        """The longest that a call can take, in seconds."""
        return self.timeout_s * (self.retries + 1) + self.backoff_s * (2.0**self.retries - 1)

    async def run(self, call: WrittenCall) -> Outcome:
        """The outcome of a call. Raises only CancelledError, where the caller is cancelled."""
        started = time.perf_counter()
        if (arguments := call.parsed) is None:
            return _failed(call, f"the arguments are not a JSON object: {call.arguments[:_SHOWN]}", 0, started)
        try:
            fields = self.arguments.validate_python(ArgsKwargs((), arguments))
        except pydantic.ValidationError as error:
            return _failed(call, _reasons(error), 0, started)
        for tries in range(1, self.retries + 2):
            try:
                async with asyncio.timeout(self.timeout_s):
                    content = _to_text(await self._called(fields))
                return Outcome(call, content, True, tries, started, time.perf_counter())
            except TimeoutError as error:
                wrong = str(error) or f"{self.name} took longer than {self.timeout_s:g} s"
            except asyncio.CancelledError:
                if (task := asyncio.current_task()) is None or task.cancelling():
                    raise
                wrong = f"{self.name} was cancelled"
            except Exception as error:
                wrong = f"{type(error).__name__}: {error}"
                log.info("the tool %s failed", self.name, exc_info=error)
            if tries <= self.retries:
                await asyncio.sleep(self.backoff_s * 2.0 ** (tries - 1))
        return _failed(call, wrong, self.retries + 1, started)

    async def _called(self, fields: dict[str, Any]) -> Any:
        if inspect.iscoroutinefunction(self.function):
            return await self.function(**fields)
        result = await asyncio.to_thread(self.function, **fields)
        return await result if inspect.isawaitable(result) else result


@dataclass(slots=True)
class Toolbox:
    """The tools of an agent, by name."""

    tools: dict[str, Tool] = field(default_factory=dict)

    @overload
    def tool(self, function: Function, /) -> Function: ...

    @overload
    def tool(self, /, *, name: str = ..., **limits: float) -> Callable[[Function], Function]: ...

    def tool(self, function: Callable[..., Any] | None = None, /, *, name: str = "", **limits: Any) -> Any:
        """Add a function; a decorator, with or without `timeout_s`, `retries` and `backoff_s`.

        Raises ConfigError for a name that is taken or invalid, and for parameters that have no JSON schema.
        """

        def add(plain: Function) -> Function:
            self.add(tool_of(plain, name=name, **limits))
            return plain

        return add if function is None else add(function)

    def add(self, tool: Tool) -> None:
        """Add a tool. Raises ConfigError where there is one of its name."""
        if tool.name in self.tools:
            raise ConfigError(f"there are two tools named {tool.name!r}", "name")
        self.tools[tool.name] = tool

    @property
    def declared(self) -> list[Json]:
        """All tools as an OpenAI client declares them."""
        return [tool.schema for tool in self.tools.values()]

    def longest_s(self, calls: Iterable[WrittenCall]) -> float:
        """The longest that these calls can take together, in seconds."""
        return max((self.tools[call.name].longest_s for call in calls if call.name in self.tools), default=0.0)

    async def run(self, call: WrittenCall) -> Outcome:
        """The outcome of a call; for an unknown tool, an error that names the known ones."""
        tool = self.tools.get(call.name)
        if tool is None:
            names = ", ".join(self.tools) or "none"
            return _failed(call, f"there is no tool {call.name!r}; there are: {names}", 0, time.perf_counter())
        return await tool.run(call)


def tool_of(function: Callable[..., Any], *, name: str = "", **limits: Any) -> Tool:
    """The tool of a function. Raises ConfigError."""
    name = name or function.__name__
    if not _NAME.fullmatch(name):
        raise ConfigError(f"{name!r} is no name of a tool: [a-zA-Z0-9_-]{{1,64}}", "name")
    for limit, least in (("timeout_s", 1e-9), ("retries", 0), ("backoff_s", 0)):
        if limits.get(limit, least) < least:
            raise ConfigError(f"{limit} of {name!r} is too small", limit)
    for item in inspect.signature(function).parameters.values():
        if item.kind not in (item.POSITIONAL_OR_KEYWORD, item.KEYWORD_ONLY):
            raise ConfigError(f"{name!r} has a parameter {item.name!r} that cannot be given by name", item.name)

    @wraps(function)
    def arguments(**fields: Any) -> dict[str, Any]:
        return fields

    try:
        adapter: pydantic.TypeAdapter[dict[str, Any]] = pydantic.TypeAdapter(arguments)  # type: ignore[arg-type]
        parameters = {"required": [], **adapter.json_schema(schema_generator=_Untitled)}
    except (pydantic.errors.PydanticUserError, pydantic.errors.PydanticUndefinedAnnotation) as error:
        raise ConfigError(f"the parameters of {name!r} have no JSON schema: {error}", name) from error
    description, texts = _documented(inspect.getdoc(function) or "")
    properties = parameters.setdefault("properties", {})
    for parameter, declared in properties.items():
        declared.pop("title", None)
        declared |= {"description": texts[parameter]} if texts.get(parameter) else {}
    schema = {"type": "function", "function": {"name": name, "description": description, "parameters": parameters}}
    return Tool(name, schema, function, adapter, **limits)


class _Untitled(GenerateJsonSchema):
    """Without titles, which repeat a parameter's name."""

    def field_title_should_be_set(self, schema: Any) -> bool:
        return False


def _documented(text: str) -> tuple[str, dict[str, str]]:
    """The text of a docstring before its first section, and that of each parameter under `Args:`."""
    text = re.sub(r"(?m)^(Returns|Raises|Yields|Examples?|Notes?):.*\Z", "", text, flags=re.DOTALL)
    description, _, arguments = text.partition("Args:\n")
    parameters: dict[str, str] = {}
    name = ""
    for line in inspect.cleandoc(arguments).splitlines():
        if match := re.match(r"\*{0,2}(\w+)\s*(?:\([^)]*\))?:\s*(.*)", line):
            name = match[1]
            parameters[name] = match[2]
        elif name:
            parameters[name] += f" {line.strip()}"
    return description.strip(), {name: text.strip() for name, text in parameters.items()}


def _to_text(result: Any) -> str:
    """A result as text that can be sent, without half surrogate pairs."""
    text = result if isinstance(result, str) else to_json(result, fallback=str).decode()
    return text.encode(errors="replace").decode()


def _failed(call: WrittenCall, wrong: str, tries: int, started: float) -> Outcome:
    content = json.dumps({"error": wrong}, ensure_ascii=False)
    return Outcome(call, _to_text(content), False, tries, started, time.perf_counter())


def _reasons(error: pydantic.ValidationError) -> str:
    """The error of each argument, in a line."""
    wrong = (f"{'.'.join(str(part) for part in item['loc']) or 'arguments'}: {item['msg']}" for item in error.errors())
    return "; ".join(wrong)[:_SHOWN]
