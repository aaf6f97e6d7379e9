from dataclasses import replace

import orjson
import pytest

from holdfast.replicas.errors import ErrorKind, InvalidRequestError
from holdfast.replicas.requests import JsonOutput, ModelCard, RawPrompt
from holdfast.router.protocol.anthropic import MessagesBody, chat_prompt, messages_turn
from holdfast.router.protocol.body import validate
from holdfast.router.protocol.chat import ChatBody, chat_turn
from holdfast.router.protocol.completions import CompletionBody, completion_turn, read_tokenize
from holdfast.router.protocol.prefills import read_prefill
from holdfast.router.protocol.sessions import read_open

MODEL = ModelCard("m", context_length=100, vocabulary=50)
MESSAGES = [{"role": "user", "content": "hi"}]
TOOL = {"type": "function", "function": {"name": "f"}}


def chat(**fields):
    return chat_turn(validate(ChatBody, {"model": "m", "messages": MESSAGES, **fields}), MODEL)


def allowed(mode, *names):
    tools = [{"type": "function", "function": {"name": name}} for name in names]
    return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": tools}}


def chosen(choice):
    return {"tool_choice": choice, "tools": [TOOL]}


def formed(kind, **more):
    return {"response_format": {"type": kind, **more}}


def completion(**fields):
    return completion_turn(validate(CompletionBody, {"model": "m", "prompt": "hi", **fields}), MODEL)


def test_defaults_are_openais():
    turn = chat()
    assert (turn.sampling.temperature, turn.sampling.top_p, turn.sampling.seed) == (1.0, 1.0, None)
    assert turn.sampling.max_tokens == -1
    assert turn.sampling.logprobs is None
    assert (turn.stop, turn.stream, turn.include_usage) == ((), False, False)
    assert (turn.prompt.tool_choice, turn.prompt.parallel_tool_calls) == ("auto", True)


def test_every_sampling_field_arrives():
    as_they_are = {"temperature": 0, "top_p": 0.5, "min_p": 0.1, "seed": -3, "presence_penalty": 1}
    as_they_are |= {"frequency_penalty": -1, "ignore_eos": True}
    others = {"max_completion_tokens": 7, "top_k": -1, "logit_bias": {"9": 2, "4": -100}, "stop_token_ids": [3, 3]}
    sampling = chat(**as_they_are, **others, logprobs=True, top_logprobs=2).sampling
    assert {name: getattr(sampling, name) for name in as_they_are} == as_they_are
    assert (sampling.max_tokens, sampling.top_k, sampling.logprobs) == (7, 0, 2)
    assert list(sampling.logit_bias.items()) == [(4, -100.0), (9, 2.0)]
    assert sampling.stop_token_ids == frozenset({3})


@pytest.mark.parametrize(("asked", "kept"), [(7, 7), (50, 50), (51, 50), (2**63, 50)])
def test_a_large_top_k_is_all_of_the_vocabulary(asked, kept):
    assert chat(top_k=asked).sampling.top_k == kept


def test_no_mass_at_all_is_the_most_likely_token():
    assert chat(top_p=0, temperature=1.5) == chat(temperature=0)
    assert completion(top_p=0.0) == completion(temperature=0)
    assert chat(top_p=1e-9).sampling.temperature == 1.0


def test_an_empty_cache_key_is_none():
    assert chat(prompt_cache_key="") == chat()
    assert chat(prompt_cache_key="k").ids.prompt_cache_key == "k"


def test_chat_prompt_carries_tools_and_template_arguments():
    prompt = chat(tools=[TOOL], tool_choice="none", parallel_tool_calls=False, chat_template_kwargs={"a": 1}).prompt
    assert prompt.tools == (TOOL,)
    assert (prompt.tool_choice, prompt.parallel_tool_calls, prompt.template_kwargs) == ("none", False, {"a": 1})


def test_a_choice_of_tools_becomes_what_the_reply_must_be():
    tools = [TOOL, {"type": "function", "function": {"name": "g"}}]
    required = chat(tools=tools, tool_choice="required").prompt
    assert (required.tool_choice, required.forced_tool) == ("required", "")
    named = chat(tools=tools, tool_choice={"type": "function", "function": {"name": "g"}}).prompt
    assert (named.tool_choice, named.forced_tool) == ("required", "g")
    for mode in ("auto", "required"):
        some = chat(tools=tools, tool_choice=allowed(mode, "g", "g")).prompt
        assert (some.tool_choice, some.forced_tool, some.allowed_tools) == (mode, "", ("g",))
        assert [tool["function"]["name"] for tool in some.tools] == ["f", "g"]
    assert required.allowed_tools == named.allowed_tools == ()


def test_a_response_format_becomes_the_schema_of_the_reply():
    schema = {"type": "object", "properties": {"a": {"type": "string"}}}
    body = {"name": "answer", "schema": schema, "strict": True}
    loose = {"name": "answer", "schema": None, "strict": None}
    for fields, output in (
        ({}, None),
        (formed("text"), None),
        (formed("json_object"), JsonOutput({"type": "object"})),
        (formed("json_schema", json_schema=body), JsonOutput(schema, True)),
        (formed("json_schema", json_schema=loose), JsonOutput({"type": "object"})),
    ):
        assert chat(**fields).prompt.output == output


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"tool_choice": "required"}, "tool_choice"),
        (chosen({"type": "function", "function": {"name": "g"}}), "tool_choice.function.name"),
        (chosen({"type": "function"}), "tool_choice.function"),
        (chosen({"type": "custom"}), "tool_choice.type"),
        (chosen({"type": "allowed_tools"}), "tool_choice.allowed_tools"),
        (chosen(allowed("none", "f")), "tool_choice.allowed_tools.mode"),
        (chosen(allowed([], "f")), "tool_choice.allowed_tools.mode"),
        (chosen(allowed("auto")), "tool_choice.allowed_tools.tools"),
        (chosen(allowed("auto", "f", "g")), "tool_choice.allowed_tools.tools.1.function.name"),
        ({"tool_choice": "sometimes"}, "tool_choice"),
        (formed("xml"), "response_format.type"),
        (formed("json_schema"), "response_format.json_schema"),
        (formed("json_schema", json_schema={}), "response_format.json_schema.name"),
        (formed("json_object", strict=True), "response_format.strict"),
        (formed("json_schema", json_schema={"name": "n", "schema": 1}), "response_format.json_schema.schema"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"max_tokens": 5, "max_completion_tokens": 6}, "max_tokens"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"stop": ["a", ""]}, "stop"),
        ({"stop": ""}, "stop"),
        ({"stop": ["x"] * 17}, "stop"),
        ({"logit_bias": {"x": 1}}, "logit_bias.x"),
        ({"logit_bias": {"50": 1}}, "logit_bias.50"),
        ({"logit_bias": {"1" * 5000: 1}}, f"logit_bias.{'1' * 5000}"),
        ({"stop_token_ids": [1, 50]}, "stop_token_ids.1"),
        ({"min_tokens": 101}, "min_tokens"),  # more than the context
    ],
)
def test_fields_that_do_not_make_sense_together(fields, field):
    with pytest.raises(InvalidRequestError) as refused:
        chat(**fields)
    assert (refused.value.kind, refused.value.field) == (ErrorKind.INVALID, field)


@pytest.mark.parametrize("name", ["max_tokens", "max_completion_tokens"])
def test_more_tokens_than_the_context_are_as_many_as_the_context_has(name):
    assert chat(**{name: 99}).sampling.max_tokens == 99
    assert chat(**{name: 10**30}).sampling.max_tokens == 100


def test_completion_prompts():
    assert completion().prompt == RawPrompt("hi")
    assert completion(prompt=[1, 2]).prompt == RawPrompt((1, 2))
    assert completion(prompt=["hi"]).prompt == RawPrompt("hi")
    assert completion(prompt=[[1, 2]]).prompt == RawPrompt((1, 2))
    assert completion(logprobs=3).sampling.logprobs == 3
    at = {"prompt": ([], ""), "prompt.1": (["x", ""], [1, 50]), "prompt.1.0": ([[1], [50]],), "prompt.0.0": ([["x"]],)}
    for field, prompt in [(field, prompt) for field, prompts in at.items() for prompt in prompts]:
        with pytest.raises(InvalidRequestError) as refused:
            completion(prompt=prompt)
        assert refused.value.field == field


def test_several_prompts_and_choices_are_answers_of_their_own():
    turn = completion(prompt=["a", "b"], n=2, seed=3, echo=True)
    assert turn.prompt == RawPrompt("a", echo=True)
    assert [(other.prompt.content, other.sampling.choice, other.again) for other in turn.others] == [
        ("a", 1, True),
        ("b", 0, False),
        ("b", 1, True),
    ]
    assert {other.sampling.seed for other in turn.others} == {3}
    assert [other.sampling.choice for other in chat(n=3).others] == [1, 2]
    assert chat(n=1) == chat()
    for asked in ({"prompt": ["a"] * 100, "n": 2}, {"max_tokens": 0}, {"max_tokens": 2, "min_tokens": 3}):
        with pytest.raises(InvalidRequestError):
            completion(**asked)
    assert completion(max_tokens=0, echo=True).sampling.max_tokens == 0


def test_how_much_is_thought_is_told_to_the_template():
    assert chat(reasoning_effort="low").prompt.template_kwargs == {"reasoning_effort": "low", "enable_thinking": True}
    assert chat(reasoning_effort="none").prompt.template_kwargs["enable_thinking"] is False
    own = chat(reasoning_effort="high", chat_template_kwargs={"enable_thinking": False, "a": 1}).prompt.template_kwargs
    assert own == {"reasoning_effort": "high", "enable_thinking": False, "a": 1}


def test_the_models_own_defaults_stand_where_a_request_says_nothing():
    card = replace(MODEL, defaults={"temperature": 0.6, "top_k": 20, "repetition_penalty": 1.1})
    body = {"model": "m", "messages": MESSAGES}
    sampling = chat_turn(validate(ChatBody, body), card).sampling
    assert (sampling.temperature, sampling.top_k, sampling.repetition_penalty, sampling.top_p) == (0.6, 20, 1.1, 1.0)
    told = chat_turn(validate(ChatBody, {**body, "temperature": 1, "top_k": 0}), card).sampling
    assert (told.temperature, told.top_k, told.repetition_penalty) == (1.0, 0, 1.1)
    assert messages_sampling({}, card).temperature == 0.6
    assert messages_sampling({"temperature": 0.2}, card).temperature == 0.2


def messages_sampling(fields, card):
    body = validate(MessagesBody, {"model": "m", "messages": MESSAGES, "max_tokens": 5, **fields})
    return messages_turn(body, chat_prompt(body), card).sampling


def test_a_template_sees_no_field_of_a_tool_that_is_not_known():
    """So that a prompt that is tokenized or computed ahead is that of the turn."""
    tool = {"type": "function", "function": {"name": "f", "description": "d"}}
    written = {**tool, "cache_control": {}, "function": {**tool["function"], "defer_loading": True}}
    assert chat(tools=[written]).prompt.tools == (tool,)
    raw = orjson.dumps({"model": "m", "messages": MESSAGES, "tools": [written]})
    for prompt in (
        read_tokenize(raw, (MODEL,))[0],
        read_prefill(raw, (MODEL,))[1],
        read_open(raw, (MODEL,), "s").prompt,
    ):
        assert prompt.tools == (tool,)
