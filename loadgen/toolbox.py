"""Typed tools: Python functions as an OpenAI client declares them, and the calls of a model run as they ask for.

    tools = Toolbox()

    @tools.tool(timeout_s=10, retries=2)
    async def get_weather(city: str, days: int = 1) -> dict[str, float]:
        \"\"\"Weather of a city.

        Args:
            city: its name in English
        \"\"\"

A tool's schema is what its signature and docstring say. Whatever goes wrong with a call, arguments that do not fit, a
tool that raises or takes too long, becomes the call's result, for the model to read. Not here: when a call is run
(`orchestrator`).
"""

from __future__ import annotations

import asyncio
import inspect
import json
import logging
import re
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, TypeVar, get_type_hints, overload

import pydantic
from pydantic.json_schema import GenerateJsonSchema
from pydantic_core import to_json

from holdfast.loadgen.conversation import WrittenCall
from holdfast.loadgen.program import Json
from holdfast.replicas.errors import ConfigError

log = logging.getLogger(__name__)

Function = TypeVar("Function", bound=Callable[..., Any])

TIMEOUT_S = 60.0
_NAME = re.compile(r"[a-zA-Z0-9_-]{1,64}")
_SHOWN = 500  # characters of what is wrong that a model is told


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of a call: `content` is its result, or what went wrong where not `ok`. Times are `perf_counter`'s."""

    call: WrittenCall
    content: str
    ok: bool
    tries: int
    started: float
    ended: float

    @property
    def message(self) -> Json:
        """The message that tells the model."""
        return {"role": "tool", "tool_call_id": self.call.call_id, "content": self.content}


@dataclass(frozen=True, slots=True)
class Tool:
    """A function that a model may call. A try that raises, or takes `timeout_s`, is repeated up to `retries` times,
    after `backoff_s` and then twice as long each time.

    A function that is not async runs on a thread, which goes on after a timeout or a cancelled run: none can be ended.
    """

    name: str
    about: str
    function: Callable[..., Any]
    arguments: type[pydantic.BaseModel]
    timeout_s: float = TIMEOUT_S
    retries: int = 0
    backoff_s: float = 0.1

    @property
    def schema(self) -> Json:
        """The tool as an OpenAI client declares it."""
        parameters = self.arguments.model_json_schema(schema_generator=_Untitled)
        del parameters["title"]
        parameters.setdefault("required", [])
        return {
            "type": "function",
            "function": {"name": self.name, "description": self.about, "parameters": parameters},
        }

    @property
    def longest_s(self) -> float:
        """Seconds after which every call has ended, whatever happens."""
        return self.timeout_s * (self.retries + 1) + self.backoff_s * (2.0**self.retries - 1)

    async def run(self, call: WrittenCall) -> Outcome:
        """The outcome of a call. Raises nothing but CancelledError where the caller is cancelled."""
        started = time.perf_counter()
        if (arguments := call.parsed) is None:
            return _failed(call, f"the arguments are not a JSON object: {call.arguments[:_SHOWN]}", 0, started)
        try:
            given = self.arguments.model_validate(arguments)
        except pydantic.ValidationError as error:
            return _failed(call, _told(error), 0, started)
        fields = {(of.alias or name): getattr(given, name) for name, of in self.arguments.model_fields.items()}
        for tries in range(1, self.retries + 2):
            try:
                async with asyncio.timeout(self.timeout_s):
                    content = _written(await self._called(fields))
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

    async def _called(self, fields: Mapping[str, Any]) -> Any:
        if inspect.iscoroutinefunction(self.function):
            return await self.function(**fields)
        told = await asyncio.to_thread(self.function, **fields)
        return await told if inspect.isawaitable(told) else told


@dataclass(slots=True)
class Toolbox:
    """The tools of an agent, by name."""

    tools: dict[str, Tool] = field(default_factory=dict)

    @overload
    def tool(self, function: Function, /) -> Function: ...

    @overload
    def tool(
        self,
        /,
        *,
        name: str = ...,
        timeout_s: float = ...,
        retries: int = ...,
        backoff_s: float = ...,
    ) -> Callable[[Function], Function]: ...

    def tool(
        self,
        function: Callable[..., Any] | None = None,
        /,
        *,
        name: str = "",
        timeout_s: float = TIMEOUT_S,
        retries: int = 0,
        backoff_s: float = 0.1,
    ) -> Any:
        """Add a function; as a decorator, with or without arguments, it leaves the function as it is.

        Raises ConfigError for a name that is taken or no tool can have, and for parameters that no model can fill.
        """

        def add(given: Function) -> Function:
            self.add(tool_of(given, name=name, timeout_s=timeout_s, retries=retries, backoff_s=backoff_s))
            return given

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
        """Seconds after which all these calls have ended that begin now."""
        return max((self.tools[call.name].longest_s for call in calls if call.name in self.tools), default=0.0)

    async def run(self, call: WrittenCall) -> Outcome:
        """The outcome of a call; of a tool that is not here, what there is."""
        tool = self.tools.get(call.name)
        if tool is None:
            known = ", ".join(self.tools) or "none"
            return _failed(call, f"there is no tool {call.name!r}; there are: {known}", 0, time.perf_counter())
        return await tool.run(call)


def tool_of(function: Callable[..., Any], *, name: str = "", **limits: Any) -> Tool:
    """The tool that a function is. Raises ConfigError."""
    name = name or function.__name__
    if not _NAME.fullmatch(name):
        raise ConfigError(f"{name!r} is no name of a tool: [a-zA-Z0-9_-]{{1,64}}", "name")
    for limit, least in (("timeout_s", 1e-9), ("retries", 0), ("backoff_s", 0)):
        if limits.get(limit, least) < least:
            raise ConfigError(f"{limit} of {name!r} is too small", limit)
    about, parameters = _documented(inspect.getdoc(function) or "")
    hints = get_type_hints(function, include_extras=True)
    fields: dict[str, Any] = {}
    for at, each in enumerate(inspect.signature(function).parameters.values()):
        if each.kind not in (each.POSITIONAL_OR_KEYWORD, each.KEYWORD_ONLY):
            raise ConfigError(f"{name!r} has a parameter {each.name!r} that cannot be given by name", each.name)
        kind = hints.get(each.name, Any)
        if text := parameters.get(each.name):
            kind = Annotated[kind, pydantic.Field(description=text)]
        default = ... if each.default is each.empty else each.default
        # Fields go by numbers and parameters by alias: a parameter may have a name that pydantic has a use for.
        fields[f"p{at}"] = (kind, pydantic.Field(default, alias=each.name))
    try:
        arguments = pydantic.create_model(name, __config__=pydantic.ConfigDict(extra="forbid"), **fields)
        tool = Tool(name, about, function, arguments, **limits)
        assert tool.schema  # every parameter can be declared
    except (pydantic.errors.PydanticUserError, pydantic.errors.PydanticUndefinedAnnotation) as error:
        raise ConfigError(f"the parameters of {name!r} have no JSON schema: {error}", name) from error
    return tool


class _Untitled(GenerateJsonSchema):
    """Without titles, which say a parameter's name again."""

    def field_title_should_be_set(self, schema: Any) -> bool:
        return False


def _documented(text: str) -> tuple[str, dict[str, str]]:
    """What a docstring says before its first section, and of each parameter under `Args:`."""
    about, _, rest = re.sub(r"(?m)^(Returns|Raises|Yields|Examples?|Notes?):.*\Z", "", text, flags=re.DOTALL).partition(
        "Args:\n"
    )
    parameters: dict[str, str] = {}
    last = ""
    for line in inspect.cleandoc(rest).splitlines():
        if found := re.match(r"\*{0,2}(\w+)\s*(?:\([^)]*\))?:\s*(.*)", line):
            last = found[1]
            parameters[last] = found[2]
        elif last:
            parameters[last] += f" {line.strip()}"
    return about.strip(), {name: told.strip() for name, told in parameters.items()}


def _written(result: Any) -> str:
    """A result as text that can be sent: half a surrogate pair cannot."""
    text = result if isinstance(result, str) else to_json(result, fallback=str).decode()
    return text.encode(errors="replace").decode()


def _failed(call: WrittenCall, wrong: str, tries: int, started: float) -> Outcome:
    content = json.dumps({"error": wrong}, ensure_ascii=False)
    return Outcome(call, _written(content), False, tries, started, time.perf_counter())


def _told(error: pydantic.ValidationError) -> str:
    """What is wrong with each argument, in a line."""
    wrong = (f"{'.'.join(str(part) for part in each['loc']) or 'arguments'}: {each['msg']}" for each in error.errors())
    return "; ".join(wrong)[:_SHOWN]
