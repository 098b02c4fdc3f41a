"""Headless Chromium, driven by its DevTools protocol: open a page, click, read what it shows, take a picture."""

import base64
import json
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import pytest
from websockets.sync.client import ClientConnection, connect

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
# reason: a person's machine may have no browser; CI installs one where it may
in_chromium = pytest.mark.skipif(CHROMIUM is None, reason="no chromium on this machine to click through the page with")
QUIET = [
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--hide-scrollbars",
]
"""No window, and no network of the browser's own."""
DEADLINE_S = 60.0


def count_of(css: str) -> str:
    """Returns the expression for the number of elements."""
    return f"document.querySelectorAll({json.dumps(css)}).length"


class Tab:
    """One page of a browser. `complaints` are what its scripts or its policies have said went wrong."""

    def __init__(self, line: ClientConnection) -> None:
        self._line, self._numbers = line, count(1)
        self.complaints: list[str] = []
        self.requested: list[str] = []
        for domain in ("Page", "Runtime", "Log", "Network"):
            self._call(f"{domain}.enable")

    def _call(self, method: str, **params: Any) -> Any:
        number = next(self._numbers)
        self._line.send(json.dumps({"id": number, "method": method, "params": params}))
        while True:
            message = json.loads(self._line.recv(DEADLINE_S))
            self._note(message)
            if message.get("id") == number:
                assert "error" not in message, message
                return message["result"]

    def _note(self, message: dict[str, Any]) -> None:
        match message:
            case {"method": "Runtime.exceptionThrown", "params": {"exceptionDetails": details}}:
                self.complaints.append(str(details.get("exception", details)))
            case {"method": "Log.entryAdded", "params": {"entry": {"level": "error" | "warning", "text": text}}}:
                self.complaints.append(text)
            case {"method": "Network.requestWillBeSent", "params": {"request": {"url": url}}}:
                self.requested.append(url)

    def open(self, url: str) -> None:
        """Opens an address, and waits until the page is there."""
        self._call("Page.navigate", url=url)
        self.until("document.readyState === 'complete'")

    def run(self, script: str) -> Any:
        """Returns the value of an expression in the page."""
        result = self._call("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in result, result["exceptionDetails"]
        return result["result"].get("value")

    def until(self, script: str) -> Any:
        """Waits until an expression is true, and returns its value."""
        ends = time.monotonic() + DEADLINE_S
        while not (value := self.run(script)):
            assert time.monotonic() < ends, f"the page never came to {script}; it shows {self.text('body')[:2000]}"
            time.sleep(0.05)
        return value

    def text(self, css: str) -> str:
        """Returns the text of an element as it is seen."""
        return str(self.run(f"(document.querySelector({json.dumps(css)}) || {{}}).innerText || ''"))

    def click(self, css: str) -> None:
        """Clicks where the element is, as a person does."""
        element = f"document.querySelector({json.dumps(css)})"
        self.until(f"{element} && {element}.getClientRects().length > 0")
        x, y = self.run(
            f"(() => {{ const e = {element}; e.scrollIntoView({{block: 'center'}});"
            " const r = e.getBoundingClientRect(); return [r.x + r.width / 2, r.y + r.height / 2]; })()"
        )
        for kind in ("mousePressed", "mouseReleased"):
            self._call("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", clickCount=1)

    def picture(self, file: Path, width: int, height: int) -> None:
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
        self._call("Emulation.setDeviceMetricsOverride", **size)
        file.write_bytes(base64.b64decode(self._call("Page.captureScreenshot", format="png")["data"]))


@contextmanager
def browser(profile: Path) -> Iterator[Tab]:
    """Starts Chromium with a profile of its own, and ends it."""
    assert CHROMIUM is not None
    flags = [*QUIET, "--remote-debugging-port=0", f"--user-data-dir={profile}", "--window-size=1280,900", "about:blank"]
    running = subprocess.Popen([CHROMIUM, *flags], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        with connect(_address(profile, running), max_size=None, proxy=None) as line:
            yield Tab(line)
    finally:
        running.terminate()
        try:
            running.wait(10)
        except subprocess.TimeoutExpired:
            running.kill()
            running.wait(10)


def _address(profile: Path, running: subprocess.Popen[bytes]) -> str:
    """Waits until the browser says where its first page listens."""
    file, ends = profile / "DevToolsActivePort", time.monotonic() + DEADLINE_S
    while not (file.exists() and file.read_text().count("\n")):
        assert running.poll() is None, f"chromium ended with {running.returncode}"
        assert time.monotonic() < ends, f"chromium did not listen within {DEADLINE_S:g} s"
        time.sleep(0.05)
    port = file.read_text().splitlines()[0]
    while True:
        with urlopen(f"http://127.0.0.1:{port}/json/list", timeout=DEADLINE_S) as response:
            pages = [page for page in json.load(response) if page["type"] == "page"]
        if pages:
            return str(pages[0]["webSocketDebuggerUrl"])
        assert time.monotonic() < ends, f"chromium opened no page within {DEADLINE_S:g} s"
        time.sleep(0.05)
