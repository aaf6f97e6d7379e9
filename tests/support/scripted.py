"""A model that does one tool task, on a real engine: it calls a tool of the client's, and answers with the result.

The engine computes each prompt and draws each token; of these only the script's next one is allowed. What is called
depends on the tools that a request declares: each client has one that tells the weather, runs a command or reads a
file. Requests that no task is in (titles, benchmarks) get what the model says by itself.

    python tests/support/replicas_in_serve.py scripted:ScriptedReplica serve
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from holdfast.cluster.engine_replica import EngineReplica
from holdfast.replicas.constraints.matcher import ForcedTokens
from holdfast.replicas.requests import ChatPrompt, RawPrompt
from holdfast.replicas.service import Service
from holdfast.replicas.text.conversation import Constraints

WEATHER = "What is the weather in Oslo?"
HELLO = "Say hello."
TOLD = "The tool says: "  # an answer begins so, also where it is told again in a summary
_FILE = re.compile(r"/\S+/note\.txt")


class ScriptedReplica(EngineReplica):
    async def __init__(self, *told: Any) -> None:  # type: ignore[misc]
        await super().__init__(*told)
        follow_script(self._service)


def follow_script(service: Service) -> None:
    """Let the service's model say what `reply` has for it."""
    text = service.text
    usual = text.constraints

    def constraints(prompt: ChatPrompt | RawPrompt, scope: str = "") -> Constraints:
        said = reply(prompt) if isinstance(prompt, ChatPrompt) else None
        if said is None:
            return usual(prompt, scope)
        tokens = text.encode(RawPrompt(f"{said}<|im_end|>")).tokens
        return Constraints(ForcedTokens(tokens, text.vocabulary))

    text.constraints = constraints  # type: ignore[method-assign]


def reply(prompt: ChatPrompt) -> str | None:
    """What the model says, in its format of calls; None: what it likes."""
    for message in reversed(prompt.messages):
        said = _text(message)
        if message["role"] == "tool":
            return TOLD + said
        if message["role"] == "user" and HELLO in said:
            return "Hello"
        if message["role"] == "user" and TOLD in said:
            return said[said.index(TOLD) :]
        if message["role"] == "user" and (arguments := _arguments(said)):
            names = [tool["function"]["name"] for tool in prompt.tools]
            name = next((name for name in arguments if name in names), None)
            if name is None:
                return "A word"  # it is to have a title
            call = json.dumps({"name": name, "arguments": arguments[name]})
            return f"I look.\n<tool_call>\n{call}\n</tool_call>"
    return None


def _arguments(asked: str) -> Mapping[str, Mapping[str, Any]]:
    """What the tools are called with that may do what is asked, by their names; empty where no task is in it."""
    if WEATHER in asked:
        return {"get_weather": {"city": "Oslo"}}
    if found := _FILE.search(asked):
        path = found[0]
        return {
            "Read": {"file_path": path},
            "read": {"filePath": path},
            "exec_command": {"cmd": f"cat {path}"},
            "shell": {"command": ["cat", path]},
        }
    return {}


def _text(message: Mapping[str, Any]) -> str:
    content = message.get("content") or ""
    return content if isinstance(content, str) else "".join(part.get("text", "") for part in content)
