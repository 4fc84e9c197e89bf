"""The playground in a real browser, headless Chromium, over a server that answers by rote."""

import os
import re
import subprocess
import sys
from collections.abc import Iterator

import pytest

from tests.server.playground_fake import FILES, KEY, TEXT, Fake, fake_server
from tests.waiting import wait_until
from tools import chromium
from tools.chromium import Browser

pytestmark = pytest.mark.skipif(
    chromium.missing() is not None and os.environ.get("CI") != "true", reason=str(chromium.missing())
)

ANSWER = ".turn:last-child .answer"
STATS = ".turn:last-child .stats"
REFUSED = "Failed to load resource"  # the console says so of every status above 399


@pytest.fixture(scope="module")
def tab() -> Iterator[Browser]:
    with chromium.browser() as opened:
        yield opened


@pytest.fixture(scope="module")
def served() -> Iterator[Fake]:
    with fake_server() as fake:
        yield fake


@pytest.fixture
def fake(served: Fake, tab: Browser) -> Iterator[Fake]:
    """The page just opened. Nothing that the policy refuses and no exception may be in the console at the end."""
    served.bodies.clear()
    served.wants_key = False
    tab.console()  # what is left of the page before
    tab.open(served.url)
    tab.run("sessionStorage.clear()")
    tab.wait("document.querySelector('#model').textContent")
    yield served
    assert [line for line in tab.console() if REFUSED not in line] == []


def ask(tab: Browser, text: str) -> None:
    tab.clear("#prompt")
    tab.type("#prompt", text)
    tab.press("Enter")


def wait_for_answer(tab: Browser) -> str:
    tab.wait("document.querySelector('.turn') && !document.querySelector('.busy')")
    return tab.text(ANSWER)


def test_an_answer_streams_with_its_numbers(tab: Browser, fake: Fake) -> None:
    tab.clear("[name=temperature]")
    tab.type("[name=temperature]", "0.25")
    tab.type("[name=seed]", "7")
    tab.type("[name=stop]", "END\n\\n\\n")
    ask(tab, "hello")
    assert wait_for_answer(tab) == TEXT
    numbers = r"first token \d+ ms · [\d.]+ tokens/s · 9 in \(4 cached\) · 10 out · cut at max_tokens"
    assert re.fullmatch(numbers, tab.text(STATS)), tab.text(STATS)
    assert fake.bodies == [
        {
            "model": "demo",
            "messages": [{"role": "user", "content": "hello"}],
            "temperature": 0.25,
            "top_p": 1,
            "top_k": 0,
            "min_p": 0,
            "seed": 7,
            "stop": ["END", "\n\n"],
            "stream": True,
            "stream_options": {"include_usage": True, "continuous_usage_stats": True},
        }
    ]
    # The answer has the colour of its request in the pool.
    tab.wait("document.querySelectorAll('#requests li').length === 2")
    marked = "document.querySelectorAll('.turn .stats, #requests li')"
    answer, one, two = tab.run(f"return [...{marked}].map(element => element.style.getPropertyValue('--request'))")
    assert answer == one != two


def test_sliders_and_numbers_are_one(tab: Browser, fake: Fake) -> None:
    tab.run("""const slider = document.querySelector('[type=range][data-of=top_k]');
               slider.value = 40; slider.dispatchEvent(new Event('input'))""")
    assert tab.run("return document.querySelector('[name=top_k]').value") == "40"
    tab.clear("[name=min_p]")
    tab.type("[name=min_p]", "0.5")
    assert tab.run("return document.querySelector('[type=range][data-of=min_p]').value") == "0.5"
    assert tab.run("return document.querySelector('[name=max_tokens]').max") == "512"  # the model's context
    ask(tab, "hello")
    wait_for_answer(tab)
    tab.clear("[name=max_tokens]")
    tab.type("[name=max_tokens]", "511")
    ask(tab, "hello")
    wait_for_answer(tab)
    assert [body.get("max_tokens") for body in fake.bodies] == [None, 511]  # all the way up: no limit of its own
    tab.type("[name=top_p]", "7")  # 17: more than 1
    ask(tab, "hello")
    tab.wait("document.activeElement.name === 'top_p'")
    assert len(fake.bodies) == 2


def test_a_conversation_goes_on_is_retried_and_cleared(tab: Browser, fake: Fake) -> None:
    tab.type("[name=system]", "Be brief.")
    ask(tab, "one")
    wait_for_answer(tab)
    ask(tab, "refuse")  # has no answer, so it is no part of what follows
    wait_for_answer(tab)
    ask(tab, "two")
    wait_for_answer(tab)
    tab.click(".turn:last-child .retry")
    tab.wait("document.querySelectorAll('.turn').length === 3")
    wait_for_answer(tab)
    expected = [("system", "Be brief."), ("user", "one"), ("assistant", TEXT), ("user", "two")]
    for body in fake.bodies[-2:]:
        assert [(message["role"], message["content"]) for message in body["messages"]] == expected
    tab.click("#clear")
    assert tab.run("return document.querySelectorAll('.turn').length") == 0
    ask(tab, "three")
    wait_for_answer(tab)
    assert len(fake.bodies[-1]["messages"]) == 2


def test_escape_stops_and_the_server_notices(tab: Browser, fake: Fake) -> None:
    aborted = fake.num_aborted
    ask(tab, "slowly")
    tab.wait(f"document.querySelector('{ANSWER}')?.textContent.length > 20")
    assert tab.run("return document.querySelector('#send').hidden && !document.querySelector('#stop').hidden")
    tab.press("Escape")
    text = wait_for_answer(tab)
    assert text.startswith("word word")
    assert re.search(r" in \(4 cached\) · \d+ out · stopped$", tab.text(STATS))
    tab.wait("!document.querySelector('#send').hidden")
    ask(tab, "slowly")
    tab.wait(f"document.querySelector('{ANSWER}')?.textContent")
    tab.click("#stop")
    wait_for_answer(tab)
    wait_until(lambda: fake.num_aborted == aborted + 2)
    ask(tab, "hello")  # what was said before the stop is part of the conversation
    wait_for_answer(tab)
    assert fake.bodies[-1]["messages"][1] == {"role": "assistant", "content": text}


def test_shift_and_enter_makes_a_line(tab: Browser, fake: Fake) -> None:
    tab.type("#prompt", "first")
    tab.press("Shift", "Enter")
    tab.type("#prompt", "second")
    assert fake.bodies == []
    tab.press("Enter")
    wait_for_answer(tab)
    assert fake.bodies[0]["messages"][0]["content"] == "first\nsecond"
    tab.press("Enter")  # nothing to say
    assert len(fake.bodies) == 1


@pytest.mark.parametrize("mode", ["chat", "completion"])
def test_tokens_show_their_alternatives(tab: Browser, fake: Fake, mode: str) -> None:
    tab.click(f"[value={mode}] + span")
    tab.click("[name=probabilities]")
    ask(tab, "hello")
    assert wait_for_answer(tab) == TEXT
    spans = tab.run("return [...document.querySelectorAll('.token')].map(token => token.textContent)")
    assert spans[:3] == ["Once", " upon", " a"]
    assert "".join(spans) == TEXT
    assert "<|end|>" not in spans
    tab.hover(".token:nth-child(2)")
    lines = tab.run("return [...document.querySelectorAll('.alternative')].map(line => line.textContent)")
    assert lines == ["␣upon90.0%", "␣never1.0%"]
    tab.hover("#model")
    assert tab.run("return document.querySelector('#alternatives').hidden")
    tab.run("document.querySelector('.answer').focus()")
    tab.press("ArrowRight")
    tab.press("ArrowRight")
    assert tab.run("return document.activeElement.textContent") == " upon"
    assert not tab.run("return document.querySelector('#alternatives').hidden")


def test_a_completion_goes_on(tab: Browser, fake: Fake) -> None:
    tab.click("[value=completion] + span")
    assert tab.run("return document.querySelector('#system').hidden")
    ask(tab, "It was ")
    wait_for_answer(tab)
    tab.press("Enter")  # an empty text goes on
    wait_for_answer(tab)
    ask(tab, " And then")
    wait_for_answer(tab)
    prompts = [body["prompt"] for body in fake.bodies]
    assert prompts == ["It was ", f"It was {TEXT}", f"It was {TEXT}{TEXT} And then"]
    tab.click("[value=chat] + span")  # another conversation
    assert tab.run("return document.querySelectorAll('#chat .turn').length") == 0
    assert tab.run("return document.querySelector('#completion').parentElement.hidden")


def test_errors_are_text(tab: Browser, fake: Fake) -> None:
    ask(tab, "refuse")
    assert "<img src=x" in wait_for_answer(tab)
    assert tab.run("return document.querySelectorAll('.turn img').length") == 0
    assert "owned" not in tab.run("return document.title")
    ask(tab, "break")
    assert wait_for_answer(tab) == "Once upon a" + "the engine ended"
    assert tab.text(f"{ANSWER} .error") == "the engine ended"


def test_a_key_stays_in_the_tab(tab: Browser, fake: Fake) -> None:
    fake.wants_key = True
    tab.wait("document.querySelector('#status').textContent.includes('API key')")
    ask(tab, "hello")
    assert wait_for_answer(tab) == "give an API key"
    tab.wait("document.activeElement.name === 'key'")
    tab.type("[name=key]", KEY)
    tab.click(".turn:last-child .retry")
    tab.wait(f"document.querySelector('{ANSWER}').textContent.startsWith('Once')")
    assert tab.run("return JSON.stringify(sessionStorage)") == f'{{"jaxvllm.api-key":"{KEY}"}}'
    assert tab.run("return localStorage.length + document.cookie.length") == 0
    assert KEY not in tab.run("return location.href")
    tab.run("sessionStorage.clear()")


def test_the_pool_is_drawn(tab: Browser, fake: Fake) -> None:
    tab.wait("document.querySelector('#pool canvas')?.ariaLabel")
    pool = "document.querySelector('#pool canvas')"
    assert tab.run(f"return {pool}.ariaLabel") == "pages: 25 free, 4 owned, 2 cached, 1 trash; 1 shared"
    assert tab.text("#pool-summary") == "4 of 31 pages · 2 running · 1 waiting"
    lines = tab.run("return [...document.querySelectorAll('#requests li')].map(line => line.textContent)")
    assert lines == ["chatcmpl-one40 tokens in 3 pages, 1 shared", "chatcmpl-two20 tokens in 2 pages, 1 shared"]
    pixels = tab.run(f"return [...{pool}.getContext('2d').getImageData(0, 0, 128, 16).data]")

    def pixel(page: int, y: int) -> tuple[int, ...]:
        start = 4 * (128 * y + 16 * page + 2)
        return tuple(pixels[start : start + 4])

    trash, shared, one, _, two, cached, _, free = (pixel(page, 2) for page in range(8))
    assert shared == one and pixel(1, 13) == two  # a stripe of each owner
    assert len({trash, one, two, cached, free}) == 5
    for page, text in [(1, "page 1: tokens 0 to 15 of chatcmpl-one, chatcmpl-two"), (5, "page 5: cached")]:
        left = tab.run(f"return Math.round({pool}.clientWidth / 2)")
        tab.hover("#pool canvas", 16 * page + 8 - left, -8)
        assert tab.text("#detail") == text


def test_the_steps_are_drawn(tab: Browser, fake: Fake) -> None:
    tab.wait("document.querySelector('#steps-summary').textContent.includes('padding')")
    assert tab.text("#steps-summary") == "48% padding · host 0.50 ms · device 12 ms"
    half = tab.run("return Math.floor(document.querySelector('#steps').clientWidth / 2)")
    tab.hover("#steps", half - 4)
    assert tab.text("#detail") == "replica 0: 2 decode + 30 prefill in a bucket of 64; host 0.50 ms, device 12 ms"


def test_a_hidden_tab_does_not_ask(tab: Browser, fake: Fake) -> None:
    tab.run("""window.asked = 0; const before = window.fetch;
               window.fetch = (...what) => { window.asked += 1; return before(...what); }""")
    tab.wait("window.asked > 1")
    tab.run("Object.defineProperty(document, 'visibilityState', {value: 'hidden', configurable: true})")
    asked = tab.run("return window.asked")
    # The page's own timers: a machine that is slow with one of them is slow with all.
    assert tab.run("return new Promise(done => setTimeout(() => done(window.asked), 1000))") == asked
    tab.run("Object.defineProperty(document, 'visibilityState', {value: 'visible'})")
    tab.wait(f"window.asked > {asked}")


@pytest.mark.parametrize("width", [360, 800, 1440])
def test_it_fits_and_is_named(tab: Browser, fake: Fake, width: int) -> None:
    tab.open(fake.url, width=width, height=720)
    tab.wait("document.querySelector('#pool canvas')")
    assert tab.run("return document.documentElement.scrollWidth") <= width
    fields = "input, textarea, button, canvas"
    tab.run("document.querySelector('#settings').open = true")
    number = tab.run("return document.querySelectorAll(arguments[0]).length", fields)
    shown = tab.run("return [...document.querySelectorAll(arguments[0])].map(e => e.checkVisibility())", fields)
    assert number > 20
    names = [tab.name_of(fields, i) for i in range(number) if shown[i]] if width == 1440 else ["checked once"]
    assert all(names), names


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_text_stands_out(scheme: str) -> None:
    """WCAG 2.2, 1.4.3: a contrast of 4.5 at least."""
    light, dark = re.findall(r":root \{(.*?)\}", (FILES / "style.css").read_text(), re.DOTALL)
    colours = dict(re.findall(r"--([\w-]+): (#\w{6});", {"light": light, "dark": dark}[scheme]))
    pairs = [(ink, ground) for ink in ("ink", "muted", "error", "accent") for ground in ("ground", "panel")]
    for ink, ground in [*pairs, ("on-accent", "accent")]:
        high, low = sorted((luminance(colours[ink]), luminance(colours[ground])), reverse=True)
        assert (high + 0.05) / (low + 0.05) >= 4.5, (ink, ground)


@pytest.mark.slow
def test_it_runs_on_the_real_server(tab: Browser) -> None:
    few = ("--num-pages", "100", "--max-num-seqs", "2", "--max-num-batched-tokens", "64")  # and so few buckets
    command = [sys.executable, "-m", "jaxvllm.serve", "--port", "0", *few]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as server:
        try:
            assert server.stderr is not None
            url = next(line.split()[-1] for line in server.stderr if "ready after" in line)
            tab.console()
            tab.open(url + "/")
            tab.click("[name=probabilities]")
            tab.clear("[name=max_tokens]")
            tab.type("[name=max_tokens]", "20")
            for mode, prompt in [("chat", "What is the capital of France?"), ("completion", "Once upon a time")]:
                tab.click(f"[value={mode}] + span")
                ask(tab, prompt)
                tab.wait(f"document.querySelector('#{mode} .stats')?.textContent && !document.querySelector('.busy')")
                assert re.search(r" in \(\d+ cached\) · \d+ out", tab.text(f"#{mode} .stats"))
                tokens = f"[...document.querySelectorAll('#{mode} .token')]"
                text = tab.text(f"#{mode} .answer")
                assert text and tab.run(f"return {tokens}.map(token => token.textContent).join('')") == text
            tab.wait("document.querySelector('#steps-summary').textContent.includes('padding')")
            tab.wait("document.querySelector('#pool-summary').textContent === '0 of 99 pages · 0 running · 0 waiting'")
            assert tab.console() == []
        finally:
            server.terminate()


def luminance(colour: str) -> float:
    parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    red, green, blue = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def test_nothing_comes_from_outside() -> None:
    texts = {path.name: path.read_text() for path in FILES.iterdir()}
    assert {"index.html", "main.js", "style.css"} <= texts.keys()
    for name, text in texts.items():
        addresses = set(re.findall(r"(?:https?:)?//[\w.]+\.\w+[^\s\"']*", text))
        assert addresses <= {"http://www.w3.org/2000/svg"}, name
        assert "innerHTML" not in text and "insertAdjacentHTML" not in text, name
