"""`holdfast chat`: a conversation with a running server in a terminal, or from a pipe. Whoever types is the tool, too.

An answer is shown as it comes and a call as it closes; under each answer stands what it cost. In a pipe every line of
the input is a message, or the result of a call where one waits; nothing but answers is printed then.
"""

from __future__ import annotations

import asyncio
import json
import secrets
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.text import Text

from holdfast.loadgen.chat import ChatClient, Exchange, streamed
from holdfast.loadgen.conversation import WrittenCall
from holdfast.loadgen.program import Json
from holdfast.loadgen.sse import Gathered
from holdfast.replicas.errors import ConfigError, HoldfastError, UnavailableError

Read = Callable[[str], str]  # a line, asked for by a prompt; raises EOFError at the end

TIMEOUT_S = 600.0
FAILED = 1  # exit status of a pipe of which a turn had no answer
ANEW = "/new"
HINT = f"{ANEW} begins a new conversation, Ctrl-D leaves"


@dataclass(frozen=True, slots=True)
class Asked:
    """What every turn has; "" for model and program: the server's first model, a new program."""

    model: str = ""
    system: str = ""
    program: str = ""
    tools: tuple[Json, ...] = ()
    temperature: float = 0.0
    max_tokens: int = 512


def read_tools(path: Path) -> tuple[Json, ...]:
    """The tools in a file: one or a list, as OpenAI has them or only the `function` of each. Raises ConfigError."""
    try:
        told = json.loads(path.read_text())
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}", "tools") from error
    except ValueError as error:
        raise ConfigError(f"{path} is not JSON: {error}", "tools") from error
    tools = told if isinstance(told, list) else [told]
    found = [each if isinstance(each, dict) and "function" in each else {"function": each} for each in tools]
    if not all(isinstance(each["function"], dict) and each["function"].get("name") for each in found):
        raise ConfigError(f"{path} is no tool, nor a list of them: each has a 'name' at least", "tools")
    return tuple({"type": "function", **each} for each in found)


def run(url: str, key: str, asked: Asked) -> int:
    """Talk until the input ends; the exit status. Raises UnavailableError where no server answers."""
    interactive = sys.stdin.isatty()
    console = Console(highlight=False, soft_wrap=True)
    with asyncio.Runner() as runner:
        talk = runner.run(_begin(url, key, asked, console))
        try:
            return _loop(talk, runner, _line(interactive), interactive)
        finally:
            runner.run(talk.close())


async def _begin(url: str, key: str, asked: Asked, console: Console) -> Talk:
    client = ChatClient(url.rstrip("/"), TIMEOUT_S, key)
    try:
        return Talk(client, console, asked, await _model(client, url, asked.model))
    except BaseException:
        await client.__aexit__(None, None, None)
        raise


async def _model(client: ChatClient, url: str, wanted: str) -> str:
    """The model to ask. Raises UnavailableError where no server says that we may."""
    try:
        status, told = await client.call("GET", "/v1/models")
    except UnavailableError as error:
        raise UnavailableError(f"no server answers at {url}; `--url` names another one") from error
    if status in (401, 403):
        why = told["error"]["message"] if isinstance(told, dict) else told
        raise UnavailableError(f"{why}. Give it by --api-key-file or in HOLDFAST_API_KEY")
    if status != 200 or not isinstance(told, dict):
        raise UnavailableError(f"what answers at {url} is no Holdfast server")
    return wanted or str(told["data"][0]["id"])


def _line(interactive: bool) -> Read:
    if interactive:
        import readline  # noqa: F401  (so that a line can be edited)
    return input if interactive else lambda prompt: input()


def _loop(talk: Talk, runner: asyncio.Runner, read: Read, interactive: bool) -> int:
    if interactive:
        talk.say(f"{talk.model}, program {talk.program}. {HINT}\n", "dim")
    while True:
        try:
            text = read("\nyou> ").strip()
            if text == ANEW:
                runner.run(talk.anew())
            elif text:
                talk.hear(text)
                while calls := runner.run(talk.turn()):
                    talk.messages += [_result(call, read) for call in calls]
        except EOFError:
            return 0
        except HoldfastError as error:
            talk.say(f"\n{error.message}\n", "red")
            if not interactive:
                return FAILED


def _result(call: WrittenCall, read: Read) -> Json:
    return {"role": "tool", "tool_call_id": call.call_id, "content": read(f"result of {call.name}> ")}


@dataclass(slots=True)
class Talk:
    """One conversation, and where it is shown."""

    client: ChatClient
    console: Console
    asked: Asked
    model: str
    messages: list[Json] = field(default_factory=list)
    program: str = ""
    _before: int = field(
        default=0, init=False
    )  # messages before what the user said last: they stay when its answer fails

    def __post_init__(self) -> None:
        self._start()

    async def anew(self) -> None:
        """Forget it all, also on the server, and begin again under another name."""
        await self._over()
        self._start(named=False)
        self.say(f"program {self.program}\n", "dim")

    async def close(self) -> None:
        await self._over()
        await self.client.__aexit__(None, None, None)

    def hear(self, text: str) -> None:
        """Take in what the user says."""
        self._before = len(self.messages)
        self.messages.append({"role": "user", "content": text})

    async def turn(self) -> list[WrittenCall]:
        """Ask, show what comes; the calls that wait for their results.

        One that was cut is shown and no part of the conversation. Raises UnavailableError: nothing was said since the
        user spoke, and he did not.
        """
        shown = Shown(self)
        exchange = await self.client.send(streamed(self._body()), {}, shown.more)
        if exchange.failure:
            del self.messages[self._before :]
            raise UnavailableError(f"{exchange.failure}: {exchange.detail}")
        told = exchange.answer
        calls = [told.call(index) for index in sorted(told.closed)]
        answer: Json = {"role": "assistant", "content": told.said.text or (None if calls else "")}
        if calls:
            answer["tool_calls"] = [
                {"id": each.call_id, "type": "function", "function": {"name": each.name, "arguments": each.arguments}}
                for each in calls
            ]
        self.messages.append(answer)
        if shown.wrote:
            self.say("\n")
        for index in sorted(told.calls.keys() - told.closed):
            call = told.call(index)
            self.say(f"{call.name} {call.arguments} (cut off)\n", "red")
        self.note(f"{cost(exchange)}\n")
        return calls

    def say(self, text: str, style: str = "") -> None:
        """Show text as it is: what a model writes is neither markup nor a command to the terminal."""
        plain = "".join(each for each in text if each.isprintable() or each in "\n\t")
        self.console.print(Text(plain, style), end="")
        self.console.file.flush()

    def note(self, text: str) -> None:
        """For people only."""
        if self.console.is_terminal:
            self.say(text, "dim")

    def _start(self, *, named: bool = True) -> None:
        self.messages = [{"role": "system", "content": self.asked.system}] if self.asked.system else []
        self._before = len(self.messages)
        self.program = (self.asked.program if named else "") or f"chat-{secrets.token_hex(3)}"

    async def _over(self) -> None:
        """The server need keep nothing for the program. Where it cannot be told, that ends by itself."""
        if any(each["role"] == "assistant" for each in self.messages):
            try:
                await self.client.call("DELETE", f"/v1/programs/{self.program}")
            except UnavailableError:
                pass

    def _body(self) -> Json:
        asked = self.asked
        body: dict[str, Any] = {"model": self.model, "messages": self.messages, "program_id": self.program}
        body |= {"temperature": asked.temperature, "max_tokens": asked.max_tokens}
        return body | ({"tools": list(asked.tools)} if asked.tools else {})


class Shown:
    """How much of an answer that comes has been shown."""

    def __init__(self, talk: Talk) -> None:
        self._talk = talk
        self._began = time.perf_counter()
        self._thoughts = self._texts = self._calls = 0
        self.wrote = False  # the line has text on it

    def more(self, answer: Gathered) -> None:
        """Show what came since the last time."""
        for piece in answer.reasoning[self._thoughts :]:
            self._write(piece, "dim italic")
        for piece in answer.text[self._texts :]:
            self._write(piece)
        self._thoughts, self._texts = len(answer.reasoning), len(answer.text)
        for index in answer.closed[self._calls :]:
            call, after = answer.call(index), time.perf_counter() - self._began
            if self.wrote:
                self._talk.say("\n")
            self._talk.say(f"{call.name} {call.arguments}", "magenta")
            self._talk.note(f"  closed after {after:.2f} s")
            self._talk.say("\n")
            self.wrote = False
        self._calls = len(answer.closed)

    def _write(self, text: str, style: str = "") -> None:
        self._talk.say(text, style)
        self.wrote = True


def cost(exchange: Exchange) -> str:
    """What a turn cost, in words."""
    answer = exchange.answer
    if exchange.cache == "hit":
        return "answered from the response cache"
    told = [
        f"{answer.prompt_tokens} prompt tokens, {answer.cached_tokens or 0} cached",
        f"{answer.output_tokens} drawn",
    ]
    if answer.drafted:
        told[-1] += f", {answer.accepted} of {answer.drafted} drafts right"
    if exchange.first_token is not None:
        told.append(f"first token after {exchange.first_token - exchange.started:.2f} s")
    return " · ".join([*told, f"{exchange.ended - exchange.started:.2f} s in all"])
