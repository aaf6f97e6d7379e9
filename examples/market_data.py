"""Prices come in, three questions stand: a session that is fed tick by tick, its answers there when asked for.

    python examples/market_data.py http://localhost:8000

Answers are made while the server has nothing else to do. Each says which tick it has seen, so whoever reads it decides
whether that is new enough or asks now.
"""

import random
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import httpx

INTRODUCTION = [{"role": "system", "content": "You watch prices. Answer with a few words."}]
QUESTIONS = ("Which price was highest?", "Is the price rising or falling?", "What was the last price?")
TICKS = 12
PATIENCE_S = 60.0  # for answers, after the last tick


def ticks(n: int, seed: int = 0) -> Iterator[str]:
    """Lines as a feed would bring them."""
    rng, price = random.Random(seed), 100.0
    for second in range(n):
        price += rng.gauss(0.0, 0.4)
        yield f"\n12:00:{second:02d} ACME {price:.2f}"


def watch(client: httpx.Client, model: str, say: Callable[[str], None] = print) -> list[dict[str, Any]]:
    """Feed a session, with questions standing, and return what they were answered last."""
    session = called(client, "POST", "/v1/sessions", model=model, messages=INTRODUCTION)["id"]
    here = f"/v1/sessions/{session}"
    try:
        standing = [
            called(client, "POST", f"{here}/questions", messages=asks(question), max_tokens=24, temperature=0)["id"]
            for question in QUESTIONS
        ]
        for tick in ticks(TICKS):
            usage = called(client, "POST", f"{here}/append", text=tick)["usage"]
            cached = usage["prompt_tokens_details"]["cached_tokens"]
            say(f"{tick.strip()}   {usage['prompt_tokens'] - cached} tokens computed, {cached} were there")

        # A question that does not wait for idle time costs its own tokens.
        now = called(client, "POST", f"{here}/query", messages=asks("Highest so far?"), max_tokens=24, temperature=0)
        say(f"asked now: {now['choices'][0]['text']!r}, {now['usage']['prompt_tokens']} tokens of context")

        until = time.monotonic() + PATIENCE_S
        while True:
            answers = [called(client, "GET", f"{here}/questions/{each}") for each in standing]
            if all(answer["up_to_date"] for answer in answers) or time.monotonic() > until:
                break
            time.sleep(0.05)
        for question, answer in zip(QUESTIONS, answers, strict=True):
            seen = f"seen {answer['append']} of {answer['appends']} appends"
            say(f"{question} {answer['answer'] and answer['answer']['text']!r} ({seen}, {answer['age_s']} s old)")
        return answers
    finally:
        called(client, "DELETE", here)


def asks(question: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": question}]


def called(client: httpx.Client, method: str, path: str, **body: object) -> dict[str, Any]:
    answer = client.request(method, path, json=body or None)
    answer.raise_for_status()
    told: dict[str, Any] = answer.json()
    return told


if __name__ == "__main__":
    with httpx.Client(base_url=sys.argv[1] if sys.argv[1:] else "http://localhost:8000", timeout=PATIENCE_S) as client:
        watch(client, client.get("/v1/models").json()["data"][0]["id"])
