"""An agent's loop against an OpenAI-compatible server: ask, run the tools that the model calls, ask again (Sutradhara,
4.1 and 4.2).

    answer    |-- text -- call 0 --|-- call 1 --|
    tools                          |---- call 0 runs ----|                      a call begins as it closes
                                                |---------- call 1 runs -----|
    prefill                                     |- known -|  |- result 0 -|     sent ahead while tools run
    next turn                                                                |---

Holdfast marks in its stream which call has closed. From another server a call has closed when the next one begins or
the answer ends. The known part of the next prompt is sent ahead to a server that takes it (`POST /v1/prefills`). That
only saves the next turn work: nothing waits for it, and the next turn sends the whole conversation.
Tools are in `toolbox`, streams in `chat`.
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

from holdfast.loadgen.chat import ChatClient, Exchange, Gathered, Kind, Piece, streamed
from holdfast.loadgen.conversation import Said, WrittenCall, assistant
from holdfast.loadgen.program import Json
from holdfast.loadgen.toolbox import Outcome, Toolbox
from holdfast.replicas.errors import ConfigError, UnavailableError

T = TypeVar("T")

log = logging.getLogger(__name__)

PREFILLS = "/v1/prefills"
END_S = 5.0  # longest wait of an ending run for its tools to stop, and for its last requests to the server
SPLIT_AFTER_S = 0.01  # a tool that ends by then needs no prefill
_TRIES = 3  # of a last request, while a replica does not answer
_AGAIN_S = 0.2  # each try waits so much longer
_SPARE_S = 10.0  # a prefill is kept so much longer than the tools may run
_MISSING = (404, 405)  # a server that has no such path


@dataclass(frozen=True, slots=True)
class TextHeard:
    """A piece of the answer's text."""

    program_id: str
    text: str


@dataclass(frozen=True, slots=True)
class CallClosed:
    """A call is complete; its tool begins now, while the answer may go on."""

    program_id: str
    call: WrittenCall


StreamEvent: TypeAlias = TextHeard | CallClosed
Prompt: TypeAlias = Callable[[Sequence[Json]], Sequence[Json]]


class TurnFailedError(UnavailableError):
    """The server did not answer a turn, which is `exchange`."""

    def __init__(self, exchange: Exchange) -> None:
        super().__init__(f"{exchange.failure}: {exchange.detail}")
        self.exchange = exchange


@dataclass(frozen=True, slots=True)
class Run:
    """The result of a run. `reason` is that of the last answer, or `max_turns`.

    `messages` is the whole conversation, to continue from. `ahead` counts the prefills that the server accepted.
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
        first_token = self.turns[-1].first_token if self.turns else None
        return None if first_token is None else first_token - self.turns[0].started


@dataclass(slots=True)
class Orchestrator:
    """Runs an agent's programs against one server, any number at once. The client is its owner's.

    `fields` (`temperature`, `max_tokens`, `chat_template_kwargs`) and `headers` go into every turn. `prompt` makes the
    model's prompt of the conversation; it is also called before all results are there. With `dispatch` false, tools
    wait for the end of the answer. With `split` false, nothing is sent ahead; it becomes false for a server without
    prefills. Nothing is sent ahead for a tool that ends within `split_after_s`: it would delay the turn itself.

    A run sends a heartbeat every `heartbeat_s` seconds: the server ends a program whose client has disappeared. 0, or
    `keep`: it sends none. Raises ConfigError for `max_turns` below 1.
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
    _callbacks: list[Callable[[StreamEvent], None]] = field(default_factory=list)

    def __post_init__(self) -> None:
        if self.max_turns < 1:
            raise ConfigError("max_turns must be at least 1", "max_turns")

    def register_streaming_callback(self, function: Callable[[StreamEvent], None]) -> None:
        """Call `function` with every piece of text and every call that closes, of all runs.

        It runs between two reads of the stream, so it has to be quick. Its exceptions are logged.
        """
        self._callbacks.append(function)

    async def run(self, question: str | Sequence[Json], program_id: str = "", *, keep: bool = False) -> Run:
        """Run from a question, or the messages of a conversation, to an answer without calls.

        The program ends with the run; with `keep` it can be continued after an answer. Cancelling the run cancels its
        tools. Raises TurnFailedError where the server does not answer.
        """
        messages = [{"role": "user", "content": question}] if isinstance(question, str) else list(question)
        running = _Running(self, program_id or secrets.token_hex(8), messages, keep)
        try:
            return await running.to_the_end()
        finally:
            await running.close()

    def notify(self, event: StreamEvent) -> None:
        """Call every registered function."""
        for callback in self._callbacks:
            try:
                callback(event)
            except Exception as error:  # the user's code, in the middle of a stream
                log.error("a streaming callback failed", exc_info=error)


class _Running:
    """One run: its conversation, its tasks, and its state on the server."""

    def __init__(self, agent: Orchestrator, program_id: str, messages: list[Json], keep: bool) -> None:
        self._agent = agent
        self._id = program_id
        self._messages = messages
        self._keep = keep  # an answer does not end the program
        self._over = False  # the program has ended on the server
        self._holdfast = False  # whether the server is Holdfast
        # In a header: another server may refuse an unknown field.
        self._headers = {"x-session-id": program_id, **agent.headers}
        self._tools = agent.tools.declared
        self._tasks: set[asyncio.Task[Any]] = set()
        self._ahead: _Prefills | None = None  # of a pause
        self._pauses: list[_Prefills] = []
        self._exchanges: list[Exchange] = []
        self._outcomes: list[Outcome] = []

    async def to_the_end(self) -> Run:
        """Run turns until an answer has no calls, or `max_turns`."""
        for turns_left in range(self._agent.max_turns - 1, -1, -1):
            answer, tools = await self._turn(last=not turns_left)
            if not tools:
                break
            await self._pause(answer.calls, tools)
        self._over = self._over or self._keep
        reason = "max_turns" if answer.calls else self._exchanges[-1].answer.reason
        turns, outcomes, ahead = tuple(self._exchanges), tuple(self._outcomes), sum(p.accepted for p in self._pauses)
        return Run(self._id, answer.text, reason, tuple(self._messages), turns, outcomes, ahead)

    async def close(self) -> None:
        """End the tasks of the run, and its program on the server."""
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            _, pending = await asyncio.wait(self._tasks, timeout=END_S)
            for task in pending:
                log.warning("%s did not end with its run", task.get_name())
        paths = [f"{PREFILLS}/{self._ahead.handle}"] if self._ahead is not None and self._ahead.handle else []
        if self._holdfast and not self._over:
            paths.append(f"/v1/programs/{quote(self._id, safe='')}")
        try:
            async with asyncio.timeout(END_S):
                for path in paths:
                    await self._delete(path)
        except (UnavailableError, TimeoutError) as error:
            log.info("the server did not end program %s: %s", self._id, error)

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
        """The model's answer, and the tools that run for it, in the order of its calls."""
        agent, self._ahead = self._agent, None
        body = self._request() | dict(agent.fields)
        if last and self._holdfast and not self._keep:
            body["program_end"] = True
        tools: dict[int, asyncio.Task[Outcome]] = {}

        def on_pieces(partial: Gathered, pieces: list[Piece]) -> None:
            self._holdfast = self._holdfast or partial.marked
            for kind, piece in pieces:
                if kind is Kind.TEXT:
                    agent.notify(TextHeard(self._id, piece))
                elif kind is Kind.CLOSED:
                    call = self._call(partial, piece)
                    if agent.dispatch and not last:
                        tools[piece] = self._run_tool(call)
                    agent.notify(CallClosed(self._id, call))

        exchange = await agent.client.send(streamed(body), self._headers, on_pieces)
        calls = {index: self._call(exchange.answer, index) for index in sorted(exchange.answer.closed)}
        self._exchanges.append(exchange)
        if exchange.failure:
            raise TurnFailedError(exchange)
        if self._holdfast and len(self._exchanges) == 1 and agent.heartbeat_s and not self._keep:
            self._begin(self._beat(), "a heartbeat")
        self._over = "program_end" in body
        answer = Said("".join(exchange.answer.text), tuple(calls.values()))
        self._messages.append(self._message(answer, "".join(exchange.answer.reasoning)))
        return answer, [] if last else [tools.get(index) or self._run_tool(call) for index, call in calls.items()]

    def _call(self, answer: Gathered, index: int) -> WrittenCall:
        """A call, with defaults for fields that the server has left out."""
        call = answer.call(index)
        call_id = call.call_id or f"call_{len(self._exchanges)}_{index}"
        return replace(call, call_id=call_id, arguments=call.arguments or "{}")

    def _request(self) -> Json:
        """The fields that every request for the next turn has: the known part of its prompt."""
        body: Json = {"model": self._agent.model, "messages": list(self._agent.prompt(self._messages))}
        return body | ({"tools": self._tools} if self._tools else {})

    def _message(self, answer: Said, reasoning: str) -> Json:
        """An answer as the next prompt has it: with arguments that a template can read, and the model's reasoning."""
        calls = (call if call.parsed is not None else replace(call, arguments="{}") for call in answer.calls)
        message = assistant(Said(answer.text, tuple(calls)))
        if not answer.calls:
            message["content"] = answer.text  # an empty answer is "", not null
        return message | ({"reasoning_content": reasoning} if reasoning and self._holdfast else {})

    def _run_tool(self, call: WrittenCall) -> asyncio.Task[Outcome]:
        return self._begin(self._agent.tools.run(call), f"the tool {call.name}")

    async def _beat(self) -> None:
        """Send heartbeats, three times as often as the server expects them."""
        agent, path = self._agent, f"/v1/programs/{quote(self._id, safe='')}/heartbeat"
        body, status = {"within_s": 3 * agent.heartbeat_s}, 0
        while status not in _MISSING:
            await asyncio.sleep(agent.heartbeat_s)
            with suppress(UnavailableError):
                status, _ = await agent.client.call("POST", path, body, agent.headers)

    # ---- a pause ----

    async def _pause(self, calls: Sequence[WrittenCall], tools: Sequence[asyncio.Task[Outcome]]) -> None:
        """Wait for the tools, and send the known part of the next prompt ahead, result by result, in order."""
        common = {"program_id": self._id, "keep_s": self._agent.tools.longest_s(calls) + _SPARE_S}
        if "chat_template_kwargs" in self._agent.fields:
            common["chat_template_kwargs"] = self._agent.fields["chat_template_kwargs"]
        self._ahead = ahead = _Prefills(self._agent, common)
        self._pauses.append(ahead)
        for tool in tools:
            if self._agent.split and self._agent.split_after_s > 0:
                await asyncio.wait([tool], timeout=self._agent.split_after_s)
            if self._agent.split and not tool.done() and ahead.request(self._request()):
                self._begin(ahead.send(), "a prefill")
            outcome = await tool
            self._outcomes.append(outcome)
            self._messages.append(outcome.message)


class _Prefills:
    """Prefills of one turn, one request at a time. Messages that arrive meanwhile go with the next request.

    Failures are only logged: the turn sends the whole conversation either way.
    """

    def __init__(self, agent: Orchestrator, common: Json) -> None:
        self.handle = ""
        self.accepted = 0  # requests that the server accepted
        self._agent = agent
        self._common = common
        self._pending: Json | None = None
        self._sent_messages: list[Json] = []  # messages that the server has
        self._sending = False

    def request(self, request: Json) -> bool:
        """Set the known part of the prompt. True: the caller has to call `send`; False: `send` is running."""
        self._pending = request
        idle, self._sending = not self._sending, True
        return idle

    async def send(self) -> None:
        """Send until nothing is pending."""
        try:
            while self._pending is not None and self._agent.split:
                request, self._pending = self._pending, None
                self.accepted += await self._post(request)
        except UnavailableError as error:
            log.info("a prefill failed: %s", error)
        finally:
            self._sending = False

    async def _post(self, request: Json) -> bool:
        messages, more = request["messages"], len(self._sent_messages)
        extends = bool(self.handle) and messages[:more] == self._sent_messages
        path, body = PREFILLS, request | self._common
        if extends:
            path, body = f"{PREFILLS}/{self.handle}/extend", {"messages": messages[more:]}
        status, reply = await self._agent.client.call("POST", path, body, self._agent.headers)
        accepted = status == 200 and isinstance(reply, dict)
        self.handle = quote(str(reply.get("id", "")), safe="") if accepted else ""
        self._sent_messages = messages
        if not accepted:
            log.info("a prefill was refused: %s %s", status, reply)
        if status in _MISSING and not extends:
            self._agent.split = False
        if status == 400 and self._common.pop("keep_s", None) is not None:  # longer than the server keeps a prefill
            return await self._post(request)
        return accepted
