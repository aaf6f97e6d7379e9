"""What is changed in Serve's replica, in whose process a router or an engine runs. Four things:

The gRPC server by which replicas talk to each other runs whatever is sent with the cluster's token, and Serve has its
address in its source: every interface. Whoever calls it does so at the address of its node; where that is loopback, on
a cluster of one machine, nothing else is listened on.

It serves whoever's call comes to its port, which may have been another replica's that has died: of another model, or of
another cluster with the same key. Here a call that names another replica is refused before it is read.

A router that Serve stops by itself, for an upgrade or because its machine is drained, is not told of it, and what is
not over in time is cut off. Here it is told first, so that it can end what runs with an error that says so.

A router looks for garbage in what is new. What Serve has frozen at its start is left alone by Python's collections, but
not what comes later and stays, as a hundred thousand programs do: looking through that takes tenths of a second, again
and again, with all requests waiting.

No other file uses these private names; `tests/cluster/test_serve_replica.py` checks that they are still there.
"""

import gc
import itertools
from collections.abc import Callable, Mapping
from functools import wraps
from ipaddress import ip_address
from typing import Any

import ray
from grpc import StatusCode
from ray.serve._private import replica

from holdfast.router.affinity import MEANT

EVERYWHERE = "[::]:"
YOUNG = 2  # collections of what is not quite new, between two whole ones; 10 is Python's own
LOOKS = 1000  # whole collections of what is new, between two that look through everything
TOLD: list[Callable[[], object]] = []  # called when Serve begins to stop this process's replica
REPLIES = ("HandleRequest", "HandleRequestWithRejection")  # Serve's calls with one answer
STREAMS = tuple(f"{name}Streaming" for name in REPLIES)  # and with many


def install(on_stop: Callable[[], object] | None = None) -> None:
    """Change Serve's replica, which this process must be about to start as. A second call does nothing more."""
    replica.add_port_to_grpc_server = _bound
    replica.Replica._perform_graceful_shutdown = _stopped
    for name, handler in _HANDLERS.items():
        setattr(replica.Replica, name, handler)
    if on_stop is not None:
        TOLD.append(on_stop)


def freeze_what_stays() -> None:
    """From now on what outlives a whole collection of garbage is in none of the next `LOOKS`. These come often, so that
    each has little to look through.

    A cycle of it that nobody needs any more stays as long, so this is for a process whose requests leave none.
    """
    gc.set_threshold(*gc.get_threshold()[:2], YOUNG)
    if _freeze not in gc.callbacks:
        gc.callbacks.append(_freeze)


_looks = itertools.count(1)


def _freeze(phase: str, info: Mapping[str, int]) -> None:
    if phase == "stop" and info["generation"] == 2:
        if next(_looks) % LOOKS:
            gc.freeze()
        else:
            gc.unfreeze()


_serves_address = replica.add_port_to_grpc_server
_serves_stop = replica.Replica._perform_graceful_shutdown


@wraps(_serves_address)
def _bound(server: Any, address: str) -> Any:
    node = ray.util.get_node_ip_address()
    if address.startswith(EVERYWHERE) and ip_address(node).is_loopback:
        address = f"{node}:{address.removeprefix(EVERYWHERE)}"
    return _serves_address(server, address)


@wraps(_serves_stop)
async def _stopped(self: Any) -> None:
    for tell in TOLD:
        tell()
    await _serves_stop(self)


async def _refuse_others(self: Any, context: Any) -> None:
    """Ends a call that is meant for another replica, so that its caller takes that one for gone."""
    meant = dict(context.invocation_metadata() or ()).get(MEANT, self._replica_id.unique_id)
    if meant != self._replica_id.unique_id:
        await context.abort(StatusCode.UNAVAILABLE, f"this is not replica {meant}")


def _reply(served: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(served)
    async def handler(self: Any, request: Any, context: Any) -> Any:
        await _refuse_others(self, context)
        return await served(self, request, context)

    return handler


def _stream(served: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(served)
    async def handler(self: Any, request: Any, context: Any) -> Any:
        await _refuse_others(self, context)
        async for answer in served(self, request, context):
            yield answer

    return handler


_SERVES = {name: getattr(replica.Replica, name) for name in (*REPLIES, *STREAMS)}
_HANDLERS = {name: (_stream if name in STREAMS else _reply)(served) for name, served in _SERVES.items()}
