"""Answers: several to one request, and a whole answer as pieces.

The first of several answers is the turn of its program, and the client continues with it. The others belong to no
program. Pieces to answer: `replicas/requests.py`.
"""

import asyncio
import secrets
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import replace
from hashlib import blake2b
from typing import Any

from holdfast.replicas.errors import HoldfastError
from holdfast.replicas.plan import Sampling
from holdfast.replicas.requests import (
    NOTHING_USED,
    Answer,
    Completed,
    Errored,
    GenerateRequest,
    Piece,
    ReasoningDelta,
    Started,
    TextDelta,
    ToolCallDelta,
    Usage,
    Work,
)
from holdfast.router.backend import Backend, Batch, Routed, RoutingHint
from holdfast.router.protocol.errors import ReplyError
from holdfast.router.protocol.turn import Choice


def pieces_of(answer: Answer) -> tuple[Piece, ...]:
    """The pieces that make up `answer`."""
    pieces: list[Piece] = [Started("", answer.usage.prompt, answer.usage.cached)]
    if answer.reasoning:
        pieces.append(ReasoningDelta(answer.reasoning))
    if answer.text or answer.logprobs:
        pieces.append(TextDelta(answer.text or "", answer.logprobs))
    for index, call in enumerate(answer.tool_calls):
        pieces.append(ToolCallDelta(index, call.call_id, call.name, call.arguments, call.closed))
    pieces.append(Completed(answer.reason, answer.usage, answer.timing, answer.called, answer.stop))
    return tuple(pieces)


def repeated(answer: Answer, unique: str) -> Answer:
    """`answer` for another request: its calls get ids of their own, made from `unique`.

    An id that the model wrote itself (`functions.get_weather:0`) stays: its template shows ids to the model.
    """
    calls = tuple(
        call if ":" in call.call_id else replace(call, call_id=_call_id(call.call_id, f"{unique}/{index}"))
        for index, call in enumerate(answer.tool_calls)
    )
    return replace(answer, tool_calls=calls)


def _call_id(before: str, name: str) -> str:
    """An id in the form of `before`: with a prefix, or nine letters and digits, which is all that Mistral takes."""
    digest = blake2b(name.encode(), digest_size=12).hexdigest()
    return f"call_{digest}" if before.startswith("call_") else digest[:9]


# ---- several answers ----


def ids(first: str, others: Sequence[Choice]) -> list[str]:
    """The ids by which replicas know the answers to the request `first`."""
    return [first, *(f"{first}-{number}" for number in range(1, len(others) + 1))]


def commands(first: GenerateRequest, others: Sequence[Choice]) -> list[GenerateRequest]:
    """The commands to the replicas: the turn, and the other answers."""
    names = ids(first.request_id, others)[1:]
    return [first] + [
        replace(
            first,
            request_id=name,
            prompt=other.prompt,
            sampling=other.sampling,
            program_id="",
            program_turns=0,
            answered_turns=0,
            program_end=False,
        )
        for name, other in zip(names, others, strict=True)
    ]


def varied(sampling: Sampling) -> Sampling:
    """`sampling` with a random seed if it has none: the same prompt then gives a different answer each time."""
    if sampling.seed is not None or sampling.temperature <= 0:
        return sampling
    return replace(sampling, seed=secrets.randbits(63))


def total(usages: Sequence[Usage], others: Sequence[Choice]) -> Usage:
    """The usage of all answers, where each prompt counts once."""
    prompts = [usages[0], *(usage for usage, other in zip(usages[1:], others, strict=True) if not other.again)]
    return Usage(
        prompt=sum(each.prompt for each in prompts),
        cached=sum(each.cached for each in prompts),
        completion=sum(each.completion for each in usages),
        reasoning=sum(each.reasoning for each in usages),
        work=sum((each.work for each in usages), Work()),
    )


async def generate(
    backend: Backend, requests: Sequence[GenerateRequest], others: Sequence[Choice], place: RoutingHint
) -> tuple[Routed, list[Answer]]:
    """The first reply, with the usage of all, and the other answers. Raises ReplyError if one of them fails."""
    tasks = [asyncio.create_task(backend.generate(each, place)) for each in requests]
    try:
        first, *rest = await asyncio.gather(*tasks)
    except HoldfastError as error:
        await _end(tasks)
        usages = [None if task.cancelled() or task.exception() else task.result().reply.usage for task in tasks]
        raise ReplyError(error.info, await _used(backend, requests, usages, others)) from error
    finally:
        await _end(tasks)
    usage = total([each.reply.usage for each in (first, *rest)], others)
    answers: list[Answer] = []
    for each in (first, *rest):
        if isinstance(each.reply, Errored):
            raise ReplyError(each.reply.error, usage)
        answers.append(each.reply)
    return replace(first, reply=replace(answers[0], usage=usage)), answers[1:]


async def stream(
    backend: Backend, requests: Sequence[GenerateRequest], others: Sequence[Choice], place: RoutingHint
) -> AsyncGenerator[Batch, None]:
    """The replies as they are made. The first one ends last, with the usage of all, and fails if any other fails."""
    queue: asyncio.Queue[Batch | BaseException] = asyncio.Queue(len(requests))
    usages: list[Usage | None] = [None] * len(requests)  # of those that have ended

    async def read(number: int) -> None:
        try:
            async with aclosing(backend.stream(requests[number], place)) as batches:
                async for batch in batches:
                    await queue.put(replace(batch, choice=number))
        except Exception as error:
            await queue.put(error)

    tasks = [asyncio.create_task(read(number)) for number in range(len(requests))]
    running, last_batch = len(requests), None
    try:
        while running:
            batch = await queue.get()
            if isinstance(batch, HoldfastError):
                await _end(tasks)
                raise ReplyError(batch.info, await _used(backend, requests, usages, others)) from batch
            if isinstance(batch, BaseException):
                raise batch
            last = batch.pieces[-1]
            if isinstance(last, Errored):
                usages[batch.choice] = last.usage
                await _end(tasks)
                usage = await _used(backend, requests, usages, others)
                yield replace(batch, choice=0, pieces=(replace(last, usage=usage),))
                return
            if isinstance(last, Completed):
                running -= 1
                usages[batch.choice] = last.usage
                if batch.choice == 0:
                    last_batch = replace(batch, pieces=(last,))
                    batch = replace(batch, pieces=batch.pieces[:-1])
            if batch.pieces:
                yield batch
        assert last_batch is not None  # the first has completed
        [last] = last_batch.pieces
        assert isinstance(last, Completed)
        usage = total([each or NOTHING_USED for each in usages], others)
        yield replace(last_batch, pieces=(replace(last, usage=usage),))
    finally:
        await _end(tasks)


async def _used(
    backend: Backend, requests: Sequence[GenerateRequest], usages: Sequence[Usage | None], others: Sequence[Choice]
) -> Usage:
    """The usage of all answers. For answers that were cut off the replicas are asked."""
    used = [usage or await backend.drawn(each.request_id) for each, usage in zip(requests, usages, strict=True)]
    return total([each or NOTHING_USED for each in used], others)


async def _end(tasks: Sequence[asyncio.Task[Any]]) -> None:
    """Cancel the tasks that have not ended, and wait for them."""
    for task in tasks:
        task.cancel()
    await asyncio.wait(tasks)
