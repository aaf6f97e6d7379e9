"""Several answers to one request: asked of the replicas side by side, and joined to one reply.

The first answer is the turn of its program, which the request's client goes on with; the others are nobody's turn.
"""

import asyncio
import secrets
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import replace
from typing import Any

from holdfast.replicas.errors import HoldfastError
from holdfast.replicas.plan import Sampling
from holdfast.replicas.requests import NOTHING_USED, Answer, Completed, Errored, GenerateRequest, Usage, Work
from holdfast.router.backend import Backend, Batch, Place, Routed
from holdfast.router.protocol.errors import ReplyError
from holdfast.router.protocol.turn import Choice


def ids(first: str, others: Sequence[Choice]) -> list[str]:
    """The ids under which the replicas know the answers to the request that is known there as `first`."""
    return [first, *(f"{first}-{number}" for number in range(1, len(others) + 1))]


def commands(first: GenerateRequest, others: Sequence[Choice]) -> list[GenerateRequest]:
    """What to ask the replicas for: the turn, and the other answers."""
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
    """`sampling` with a random seed where it has none: the same prompt gives another answer each time."""
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
    backend: Backend, asked: Sequence[GenerateRequest], others: Sequence[Choice], place: Place
) -> tuple[Routed, list[Answer]]:
    """The first reply, with the usage of all, and the other answers. Raises ReplyError where one of those fails."""
    tasks = [asyncio.create_task(backend.generate(each, place)) for each in asked]
    try:
        routed, *rest = await asyncio.gather(*tasks)
    except HoldfastError as error:
        await _end(tasks)
        told = [None if task.cancelled() or task.exception() else task.result().reply.usage for task in tasks]
        raise ReplyError(error.info, await _used(backend, asked, told, others)) from error
    finally:
        await _end(tasks)
    usage = total([each.reply.usage for each in (routed, *rest)], others)
    answers: list[Answer] = []
    for each in (routed, *rest):
        if isinstance(each.reply, Errored):
            raise ReplyError(each.reply.error, usage)
        answers.append(each.reply)
    return replace(routed, reply=replace(answers[0], usage=usage)), answers[1:]


async def stream(
    backend: Backend, asked: Sequence[GenerateRequest], others: Sequence[Choice], place: Place
) -> AsyncGenerator[Batch, None]:
    """The replies as they are made. The first one ends last, with the usage of all; it fails where another does."""
    queue: asyncio.Queue[Batch | BaseException] = asyncio.Queue(len(asked))
    usages: list[Usage | None] = [None] * len(asked)  # of those that have ended

    async def read(number: int) -> None:
        try:
            async with aclosing(backend.stream(asked[number], place)) as batches:
                async for batch in batches:
                    await queue.put(replace(batch, choice=number))
        except Exception as error:
            await queue.put(error)

    tasks = [asyncio.create_task(read(number)) for number in range(len(asked))]
    left, held = len(asked), None
    try:
        while left:
            batch = await queue.get()
            if isinstance(batch, HoldfastError):
                await _end(tasks)
                raise ReplyError(batch.info, await _used(backend, asked, usages, others)) from batch
            if isinstance(batch, BaseException):
                raise batch
            last = batch.pieces[-1]
            if isinstance(last, Errored):
                usages[batch.choice] = last.usage
                await _end(tasks)
                usage = await _used(backend, asked, usages, others)
                yield replace(batch, choice=0, pieces=(replace(last, usage=usage),))
                return
            if isinstance(last, Completed):
                left -= 1
                usages[batch.choice] = last.usage
                if batch.choice == 0:
                    held = replace(batch, pieces=(last,))
                    batch = replace(batch, pieces=batch.pieces[:-1])
            if batch.pieces:
                yield batch
        assert held is not None  # the first has completed
        [last] = held.pieces
        assert isinstance(last, Completed)
        usage = total([each or NOTHING_USED for each in usages], others)
        yield replace(held, pieces=(replace(last, usage=usage),))
    finally:
        await _end(tasks)


async def _used(
    backend: Backend, asked: Sequence[GenerateRequest], told: Sequence[Usage | None], others: Sequence[Choice]
) -> Usage:
    """What was done for all, where some were cut off and have not told."""
    used = [known or await backend.drawn(each.request_id) for each, known in zip(asked, told, strict=True)]
    return total([each or NOTHING_USED for each in used], others)


async def _end(tasks: Sequence[asyncio.Task[Any]]) -> None:
    """Cancel what has not ended, and wait for it."""
    for task in tasks:
        task.cancel()
    await asyncio.wait(tasks)
