import math
from dataclasses import replace

import orjson
import pytest
from fake_backend import DONE, HELLO, USAGE
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from openai.types.completion import Completion

from holdfast.replicas.requests import (
    Answer,
    AnswerBuilder,
    Completed,
    LogprobText,
    ReasoningDelta,
    TextDelta,
    ToolCallDelta,
    Usage,
    Work,
)
from holdfast.router.protocol.chat import ChatEncoder, chat_reply
from holdfast.router.protocol.completions import CompletionEncoder
from holdfast.router.protocol.replies import chat_logprobs, completion_logprobs

ODD = 'quote " newline \n line separator \u2028 é 🐎 </script>'
TOKEN = LogprobText("ab", b"ab", -0.5, (LogprobText("ab", b"ab", -0.5), LogprobText("c", b"c", -math.inf)))


def encode(encoder, *batches):
    return encoder.opening() + b"".join(encoder.encode(batch) for batch in batches)


def events(raw):
    """Payloads of the events in `raw`, which must be nothing but whole events."""
    assert raw.endswith(b"\n\n")
    lines = raw[:-2].split(b"\n\n")
    assert all(line.startswith(b"data: ") and b"\n" not in line for line in lines)
    return [line if line == b"data: [DONE]" else orjson.loads(line[6:]) for line in lines]


def chat(include_usage=False):
    return ChatEncoder("chatcmpl-1", 7, "m", include_usage)


def test_role_first_then_text_then_the_reason_then_the_end():
    *chunks, end = events(encode(chat(), *HELLO))
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
    assert deltas[0] == {"role": "assistant", "content": "", "refusal": None}
    assert [delta.get("content") for delta in deltas[1:]] == ["Hel", "lo", "!", None]
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks] == [None, None, None, None, "stop"]
    assert end == b"data: [DONE]"
    assert all("usage" not in chunk for chunk in chunks)
    for chunk in chunks:
        parsed = ChatCompletionChunk.model_validate(chunk, strict=True)
        assert (parsed.id, parsed.created, parsed.model) == ("chatcmpl-1", 7, "m")


def test_the_usage_chunk_comes_last_and_only_when_asked_for():
    *chunks, usage, _ = events(encode(chat(include_usage=True), *HELLO))
    assert [chunk["usage"] for chunk in chunks] == [None] * len(chunks)
    assert usage["choices"] == []
    assert usage["usage"] == {
        "prompt_tokens": USAGE.prompt,
        "completion_tokens": USAGE.completion,
        "total_tokens": USAGE.prompt + USAGE.completion,
        "prompt_tokens_details": {"cached_tokens": USAGE.cached},
    }
    assert usage["timing"] == {"queue_ms": 125.0, "prefill_ms": 125.0, "decode_ms": 250.0}
    ChatCompletionChunk.model_validate(usage, strict=True)


def test_drafts_are_told_where_there_were_any():
    done = replace(HELLO[-1][-1], usage=replace(USAGE, work=Work(drafted=8, accepted=5)))
    *_, last, _ = events(encode(chat(include_usage=True), *HELLO[:-1], (done,)))
    assert (last["timing"]["drafted"], last["timing"]["accepted"]) == (8, 5)
    assert "drafted" not in last["usage"]


@pytest.mark.parametrize("include_usage", [False, True])
def test_a_call_is_told_to_be_whole_with_the_chunk_that_closes_it(include_usage):
    two = [(ToolCallDelta(0, "a", "f", "{}", closed=True), ToolCallDelta(1, "b", "g", "{")), (DONE,)]
    *chunks, _ = events(encode(chat(include_usage), *two))
    assert [chunk["holdfast"] for chunk in chunks if "holdfast" in chunk] == [{"tool_call_closed": 0}]
    (closing,) = (ChatCompletionChunk.model_validate(chunk, strict=True) for chunk in chunks if "holdfast" in chunk)
    call = closing.choices[0].delta.tool_calls[0]
    assert (call.index, call.id, call.function.arguments) == (0, "a", "{}")


@pytest.mark.parametrize("encoder", [chat(), CompletionEncoder("cmpl-1", 7, "m", False)])
def test_any_text_arrives_as_it_was(encoder):
    *chunks, _ = events(encode(encoder, (TextDelta(ODD),), (DONE,)))
    choices = [chunk["choices"][0] for chunk in chunks]
    texts = [choice["text"] if "text" in choice else choice["delta"].get("content") for choice in choices]
    assert ODD in texts


def test_reasoning_is_a_field_of_its_own_and_its_tokens_are_counted():
    usage = Usage(10, 4, 9, reasoning=6)
    done = Completed("stop", usage, DONE.timing)
    pieces = ((ReasoningDelta("Hm"),), (ReasoningDelta("."), TextDelta("Hi")), (done,))
    *chunks, last, _ = events(encode(chat(include_usage=True), *pieces))
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
    assert [delta.get("reasoning_content") for delta in deltas] == [None, "Hm", ".", None, None]
    assert [delta.get("content") for delta in deltas] == ["", None, None, "Hi", None]
    assert last["usage"]["completion_tokens_details"] == {"reasoning_tokens": 6}
    built = AnswerBuilder()
    for batch in pieces:
        built.add(batch)
    whole = orjson.loads(chat_reply("chatcmpl-1", 7, "m", built.answer()))
    message = whole["choices"][0]["message"]
    assert (message["reasoning_content"], message["content"]) == ("Hm.", "Hi")
    assert ChatCompletion.model_validate(whole).usage.completion_tokens_details.reasoning_tokens == 6
    plain = orjson.loads(chat_reply("chatcmpl-1", 7, "m", Answer("Hi", (), (), "stop", USAGE, DONE.timing)))
    assert "reasoning_content" not in plain["choices"][0]["message"]
    assert CompletionEncoder("cmpl-1", 7, "m", False).encode(pieces[0]) == b""


def test_chat_logprobs():
    chunk = events(chat().encode((TextDelta("ab", (TOKEN,)),)))[0]
    [content] = chunk["choices"][0]["logprobs"]["content"]
    assert (content["token"], content["logprob"], content["bytes"]) == ("ab", -0.5, [97, 98])
    assert [other["logprob"] for other in content["top_logprobs"]] == [-0.5, -9999.0]
    ChatCompletionChunk.model_validate(chunk, strict=True)


def test_completion_chunks_and_the_offsets_of_their_logprobs():
    encoder = CompletionEncoder("cmpl-1", 7, "m", True)
    *chunks, usage, end = events(encode(encoder, (TextDelta("ab", (TOKEN,)),), (TextDelta("ab", (TOKEN,)), DONE)))
    assert [chunk["choices"][0]["text"] for chunk in chunks] == ["ab", "ab", ""]
    assert [chunk["choices"][0]["logprobs"]["text_offset"] for chunk in chunks[:2]] == [[0], [2]]
    assert chunks[2]["choices"][0]["finish_reason"] == "stop"
    assert (usage["usage"]["completion_tokens"], end) == (USAGE.completion, b"data: [DONE]")
    for chunk in chunks:
        Completion.model_validate({**chunk, "choices": [{**chunk["choices"][0], "finish_reason": "stop"}]}, strict=True)


def test_text_offsets_count_a_split_character_once():
    parts = [b"T", b"\xc3", b"\xbcr ", b"\xe6\x97", b"\xa5", b" ok"]
    text = b"".join(parts).decode()
    tokens = [LogprobText(part.decode("utf-8", "backslashreplace"), part, -1.0) for part in parts]
    offsets = [0, 1, 1, 4, 4, 5]
    assert text[offsets[-1] :] == " ok"
    assert completion_logprobs(tokens)["text_offset"] == offsets
    for at in range(len(tokens)):
        encoder = CompletionEncoder("cmpl-1", 7, "m", False)
        chunks = events(
            encoder.encode((TextDelta("x", tuple(tokens[: at + 1])), TextDelta("y", tuple(tokens[at + 1 :]))))
        )
        choices = [chunk["choices"][0] for chunk in chunks]
        assert [o for choice in choices for o in (choice["logprobs"] or {}).get("text_offset", [])] == offsets


def test_parts_of_characters_are_named_by_their_bytes_and_tokens_without_text_have_no_length():
    def token(content, top=(), **told):
        told = {"token": content.decode("utf-8", "backslashreplace"), "bytes": content, **told}
        return LogprobText(logprob=-1.0, top=top, **told)

    parts = [token(part) for part in (b" \xf0\x9f", b"\x91", b"\xa9")]
    tokens = [token(b" \xf0\x9f", tuple(parts)), *parts[1:], token(b"", token="<|im_end|>"), token("日é".encode())]
    told = completion_logprobs(tokens)
    assert told["tokens"] == [r"bytes: \xf0\x9f", r"bytes:\x91", r"bytes:\xa9", "<|im_end|>", "日é"]
    assert list(told["top_logprobs"][0]) == told["tokens"][:3]
    assert told["text_offset"] == [0, 1, 1, 2, 2]
    (entry, *_) = chat_logprobs(tokens)["content"]
    assert (entry["token"], entry["bytes"]) == (r" \xf0\x9f", [0x20, 0xF0, 0x9F])
