"""Digests by which prompts are placed: histories of conversations, and beginnings that prompts share."""

from dataclasses import replace
from itertools import count

from holdfast.replicas.requests import ChatPrompt, RawPrompt
from holdfast.router.records.conversations import HISTORIES, PLAIN, Preamble, conversation, histories, shared_prefix

TASK = ({"role": "system", "content": "be brief"}, {"role": "user", "content": "fix the bug"})
TOOLS = ({"type": "function", "function": {"name": "ls"}},)
numbers = count()


def reply():
    function = {"name": "ls", "arguments": "{}"}
    return {"role": "assistant", "tool_calls": [{"id": f"call_{next(numbers)}", "function": function}]}


def result(said, text="files"):
    return {"role": "tool", "tool_call_id": said["tool_calls"][0]["id"], "content": text}


# ---- placement ----


def known(*messages, scope="acme pocket"):
    sent = conversation("pocket", ChatPrompt(messages, TOOLS))
    return dict(histories(scope, replace(sent, preamble=Preamble("", 0, 1000))))


def test_a_branch_knows_the_conversation_that_it_leaves():
    """What it has in common with each turn of the other one is the turn's own history."""
    said, later = reply(), reply()
    first = known(*TASK)
    second = known(*TASK, said, result(said))
    branch = known(*TASK, said, result(said, "other files"))
    further = known(*TASK, said, result(said), later, result(later, "other"))
    assert list(branch)[1:] == list(first)
    assert list(further)[1:] == list(second)
    assert further[next(iter(second))] == 1000 * 4 // 6
    assert known(*TASK) == first
    assert not known(*TASK, scope="other pocket").keys() & first.keys()


def test_of_a_long_conversation_few_histories_are_looked_for():
    messages = list(TASK)
    for _ in range(20):
        said = reply()
        messages += [said, result(said)]
    found = list(known(*messages).values())
    assert len(found) == HISTORIES
    assert found == sorted(found, reverse=True)
    assert found[0] == 1000


def prefix(prompt, scope="acme pocket"):
    return shared_prefix(scope, conversation("pocket", prompt))


def test_plain_prompts_are_placed_by_what_they_begin_with():
    same = "x" * 4 * PLAIN
    one, other = (conversation("pocket", RawPrompt(same + end)).preamble for end in ("a" * 400, "b"))
    assert one.digest == other.digest != ""
    assert (one.tokens, one.prompt_tokens, other.prompt_tokens) == (PLAIN, PLAIN + 100, PLAIN)
    assert prefix(RawPrompt(same + "a")) == prefix(RawPrompt(same + "b")) != prefix(RawPrompt(same), "other pocket")
    assert conversation("pocket", RawPrompt(same[1:])).preamble == Preamble("", 0, PLAIN - 1)
    assert prefix(RawPrompt(same[1:])) == ""
    ids = tuple(range(PLAIN + 5))
    assert prefix(RawPrompt(ids)) == prefix(RawPrompt(ids[:PLAIN])) != ""


def test_chats_are_placed_by_tools_and_the_messages_before_the_first_of_a_user():
    one, other = (prefix(ChatPrompt([TASK[0], {"role": "user", "content": text}], TOOLS)) for text in ("a", "b"))
    assert one == other != ""
    assert prefix(ChatPrompt(TASK, ())) != one
    assert prefix(ChatPrompt([TASK[1]], ())) == ""
    preamble = conversation("pocket", ChatPrompt(TASK, TOOLS)).preamble
    assert 0 < preamble.tokens < preamble.prompt_tokens
