"""Chromium without a window, driven over its DevTools protocol through a pipe: no driver and no library is needed."""

import base64
import json
import os
import select
import shutil
import subprocess
from contextlib import suppress
from pathlib import Path
from typing import Any

import waiting
from waiting import PATIENCE_S

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
ARGUMENTS = (
    *("--headless=new", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--no-first-run", "--mute-audio"),
    *("--disable-background-networking", "--disable-component-update", "--disable-extensions", "--disable-sync"),
    *("--disable-dev-shm-usage", "--force-color-profile=srgb", "--remote-debugging-pipe"),
)


class Browser:
    """A context manager: the browser, with a profile of its own in `folder`."""

    def __init__(self, folder: Path) -> None:
        assert CHROMIUM is not None
        theirs_in, self._out = os.pipe()
        self._in, theirs_out = os.pipe()

        def wire() -> None:  # Chromium reads commands from descriptor 3 and writes answers to 4
            first, second = os.dup(theirs_in), os.dup(theirs_out)
            os.dup2(first, 3)
            os.dup2(second, 4)

        self._process = subprocess.Popen(
            [CHROMIUM, *ARGUMENTS, f"--user-data-dir={folder}", "about:blank"],
            preexec_fn=wire,
            close_fds=False,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(theirs_in)
        os.close(theirs_out)
        self._rest = b""
        self._serial = 0
        self.events: list[dict[str, Any]] = []

    def __enter__(self) -> "Browser":
        return self

    def __exit__(self, *_: object) -> None:
        with suppress(AssertionError):
            self.call("Browser.close", {})
        self._process.wait(PATIENCE_S)
        os.close(self._in)
        os.close(self._out)

    def page(self, width: int = 1280, height: int = 800, dark: bool = False, phone: bool = False) -> "Page":
        """An empty page of this size."""
        target = self.call("Target.createTarget", {"url": "about:blank"})["targetId"]
        session = self.call("Target.attachToTarget", {"targetId": target, "flatten": True})["sessionId"]
        return Page(self, session, width, height, dark, phone)

    def call(self, method: str, parameters: dict[str, Any], session: str = "") -> dict[str, Any]:
        """What the browser answers to a command; events that come meanwhile are kept."""
        self._serial += 1
        message = {"id": self._serial, "method": method, "params": parameters}
        os.write(self._out, json.dumps(message | ({"sessionId": session} if session else {})).encode() + b"\0")
        while True:
            told = self._read()
            if told.get("id") == self._serial:
                assert "error" not in told, f"{method}: {told['error']}"
                return dict(told["result"])
            self.events.append(told)

    def _read(self) -> dict[str, Any]:
        while b"\0" not in self._rest:
            assert select.select([self._in], [], [], PATIENCE_S)[0], "the browser says nothing"
            piece = os.read(self._in, 1 << 20)
            assert piece, "the browser has gone"
            self._rest += piece
        told, _, self._rest = self._rest.partition(b"\0")
        return dict(json.loads(told))


class Page:
    """One tab. What goes wrong in it, a refusal of its policy included, is in `faults`."""

    def __init__(self, browser: Browser, session: str, width: int, height: int, dark: bool, phone: bool) -> None:
        self._browser, self._session = browser, session
        for domain in ("Page", "Runtime", "Log"):
            self.call(f"{domain}.enable")
        scale = 2 if phone else 1
        self.call(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=scale, mobile=phone
        )
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        return self._browser.call(method, parameters, self._session)

    def open(self, url: str) -> None:
        told = self.call("Page.navigate", url=url)
        assert "errorText" not in told, f"{url}: {told['errorText']}"
        self.until("document.readyState === 'complete'")

    def run(self, script: str) -> Any:
        """The value of an expression, awaited where it is a promise."""
        told = self.call("Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True)
        assert "exceptionDetails" not in told, told["exceptionDetails"]
        return told["result"].get("value")

    def until(self, script: str) -> None:
        """Wait until an expression is true. While another page is loaded it may raise, or end with the one before."""

        def found() -> bool:
            try:
                return bool(self.run(f"(() => {{ try {{ return Boolean({script}); }} catch {{ return false; }} }})()"))
            except AssertionError as error:
                if "Inspected target navigated" in str(error):
                    return False
                raise

        try:
            waiting.until(found)
        except TimeoutError:
            raise AssertionError(f"{script}\n{self.run('document.body.innerText')}\n{self.faults}") from None

    def click(self, selector: str, x: float | None = None, y: float | None = None) -> None:
        """A click of the mouse on an element: in its middle, or so many pixels from its corner. Once it is shown."""
        self.until(f"document.querySelector({selector!r})?.offsetParent")
        box = self.run(
            f"(() => {{ const e = document.querySelector({selector!r}); e.scrollIntoView({{block: 'nearest'}});"
            " const b = e.getBoundingClientRect(); return [b.x, b.y, b.width, b.height]; })()"
        )
        at = {"x": box[0] + (box[2] / 2 if x is None else x), "y": box[1] + (box[3] / 2 if y is None else y)}
        for kind in ("mousePressed", "mouseReleased"):
            self.call("Input.dispatchMouseEvent", type=kind, button="left", clickCount=1, **at)

    def write(self, selector: str, text: str) -> None:
        """Text typed into a field, in place of what is there. Once it is shown."""
        self.until(f"document.querySelector({selector!r})?.offsetParent")
        self.run(f"(e => {{ e.focus(); e.select(); }})(document.querySelector({selector!r}))")
        self.call("Input.insertText", text=text)

    def enter(self) -> None:
        for kind in ("keyDown", "keyUp"):
            self.call(
                "Input.dispatchKeyEvent", type=kind, key="Enter", code="Enter", windowsVirtualKeyCode=13, text="\r"
            )

    def picture(self, path: Path) -> None:
        """A screenshot, as PNG."""
        path.write_bytes(base64.b64decode(self.call("Page.captureScreenshot", format="png")["data"]))

    @property
    def faults(self) -> list[str]:
        found = []
        for event in self._browser.events:
            told = event.get("params", {})
            if event.get("sessionId") != self._session:
                continue
            if event["method"] == "Runtime.exceptionThrown":
                found.append(json.dumps(told["exceptionDetails"])[:400])
            elif event["method"] == "Log.entryAdded" and told["entry"]["level"] == "error":
                found.append(f"{told['entry']['text']} {told['entry'].get('url', '')}")
        return found
