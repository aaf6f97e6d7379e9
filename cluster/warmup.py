"""The first real request to a new cluster, and what is printed for the user afterwards."""

import json
from pathlib import Path
from typing import Any

import httpx

from holdfast.cluster.config import Settings
from holdfast.cluster.watch import URL
from holdfast.replicas.errors import UnavailableError

TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "description": "Current weather of a city",
            "parameters": {
                "type": "object",
                "properties": {"city": {"type": "string", "description": "Name of the city"}},
                "required": ["city"],
            },
        },
    },
    {
        "type": "function",
        "function": {
            "name": "get_time",
            "description": "Current local time of a city",
            "parameters": {
                "type": "object",
                "properties": {"city": {"type": "string", "description": "Name of the city"}},
                "required": ["city"],
            },
        },
    },
]
QUESTION = "What is the weather in Paris?"


def first_request(settings: Settings, url: str) -> str:
    """Send one; the name under which the model is served. Raises UnavailableError where it does not work.

    With API keys only the health of the cluster is asked for, because keys are known here by their hash alone.
    """
    timeout = settings.server.ready_timeout_s
    try:
        with httpx.Client(base_url=url, timeout=timeout, trust_env=False) as client:
            client.get("/health").raise_for_status()
            if settings.tenants:
                return settings.engine.served_name or Path(settings.engine.model).name
            model = str(client.get("/v1/models").raise_for_status().json()["data"][0]["id"])
            client.post("/v1/chat/completions", json={**example(model), "max_tokens": 1}).raise_for_status()
            return model
    except httpx.HTTPStatusError as error:
        raise UnavailableError(f"the first request failed: {error.response.text[:500]}") from error
    except (httpx.HTTPError, LookupError, ValueError) as error:
        raise UnavailableError(f"the first request failed: {error!r}") from error


def example(model: str) -> dict[str, Any]:
    """A chat completion with two tools, which the pocket model answers with a tool call."""
    return {
        "model": model,
        "temperature": 0,
        "messages": [{"role": "user", "content": QUESTION}],
        "tools": TOOLS,
    }


def banner(url: str, model: str, seconds: float, needs_key: bool = False, page: bool = True) -> str:
    """What to do with the cluster: a line to paste, where its page is, and how the `openai` client reaches it."""
    key = " -H 'Authorization: Bearer YOUR_KEY'" if needs_key else ""
    body = json.dumps(example(model), separators=(",", ":"))
    here = "" if url == URL else f" --url {url}"
    look, talk = (f"{url}/   or ", f"{url}/#try   or ") if page else ("", "")
    return f"""
Holdfast serves {model} at {url}/v1 (ready in {seconds:.0f} s; Ctrl-C stops it)

Try a tool call:

curl -s {url}/v1/chat/completions -H 'Content-Type: application/json'{key} -d '{body}'

Look at it:   {look}`holdfast top{here}`
Talk to it:   {talk}`holdfast chat{here}`
From Python:  openai.OpenAI(base_url="{url}/v1", api_key="{"YOUR_KEY" if needs_key else "none"}")
"""
