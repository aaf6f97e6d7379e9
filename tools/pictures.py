"""Take the pictures of docs/pictures that show a running server with agents.

    make serve                                                          # in one terminal
    .venv/bin/python tools/pictures.py http://127.0.0.1:8000    # in another: `make pictures`

`top.svg` is the screen of `holdfast top`; `page-*.png` are screenshots of the page in Chromium (apt install chromium).
The agents ask for the weather, wait for their tool, and ask again. `--programs 1000 --out FOLDER` runs many agents.
"""

import argparse
import asyncio
import io
import random
import re
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).resolve().parents[1] / "tests" / "support"))
import aiohttp
import httpx
from browser import Browser, Page
from rich._export_format import CONSOLE_SVG_FORMAT
from rich.console import Console

from holdfast.cluster import status

CITIES = ("Paris", "Oslo", "Lima", "Cairo", "Rome", "Delhi", "Quito", "Tokyo", "Berlin", "Madrid")
TOOLS = {
    "get_weather": ("Current weather of a city", "city"),
    "get_time": ("Current time in a city", "city"),
}
SHOWN_S = 45.0  # agents run for this time before the pictures


def tools() -> list[dict[str, Any]]:
    def schema(field: str) -> dict[str, Any]:
        return {"type": "object", "properties": {field: {"type": "string"}}, "required": [field]}

    return [
        {"type": "function", "function": {"name": name, "description": text, "parameters": schema(field)}}
        for name, (text, field) in TOOLS.items()
    ]


async def agent(client: aiohttp.ClientSession, url: str, name: str, pause_s: float, rng: random.Random) -> None:
    """Run one agent after the other. Their names begin with `name`; they ask questions and run tools in between."""
    await asyncio.sleep(rng.uniform(0, pause_s))
    for run in range(1000):
        messages: list[dict[str, Any]] = [{"role": "system", "content": "You are a helpful assistant."}]
        for _ in range(rng.randint(2, 5)):
            topic = rng.choice(("weather", "time"))
            messages.append({"role": "user", "content": f"What is the {topic} in {rng.choice(CITIES)}?"})
            for _ in range(2):
                body = {"model": "pocket", "messages": messages, "tools": tools(), "max_tokens": 64, "temperature": 0}
                body |= {"program_id": f"{name}-{run}"}
                async with client.post(f"{url}/v1/chat/completions", json=body) as answer:
                    if answer.status != 200:
                        await asyncio.sleep(1.0)
                        break
                    message = (await answer.json())["choices"][0]["message"]
                messages.append(message)
                if not message.get("tool_calls"):
                    break
                await asyncio.sleep(rng.uniform(0.2, 2.0) * pause_s)
                for call in message["tool_calls"]:
                    result = f"{rng.randint(-5, 35)} degrees, {rng.choice(('sunny', 'cloudy', 'rain'))}"
                    messages.append({"role": "tool", "tool_call_id": call["id"], "content": result})
            await asyncio.sleep(rng.uniform(0, pause_s))


@contextmanager
def agents(url: str, programs: int, pause_s: float) -> Iterator[None]:
    """Run `programs` agents until the block ends. Their tools take random times around `pause_s`."""
    stop = threading.Event()

    async def run() -> None:
        connector = aiohttp.TCPConnector(limit=64)
        timeout = aiohttp.ClientTimeout(total=300)
        async with aiohttp.ClientSession(connector=connector, timeout=timeout) as client:
            crowd = [
                asyncio.create_task(agent(client, url, f"trip-{number:03}", pause_s, random.Random(number)))
                for number in range(programs)
            ]
            await asyncio.to_thread(stop.wait)
            for each in crowd:
                each.cancel()

    thread = threading.Thread(target=asyncio.run, args=(run(),))
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()


def top_picture(url: str, path: Path) -> None:
    """Save the screen of `holdfast top` for a running server as SVG."""
    console = Console(record=True, width=112, height=30, file=io.StringIO())
    server = status.Server(url)
    with status.client() as client:

        def ask() -> dict[str, Any]:
            return status.fetch(client, server, status.MOST)

        keys = iter(["", "q"])

        def wait(seconds: float) -> str:
            time.sleep(seconds)
            return next(keys)

        *_, last = status.looks(ask, ask(), 2.0, console, wait)
    console.print(last)
    # Rich's own format fetches a font from the network.
    plain = re.sub(r"@font-face \{\{.*?\}\}", "", CONSOLE_SVG_FORMAT, flags=re.DOTALL)
    plain = plain.replace("Fira Code, monospace", "DejaVu Sans Mono, Menlo, Consolas, monospace")
    path.write_text(console.export_svg(title="holdfast top", code_format=plain, unique_id="top"))


def try_it(page: Page, url: str) -> None:
    """Hold a conversation on the page that ends in a call without a result."""
    page.open(f"{url}/#try")
    page.until("document.getElementById('model').options.length")
    for number, answer in enumerate(("21 degrees, sunny", "")):
        page.write("#words", f"What is the weather in {('Paris', 'Oslo')[number]}?")
        page.enter()
        page.until(f"document.querySelectorAll('.call.closed').length > {number}")
        if answer:
            page.write(".call.closed form input", answer)
            page.enter()
            page.until("document.querySelectorAll('#log li.assistant small').length == 2")
    page.until("document.querySelectorAll('#log li.assistant small').length == 3")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("url")
    parser.add_argument("--programs", type=int, default=14)
    parser.add_argument("--pause", type=float, default=4.0, help="mean time of a tool, in seconds")
    parser.add_argument("--seconds", type=float, default=SHOWN_S)
    parser.add_argument("--out", type=Path, default=Path("docs/pictures"))
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    with (
        tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder,
        Browser(Path(folder)) as browser,
        agents(options.url, options.programs, options.pause),
    ):
        pages = {
            "page-light": browser.page(1200, 760),
            "page-dark": browser.page(1200, 760, dark=True),
            "page-phone": browser.page(390, 844, dark=True, phone=True),
        }
        time.sleep(options.seconds)
        for name, page in pages.items():
            page.call("Page.bringToFront")
            page.open(options.url)
            page.until("document.getElementById('replicas').children.length")
            time.sleep(3.0)
            if name == "page-dark":
                choose = "const b = [...document.querySelectorAll('#chips button')][2]; b.click()"
                page.run(f"(() => {{ {choose} }})()")
                page.click("#timeline", 60, 30)
            page.picture(options.out / f"{name}.png")
            assert page.faults == [], page.faults
        top_picture(options.url, options.out / "top.svg")
        page = pages["page-light"]
        page.call("Page.bringToFront")
        try_it(page, options.url)
        page.picture(options.out / "page-try.png")
        httpx.get(f"{options.url}/health", trust_env=False)


if __name__ == "__main__":
    main()
