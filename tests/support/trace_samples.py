"""Small programs made by hand, and hypothesis strategies for what each format of traces can carry."""

from typing import Any

from hypothesis import strategies as st

from holdfast.loadgen.program import Json, Output, Program, Sized, Turn

TOOL: Json = {
    "type": "function",
    "function": {
        "name": "weigh",
        "description": "Weigh a parcel.",
        "parameters": {"type": "object", "properties": {"parcel": {"type": "string"}}, "required": ["parcel"]},
    },
}


def user(text: str) -> Json:
    return {"role": "user", "content": text}


def says(text: str) -> Json:
    return {"role": "assistant", "content": text}


def calls(*ids: str) -> Json:
    made = [{"id": i, "type": "function", "function": {"name": "weigh", "arguments": '{"parcel":"A"}'}} for i in ids]
    return {"role": "assistant", "content": None, "tool_calls": made}


def result(call_id: str, text: str = "3 kg") -> Json:
    return {"role": "tool", "tool_call_id": call_id, "content": text}


def parcel_program() -> Program:
    """Three turns: a call, its result, and another question of the user."""
    system = {"role": "system", "content": "You weigh parcels."}
    asked = Turn((system, user("How heavy is A?")), tools=(TOOL,), sampling={"temperature": 0}, max_tokens=64)
    called = Output(calls("c1"), tokens=12, prompt_tokens=40, first_token_ms=8.5, latency_ms=40.25)
    told = Turn((result("c1"),), tools=(TOOL,), delay_ms=290.0, output=Output(says("3 kg."), tokens=5))
    last = Turn((user("And B?"),), tools=(TOOL,), delay_ms=1500, output=Output(says("I do not know."), tokens=6))
    first = Turn(asked.prompt, False, asked.tools, asked.sampling, asked.max_tokens, 12.5, None, called)
    return Program("parcel", (first, told, last), tenant="quiet", closing=(user("Thanks."),))


TEXTS = st.text(max_size=8)
NAMES = st.text(min_size=1, max_size=4)
COUNTS = st.none() | st.integers(0, 10**6)
TIMES = st.none() | st.integers(0, 10**7) | st.floats(0, 1e7)
VALUES = TEXTS | st.booleans() | st.none() | st.integers(-9, 9)
JSON_OBJECTS = st.dictionaries(NAMES, VALUES, max_size=2)
MESSAGES = st.builds(
    lambda role, content, more: {
        **more,
        "role": role,
        "content": content,
        **({"tool_call_id": "c1"} if role == "tool" else {}),
    },
    st.sampled_from(["user", "tool", "assistant", "system"]),
    st.none() | TEXTS,
    JSON_OBJECTS,
)
ASSISTANT = MESSAGES.map(lambda message: {**message, "role": "assistant"})
TOOL_LISTS = st.lists(JSON_OBJECTS, min_size=1, max_size=2).map(tuple)
TOOLS = st.just(()) | TOOL_LISTS
SAMPLING = JSON_OBJECTS.filter(lambda fields: not {"messages", "tools"} & set(fields))


def outputs(answers: st.SearchStrategy[Any]) -> st.SearchStrategy[Output]:
    return st.builds(
        Output,
        answer=answers,
        kept=st.none() | ASSISTANT,
        prompt_tokens=COUNTS,
        cached_tokens=COUNTS,
        tokens=COUNTS,
        reason=st.none() | TEXTS,
        failure=st.none() | TEXTS,
        first_token_ms=TIMES,
        latency_ms=TIMES,
        queue_ms=TIMES,
        prefill_ms=TIMES,
        decode_ms=TIMES,
    )


def turns(prompts: st.SearchStrategy[Any], answers: st.SearchStrategy[Any], **fields: Any) -> st.SearchStrategy[Turn]:
    given = {
        "prompt": prompts,
        "tools": TOOLS,
        "sampling": SAMPLING,
        "max_tokens": COUNTS,
        "at_ms": TIMES,
        "delay_ms": TIMES,
        "output": outputs(answers),
        **fields,
    }
    return st.builds(Turn, **given)


@st.composite
def traces(draw: Any, first: st.SearchStrategy[Turn], later: st.SearchStrategy[Turn]) -> tuple[Program, ...]:
    """One to three programs of one to four turns, with ids of their own."""
    ids = draw(st.lists(NAMES, min_size=1, max_size=3, unique=True))
    return tuple(
        Program(
            name,
            (draw(first), *draw(st.lists(later, max_size=3))),
            draw(TEXTS),
            draw(st.lists(MESSAGES, max_size=1).map(tuple)),
        )
        for name in ids
    )


PROMPTS = st.lists(MESSAGES, max_size=3).map(tuple)
SOME = st.lists(MESSAGES, min_size=1, max_size=3).map(tuple)

RECORDED = traces(turns(SOME, ASSISTANT), turns(PROMPTS, ASSISTANT) | turns(SOME, ASSISTANT, whole=st.just(True)))
SIZED = turns(
    st.builds(Sized, st.integers(0, 9999), st.none() | st.lists(st.integers(0, 99), max_size=3).map(tuple)),
    st.none() | ASSISTANT,
    tools=st.just(()),
)
LENGTHS = traces(SIZED, SIZED)
