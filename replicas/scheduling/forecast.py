"""When a request's answer will be there: how fast the queue moves and what serving takes, learned from those before.

    now         + waiting                                    + serving
    arrival       those before it * seconds between starts     first token (+ tokens * seconds of each)

times what such forecasts turned out to be short of lately. Seconds between starts are learned while somebody waits:
then a start is as soon as there is room. What clients did not wait for counts as far as it came, or a server that is
too slow for all of them would learn nothing. Nothing is expected before some requests have shown it. Pure: time comes
in. One thread writes, any may read.
"""

from holdfast.replicas.sequences import Sequence

_KEEPS = 0.98  # of what was learned, with each observation
_LEAST = 8  # observations before a mean is believed
_ON_TIME = 0.95  # of the answers that forecasts are right for
_STRIDE = 0.05  # by which the correction grows with a forecast that was short
_MOST = 4.0  # times a forecast, at most


class Mean:
    """Of the latest observations, older ones counting less and less."""

    def __init__(self) -> None:
        self._sum = 0.0
        self._weight = 0.0
        self._seen = 0

    def add(self, total: float, n: int = 1) -> None:
        """`n` observations, of so much together."""
        keep = _KEEPS**n
        self._sum, self._weight, self._seen = self._sum * keep + total, self._weight * keep + n, self._seen + n

    @property
    def value(self) -> float:
        """0 while too few were seen."""
        return self._sum / self._weight if self._seen >= _LEAST else 0.0


class Forecast:
    """Of one engine. Seconds."""

    def __init__(self) -> None:
        self._gap = Mean()  # between two starts
        self._first = Mean()  # from a start to the first token
        self._token = Mean()  # of each further one
        self._tokens = Mean()  # that an answer has
        self._since: float | None = None  # the latest start in a time in which somebody waits
        self.correction = 1.0

    # ---- learning ----

    def started(self, n: int, waiting: int, now: float) -> None:
        """A step begins with so many new requests, and so many wait still."""
        if n and self._since is not None:
            self._gap.add(now - self._since, n)
        if not waiting:
            self._since = None
        elif n or self._since is None:
            self._since = now

    def left(self, sequence: Sequence, now: float, *, whole: bool) -> None:
        """A sequence leaves the batch for good, with its `whole` answer or as far as it came."""
        if sequence.background or sequence.scheduled is None:
            return
        first, drawn = sequence.first_token, sequence.length - sequence.n_prompt
        self._first.add((now if first is None else first) - sequence.scheduled)
        self._tokens.add(drawn if whole else max(drawn, self._tokens.value))
        if first is not None and drawn > 1:
            self._token.add(now - first, drawn - 1)
        end = first if sequence.submit.begins else now if whole else None
        late = (now if end is None else end) - sequence.arrived > sequence.expected_s * self.correction
        if sequence.expected_s > 0 and (late or end is not None):
            step = _STRIDE * (_ON_TIME if late else _ON_TIME - 1)
            self.correction = min(max(self.correction + step, 1.0), _MOST)

    # ---- foretelling ----

    @property
    def gap_s(self) -> float:
        """Between two starts while somebody waits; 0: not known yet."""
        return self._gap.value

    def serving_s(self, max_tokens: float, begins: bool) -> float:
        """From a start to the first token, where that is what is wanted, or to the whole answer."""
        if begins:
            return self._first.value
        tokens = min(max_tokens, self._tokens.value)
        return self._first.value + max(0.0, tokens - 1) * self._token.value

    def answer_s(self, max_tokens: float, begins: bool, before: int) -> float:
        """Until one has what it wants, behind so many others; not corrected."""
        waiting_s = (before + 1) * self.gap_s if before else 0.0
        return waiting_s + self.serving_s(max_tokens, begins)
