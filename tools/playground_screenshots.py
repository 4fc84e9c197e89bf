"""Takes the pictures of docs/playground.md from the real server: `python -m tools.playground_screenshots`."""

import io
import json
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from PIL import Image

from tools.chromium import Browser, browser

IMAGES = Path(__file__).parent.parent / "docs" / "images"
PORT = 8765
URL = f"http://127.0.0.1:{PORT}/"
# There are few enough pages to see each, and enough requests to fill a good part of them.
SERVER = ("-m", "jaxvllm.serve", "--port", str(PORT), "--num-pages", "400")
SYSTEM = "You tell stories for children. They are short, kind and quiet, and every animal in them has a name."
ANIMALS = ("frog", "fox", "hen", "dog", "owl", "duck")


@contextmanager
def served() -> Iterator[None]:
    """Runs a server, which is ready in the block and ends with it."""
    with subprocess.Popen([sys.executable, *SERVER]) as process:
        try:
            while not _is_ready():
                if process.poll() is not None:
                    raise SystemExit(f"the server ended with exit code {process.returncode}")
                time.sleep(0.2)
            yield
        finally:
            process.terminate()


def _is_ready() -> bool:
    try:
        with urllib.request.urlopen(URL + "ready", timeout=5) as response:
            return bool(response.status == 200)
    except (urllib.error.URLError, ConnectionError, TimeoutError):
        return False


@contextmanager
def company() -> Iterator[None]:
    """Runs other clients in the block, each of which asks for one story after another with the same system prompt."""
    done = threading.Event()
    threads = [threading.Thread(target=_ask_on, args=(animal, done)) for animal in ANIMALS]
    for thread in threads:
        thread.start()
        time.sleep(0.15)  # so that they do not all start in the same step
    try:
        yield
    finally:
        done.set()
        for thread in threads:
            thread.join()


def _ask_on(animal: str, done: threading.Event) -> None:
    while not done.is_set():
        user = f"Tell me a long story about a {animal}."
        messages = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": user}]
        body = json.dumps({"messages": messages, "max_tokens": 400, "ignore_eos": True}).encode()
        headers = {"Content-Type": "application/json"}
        with urllib.request.urlopen(urllib.request.Request(f"{URL}v1/chat/completions", body, headers)) as response:
            response.read()


def save(page: Browser, name: str) -> None:
    """Saves one picture in docs/images."""
    IMAGES.mkdir(exist_ok=True)
    path = IMAGES / f"playground-{name}.png"
    # With a palette, a picture takes a third of the bytes and looks the same.
    Image.open(io.BytesIO(page.screenshot())).convert("RGB").quantize(256).save(path, optimize=True)
    print(f"{path.relative_to(IMAGES.parent.parent)}: {path.stat().st_size} bytes")


def ask(page: Browser, text: str) -> None:
    """Asks a question, and waits for the end of the answer."""
    page.type("#prompt", text)
    page.press("Enter")
    page.wait("document.querySelector('.turn') && !document.querySelector('.busy')", seconds=60)


def take(page: Browser) -> None:
    """Takes all pictures."""
    connected = "document.querySelector('#model').textContent"
    page.forget(URL)
    page.open(URL, 1280, 800)
    page.wait(connected)
    page.click("[name=probabilities]")
    page.type("[name=seed]", "3")
    ask(page, "Which day comes after Friday?")
    ask(page, "Tell me a short story.")
    # By now the small buckets, which are compiled last, are ready, so there is less padding.
    page.wait("parseInt(document.querySelector('#steps-summary').textContent) < 50", seconds=90)
    page.run("""const doubt = (token) => Number(token.style.getPropertyValue('--doubt'));
        const tokens = [...document.querySelectorAll('.turn:last-child .token')].slice(20);
        tokens.reduce((a, b) => (doubt(a) > doubt(b) ? a : b)).id = 'doubtful'""")
    page.hover("#doubtful")
    save(page, "chat")

    page.forget(URL)
    page.open(URL, 1280, 800, "dark")
    page.wait(connected)
    page.click("[value=completion] + span")
    page.type("[name=seed]", "5")
    page.type("#prompt", "Once upon a time, on an island,")
    page.press("Enter")
    page.wait("document.querySelector('.answer')?.textContent.length > 300", seconds=60)
    save(page, "completion-dark")
    page.press("Escape")

    page.forget(URL)
    page.open(URL, 390, 800)
    page.wait(connected)
    ask(page, "Tell me a short story about a fox.")
    save(page, "narrow")


def main() -> None:
    with served(), browser() as page, company():
        take(page)


if __name__ == "__main__":
    main()
