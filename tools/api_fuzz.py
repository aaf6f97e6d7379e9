"""Send a router over HTTP the cases that schemathesis generates from `/openapi.json`: `python tools/api_fuzz.py`.

Operations share the cases equally; those that generate get five times as many. Half of the cases follow the document,
the other half break it somewhere. No response may be a 5xx or differ from the document. The router is the real one. The
backend behind it replies at once with text, thoughts, calls and log probabilities; `--engine` takes the shipped model
instead. *Accepted* is the share of valid generation requests that got a 200. Progress goes to standard error. Ctrl-C or
SIGTERM ends the run and prints the results so far.
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

CHECK_NAMES = (
    "not_a_server_error",
    "status_code_conformance",
    "content_type_conformance",
    "response_headers_conformance",
    "response_schema_conformance",
)
WEIGHT = 5  # cases of an operation that generates, to one of any other
TINY = EngineConfig(cells=1024, context_length=256, threads=1, speculation=DraftConfig(enabled=False))


class NoBooks:
    """A store that books nothing."""

    degraded = True

    async def script(self, source: str, keys: Sequence[str], arguments: Sequence[str | bytes | float]) -> list[Any]:
        return [[] for _ in arguments] if source == SUMS else []

    async def try_script(self, *_: object) -> None:
        return None


class Talker(FakeBackend):
    """A backend whose replies cover text, reasoning, calls and log probabilities."""

    async def stream(self, request: GenerateRequest, place: RoutingHint = ANYWHERE) -> AsyncGenerator[Batch, None]:
        if request.sampling.logprobs is not None:
            top = (LogprobText("b", b"b", -2.0),) * request.sampling.logprobs
            logprob = LogprobText("Hi", b"Hi", -0.5, top)
            self.script = [(TextDelta("Hi", (logprob,)),), (DONE,)]
        elif getattr(request.prompt, "tools", ()):
            self.script = [(ReasoningDelta("Well."),), *CALL]
        else:
            self.script = HELLO
        async for batch in super().stream(request, place):
            yield batch

    async def detokenize(self, tokens: Sequence[int]) -> str:
        return " ".join(map(str, tokens))  # every token can be decoded here

    async def session(self, call: SessionCall, program: str, replica_id: str) -> SessionState:
        question = getattr(call, "question", None)
        if question is None and (question_id := getattr(call, "question_id", "")):
            question = Question(question_id, RawPrompt("hello"), Sampling(max_tokens=5))
        questions = (QuestionState(question, await self._answer(), 1),) if question else ()
        return SessionState(call.session_id, 1, 1, 1.0, 60.0, questions=questions, replica_id="r1")

    async def _answer(self) -> Answer:
        reply = (await self.generate(GenerateRequest("q", RawPrompt("hello"), Sampling(max_tokens=5)))).reply
        assert isinstance(reply, Answer)
        return reply


@dataclass
class FuzzResults:
    """The results of a run: cases, statuses, accepted requests, refusals and faults."""

    cases: int = 0
    statuses: Counter[int] = field(default_factory=Counter)
    sent: Counter[str] = field(default_factory=Counter)
    accepted: Counter[str] = field(default_factory=Counter)
    refusals: Counter[str] = field(default_factory=Counter)
    faults: dict[str, str] = field(default_factory=dict)

    @property
    def share(self) -> float:
        """The share of valid generation requests that were accepted."""
        return sum(self.accepted.values()) / max(sum(self.sent.values()), 1)

    def summary(self) -> str:
        shares = ", ".join(f"{name} {self.accepted[name] / n:.0%}" for name, n in sorted(self.sent.items()))
        statuses = ", ".join(f"{status}: {n}" for status, n in sorted(self.statuses.items()))
        return (
            f"{self.cases} cases; answers {statuses}\n"
            f"{self.share:.0%} of {sum(self.sent.values())} valid generation requests accepted ({shares})\n"
            f"{len(self.faults)} faults"
        )


def fuzz(address: str, cases: int, results: FuzzResults | None = None) -> FuzzResults:
    """Send about `cases` cases and add their results to `results`."""
    schema = schemathesis.openapi.from_url(f"{address}/openapi.json")
    operations = [operation.ok() for operation in schema.get_all_operations()]
    weights = [WEIGHT if "generation" in (operation.tags or ()) else 1 for operation in operations]
    results = results or FuzzResults()
    with httpx.Client(base_url=address, timeout=60) as http:
        model = http.get("/v1/models").json()["data"][0]["id"]
        response = http.post("/v1/responses", json={"model": model, "input": "hello"}).json()["id"]
    known = {"previous_response_id": response, "response_id": response}
    for operation, weight in zip(operations, weights, strict=True):
        generates = weight == WEIGHT
        # One session for each operation: a router remembers a limited number of programs.
        session = httpx.post(f"{address}/v1/sessions", json={"model": model, "text": "hello"}, timeout=60)
        known["session_id"] = session.json()["id"]
        has_input = operation.body or operation.path_parameters or operation.query
        breakable = operation.body or operation.query  # a path is any text
        for mode in (GenerationMode.POSITIVE, GenerationMode.NEGATIVE) if breakable else (GenerationMode.POSITIVE,):
            # A quarter more, because some cases cannot be broken.
            count = cases * weight * 5 // (8 * sum(weights)) + 1
            _send(address, operation, mode, count if has_input else 1, results, known, generates=generates)
        print(f"{operation.label}: {results.cases} cases, {len(results.faults)} faults", file=sys.stderr, flush=True)
    return results


def refer(case: object, known: Mapping[str, str]) -> None:
    """Make a valid request refer to things that exist: a schema cannot express references between fields.

    Remove fields that other fields rule out: event options without a stream, a tool choice without tools.
    """
    for name in set(case.path_parameters or ()) & set(known) - ({"session_id"} if case.method == "DELETE" else set()):  # type: ignore[attr-defined]
        case.path_parameters[name] = known[name]  # type: ignore[attr-defined]
    body = case.body  # type: ignore[attr-defined]
    if not isinstance(body, dict):
        return
    for name in set(body) & set(known):
        body[name] = known[name] if body[name] is not None else None
    body.pop("prefill_id", None)
    body.pop("id", None)  # of a session that does not exist
    if not body.get("stream"):
        body.pop("stream_options", None)
    if not body.get("logprobs"):
        body.pop("top_logprobs", None)
    if body.get("max_completion_tokens") is not None or body.get("min_tokens"):
        body.pop("max_tokens", None)
        body.pop("min_tokens", None)
    if not body.get("tools") or not isinstance(body.get("tool_choice"), str):
        body.pop("tool_choice", None)
    kinds = [kind for kind in ("text", "tokens", "messages", "prompt") if body.get(kind) is not None]
    if case.path.startswith(("/v1/sessions", "/tokenize")):  # type: ignore[attr-defined]
        for kind in kinds[1:]:
            del body[kind]
        if "messages" not in kinds[:1]:
            body.pop("tools", None)
            body.pop("chat_template_kwargs", None)
    if case.path.startswith("/v1/responses") and not body.get("input"):  # type: ignore[attr-defined]
        body["input"] = "hello"
    _refer_calls(body)


def _refer_calls(body: dict[str, Any]) -> None:
    """Insert the call before every tool result that has none."""
    messages = body.get("messages")
    if isinstance(messages, list):
        function = {"name": "f", "arguments": "{}"}
        rewritten: list[Any] = []
        for message in messages:
            content = message.get("content")
            if message["role"] == "tool":
                call = {"id": message["tool_call_id"], "function": function}
                rewritten.append({"role": "assistant", "content": None, "tool_calls": [call]})
            tool_results = [b for b in content if b.get("type") == "tool_result"] if isinstance(content, list) else []
            uses = [
                {"type": "tool_use", "id": result["tool_use_id"], "name": "f", "input": {}} for result in tool_results
            ]
            if uses and message["role"] == "user":
                rewritten.append({"role": "assistant", "content": uses})
            if message["role"] == "assistant" and not content and not message.get("tool_calls"):
                message["content"] = "x"
            rewritten.append(message)
        if "system" in body and rewritten and rewritten[-1]["role"] == "assistant":
            rewritten.append({"role": "user", "content": "hello"})
        body["messages"] = rewritten
    items = body.get("input")
    if isinstance(items, list):
        rewritten = []
        for item in items:
            if str(item.get("type", "")).endswith("call_output"):
                rewritten.append({"type": "function_call", "call_id": item["call_id"], "name": "f", "arguments": "{}"})
            rewritten.append(item)
        body["input"] = [*rewritten, {"role": "user", "content": "hello"}]


def _send(
    address: str,
    operation: object,
    mode: GenerationMode,
    n: int,
    results: FuzzResults,
    known: Mapping[str, str],
    *,
    generates: bool,
) -> None:
    strategy = operation.as_strategy(generation_mode=mode)  # type: ignore[attr-defined]
    checks = [CHECKS.get_one(name) for name in CHECK_NAMES]

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
        response = case.call(base_url=address)  # type: ignore[attr-defined]
        results.cases += 1
        results.statuses[response.status_code] += 1
        name = f"{case.method} {case.path}"  # type: ignore[attr-defined]
        if generates and positive:
            results.sent[name] += 1
            results.accepted[name] += response.status_code == 200
            if response.status_code != 200:
                results.refusals[f"{name}: {response.text[:160]}"] += 1
        try:
            case.validate_response(response, checks=checks)  # type: ignore[attr-defined]
        except Exception as error:
            key = f"{name} {response.status_code} {type(error).__name__} {str(error)[:60]}"
            results.faults.setdefault(key, f"{error}\n{case.as_curl_command()}")  # type: ignore[attr-defined]
        except BaseExceptionGroup as errors:
            key = f"{name} {response.status_code} {errors.exceptions[0]!r:.80}"
            results.faults.setdefault(key, f"{errors.exceptions[0]}\n{case.as_curl_command()}")  # type: ignore[attr-defined]

    with suppress(Unsatisfiable):
        send()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cases", type=int, default=20_000)
    parser.add_argument("--engine", action="store_true", help="run the shipped model behind the router")
    parser.add_argument("--refusals", action="store_true", help="print why valid requests were refused")
    options = parser.parse_args()
    for signal_number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(signal_number, signal.default_int_handler)
    backend = ServiceBackend(TINY) if options.engine else Talker()
    start, results = time.monotonic(), FuzzResults()
    with (
        World(backend, books=UsageBooks(RouterConfig(), Quotas(NoBooks()))).served() as address,
        suppress(KeyboardInterrupt),
    ):  # an interrupt ends the run with the results so far
        fuzz(address, options.cases, results)
    print(results.summary(), f"in {time.monotonic() - start:.0f} s")
    if options.refusals:
        for reason, n in results.refusals.most_common(40):
            print(n, reason)
    for key, fault in results.faults.items():
        print("----", key, fault, sep="\n")
    return 1 if results.faults or results.share <= 0.5 else 0


if __name__ == "__main__":
    sys.exit(main())
