"""The face of the streaming tool-call validator: text in, text deltas and tool call deltas out.

Source: Stateful Inference, section 3.7. What comes out:

- A call is sent as soon as its name is known to be declared: first a delta with id and name, then its arguments as
  the model writes them. It is in `calls` once it has closed.
- A call of an undeclared tool, and everything else that turns out to be no call, comes out as text, unchanged;
  unless whoever `on_undeclared` asks wants to have it written again: then the reading ends, and nothing of it is sent.
- A call that was announced stays one: where its JSON breaks or ends early its arguments stay unfinished (as the
  client of a reply cut by `max_tokens` expects), it is never in `calls`, and what follows it is text.
- White space between calls, and one line end before the first, are markup: chat templates write them again.
- After a closed call another one may begin within a grace of white space. Any other text asks for the end of
  the reply (`should_stop`) and is dropped. With `parallel` False the first closed call does.
"""

from collections.abc import Callable

from holdfast.replicas.requests import TextDelta, ToolCall, ToolCallDelta
from holdfast.replicas.text.formats import ToolFormat
from holdfast.replicas.text.grammars import GRAMMARS
from holdfast.replicas.text.scanning import Run, Scan
from holdfast.replicas.text.tracker import CallRules, Delta, Tracker


class ToolCallParser:
    """Reads one reply. `call_id` gives the id of the call with that index. How the text is cut never matters."""

    def __init__(
        self,
        format: ToolFormat,
        declared_names: frozenset[str],
        parallel: bool,
        call_id: Callable[[int], str],
        *,
        early_stop: bool = True,
        grace: int = 16,
    ) -> None:
        rules = CallRules(declared_names, parallel, early_stop, grace)
        self._tracker = Tracker(rules, call_id)
        self._scan: Scan | None = None
        self._run: Run | None = None  # what may be passed by the piece
        self._read = 0  # characters of earlier pieces
        if declared_names and format in GRAMMARS:
            self._scan = GRAMMARS[format](self._tracker)
            next(self._scan)

    @property
    def calls(self) -> tuple[ToolCall, ...]:
        """The calls that have closed."""
        return tuple(self._tracker.calls)

    @property
    def announced(self) -> int:
        """How many calls were sent, closed or not."""
        return self._tracker.announced

    @property
    def should_stop(self) -> bool:
        """Nothing that the model writes from here on would be sent."""
        return self._tracker.stopped

    def on_undeclared(self, ask: Callable[[int, int], bool]) -> None:
        """Who is asked about calls of undeclared tools: see `Tracker`."""
        self._tracker.on_undeclared = ask

    def feed(self, text: str) -> list[Delta]:
        """What `text` settles; nothing once `should_stop`."""
        if self._scan is None:
            return [TextDelta(text)] if text else []
        position = 0
        while position < len(text) and not self._tracker.stopped:
            run = self._run
            if run is not None and (plain := run.plain.match(text, position)):
                run.put(plain[0])
                position = plain.end()
                continue
            self._tracker.position = self._read + position
            self._run = self._scan.send(text[position])
            position += 1
        self._read += position
        return self._taken()

    def finish(self) -> list[Delta]:
        """The reply is over: what was held back. Call once."""
        scan, self._scan = self._scan, None
        if scan is None:
            return []
        try:
            if not self._tracker.stopped:
                self._tracker.position = self._read
                scan.send("")
        except StopIteration:
            pass
        self._tracker.end()
        return self._taken()

    def _taken(self) -> list[Delta]:
        taken, self._tracker.deltas = merged(self._tracker.deltas), []
        return taken


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
    return ToolCallDelta(first.index, first.call_id, first.name, "".join(call.arguments for call in calls))
