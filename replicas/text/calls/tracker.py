"""What comes out of a reply with tool calls in it: text, and calls as they open, fill and close.

Source: Stateful Inference, section 3.7. The readers tell a `Tracker` what they find; it decides what the client sees:

- A call is sent as soon as its name is known to be declared and its arguments have begun: first a delta with id and
  name, then its arguments as the model writes them. Once it has closed it is in `calls`, and the client is told; that
  is never taken back.
- Up to there what belongs to a call is held. Where it turns out to be none it is text exactly as written. So is a call
  of an undeclared tool; unless whoever `on_unguarded` asks wants to have it written again: then the reading ends, and
  nothing of it is sent.
- A call that was sent stays one, and no character of it is text. Where its JSON breaks, its arguments stay unfinished,
  it is never in `calls`, and what follows is text. Where the reply ends in it (cut by `max_tokens`), that is all.
- Where calls are guaranteed no part of one is text: a call that is cut before it could be sent is left out, and so is
  what may have begun one where the reply is cut.
- White space between calls, and one line end before the first, are markup: chat templates write them again.
- After a closed call another one may begin within a grace of white space. Any other text asks for the end of
  the reply (`stopped`) and is dropped. So does a call that says the same as the one before it: a model that repeats
  itself would go on to the end of its tokens. With `parallel` False the first closed call does.

Not here: which text is a call (`readers`).
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from holdfast.replicas.requests import TextDelta, ToolCall, ToolCallDelta
from holdfast.replicas.text.calls.scan import NotACallError

Delta: TypeAlias = TextDelta | ToolCallDelta

GRACE = 16
"""Another call may begin within so many characters of white space after a closed one: line ends and an indentation."""


@dataclass(frozen=True, slots=True)
class CallLimits:
    """What the request allows.

    `early_stop`: text after a closed call that does not begin another one ends the reply, and is dropped; a call that
    says the same as the one before it ends the reply. `guaranteed` tells, at any time, whether what a marker begins is
    sure to be a call, so that one that is cut before it is sent is nothing, and no text. `schemas`: of the tools'
    arguments, for formats that do not tell a text from a number.
    """

    declared: frozenset[str]
    parallel: bool
    early_stop: bool
    guaranteed: Callable[[], bool] = lambda: False
    schemas: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)


@dataclass(slots=True)
class OpenCall:
    """The call being read. `sent`: the client has its id and name, so it stays a call."""

    begun: bool = False  # its first character has been read
    expected: str | None = None  # the name, of a call that is not known for one before its end
    name: str | None = None
    arguments: list[str] = field(default_factory=list)  # as valid JSON
    complete: bool = False  # the arguments have closed
    call_id: str = ""
    sent: bool = False
    written_id: str = ""  # the id that the model gave it
    odd: bool = False  # its keys stand otherwise than calls have them, up to its arguments


class Tracker:
    """The state of one reply.

    Text outside of calls is told with `say`, what may belong to a call with `hold`: it waits until it is known whether
    it is text (`release`), or belongs to a call that is sent. White space after text waits as well, in `_gap`. It goes
    with the text that follows; before a call one line end of it belongs to the call's markup, and between calls all.

    A call comes as `begin_call`, `name_call`, its arguments and `close_call`; name and arguments in any order. Markup
    behind it is held, and then told with `end_markup`. `break_off` ends all that where the text turns out otherwise.

    `on_unguarded` is asked about a call of an undeclared tool, once for each, with the positions of the marker before
    it and of its first character that is held. True ends the reading there, False makes the call text. An object that
    no marker stands before may be an answer in JSON: it is asked about once its arguments begin, or its name comes
    behind them, and so is one of a declared tool, for no grammar has followed it where its keys stand otherwise than
    calls have them. False makes that one a call.
    """

    def __init__(self, limits: CallLimits, call_id: Callable[[int], str]) -> None:
        self.on_unguarded: Callable[[int, int], bool] = lambda opened, begun: False
        self.position = 0  # characters read before the one that a reader is about to look at
        self.deltas: list[Delta] = []  # what whoever feeds the readers takes away
        self.calls: list[ToolCall] = []  # closed ones
        self.call = OpenCall()
        self.n_sent = 0  # calls, closed or not
        self.stopped = False  # nothing that follows would be sent
        self.cut = False  # the reply ended before the model had ended it
        self.opener = ""  # the marker that began the calls being read
        self._opened = 0  # where it began
        self._limits = limits
        self._call_id = call_id
        self._ids: set[str] = set()  # of the calls that were sent
        self._held: list[str] = []
        self._held_from = 0
        self._gap = ""
        self._said = False  # text other than white space since the start or the last call
        self._after_call = False  # nothing but white space and markup since one has closed
        self._grace = 0  # what is left of it

    def say(self, text: str) -> None:
        """Text outside of calls."""
        self._held.append(text)
        self.release()

    def hold(self, text: str) -> None:
        """Text that may belong to a call."""
        if not self._held:
            self._held_from = self.position
        self._held.append(text)

    def release(self) -> None:
        """What is held is text, or ends the reply where it follows a closed call."""
        text = "".join(self._held)
        self._held.clear()
        if self.stopped or not text:
            return
        if self._after_call and self._limits.early_stop:
            self._grace -= len(text)
            self.stopped = self._grace < 0 or not text.isspace()
            return
        body = text.rstrip()
        if not body:
            self._gap += text
            return
        self.deltas.append(TextDelta(self._gap + body))
        self._gap = text[len(body) :]
        self._said = True
        self._after_call = False

    def open_calls(self, marker: str) -> None:
        """What is held is `marker`: calls may follow."""
        self.opener, self._opened = marker, self._held_from
        self.begin_call()

    def begin_call(self, name: str | None = None) -> None:
        """What is held, and what follows, may be a call, and not only what stands between calls.

        `name`: the call's, where it is known for one at its end only.
        """
        self.call.begun, self.call.expected = True, name

    def markup(self, text: str) -> None:
        """Text of a call that is none of its arguments; once the call is sent it is nothing."""
        if not self.call.sent:
            self.hold(text)

    def parameters(self) -> Mapping[str, Any]:
        """The schema of the arguments of the call being read."""
        return self._limits.schemas.get(self.call.name or "", {})

    def name_call(self, name: str, written_id: str = "") -> None:
        """The call's name is known; `written_id` where the model gave it an id."""
        call = self.call
        call.name, call.written_id = name, written_id
        if name in self._limits.declared:
            if call.complete:
                call.odd = call.expected is None
                if self._stands(guarded=bool(self.opener) or not call.odd):
                    self._send_call()
        elif self.opener or call.complete:
            self._stands(guarded=False)

    def begin_arguments(self, streamed: bool) -> None:
        """The arguments begin; `streamed`: they come as pieces, in `argument`, or else at once, in `set_arguments`."""
        if self.call.name in self._limits.declared:
            if self._stands(guarded=bool(self.opener) or not self.call.odd) and streamed:
                self._send_call()
        elif self.call.name is not None and not self.opener:
            self._stands(guarded=False)

    def argument(self, written: str, valid: str) -> None:
        """A piece of the arguments as the model wrote it, and as valid JSON."""
        call = self.call
        call.arguments.append(valid)
        if not call.sent:
            self.hold(written)
        elif valid:
            self.deltas.append(ToolCallDelta(self.n_sent - 1, arguments=valid))

    def set_arguments(self, valid: str) -> None:
        """The arguments are `valid`; what the model wrote for them is held."""
        self.call.arguments = [valid]
        self.end_arguments()
        if self.call.name in self._limits.declared:
            self._send_call()

    def end_arguments(self) -> None:
        """The arguments have closed."""
        self.call.complete = True

    def close_call(self) -> None:
        """The call has ended as it should; an undeclared one is text."""
        call = self.call
        if call.name not in self._limits.declared:
            self.call = OpenCall()
            self._after_call = False  # a block of its own, not prose after a call
            self.release()
            return
        if self.stopped and not call.sent:  # it is written again
            self.call = OpenCall()
            return
        if not call.sent:
            call.arguments = call.arguments or ["{}"]
            self._send_call()
        self._held.clear()
        self._count_call()

    def end_markup(self) -> None:
        """What is held ends closed calls; where there were none it is text."""
        self.call = OpenCall()
        if self._after_call:
            self._held.clear()
        else:
            self.release()

    def break_off(self, found: NotACallError) -> None:
        """The text goes on as no call does, or ends inside of one."""
        if found.undecided:
            self.hold(found.undecided)
        if not found.unread:
            begun = (
                (self.opener and self.call.name is None)
                or self._after_call
                or {self.call.name, self.call.expected} & self._limits.declared
            )
            left_out = (begun or self.cut) and self._limits.guaranteed()
            if left_out or self.call.sent or (self._after_call and not self.call.begun):
                self._held.clear()
        if self.call.sent and self.call.complete:
            self._count_call()
        self.call = OpenCall()
        self.release()

    def end_text(self) -> None:
        """The reply is over, and what is held may have been going to be a marker."""
        if self.cut and self._limits.guaranteed():
            self._held.clear()
        self.release()

    def end(self) -> None:
        """The reply is over: white space after text is part of it; after a call it was markup."""
        if self._gap and (self._said or not self.n_sent):
            self.deltas.append(TextDelta(self._gap))
        self._gap = ""

    def _send_call(self) -> None:
        """From here on it is a call: what is held belongs to it, and what has been read of its arguments goes out."""
        call = self.call
        if before := self._gap.removesuffix("\n") if self._said else "":
            self.deltas.append(TextDelta(before))
        self._gap, self._said, self._after_call = "", False, False
        call.sent = True
        known = call.written_id in self._ids or not call.written_id
        call.call_id = self._call_id(self.n_sent) if known else call.written_id
        self._ids.add(call.call_id)
        self.deltas.append(ToolCallDelta(self.n_sent, call.call_id, call.name, "".join(call.arguments)))
        self.n_sent += 1
        self._held.clear()

    def _count_call(self) -> None:
        """The call being read has closed."""
        call, self.call = self.call, OpenCall()
        closed = ToolCall(call.call_id, call.name or "", "".join(call.arguments))
        repeats = [(each.name, each.arguments) for each in self.calls[-1:]] == [(closed.name, closed.arguments)]
        self.calls.append(closed)
        self.deltas.append(ToolCallDelta(self.n_sent - 1, closed=True))
        self._after_call = True
        self._grace = GRACE
        self.stopped = not self._limits.parallel or (repeats and self._limits.early_stop)

    def _stands(self, guarded: bool) -> bool:
        """Whether the call may go on as it has begun: where it is not `guarded`, `on_unguarded` is asked."""
        if not guarded and not self.stopped:
            self.stopped = self.on_unguarded(self._opened, self._held_from)
        return not self.stopped


def merged(deltas: list[Delta]) -> list[Delta]:
    """The same stream with neighbours of one kind in one piece."""
    if len(deltas) < 2:
        return deltas
    result: list[Delta] = []
    run: list[Delta] = []
    for delta in deltas:
        if run and not _continues(run[0], delta):
            result.append(_joined(run))
            run = []
        run.append(delta)
    if run:
        result.append(_joined(run))
    return result


def _continues(first: Delta, delta: Delta) -> bool:
    if isinstance(first, TextDelta):
        return isinstance(delta, TextDelta)
    return isinstance(delta, ToolCallDelta) and delta.index == first.index and delta.call_id is None


def _joined(run: list[Delta]) -> Delta:
    first = run[0]
    if isinstance(first, TextDelta):
        texts = [delta for delta in run if isinstance(delta, TextDelta)]
        return TextDelta("".join(t.text for t in texts), tuple(entry for t in texts for entry in t.logprobs))
    calls = [delta for delta in run if isinstance(delta, ToolCallDelta)]
    arguments = "".join(call.arguments for call in calls)
    return ToolCallDelta(first.index, first.call_id, first.name, arguments, calls[-1].closed)
