"""Pre-positioning: while a program's tools run, its next prompt is computed up to their results.

The next prompt shows the turn that has ended as the chat template writes it, which may differ from how the model wrote
it, and goes on with fixed text up to the first result. All of that is known as soon as the calls are. It is work ahead
of the engine's own (`scheduling/ahead`): idle steps do it, and the turn that comes ends it.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import TypeAlias

from holdfast.replicas.errors import HoldfastError
from holdfast.replicas.events import PartialPrefill
from holdfast.replicas.requests import Answer, ChatPrompt, GenerateRequest
from holdfast.replicas.stats import Occupancy
from holdfast.replicas.types import Origin

log = logging.getLogger(__name__)

Program: TypeAlias = tuple[str, str]  # scope and id

OWN = PartialPrefill()


class PrePositioning:
    """Used on one event loop. `occupancy` says whether somebody waits; `compute` runs a background request."""

    def __init__(
        self,
        after_s: float,
        occupancy: Callable[[], Occupancy],
        compute: Callable[[GenerateRequest], Awaitable[object]],
    ) -> None:
        self._after_s = after_s
        self._occupancy = occupancy
        self._compute = compute
        self._tasks: dict[Program, asyncio.Task[None]] = {}

    def needless(self, program: Program) -> None:
        """Its next turn is there, or there is none: nothing begins any more. What has, the engine knows how to end."""
        if (task := self._tasks.pop(program, None)) is not None:
            task.cancel()

    def turn_ended(self, request: GenerateRequest, answer: Answer | None) -> None:
        """A turn may have ended, None: not yet. After one that has ended in calls there is something to prepare."""
        prompt = request.prompt
        if answer is None or answer.reason != "tool_calls" or not request.program_id or request.program_end:
            return
        if not isinstance(prompt, ChatPrompt):
            return
        shown = {
            "role": "assistant",
            "content": answer.text,
            **({"reasoning_content": answer.reasoning} if answer.reasoning and _shows_thoughts(prompt) else {}),
            "tool_calls": [
                {"id": call.call_id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
                for call in answer.tool_calls
            ],
        }
        coming = replace(
            request,
            request_id=f"{request.request_id}/ahead",
            prompt=replace(prompt, messages=[*prompt.messages, shown]),
            background=OWN,
            origin=Origin.AHEAD,
            trace={},
        )
        program = request.scope, request.program_id
        self.needless(program)
        task = self._tasks[program] = asyncio.create_task(self._run(coming))
        task.add_done_callback(lambda done: self._forget(program, done))

    async def close(self) -> None:
        tasks = list(self._tasks.values())
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)

    async def _run(self, coming: GenerateRequest) -> None:
        await asyncio.sleep(self._after_s)
        if self._occupancy().waiting:
            return  # even the text of it would be at the others' cost
        try:
            await self._compute(coming)
        except HoldfastError as error:
            log.debug("%s was not computed: %s", coming.request_id, error)

    def _forget(self, program: Program, task: asyncio.Task[None]) -> None:
        if self._tasks.get(program) is task:
            del self._tasks[program]
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("pre-positioning failed", exc_info=error)


def _shows_thoughts(prompt: ChatPrompt) -> bool:
    """Whether the client sends back what the model thinks: as it did with the last reply; before the first one, yes.

    Then nothing of the branch differs from what was drawn, and at worst nothing is gained.
    """
    replies = (message for message in reversed(prompt.messages) if message.get("role") == "assistant")
    return next(("reasoning_content" in message for message in replies), True)
