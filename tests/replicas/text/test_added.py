"""Where added tokens stand in a text: the longest of those that begin at a place."""

import re

from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, models

from holdfast.replicas.text.encode import read_added_tokens

CONTENT = st.text("<|a>\n.", min_size=1, max_size=5)


@given(st.sets(CONTENT, max_size=12), st.text("<|a>\n. ", max_size=60), st.booleans())
def test_the_longest_token_is_found_wherever_one_begins(contents: set[str], text: str, space: bool) -> None:
    tokenizer = Tokenizer(models.BPE({}, []))
    tokenizer.add_special_tokens([AddedToken(content, rstrip=space) for content in sorted(contents)])
    added = read_added_tokens(tokenizer)
    long = {content for content in contents if len(content) > 1}
    assert spans(added.all, text) == spans(one_by_one(contents), text)
    assert spans(added.control_word, text) == spans(one_by_one(long), text)
    assert spans(added.control, text) == spans(one_by_one(long, r"\s*" if space else ""), text)


def one_by_one(contents: set[str], then: str = "") -> re.Pattern[str] | None:
    tried = [re.escape(content) + then for content in sorted(contents, key=lambda content: (-len(content), content))]
    return re.compile("|".join(tried)) if tried else None


def spans(pattern: re.Pattern[str] | None, text: str) -> list[tuple[int, int]]:
    return [match.span() for match in pattern.finditer(text)] if pattern is not None else []
