"""Stop strings in a streamed text: nothing that may be the beginning of one is let out."""

from collections.abc import Sequence


class StopMatcher:
    """Cuts a text before the stop string that is complete first (of those ending together, the longest)."""

    def __init__(self, stops: Sequence[str] = ()) -> None:
        self._stops = tuple(stop for stop in stops if stop)
        self._longest = max(map(len, self._stops), default=0)
        self._held = ""
        self.passed = 0  # characters let out: where there was a stop string, its beginning
        self.stopped = False

    def feed(self, text: str) -> tuple[str, bool]:
        """The text that is safe to send, and whether a stop string was reached; after that, nothing more."""
        if self.stopped:
            return "", True
        if not self._stops:
            self.passed += len(text)
            return text, False
        text = self._held + text
        cut = self._first(text)
        if cut is not None:
            self.stopped, self._held = True, ""
            self.passed += cut
            return text[:cut], True
        safe = len(text) - self._suffix(text)
        self._held = text[safe:]
        self.passed += safe
        return text[:safe], False

    def flush(self) -> str:
        """The text is over: what was held back."""
        held, self._held = self._held, ""
        self.passed += len(held)
        return held

    def _first(self, text: str) -> int | None:
        """Where the stop string that ends first begins."""
        found = [(start + len(stop), start) for stop in self._stops if (start := text.find(stop)) >= 0]
        return min(found)[1] if found else None

    def _suffix(self, text: str) -> int:
        """Length of the longest end of `text` that a stop string begins with."""
        for length in range(min(self._longest - 1, len(text)), 0, -1):
            tail = text[-length:]
            if any(stop.startswith(tail) for stop in self._stops):
                return length
        return 0
