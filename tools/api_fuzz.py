"""Cases that schemathesis makes of `/openapi.json`, sent to a router over HTTP: `python tools/api_fuzz.py`.

Each operation gets as many as every other, generation five times as many; half of them are as the document says, half
are broken somewhere. No answer may be a 5xx, or anything that the document does not tell. The router is the real one;
behind it a backend replies at once with text, thoughts, calls and log probabilities, or `--engine` the shipped model.
*Accepted* is, of the generation requests that are as the document says, what got a 200. Standard error tells how far it
is; an interrupt, or SIGTERM, ends it with what there is.
"""

from __future__ import annotations

import argparse
import signal
import sys
import time
from collections import Counter
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).resolve().parents[1] / "tests" / "support"))
import httpx
import schemathesis
from fake_backend import CALL, DONE, HELLO, FakeBackend, World
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis.errors import Unsatisfiable
from schemathesis import GenerationMode
from schemathesis.checks import CHECKS
from service_backend import ServiceBackend

from holdfast.replicas.config import DraftConfig, EngineConfig
from holdfast.replicas.plan import Sampling
from holdfast.replicas.requests import (
    Answer,
    GenerateRequest,
    LogprobText,
    Question,
    QuestionState,
    RawPrompt,
    ReasoningDelta,
    SessionCall,
    SessionState,
    TextDelta,
)
from holdfast.router.backend import ANYWHERE, Batch, RoutingHint
from holdfast.router.config import RouterConfig
from holdfast.router.entry import SUMS, Quotas, UsageBooks

WANTED = (
    "not_a_server_error",
    "status_code_conformance",
    "content_type_conformance",
    "response_headers_conformance",
    "response_schema_conformance",
)
WEIGHT = 5  # of an operation that generates
TINY = EngineConfig(cells=1024, context_length=256, threads=1, speculation=DraftConfig(enabled=False))


class NoBooks:
    """Where nothing is booked."""

    degraded = True

    async def script(self, source: str, keys: Sequence[str], arguments: Sequence[str | bytes | float]) -> list[Any]:
        return [[] for _ in arguments] if source == SUMS else []

    async def try_script(self, *_: object) -> None:
        return None


class Talker(FakeBackend):
    """Replies with something of everything."""

    async def stream(self, request: GenerateRequest, place: RoutingHint = ANYWHERE) -> AsyncGenerator[Batch, None]:
        if request.sampling.logprobs is not None:
            top = (LogprobText("b", b"b", -2.0),) * request.sampling.logprobs
            told = LogprobText("Hi", b"Hi", -0.5, top)
            self.script = [(TextDelta("Hi", (told,)),), (DONE,)]
        elif getattr(request.prompt, "tools", ()):
            self.script = [(ReasoningDelta("Well."),), *CALL]
        else:
            self.script = HELLO
        async for batch in super().stream(request, place):
            yield batch

    async def detokenize(self, tokens: Sequence[int]) -> str:
        return " ".join(map(str, tokens))  # none of them is unlucky here

    async def session(self, call: SessionCall, program: str, replica_id: str) -> SessionState:
        question = getattr(call, "question", None)
        if question is None and (named := getattr(call, "question_id", "")):
            question = Question(named, RawPrompt("hello"), Sampling(max_tokens=5))
        told = (QuestionState(question, await self._answer(), 1),) if question else ()
        return SessionState(call.session_id, 1, 1, 1.0, 60.0, questions=told, replica_id="r1")

    async def _answer(self) -> Answer:
        reply = (await self.generate(GenerateRequest("q", RawPrompt("hello"), Sampling(max_tokens=5)))).reply
        assert isinstance(reply, Answer)
        return reply


@dataclass
class Found:
    """What was sent, how it was answered, and what was wrong."""

    cases: int = 0
    statuses: Counter[int] = field(default_factory=Counter)
    asked: Counter[str] = field(default_factory=Counter)
    accepted: Counter[str] = field(default_factory=Counter)
    refusals: Counter[str] = field(default_factory=Counter)
    faults: dict[str, str] = field(default_factory=dict)

    @property
    def share(self) -> float:
        """Of the generation requests that are as the document says, those that were accepted."""
        return sum(self.accepted.values()) / max(sum(self.asked.values()), 1)

    def told(self) -> str:
        each = ", ".join(f"{name} {self.accepted[name] / n:.0%}" for name, n in sorted(self.asked.items()))
        statuses = ", ".join(f"{status}: {n}" for status, n in sorted(self.statuses.items()))
        return (
            f"{self.cases} cases; answers {statuses}\n"
            f"{self.share:.0%} of {sum(self.asked.values())} valid generation requests accepted ({each})\n"
            f"{len(self.faults)} faults"
        )


def fuzz(address: str, cases: int, found: Found | None = None) -> Found:
    """Send about so many cases, and note in `found` what comes of them."""
    schema = schemathesis.openapi.from_url(f"{address}/openapi.json")
    operations = [each.ok() for each in schema.get_all_operations()]
    weights = [WEIGHT if "generation" in (each.tags or ()) else 1 for each in operations]
    found = found or Found()
    with httpx.Client(base_url=address, timeout=60) as http:
        model = http.get("/v1/models").json()["data"][0]["id"]
        response = http.post("/v1/responses", json={"model": model, "input": "hello"}).json()["id"]
    known = {"previous_response_id": response, "response_id": response}
    for operation, weight in zip(operations, weights, strict=True):
        generates = weight == WEIGHT
        # Another session for each: a router remembers so many programs and no more.
        opened = httpx.post(f"{address}/v1/sessions", json={"model": model, "text": "hello"}, timeout=60)
        known["session_id"] = opened.json()["id"]
        has_input = operation.body or operation.path_parameters or operation.query
        breakable = operation.body or operation.query  # a path is any text
        for mode in (GenerationMode.POSITIVE, GenerationMode.NEGATIVE) if breakable else (GenerationMode.POSITIVE,):
            # A quarter more, for some cannot be broken.
            wanted = cases * weight * 5 // (8 * sum(weights)) + 1
            _send(address, operation, mode, wanted if has_input else 1, found, known, generates=generates)
        print(f"{operation.label}: {found.cases} cases, {len(found.faults)} faults", file=sys.stderr, flush=True)
    return found


def refer(case: object, known: Mapping[str, str]) -> None:
    """Put names of what there is where a valid request names something: schemas cannot say what refers to what.

    Likewise what one field allows of another: events are for streams, a choice is of the tools that are sent.
    """
    for name in set(case.path_parameters or ()) & set(known) - ({"session_id"} if case.method == "DELETE" else set()):  # type: ignore[attr-defined]
        case.path_parameters[name] = known[name]  # type: ignore[attr-defined]
    body = case.body  # type: ignore[attr-defined]
    if not isinstance(body, dict):
        return
    for name in set(body) & set(known):
        body[name] = known[name] if body[name] is not None else None
    body.pop("prefill_id", None)
    body.pop("id", None)  # of a session: one that is not there
    if not body.get("stream"):
        body.pop("stream_options", None)
    if not body.get("logprobs"):
        body.pop("top_logprobs", None)
    if body.get("max_completion_tokens") is not None or body.get("min_tokens"):
        body.pop("max_tokens", None)
        body.pop("min_tokens", None)
    if not body.get("tools") or not isinstance(body.get("tool_choice"), str):
        body.pop("tool_choice", None)
    given = [kind for kind in ("text", "tokens", "messages", "prompt") if body.get(kind) is not None]
    if case.path.startswith(("/v1/sessions", "/tokenize")):  # type: ignore[attr-defined]
        for kind in given[1:]:
            del body[kind]
        if "messages" not in given[:1]:
            body.pop("tools", None)
            body.pop("chat_template_kwargs", None)
    if case.path.startswith("/v1/responses") and not body.get("input"):  # type: ignore[attr-defined]
        body["input"] = "hello"
    _refer_calls(body)


def _refer_calls(body: dict[str, Any]) -> None:
    """Results of calls that nobody has made are results of calls that are made before them."""
    messages = body.get("messages")
    if isinstance(messages, list):
        function = {"name": "f", "arguments": "{}"}
        told: list[Any] = []
        for message in messages:
            content = message.get("content")
            if message["role"] == "tool":
                call = {"id": message["tool_call_id"], "function": function}
                told.append({"role": "assistant", "content": None, "tool_calls": [call]})
            results = [b for b in content if b.get("type") == "tool_result"] if isinstance(content, list) else []
            uses = [{"type": "tool_use", "id": each["tool_use_id"], "name": "f", "input": {}} for each in results]
            if uses and message["role"] == "user":
                told.append({"role": "assistant", "content": uses})
            if message["role"] == "assistant" and not content and not message.get("tool_calls"):
                message["content"] = "x"
            told.append(message)
        if "system" in body and told and told[-1]["role"] == "assistant":
            told.append({"role": "user", "content": "hello"})
        body["messages"] = told
    items = body.get("input")
    if isinstance(items, list):
        told = []
        for item in items:
            if str(item.get("type", "")).endswith("call_output"):
                told.append({"type": "function_call", "call_id": item["call_id"], "name": "f", "arguments": "{}"})
            told.append(item)
        body["input"] = [*told, {"role": "user", "content": "hello"}]


def _send(
    address: str,
    operation: object,
    mode: GenerationMode,
    n: int,
    found: Found,
    known: Mapping[str, str],
    *,
    generates: bool,
) -> None:
    strategy = operation.as_strategy(generation_mode=mode)  # type: ignore[attr-defined]
    checks = [CHECKS.get_one(name) for name in WANTED]

    positive = mode is GenerationMode.POSITIVE

    @given(case=strategy)
    @settings(
        max_examples=n,
        phases=[Phase.generate],
        deadline=None,
        database=None,
        derandomize=True,
        suppress_health_check=list(HealthCheck),
    )
    def send(case: object) -> None:
        if positive:
            refer(case, known)
        answer = case.call(base_url=address)  # type: ignore[attr-defined]
        found.cases += 1
        found.statuses[answer.status_code] += 1
        name = f"{case.method} {case.path}"  # type: ignore[attr-defined]
        if generates and positive:
            found.asked[name] += 1
            found.accepted[name] += answer.status_code == 200
            if answer.status_code != 200:
                found.refusals[f"{name}: {answer.text[:160]}"] += 1
        try:
            case.validate_response(answer, checks=checks)  # type: ignore[attr-defined]
        except Exception as error:
            key = f"{name} {answer.status_code} {type(error).__name__} {str(error)[:60]}"
            found.faults.setdefault(key, f"{error}\n{case.as_curl_command()}")  # type: ignore[attr-defined]
        except BaseExceptionGroup as errors:
            key = f"{name} {answer.status_code} {errors.exceptions[0]!r:.80}"
            found.faults.setdefault(key, f"{errors.exceptions[0]}\n{case.as_curl_command()}")  # type: ignore[attr-defined]

    with suppress(Unsatisfiable):
        send()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cases", type=int, default=20_000)
    parser.add_argument("--engine", action="store_true", help="with the shipped model behind the router")
    parser.add_argument("--refusals", action="store_true", help="show why valid requests were refused")
    options = parser.parse_args()
    for end in (signal.SIGINT, signal.SIGTERM):
        signal.signal(end, signal.default_int_handler)
    backend = ServiceBackend(TINY) if options.engine else Talker()
    began, found = time.monotonic(), Found()
    with (
        World(backend, books=UsageBooks(RouterConfig(), Quotas(NoBooks()))).served() as address,
        suppress(KeyboardInterrupt),
    ):  # which ends it with what there is
        fuzz(address, options.cases, found)
    print(found.told(), f"in {time.monotonic() - began:.0f} s")
    if options.refusals:
        for why, n in found.refusals.most_common(40):
            print(n, why)
    for key, fault in found.faults.items():
        print("----", key, fault, sep="\n")
    return 1 if found.faults or found.share <= 0.5 else 0


if __name__ == "__main__":
    sys.exit(main())
