"""The first real request to a new cluster, and the text that the user sees afterwards."""

import json
from pathlib import Path
from typing import Any

import httpx

from holdfast.cluster import model_files
from holdfast.cluster.config import Settings
from holdfast.cluster.status import URL
from holdfast.replicas.errors import UnavailableError
from holdfast.router.config import WARM_UP_HEADER


def _of_a_city(name: str, description: str) -> dict[str, Any]:
    city = {"type": "string", "description": "Name of the city"}
    parameters = {"type": "object", "properties": {"city": city}, "required": ["city"]}
    return {"type": "function", "function": {"name": name, "description": description, "parameters": parameters}}


TOOLS = [
    _of_a_city("get_weather", "Current weather of a city"),
    _of_a_city("get_time", "Current local time of a city"),
]
QUESTION = "What is the weather in Paris?"
BEGINNING = "The capital of France is"


def chats(settings: Settings) -> bool:
    """Whether the model has a chat template; without one it serves completions only."""
    return bool(model_files.template(settings.engine))


def first_request(settings: Settings, url: str) -> str:
    """Send a first request and return the name under which the model is served.

    With API keys only `/health` is requested, because the server knows keys by their hash. Raises UnavailableError.
    """
    timeout = settings.server.ready_timeout_s
    try:
        with httpx.Client(base_url=url, timeout=timeout, trust_env=False) as client:
            client.get("/health").raise_for_status()
            if settings.tenants:
                return settings.engine.served_name or Path(settings.engine.model).name
            model = str(client.get("/v1/models").raise_for_status().json()["data"][0]["id"])
            path, body = example(model, chats(settings))
            own = {WARM_UP_HEADER: "1"}
            client.post(path, json={**body, "max_tokens": 1}, headers=own).raise_for_status()
            return model
    except httpx.HTTPStatusError as error:
        raise UnavailableError(f"the first request failed: {error.response.text[:500]}") from error
    except (httpx.HTTPError, LookupError, ValueError) as error:
        raise UnavailableError(f"the first request failed: {error!r}") from error


def example(model: str, chats: bool) -> tuple[str, dict[str, Any]]:
    """Path and body of an example: a chat with two tools, which Pocket answers with a call, or a completion."""
    if not chats:
        return "/v1/completions", {"model": model, "temperature": 0, "prompt": BEGINNING, "max_tokens": 32}
    message = {"role": "user", "content": QUESTION}
    return "/v1/chat/completions", {"model": model, "temperature": 0, "messages": [message], "tools": TOOLS}


def banner(
    url: str,
    model: str,
    seconds: float,
    needs_key: bool = False,
    page: bool = True,
    chats: bool = True,
    tools_as_text: bool = False,
) -> str:
    """The text about using the cluster: a command to paste, the page, and the arguments of the `openai` client."""
    key = " -H 'Authorization: Bearer YOUR_KEY'" if needs_key else ""
    path, content = example(model, chats)
    body = json.dumps(content, separators=(",", ":"))
    url_option = "" if url == URL else f" --url {url}"
    look, talk = (f"{url}/   or ", f"{url}/#try   or ") if page else ("", "")
    first = (
        "Try a tool call:" if chats else "The model has no chat template: it completes text and refuses chats. Try it:"
    )
    if tools_as_text:
        first = (
            "The chat template takes no tools, so the system prompt lists them. engine.chat_template names a file "
            f"with another template.\n{first}"
        )
    chat = f"\nTalk to it:   {talk}`holdfast chat{url_option}`" if chats else ""
    return f"""
Holdfast serves {model} at {url}/v1 (ready in {seconds:.0f} s; Ctrl-C stops it)

{first}

curl -s {url}{path} -H 'Content-Type: application/json'{key} -d '{body}'

Look at it:   {look}`holdfast top{url_option}`{chat}
From Python:  openai.OpenAI(base_url="{url}/v1", api_key="{"YOUR_KEY" if needs_key else "none"}")
"""
