"""Programs and their tools over HTTP: a program is ended, and how long tools take is shown."""

from starlette.requests import Request
from starlette.responses import Response

from holdfast.router.backend import Backend
from holdfast.router.guard import Guard
from holdfast.router.http import json_response
from holdfast.router.identity import named_program
from holdfast.router.programs import ProgramTable
from holdfast.router.protocol.errors import Refusal, RefusedError
from holdfast.router.protocol.programs import latency_reply, program_ended_reply
from holdfast.router.tool_latency import ToolLatencies


class ProgramEndpoints:
    """What a tenant may do with its programs besides asking them."""

    def __init__(self, backend: Backend, guard: Guard, programs: ProgramTable, latencies: ToolLatencies) -> None:
        self._backend = backend
        self._guard = guard
        self._programs = programs
        self._latencies = latencies

    async def end(self, request: Request) -> Response:
        """A program is over: nothing is kept for it, and its name is free.

        Raises RefusedError for an unknown one, UnavailableError where a replica does not answer: to be tried again.
        """
        with self._guard.entered(request) as tenant:
            program_id = request.path_params["program_id"]
            key = named_program(tenant.name, program_id)
            await self._backend.end_program(tenant.name, key)  # first: where it fails, the program can be ended again
            if not await self._programs.forget(key):
                raise RefusedError(Refusal.NO_PROGRAM, f"The program '{program_id}' does not exist", "program_id")
            return json_response(program_ended_reply(program_id))

    async def tool_latency(self, request: Request) -> Response:
        """The caller's own tools, and all tenants' together."""
        with self._guard.entered(request) as tenant:
            return json_response(latency_reply(tenant.name, await self._latencies.known()))
