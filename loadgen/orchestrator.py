"""An agent's loop against an OpenAI-compatible server: ask, run the tools that the model calls, ask again (Sutradhara,
4.1 and 4.2).

    answer    |-- text -- call 0 --|-- call 1 --|
    tools                          |---- call 0 runs ----|                      a call begins as it closes
                                                |---------- call 1 runs -----|
    prefill                                     |- known -|  |- result 0 -|     sent ahead while tools run
    next turn                                                                |---

Holdfast says in its stream which call has closed; elsewhere a call has closed when the next one begins or the answer
ends. What is known of the next prompt is sent ahead where the server takes it (`POST /v1/prefills`). It only saves the
next turn work: nothing waits for it, and the next turn is the whole conversation. Not here: tools (`toolbox`), streams
(`chat`).
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Callable, Coroutine, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias, TypeVar
from urllib.parse import quote

from holdfast.loadgen.chat import ChatClient, Exchange, streamed
from holdfast.loadgen.conversation import Said, WrittenCall, assistant
from holdfast.loadgen.program import Json
from holdfast.loadgen.sse import Gathered
from holdfast.loadgen.toolbox import Outcome, Toolbox
from holdfast.replicas.errors import ConfigError, UnavailableError

T = TypeVar("T")

log = logging.getLogger(__name__)

PREFILLS = "/v1/prefills"
END_S = 5.0  # what a run that ends waits at most for its tools to stop, and for the server to hear that it is over
SPLIT_AFTER_S = 0.01  # in which a tool that takes no time is back
_TRIES = 3  # of telling it, where a replica does not answer, and how much longer each waits
_AGAIN_S = 0.2
_SPARE_S = 10.0  # that a prefill may outlive the tools it is sent beside
_MISSING = (404, 405)  # a server that has no such path


@dataclass(frozen=True, slots=True)
class TextHeard:
    """A piece of the answer's text."""

    program_id: str
    text: str


@dataclass(frozen=True, slots=True)
class CallClosed:
    """A call is whole; its tool begins now, while the answer may go on."""

    program_id: str
    call: WrittenCall


Told: TypeAlias = TextHeard | CallClosed
Prompt: TypeAlias = Callable[[Sequence[Json]], Sequence[Json]]


class TurnFailedError(UnavailableError):
    """The server did not answer a turn. `exchange` says how that went."""

    def __init__(self, exchange: Exchange) -> None:
        super().__init__(f"{exchange.failure}: {exchange.detail}")
        self.exchange = exchange


@dataclass(frozen=True, slots=True)
class Run:
    """What became of a run. `reason` is that of the last answer, `max_turns` where it would have gone on.

    `messages` is the whole conversation, to go on from. `ahead` counts the prefills that the server took.
    """

    program_id: str
    text: str
    reason: str
    messages: tuple[Json, ...]
    turns: tuple[Exchange, ...]
    outcomes: tuple[Outcome, ...]
    ahead: int = 0

    @property
    def seconds(self) -> float:
        return self.turns[-1].ended - self.turns[0].started

    @property
    def first_token_s(self) -> float | None:
        """From the question to the first token of the last answer."""
        first = self.turns[-1].first_token if self.turns else None
        return None if first is None else first - self.turns[0].started


@dataclass(slots=True)
class Orchestrator:
    """Runs an agent's programs against one server, any number at once. The client is its owner's.

    `fields` (`temperature`, `max_tokens`, `chat_template_kwargs`) and `headers` go into every turn. `prompt` makes of
    the conversation what the model is asked with, where that is not the conversation itself; it is asked before all
    results are there, too. `dispatch` false: tools wait for the end of the answer. `split` false: nothing is sent
    ahead; so it becomes where a server has no such path. Nor is it where a tool is back within `split_after_s`: what
    was sent would be in the way of the turn itself. While a run goes on the server hears so every `heartbeat_s`
    seconds: it ends a program whose client has gone without a word. 0: it does not, as with `keep`. Raises ConfigError
    for less than one turn.
    """

    client: ChatClient
    model: str
    tools: Toolbox = field(default_factory=Toolbox)
    fields: Mapping[str, Any] = field(default_factory=dict)
    headers: Mapping[str, str] = field(default_factory=dict)
    prompt: Prompt = lambda messages: messages
    max_turns: int = 50
    dispatch: bool = True
    split: bool = True
    split_after_s: float = SPLIT_AFTER_S
    heartbeat_s: float = 10.0
    _callbacks: list[Callable[[Told], None]] = field(default_factory=list)

    def __post_init__(self) -> None:
        if self.max_turns < 1:
            raise ConfigError("max_turns must be at least 1", "max_turns")

    def register_streaming_callback(self, function: Callable[[Told], None]) -> None:
        """`function` is told of every piece of text and every call that closes, of all runs, as it is heard.

        It is called between two reads of the stream, so it has to be quick. What it raises is logged, and hurts nobody.
        """
        self._callbacks.append(function)

    async def run(self, asked: str | Sequence[Json], program_id: str = "", *, keep: bool = False) -> Run:
        """From a question, or the messages of a conversation, to the answer that calls nothing.

        The program ends with the run, however that ends; with `keep` an answer leaves it to be gone on with. Raises
        TurnFailedError where the server does not answer. Cancelling it cancels its tools.
        """
        messages = [{"role": "user", "content": asked}] if isinstance(asked, str) else list(asked)
        running = _Running(self, program_id or secrets.token_hex(8), messages, keep)
        try:
            return await running.to_the_end()
        finally:
            await running.close()

    def tell(self, what: Told) -> None:
        """Tell everybody who has registered."""
        for each in self._callbacks:
            try:
                each(what)
            except Exception as error:  # the user's code, in the middle of a stream
                log.error("a streaming callback failed", exc_info=error)


class _Running:
    """One run: its conversation, its tasks, and what the server knows of it."""

    def __init__(self, agent: Orchestrator, program_id: str, messages: list[Json], keep: bool) -> None:
        self._agent = agent
        self._id = program_id
        self._messages = messages
        self._keep = keep  # an answer does not end the program
        self._over = False  # the program is, and the server knows
        self._holdfast = False  # the server is one
        # By a header: another server may refuse a field that it does not know.
        self._headers = {"x-session-id": program_id, **agent.headers}
        self._tools = agent.tools.declared
        self._tasks: set[asyncio.Task[Any]] = set()
        self._ahead: _Ahead | None = None  # in a pause
        self._taken = 0  # prefills
        self._exchanges: list[Exchange] = []
        self._outcomes: list[Outcome] = []

    async def to_the_end(self) -> Run:
        """Turn after turn."""
        for left in range(self._agent.max_turns - 1, -1, -1):
            said, tools = await self._turn(last=not left)
            if not tools:
                break
            await self._pause(said.calls, tools)
        self._over = self._over or self._keep
        reason = "max_turns" if said.calls else self._exchanges[-1].answer.reason
        turns, outcomes = tuple(self._exchanges), tuple(self._outcomes)
        return Run(self._id, said.text, reason, tuple(self._messages), turns, outcomes, self._taken)

    async def close(self) -> None:
        """Nothing of the run goes on after this, and the server knows that it is over."""
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            _, left = await asyncio.wait(self._tasks, timeout=END_S)
            for task in left:
                log.warning("%s goes on after its run has ended", task.get_name())
        paths = [f"{PREFILLS}/{self._ahead.handle}"] if self._ahead is not None and self._ahead.handle else []
        if self._holdfast and not self._over:
            paths.append(f"/v1/programs/{quote(self._id, safe='')}")
        try:
            async with asyncio.timeout(END_S):
                for path in paths:
                    await self._delete(path)
        except (UnavailableError, TimeoutError) as error:
            log.info("the server was not told that %s is over: %s", self._id, error)

    async def _delete(self, path: str) -> None:
        for tries in range(_TRIES):
            await asyncio.sleep(_AGAIN_S * tries)
            status, _ = await self._agent.client.call("DELETE", path, headers=self._agent.headers)
            if status != 503:  # 503: a replica does not answer now
                return

    def _begin(self, work: Coroutine[Any, Any, T], name: str) -> asyncio.Task[T]:
        """Start a task that ends with the run at the latest."""
        task = asyncio.create_task(work, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    # ---- a turn ----

    async def _turn(self, *, last: bool) -> tuple[Said, list[asyncio.Task[Outcome]]]:
        """What the model says, and the tools that run for it, in the order of its calls."""
        agent, self._ahead = self._agent, None
        body = self._request() | dict(agent.fields)
        if last and self._holdfast and not self._keep:
            body["program_end"] = True
        hearing = _Hearing(self._id, len(self._exchanges), agent.tell)
        if agent.dispatch and not last:
            hearing.begin = self._run_tool
        try:
            exchange = await agent.client.send(streamed(body), self._headers, hearing.heard)
        finally:
            self._holdfast = self._holdfast or hearing.marked
        self._exchanges.append(exchange)
        if exchange.failure:
            raise TurnFailedError(exchange)
        if self._holdfast and len(self._exchanges) == 1 and agent.heartbeat_s and not self._keep:
            self._begin(self._beat(), "a heartbeat")
        self._over = "program_end" in body
        calls = hearing.calls(exchange.answer)
        said = Said("".join(exchange.answer.text), tuple(calls.values()))
        self._messages.append(self._message(said, "".join(exchange.answer.reasoning)))
        if last:
            return said, []
        return said, [hearing.tools.get(index) or self._run_tool(call) for index, call in calls.items()]

    def _request(self) -> Json:
        """What every request for the next turn has: what is known of its prompt."""
        body: Json = {"model": self._agent.model, "messages": list(self._agent.prompt(self._messages))}
        return body | ({"tools": self._tools} if self._tools else {})

    def _message(self, said: Said, reasoning: str) -> Json:
        """An answer as the next prompt has it: with arguments that a template can read, and what the model thought."""
        calls = (call if call.parsed is not None else replace(call, arguments="{}") for call in said.calls)
        message = assistant(Said(said.text, tuple(calls)))
        if not said.calls:
            message["content"] = said.text  # "" as well: an answer of nothing is not null
        return message | ({"reasoning_content": reasoning} if reasoning and self._holdfast else {})

    def _run_tool(self, call: WrittenCall) -> asyncio.Task[Outcome]:
        return self._begin(self._agent.tools.run(call), f"the tool {call.name}")

    async def _beat(self) -> None:
        """Say that the run goes on, three times as often as the server expects it."""
        agent, path = self._agent, f"/v1/programs/{quote(self._id, safe='')}/heartbeat"
        body, status = {"within_s": 3 * agent.heartbeat_s}, 0
        while status not in _MISSING:
            await asyncio.sleep(agent.heartbeat_s)
            with suppress(UnavailableError):
                status, _ = await agent.client.call("POST", path, body, agent.headers)

    # ---- a pause ----

    async def _pause(self, calls: Sequence[WrittenCall], tools: Sequence[asyncio.Task[Outcome]]) -> None:
        """Wait for the tools; what is known of the next prompt goes ahead, result by result, in order."""
        about = {"program_id": self._id, "keep_s": self._agent.tools.longest_s(calls) + _SPARE_S}
        if "chat_template_kwargs" in self._agent.fields:
            about["chat_template_kwargs"] = self._agent.fields["chat_template_kwargs"]
        self._ahead = ahead = _Ahead(self._agent, about)
        for tool in tools:
            if self._agent.split and self._agent.split_after_s > 0:
                await asyncio.wait([tool], timeout=self._agent.split_after_s)
            if self._agent.split and not tool.done() and ahead.want(self._request()):
                self._begin(self._send(ahead), "a prefill")
            outcome = await tool
            self._outcomes.append(outcome)
            self._messages.append(outcome.message)

    async def _send(self, ahead: _Ahead) -> None:
        self._taken += await ahead.send()


@dataclass(slots=True)
class _Hearing:
    """One answer as it is heard: its calls begin as they close, where `begin` is there to begin them."""

    program_id: str
    turn: int
    tell: Callable[[Told], None]
    begin: Callable[[WrittenCall], asyncio.Task[Outcome]] | None = None
    tools: dict[int, asyncio.Task[Outcome]] = field(default_factory=dict)
    marked: bool = False
    _texts: int = 0
    _closed: int = 0

    def heard(self, answer: Gathered) -> None:
        """After each event."""
        self.marked = answer.marked
        for text in answer.text[self._texts :]:
            self.tell(TextHeard(self.program_id, text))
        self._texts = len(answer.text)
        for index in answer.closed[self._closed :]:
            call = self._call(answer, index)
            if self.begin is not None:
                self.tools[index] = self.begin(call)
            self.tell(CallClosed(self.program_id, call))
        self._closed = len(answer.closed)

    def calls(self, answer: Gathered) -> dict[int, WrittenCall]:
        """The calls that have closed, in their order."""
        return {index: self._call(answer, index) for index in sorted(answer.closed)}

    def _call(self, answer: Gathered, index: int) -> WrittenCall:
        """A call with what a server may have left out."""
        call = answer.call(index)
        call_id = call.call_id or f"call_{self.turn}_{index}"
        return replace(call, call_id=call_id, arguments=call.arguments or "{}")


class _Ahead:
    """What is sent ahead of one turn, a request at a time: what is wanted meanwhile goes with the next one.

    No failure of it is told: the turn is the whole conversation either way.
    """

    def __init__(self, agent: Orchestrator, about: Json) -> None:
        self.handle = ""
        self._agent = agent
        self._about = about
        self._wanted: Json | None = None
        self._sent: list[Json] = []  # messages that the server has
        self._sending = False

    def want(self, request: Json) -> bool:
        """This is known by now. True: call `send`; else somebody is at it."""
        self._wanted = request
        idle, self._sending = not self._sending, True
        return idle

    async def send(self) -> int:
        """Send what is wanted until nothing more is; how many requests the server took."""
        taken = 0
        try:
            while self._wanted is not None and self._agent.split:
                request, self._wanted = self._wanted, None
                taken += await self._post(request)
        except UnavailableError as error:
            log.info("nothing was sent ahead: %s", error)
        finally:
            self._sending = False
        return taken

    async def _post(self, request: Json) -> bool:
        messages, more = request["messages"], len(self._sent)
        extends = bool(self.handle) and messages[:more] == self._sent
        path, body = PREFILLS, request | self._about
        if extends:
            path, body = f"{PREFILLS}/{self.handle}/extend", {"messages": messages[more:]}
        status, told = await self._agent.client.call("POST", path, body, self._agent.headers)
        taken = status == 200 and isinstance(told, dict)
        self.handle = quote(str(told.get("id", "")), safe="") if taken else ""
        self._sent = messages
        if not taken:
            log.info("nothing was sent ahead: %s %s", status, told)
        if status in _MISSING and not extends:
            self._agent.split = False
        if status == 400 and self._about.pop("keep_s", None) is not None:  # longer than the server keeps anything
            return await self._post(request)
        return taken
