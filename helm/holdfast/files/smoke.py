"""Asks each model for a tool call: `smoke.py FILE_WITH_KEY URL...`. Exits with 0 when all of them answer."""

import sys
from pathlib import Path

import httpx

TOOL = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Current weather of a city",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
QUESTION = {"role": "user", "content": "What is the weather in Paris?"}


def ask(url, key):
    """One line about the answer of the model at `url`. Raises httpx.HTTPError where there is none."""
    with httpx.Client(headers={"Authorization": f"Bearer {key}"}, timeout=300.0, trust_env=False) as client:
        model = client.get(f"{url}/v1/models").raise_for_status().json()["data"][0]["id"]
        body = {
            "model": model,
            "messages": [QUESTION],
            "tools": [TOOL],
            "tool_choice": "required",
            "temperature": 0,
            "max_tokens": 256,
        }
        reply = client.post(f"{url}/v1/chat/completions", json=body).raise_for_status().json()
    call = reply["choices"][0]["message"]["tool_calls"][0]["function"]
    return f"{model} at {url}: {call['name']}({call['arguments']})"


def main(key_file, urls):
    key = Path(key_file).read_text().strip()
    for url in urls:
        print(ask(url, key), flush=True)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
