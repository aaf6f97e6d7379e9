"""Where a reply goes on from when it has called a tool that the request does not declare."""

from typing import Any

import pytest

from holdfast.replicas.config import EngineConfig
from holdfast.replicas.events import Sampling, TokenLogprobs
from holdfast.replicas.requests import ChatPrompt, GenerateRequest, TextDelta
from holdfast.replicas.text.conversation import TextSide
from holdfast.replicas.text.reply import Reply

TOOLS = [{"type": "function", "function": {"name": name}} for name in ("search", "sum")]
PROMPT = ChatPrompt([{"role": "user", "content": "hi"}], TOOLS)
CONFIG = EngineConfig(undeclared="regenerate")


def reader(tokenizer: Any, tool_format: str) -> tuple[TextSide, Reply]:
    side = TextSide(tokenizer, CONFIG, tool_format)
    request = GenerateRequest("r", PROMPT, Sampling())
    return side, side.reply(request, side.encode(PROMPT), side.constraints(PROMPT).declared)


def read(tokenizer: Any, tool_format: str, text: str) -> tuple[str, str | None, list[str]]:
    """The text sent, what is kept of the tokens (None: there was nothing to write again), and what may come next."""
    side, reply = reader(tokenizer, tool_format)
    backend = tokenizer.backend_tokenizer
    sent = ""
    for token in backend.encode(text, add_special_tokens=False).ids:
        if reply.done:
            break
        sent += "".join(delta.text for delta in reply.feed([token]) if isinstance(delta, TextDelta))
    if reply.rewrite is None:
        deltas, _ = reply.finish("stop")
        return sent + "".join(d.text for d in deltas if isinstance(d, TextDelta)), None, []
    kept = side.detokenize(reply.rewrite.tokens)
    forced = side.detokenize(reply.rewrite.matcher.forced())
    return sent, kept, [forced]


CALL = '<tool_call>\n{"name": "NAME", "arguments": {}}\n</tool_call>'
CASES = [
    ("hermes", CALL.replace("NAME", "rm"), "", '<tool_call>\n{"name": "'),
    ("hermes", "I look.\n" + CALL.replace("NAME", "rm"), "I look.", 'I look.\n<tool_call>\n{"name": "'),
    ("hermes", "Write <tool_call> so: " + CALL.replace("NAME", "rm"), "Write <tool_call> so:", None),
    ("hermes", CALL.replace("NAME", "sum") + "\n" + CALL.replace("NAME", "rm"), "", None),
    ("hermes", '<tool_call>{"arguments": {"a": 1}, "name": "rm"}</tool_call>', "", "<tool_call>"),
    ("llama3", '{"name": "rm", "parameters": {}}', "", '{"name": "'),
    ("llama3", '{"name": "sum", "parameters": {}}; {"name": "rm", "parameters": {}}', "", None),
    ("mistral", '[TOOL_CALLS][{"name": "sum", "arguments": {}}, {"name": "rm", "arguments": {}}]', "", None),
    ("pythonic", "[sum(), rm(b=2)]", "", "[sum(), "),
]


@pytest.mark.parametrize(("tool_format", "text", "sent", "kept"), CASES)
def test_a_reply_goes_on_from_the_last_token_a_declared_call_could_have(
    tool_format: str, text: str, sent: str, kept: str | None, qwen_like: Any
) -> None:
    kept = text[: text.rindex("rm")] if kept is None else kept
    said, got, _ = read(qwen_like, tool_format, text)
    assert said == sent
    assert got is not None
    assert kept.startswith(got)
    assert len(kept) - len(got) < 8, "one token at most"


def test_what_was_sent_is_not_taken_back(qwen_like: Any) -> None:
    """A list that no declared call could have begun cannot be gone on with: its call is text."""
    text = '[TOOL_CALLS][{"id": "1", "name": "sum", "arguments": {}}, {"name": "rm", "arguments": {}}]'
    sent, kept, _ = read(qwen_like, "mistral", text)
    assert kept is None
    assert sent == ', {"name": "rm", "arguments": {}}]'


def test_declared_calls_and_other_text_are_left_alone(qwen_like: Any) -> None:
    assert read(qwen_like, "hermes", CALL.replace("NAME", "sum")) == ("", None, [])
    assert read(qwen_like, "hermes", 'A <tool_call> and {"name": "rm"}') == (
        'A <tool_call> and {"name": "rm"}',
        None,
        [],
    )


def test_log_probabilities_of_what_is_kept_come_along(qwen_like: Any) -> None:
    _, reply = reader(qwen_like, "hermes")
    ids = qwen_like.backend_tokenizer.encode("I look.\n" + CALL.replace("NAME", "rm"), add_special_tokens=False).ids
    logprobs = [TokenLogprobs(token, -0.5) for token in ids]
    for token, entry in zip(ids, logprobs, strict=True):
        reply.feed([token], [entry])
    assert reply.rewrite is not None
    assert list(reply.rewrite.tokens) == ids[: len(reply.rewrite.tokens)]
    assert list(reply.rewrite.logprobs) == logprobs[: len(reply.rewrite.tokens)]
