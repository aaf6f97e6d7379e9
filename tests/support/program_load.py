"""A little load that touches what a server counts: programs with a tool each, streams, repeats, a tenant's limit, a key
that is none.
"""

import threading
from typing import Any

import httpx

TOOL = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Current weather of a city",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}


class Load:
    """Again and again until it is stopped, so that whoever comes late sees all of it, too."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._over = threading.Event()
        self._threads = [threading.Thread(target=self._run, args=(i,), daemon=True) for i in range(2)]
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        self._over.set()
        for thread in self._threads:
            thread.join(180.0)

    def _run(self, worker: int) -> None:
        with httpx.Client(base_url=self._url, timeout=180.0, trust_env=False) as http:
            turn = 0
            while not self._over.is_set():
                turn += 1
                self._program(http, f"{worker}-{turn}")

    def _program(self, http: httpx.Client, name: str) -> None:
        messages: list[dict[str, Any]] = [{"role": "user", "content": "What is the weather in Paris?"}]
        body = {"model": "pocket", "messages": messages, "tools": [TOOL], "max_tokens": 40, "program_id": name}
        for _ in range(2):  # the second is a repeat
            self._ask(http, "acme", {**body, "temperature": 0, "program_id": "repeat"})
        self._ask(http, "acme", {**body, "stream": True, "tool_choice": "required"}, {"cache-control": "no-cache"})
        call = {
            "id": "call_1",
            "type": "function",
            "function": {"name": "get_weather", "arguments": '{"city": "Paris"}'},
        }
        messages += [
            {"role": "assistant", "content": None, "tool_calls": [call]},
            # With a field that nobody knows.
            {"role": "tool", "tool_call_id": "call_1", "content": '{"temperature": 21, "sky": "clear"}', "took_s": 0.2},
        ]
        self._ask(http, "acme", {**body, "tool_choice": "none"}, {"cache-control": "no-cache"})
        self._ask(http, "small", body, {"cache-control": "no-cache"})
        self._ask(http, "nobody's", body)

    def _ask(self, http: httpx.Client, key: str, body: dict[str, Any], more: dict[str, str] | None = None) -> None:
        headers = {"authorization": f"Bearer {key}", **(more or {})}
        assert http.post("/v1/chat/completions", json=body, headers=headers).status_code in (200, 401, 429)
