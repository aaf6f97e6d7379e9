"""A text cut at its first stop string, however it comes."""

from hypothesis import given
from hypothesis import strategies as st

from holdfast.replicas.text.reply import StopStrings

TEXT = st.text("ab\nc", max_size=30)
STOPS = st.lists(st.text("ab\nc", min_size=1, max_size=4), max_size=3)


def cut_naively(text: str, stops: list[str]) -> str:
    """Character by character: the first end of a stop string decides, the longest one ending there is cut."""
    for end in range(1, len(text) + 1):
        starts = [end - len(stop) for stop in stops if text[:end].endswith(stop)]
        if starts:
            return text[: min(starts)]
    return text


@given(st.lists(TEXT, max_size=8), STOPS)
def test_any_chunking_equals_the_naive_cut(chunks: list[str], stops: list[str]) -> None:
    matcher = StopStrings(stops)
    sent = ""
    for chunk in chunks:
        safe, stopped = matcher.feed(chunk)
        assert stopped == matcher.stopped
        sent += safe
        assert not any(stop in sent for stop in stops)
    whole = "".join(chunks)
    assert sent + matcher.flush() == cut_naively(whole, stops)
    assert matcher.stopped == any(stop in whole for stop in stops)


def test_holds_back_only_what_may_begin_a_stop_string() -> None:
    matcher = StopStrings(["\n\nUser:"])
    assert matcher.feed("Hello.\n") == ("Hello.", False)
    assert matcher.feed("World\n\n") == ("\nWorld", False)
    assert matcher.feed("User:x") == ("", True)
    assert matcher.feed("more") == ("", True)
    assert matcher.flush() == ""
