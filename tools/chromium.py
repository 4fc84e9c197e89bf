"""Drives a headless Chromium by Debian's chromedriver and W3C WebDriver: HTTP and JSON, without any package."""

import base64
import json
import shutil
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, Literal

# There is no sandbox, because CI is root in a container. The other options keep Chromium from calling home at a start.
FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--disable-dev-shm-usage",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--force-device-scale-factor=1",
    "--hide-scrollbars",
)
ELEMENT = "element-6066-11e4-a52e-4f735466cecf"  # the key of an element's id (W3C WebDriver, 12.1)
KEYS = {"Enter": "\ue007", "Escape": "\ue00c", "Shift": "\ue008", "Control": "\ue009", "ArrowRight": "\ue014", "v": "v"}

# Seconds to wait, for a machine that does many other things.
PATIENCE = 300.0

type Scheme = Literal["light", "dark"]


def missing() -> str | None:
    """Returns what has to be installed first, or None when nothing has."""
    absent = [name for name in ("chromium", "chromedriver") if shutil.which(name) is None]
    return f"{' and '.join(absent)} not found: apt-get install chromium chromium-driver" if absent else None


class Browser:
    """One tab. Elements are named by CSS selectors. An element that is not there raises RuntimeError."""

    def __init__(self, address: str) -> None:
        self._address = address
        options = {"binary": shutil.which("chromium"), "args": list(FLAGS)}
        always = {"goog:chromeOptions": options, "goog:loggingPrefs": {"browser": "ALL"}}
        session = _call("POST", f"{address}/session", {"capabilities": {"alwaysMatch": always}})
        self._session = f"{address}/session/{session['sessionId']}"

    def close(self) -> None:
        """Ends Chromium."""
        _call("DELETE", self._session)

    def open(self, url: str, width: int = 1440, height: int = 900, scheme: Scheme = "light") -> None:
        """Loads a page in a window of that size, for a reader who likes light or dark pages."""
        self.resize(width, height)
        self._devtools("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])
        self._post("url", url=url)

    def resize(self, width: int, height: int) -> None:
        """Gives the window this size, in pixels."""
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
        self._devtools("Emulation.setDeviceMetricsOverride", **size)

    def forget(self, url: str) -> None:
        """Removes the storage of earlier pages of this address, except for that which lasts only as long as the tab."""
        self._devtools("Storage.clearDataForOrigin", origin=url, storageTypes="all")

    def reload(self) -> None:
        """Reloads the page, as F5 does."""
        self._post("refresh")

    @contextmanager
    def before_pages(self, script: str) -> Iterator[None]:
        """Makes every page in the block run this script before its own."""
        added = self._devtools("Page.addScriptToEvaluateOnNewDocument", source=script)
        try:
            yield
        finally:
            self._devtools("Page.removeScriptToEvaluateOnNewDocument", **added)

    def run(self, script: str, *args: object) -> Any:
        """Runs a function with this body in the page, and returns its result."""
        return self._post("execute/sync", script=script, args=args)

    def wait(self, expression: str, seconds: float = PATIENCE) -> Any:
        """Waits until the expression is true, and returns its value. Raises AssertionError when it stays false."""
        deadline = time.monotonic() + seconds
        while not (value := self.run(f"return {expression}")):
            if time.monotonic() > deadline:
                raise AssertionError(f"not true after {seconds:g} s: {expression}")
            time.sleep(0.02)
        return value

    def text(self, css: str) -> str:
        """Returns the text that the first such element shows."""
        return str(self.run("return document.querySelector(arguments[0]).textContent", css))

    def click(self, css: str) -> None:
        """Clicks as a reader would: an element that is covered or hidden cannot be clicked."""
        self._post(f"element/{self._find(css)}/click")

    def type(self, css: str, text: str) -> None:
        """Types into a field, after its text. Keys named in `KEYS` are pressed through `press`."""
        self._post(f"element/{self._find(css)}/value", text=text)

    def clear(self, css: str) -> None:
        """Empties a field."""
        self._post(f"element/{self._find(css)}/clear")

    def press(self, *names: str) -> None:
        """Presses keys together, by name, wherever the focus is."""
        keys = [KEYS[name] for name in names]
        actions = [{"type": "keyDown", "value": key} for key in keys]
        actions += [{"type": "keyUp", "value": key} for key in reversed(keys)]
        self._post("actions", actions=[{"type": "key", "id": "keyboard", "actions": actions}])

    def hover(self, css: str, x: int = 0, y: int = 0) -> None:
        """Moves the pointer to an element's middle, or that far from it."""
        move = {"type": "pointerMove", "duration": 0, "origin": {ELEMENT: self._find(css)}, "x": x, "y": y}
        self._post("actions", actions=[{"type": "pointer", "id": "mouse", "actions": [move]}])

    def wheel(self, css: str, y: int) -> None:
        """Turns the mouse wheel over an element's middle, by so many pixels: downwards when positive."""
        origin = {ELEMENT: self._find(css)}
        turn = {"type": "scroll", "x": 0, "y": 0, "deltaX": 0, "deltaY": y, "duration": 0, "origin": origin}
        self._post("actions", actions=[{"type": "wheel", "id": "wheel", "actions": [turn]}])

    def swipe(self, css: str, y: int) -> None:
        """Puts a finger on an element's middle and moves it by so many pixels: downwards when positive."""
        start = {"type": "pointerMove", "duration": 0, "origin": {ELEMENT: self._find(css)}, "x": 0, "y": -y // 2}
        move = {"type": "pointerMove", "duration": 100, "origin": "pointer", "x": 0, "y": y}
        actions = [start, {"type": "pointerDown", "button": 0}, move, {"type": "pointerUp", "button": 0}]
        finger = {"type": "pointer", "id": "finger", "parameters": {"pointerType": "touch"}, "actions": actions}
        self._post("actions", actions=[finger])

    def name_of(self, css: str, nth: int = 0) -> str:
        """Returns the accessible name that a screen reader would say."""
        elements = self._post("elements", using="css selector", value=css)
        return str(_call("GET", f"{self._session}/element/{elements[nth][ELEMENT]}/computedlabel"))

    def screenshot(self) -> bytes:
        """Returns the window as PNG."""
        return base64.b64decode(_call("GET", f"{self._session}/screenshot"))

    def console(self) -> list[str]:
        """Returns the browser's complaints since the last call: exceptions, refused content, failed loads."""
        entries = self._post("se/log", type="browser")
        return [entry["message"] for entry in entries if entry["level"] in ("SEVERE", "WARNING")]

    def _find(self, css: str) -> str:
        return str(self._post("element", using="css selector", value=css)[ELEMENT])

    def _devtools(self, command: str, **params: object) -> Any:
        return self._post("goog/cdp/execute", cmd=command, params=params)

    def _post(self, path: str, **body: object) -> Any:
        return _call("POST", f"{self._session}/{path}", body)


@contextmanager
def browser() -> Iterator[Browser]:
    """Starts a browser with an empty profile, and leaves nothing behind. Raises RuntimeError if it cannot start."""
    if reason := missing():
        raise RuntimeError(reason)
    with subprocess.Popen(["chromedriver", "--port=0"], stdout=subprocess.PIPE, text=True) as driver:
        try:
            assert driver.stdout is not None
            tab = Browser(f"http://127.0.0.1:{_port(driver.stdout)}")
            try:
                yield tab
            finally:
                tab.close()
        finally:
            driver.terminate()


def _port(lines: Iterable[str]) -> str:
    """Finds the port in the line "ChromeDriver was started successfully on port 1234."."""
    for line in lines:
        if "started successfully" in line:
            return line.rsplit(" ", 1)[1].rstrip(".\n")
    raise RuntimeError("chromedriver ended before it started")


def _call(method: str, url: str, body: object = None) -> Any:
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"Content-Type": "application/json"}, method=method)
    try:
        with urllib.request.urlopen(request, timeout=PATIENCE) as response:
            return json.load(response)["value"]
    except urllib.error.HTTPError as error:
        with error:
            value = json.load(error)["value"]
        raise RuntimeError(f"{value['error']}: {value['message'].splitlines()[0]}") from None
