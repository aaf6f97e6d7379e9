"""`holdfast chat`: a conversation with a running server in a terminal, or from a pipe. The user also plays the tools.

Text is shown as it arrives and a call when it closes; the cost follows each answer. In a pipe every line of the input
is a message, or the result of a pending call; only answers are printed then.
"""

from __future__ import annotations

import asyncio
import json
import secrets
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from rich.console import Console
from rich.text import Text

from holdfast.loadgen.chat import ChatClient, Exchange, Gathered, Kind, Piece, streamed
from holdfast.loadgen.conversation import Said, WrittenCall, assistant
from holdfast.loadgen.program import Json
from holdfast.replicas.errors import ConfigError, HoldfastError, UnavailableError

TIMEOUT_S = 600.0
FAILED = 1  # exit status of a pipe after a turn without an answer
NEW = "/new"
HINT = f"{NEW} begins a new conversation, Ctrl-D leaves"
_STYLES = {Kind.TEXT: "", Kind.REASONING: "dim italic"}


@dataclass(frozen=True, slots=True)
class ChatOptions:
    """The options of every turn; "" for model and program: the server's first model, a new program."""

    model: str = ""
    system: str = ""
    program: str = ""
    tools: tuple[Json, ...] = ()
    temperature: float = 0.0
    max_tokens: int = 512


def read_tools(path: Path) -> tuple[Json, ...]:
    """The tools in a file: one or a list, as OpenAI declares them or only each `function`. Raises ConfigError."""
    try:
        content = json.loads(path.read_text())
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}", "tools") from error
    except ValueError as error:
        raise ConfigError(f"{path} is not JSON: {error}", "tools") from error
    entries = content if isinstance(content, list) else [content]
    tools = [entry if isinstance(entry, dict) and "function" in entry else {"function": entry} for entry in entries]
    if not all(isinstance(entry["function"], dict) and entry["function"].get("name") for entry in tools):
        raise ConfigError(f"{path} is no tool, nor a list of them: each has a 'name' at least", "tools")
    return tuple({"type": "function", **entry} for entry in tools)


def run(url: str, key: str, options: ChatOptions) -> int:
    """Talk until the input ends; the exit status. Raises UnavailableError where no server answers."""
    interactive = sys.stdin.isatty()
    if interactive:
        import readline  # noqa: F401  (so that a line can be edited)
    console = Console(highlight=False, soft_wrap=True)
    with asyncio.Runner() as runner:
        client = runner.run(_client(url, key))
        try:
            talk = Talk(client, console, options, runner.run(_model(client, url, options.model)))
            try:
                return _loop(talk, runner, input if interactive else lambda prompt: input(), interactive)
            finally:
                runner.run(talk.end())
        finally:
            runner.run(client.__aexit__(None, None, None))


async def _client(url: str, key: str) -> ChatClient:
    return ChatClient(url.rstrip("/"), TIMEOUT_S, key)


async def _model(client: ChatClient, url: str, name: str) -> str:
    """The model to ask. Raises UnavailableError where the server does not list its models to us."""
    try:
        status, body = await client.call("GET", "/v1/models")
    except UnavailableError as error:
        raise UnavailableError(f"no server answers at {url}; `--url` names another one") from error
    if status in (401, 403):
        why = body["error"]["message"] if isinstance(body, dict) else body
        raise UnavailableError(f"{why}. Give it by --api-key-file or in HOLDFAST_API_KEY")
    if status != 200 or not isinstance(body, dict):
        raise UnavailableError(f"the server at {url} is no Holdfast server")
    return name or str(body["data"][0]["id"])


def _loop(talk: Talk, runner: asyncio.Runner, read: Callable[[str], str], interactive: bool) -> int:
    """Turn after turn. `read` returns a line for a prompt, and raises EOFError at the end."""
    if interactive:
        talk.say(f"{talk.model}, program {talk.program}. {HINT}\n", "dim")
    while True:
        try:
            text = read("\nyou> ").strip()
            if text == NEW:
                runner.run(talk.end())
                talk.start("")
                talk.say(f"program {talk.program}\n", "dim")
            elif text:
                talk.hear(text)
                while calls := runner.run(talk.turn()):
                    results = [(call.call_id, read(f"result of {call.name}> ")) for call in calls]
                    talk.messages += [{"role": "tool", "tool_call_id": of, "content": text} for of, text in results]
        except EOFError:
            return 0
        except HoldfastError as error:
            talk.say(f"\n{error.message}\n", "red")
            if not interactive:
                return FAILED


@dataclass(slots=True)
class Talk:
    """One conversation, and the console that shows it."""

    client: ChatClient
    console: Console
    options: ChatOptions
    model: str
    messages: list[Json] = field(default_factory=list)
    program: str = ""
    _n_kept: int = field(default=0, init=False)  # messages before the user's last one, which stay if its answer fails
    _asked_at: float = field(default=0.0, init=False)
    _wrote: bool = field(default=False, init=False)  # the line has text on it

    def __post_init__(self) -> None:
        self.start(self.options.program)

    def start(self, program: str) -> None:
        """Begin again with nothing said, under this name or a new one."""
        self.messages = [{"role": "system", "content": self.options.system}] if self.options.system else []
        self._n_kept = len(self.messages)
        self.program = program or f"chat-{secrets.token_hex(3)}"

    async def end(self) -> None:
        """Let the server drop the program's state; it does so by itself later if this fails."""
        if any(message["role"] == "assistant" for message in self.messages):
            with suppress(UnavailableError):
                await self.client.call("DELETE", f"/v1/programs/{self.program}")

    def hear(self, text: str) -> None:
        """Take a message of the user."""
        self._n_kept = len(self.messages)
        self.messages.append({"role": "user", "content": text})

    async def turn(self) -> list[WrittenCall]:
        """Ask, show the answer as it comes; returns the calls that wait for their results.

        A call that was cut off is shown, but is no part of the conversation. Raises UnavailableError: then the user's
        message and all after it is forgotten.
        """
        options = self.options
        body: Json = {"model": self.model, "messages": self.messages, "program_id": self.program}
        body |= {"temperature": options.temperature, "max_tokens": options.max_tokens}
        body |= {"tools": list(options.tools)} if options.tools else {}
        self._asked_at, self._wrote = time.perf_counter(), False
        exchange = await self.client.send(streamed(body), {}, self._show)
        if exchange.failure:
            del self.messages[self._n_kept :]
            raise UnavailableError(f"{exchange.failure}: {exchange.detail}")
        answer = exchange.answer
        calls = tuple(answer.call(index) for index in sorted(answer.closed))
        message = assistant(Said(answer.said.text, calls))
        self.messages.append(message if calls else {**message, "content": answer.said.text})
        if self._wrote:
            self.say("\n")
        for index in sorted(answer.calls.keys() - answer.closed):
            call = answer.call(index)
            self.say(f"{call.name} {call.arguments} (cut off)\n", "red")
        self.note(f"{cost(exchange)}\n")
        return list(calls)

    def _show(self, answer: Gathered, pieces: list[Piece]) -> None:
        """Show the new pieces of an answer."""
        for kind, piece in pieces:
            if kind in _STYLES:
                self.say(piece, _STYLES[kind])
                self._wrote = True
            elif kind is Kind.CLOSED:
                call, seconds = answer.call(piece), time.perf_counter() - self._asked_at
                line = "\n" if self._wrote else ""
                self.say(f"{line}{call.name} {call.arguments}", "magenta")
                self.note(f"  closed after {seconds:.2f} s")
                self.say("\n")
                self._wrote = False

    def say(self, text: str, style: str = "") -> None:
        """Show text literally: a model's text is neither markup nor a command to the terminal."""
        plain = "".join(character for character in text if character.isprintable() or character in "\n\t")
        self.console.print(Text(plain, style), end="")
        self.console.file.flush()

    def note(self, text: str) -> None:
        """Show text to people only."""
        if self.console.is_terminal:
            self.say(text, "dim")


def cost(exchange: Exchange) -> str:
    """The cost of a turn, in words."""
    answer = exchange.answer
    if exchange.cache == "hit":
        return "answered from the response cache"
    parts = [f"{answer.prompt_tokens} prompt tokens, {answer.cached_tokens or 0} cached"]
    drafts = f", {answer.accepted} of {answer.drafted} drafts accepted" if answer.drafted else ""
    parts.append(f"{answer.output_tokens} generated{drafts}")
    if exchange.first_token is not None:
        parts.append(f"first token after {exchange.first_token - exchange.started:.2f} s")
    return " · ".join([*parts, f"{exchange.ended - exchange.started:.2f} s in all"])
