"""The playground in a real browser, headless Chromium, over a server that answers by rote."""

import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.explainer.reports import hostile_report
from tests.server.conftest import Server
from tests.server.playground_fake import CONTEXT, FILES, KEY, TEXT, Fake, fake_server
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
    served.wants_key, served.context_messages, served.prompt_tokens, served.has_drafts = False, 100, 9, True
    tab.console()  # what is left of the page before
    tab.forget(served.url)
    tab.open(served.url)
    tab.run("sessionStorage.clear()")
    tab.wait("document.querySelector('#model').textContent")
    yield served
    assert [line for line in tab.console() if REFUSED not in line] == []


def ask(tab: Browser, text: str) -> None:
    tab.clear("#prompt")
    if "\n" in text:  # would be sent at its first line's end if it were typed
        tab.run("const field = document.querySelector('#prompt'); field.value = arguments[0]; field.focus()", text)
    else:
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
            "explain": True,
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


@pytest.mark.parametrize("mode", ["chat", "completion"])
def test_an_answer_is_explained_on_a_click(tab: Browser, fake: Fake, mode: str) -> None:
    tab.click(f"[value={mode}] + span")
    ask(tab, "hello")
    wait_for_answer(tab)
    assert fake.bodies[-1]["explain"] is True
    assert tab.run("return document.querySelector('.explanation')") is None
    tab.click(".turn:last-child .explain")
    kinds = tab.run("return [...document.querySelectorAll('.explanation .step summary b')].map(b => b.textContent)")
    assert kinds == ["Prefill", "Decode", "Forced"]
    pages = tab.run("return [...document.querySelectorAll('.explanation .page b')].map(b => b.textContent)")
    assert pages == ["3", "5"]
    chips = tab.run("return [...document.querySelectorAll('.explanation button.chip')].map(b => b.textContent)")
    assert chips[0].startswith("</script><script>") and chips[1:] == ["⏎", "?"]
    tab.click(".explanation button.chip:nth-child(2)")  # opens the step that it came from
    opened = tab.run("return [...document.querySelectorAll('.step')].map(step => step.open)")
    assert opened == [False, False, True]
    facts = tab.text(".step[open] dl")
    assert "1 chunk): 2 tokens in a bucket of 16 (14 padding)" in facts and "refuses 1 token" in facts
    assert tab.run("return document.title") == "demo · jaxvllm"
    assert "Token probabilities" in tab.text(".explanation > .facts:last-child")
    tab.click("dialog .close")
    tab.wait("!document.querySelector('.explanation')")
    tab.click("#clear")
    ask(tab, "break")  # which has no end to explain
    wait_for_answer(tab)
    assert tab.run("return document.querySelector('.turn:last-child .explain').hidden")


# Windows as wide as those of a large screen, a laptop, a tablet and a telephone, each of them tall and low.
WINDOWS = [(width, height) for width in (2560, 1280, 768, 320) for height in (1440, 800, 600, 480, 360)]
BOX = "const box = document.querySelector(arguments[0]).getBoundingClientRect(); return [box.left, box.right]"


def seen(css: str) -> str:
    """Whether the whole of an element is in the window, and nothing covers its middle."""
    return f"""(() => {{
        const element = document.querySelector('{css}'), box = element.getBoundingClientRect();
        const top = document.elementFromPoint((box.left + box.right) / 2, (box.top + box.bottom) / 2);
        return box.top >= 0 && box.bottom <= innerHeight && element.contains(top);
    }})()"""


def test_an_explanation_opens_at_its_first_step_as_wide_as_the_page(tab: Browser, fake: Fake) -> None:
    ask(tab, "at length")
    wait_for_answer(tab)
    first, last = ".explanation .step:first-child summary", ".explanation .step:last-child summary"
    for width, height in WINDOWS:
        tab.resize(width, height)
        tab.click(".turn:last-child .explain")
        # Two frames later everything that follows a change of sizes has happened.
        tab.run("return new Promise(done => requestAnimationFrame(() => requestAnimationFrame(done)))")
        assert tab.run(f"return {seen(first)}"), f"the first step is out of view at {width} x {height}"
        left, right = tab.run(BOX, ".explanation")
        assert left <= 32 and right >= width - 48, f"{left} to {right} of {width}"
        assert tab.run("return document.documentElement.scrollWidth <= innerWidth")
        sides = "const it = document.querySelector('.explanation'); return it.scrollWidth - it.clientWidth"
        assert tab.run(sides) == 0, f"scrolls sideways at {width} x {height}"
        if height >= 600 and width >= 1024:
            assert tab.run(f"return {seen('.explanation h4')}"), f"its tokens are out of view at {width} x {height}"
        assert not tab.run(f"return {seen(last)}")
        tab.press("Escape")
        tab.wait("!document.querySelector('.explanation')")
        assert tab.run("return document.activeElement.className") == "explain"
    tab.click(".turn:last-child .explain")
    tab.run("document.querySelector('.explanation button.chip:last-child').click()")  # its step is the last one
    assert tab.run(f"return {seen(last)}")
    tab.click("dialog .close")
    tab.wait("!document.querySelector('.explanation')")


def test_escape_closes_an_explanation_and_does_not_stop_another_answer(tab: Browser, fake: Fake) -> None:
    ask(tab, "hello")
    wait_for_answer(tab)
    aborted = fake.num_aborted
    ask(tab, "slowly")
    grown = f"document.querySelector('{ANSWER}').textContent.length"
    tab.wait(f"{grown} > 20")
    tab.click(".turn:first-child .explain")
    tab.wait("document.querySelector('.explanation') !== null")
    tab.press("Escape")
    tab.wait("!document.querySelector('.explanation')")
    before = tab.run(f"return {grown}")
    tab.wait(f"{grown} > {before} + 50")
    assert fake.num_aborted == aborted
    tab.press("Escape")
    wait_for_answer(tab)


def test_a_report_is_drawn_by_the_same_modules(tab: Browser, fake: Fake, tmp_path: Path) -> None:
    path = tmp_path / "report.html"
    path.write_text(hostile_report().html, encoding="utf-8")
    tab.open(path.as_uri())
    tab.wait("document.querySelectorAll('.explanation').length === 2")
    cells = tab.run("return [...document.querySelectorAll('.timeline tbody td')].map(cell => cell.textContent)")
    assert cells == ["P5", "2", "", "", "·", "P1", "×", "F2"]
    assert "written by [0]" in tab.text("#report")
    assert tab.run("return document.title") == "One request, step by step"
    candidates = tab.run("return [...document.querySelectorAll('.candidates .line.chosen')].map(l => l.textContent)")
    assert candidates == ["␣b60.7%"]
    assert tab.run("return document.querySelectorAll('img, iframe, link').length") == 0


MARKED = "[...document.querySelectorAll('.turn:last-child .draft')].map(mark => mark.textContent)"
BACKGROUND = (
    "const mark = getComputedStyle(document.querySelector('.turn:last-child .draft')).backgroundColor; return mark"
)


@pytest.mark.parametrize("mode", ["chat", "completion"])
def test_accepted_drafts_are_marked(tab: Browser, fake: Fake, mode: str) -> None:
    tab.click(f"[value={mode}] + span")
    tab.wait("!document.querySelector('[name=drafts]').parentElement.hidden")
    tab.click("[name=drafts]")
    ask(tab, "say **bold** <b>text</b>")
    assert wait_for_answer(tab) == "**bold** <b>text</b>"
    assert fake.bodies[-1]["stream_options"]["include_draft_spans"] is True
    assert tab.run(f"return {MARKED}") == ["old*", "b>te", "/b>"]  # of three chunks, all but 3 characters each
    tinted = tab.run(BACKGROUND)
    tab.click("[name=drafts]")  # and it reads as without
    assert tab.text(ANSWER) == ("bold <b>text</b>" if mode == "chat" else "**bold** <b>text</b>")
    assert tab.run("return document.querySelectorAll('.turn strong').length") == (mode == "chat")
    tab.click("[name=drafts]")
    assert tab.run(f"return {MARKED}") == ["old*", "b>te", "/b>"]

    tab.click("#clear")
    tab.click("[name=probabilities]")  # both at once
    ask(tab, "hello")
    assert wait_for_answer(tab) == TEXT
    assert tab.run(f"return {MARKED}") == [" upon", " a", "bold"]
    others = "[...document.querySelectorAll('.turn:last-child .token:not(.draft)')].map(token => token.textContent)"
    assert tab.run(f"return {others}.join('')") == "Once café\n<b>"
    assert tab.run(BACKGROUND) == tinted
    tab.click("[name=drafts]")
    assert tab.text(ANSWER) == TEXT
    assert tab.run(BACKGROUND) == "rgba(0, 0, 0, 0)" != tinted
    ask(tab, "hello")
    wait_for_answer(tab)
    assert "include_draft_spans" not in fake.bodies[-1]["stream_options"]


def test_where_nothing_guesses_there_is_no_switch_for_it(tab: Browser, fake: Fake) -> None:
    tab.wait("!document.querySelector('[name=drafts]').parentElement.hidden")
    tab.click("[name=drafts]")
    fake.has_drafts = False
    tab.wait("document.querySelector('[name=drafts]').parentElement.hidden")
    ask(tab, "hello")
    wait_for_answer(tab)
    assert "include_draft_spans" not in fake.bodies[-1]["stream_options"]


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


def test_an_answer_has_a_form(tab: Browser, fake: Fake) -> None:
    choose = (
        "const s = document.querySelector('[name=form]'); s.value = arguments[0]; s.dispatchEvent(new Event('change'))"
    )
    expected = {"choice": ["yes", "no", "maybe"], "regex": "[0-2][0-9]:[0-5][0-9]", "json_object": True}
    for kind, value in expected.items():
        tab.run(choose, kind)
        assert tab.run("return document.querySelector('[name=constraint]').hidden") == (kind == "json_object")
        ask(tab, "hello")
        wait_for_answer(tab)
        assert fake.bodies[-1]["structured_outputs"] == {kind: value}
    tab.run(choose, "json")
    ask(tab, "hello")
    wait_for_answer(tab)
    assert fake.bodies[-1]["structured_outputs"]["json"]["required"] == ["name", "age"]
    tab.type("[name=constraint]", "}")  # no JSON any more
    ask(tab, "hello")
    assert not tab.run("return document.querySelector('[name=constraint]').checkValidity()")
    assert len(fake.bodies) == 4
    tab.run(choose, "")
    ask(tab, "hello")
    wait_for_answer(tab)
    assert "structured_outputs" not in fake.bodies[-1]


def test_a_tool_is_called_and_answers(tab: Browser, fake: Fake) -> None:
    tab.click("#tools-example")
    ask(tab, "weather")
    wait_for_answer(tab)
    assert [tool["function"]["name"] for tool in fake.bodies[-1]["tools"]] == ["get_weather"]
    assert tab.text(f"{ANSWER} .call") == 'calls get_weather{"city": "Rome"}'
    assert tab.text(f"{ANSWER} .reasoning pre") == "They ask for the weather."
    assert tab.text(STATS).endswith("calls a tool")
    assert tab.run("return document.querySelector('#prompt').placeholder") == "What the tool returns"
    tab.open(fake.url)  # the call is kept
    tab.wait("document.querySelector('#model').textContent")
    ask(tab, "sunny")
    wait_for_answer(tab)
    call = {
        "id": "call-12345",
        "type": "function",
        "function": {"name": "get_weather", "arguments": '{"city": "Rome"}'},
    }
    assert fake.bodies[-1]["messages"] == [
        {"role": "user", "content": "weather"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call-12345", "content": "sunny"},
    ]


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
    assert tab.run("return document.cookie.length") == 0
    tab.wait("localStorage.length")  # the conversation, without the key
    assert KEY not in tab.run("return JSON.stringify(localStorage)")
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


SIZES = [(1280, 800), (390, 844)]
PANE = "document.querySelector('.transcript')"


def in_view(css: str) -> str:
    """Whether the whole of an element is inside the pane, which is inside the window."""
    return f"""(() => {{
        const inner = document.querySelector('{css}').getBoundingClientRect();
        const pane = {PANE}.getBoundingClientRect();
        return inner.top >= pane.top - 1 && inner.bottom <= pane.bottom + 1
            && inner.top >= 0 && inner.bottom <= innerHeight + 1;
    }})()"""


@pytest.mark.parametrize("move", [Browser.wheel, Browser.swipe], ids=["wheel", "touch"])
@pytest.mark.parametrize("width, height", SIZES)
def test_a_tall_conversation_is_read_from_its_first_line_to_its_last(
    tab: Browser, fake: Fake, width: int, height: int, move: Callable[[Browser, str, int], None]
) -> None:
    tab.open(fake.url, width, height)
    tab.wait("document.querySelector('#model').textContent")
    for i in range(4):
        ask(tab, "say " + "\n\n".join(f"Line {line} of answer {i}." for line in range(20)))
        wait_for_answer(tab)
    first, last = ".turn:first-child .answer p:first-child", ".turn:last-child .answer p:last-child"
    assert tab.run(f"return {PANE}.scrollHeight > 3 * {PANE}.clientHeight")
    tab.wait(in_view(last))  # where the newest text is, without doing anything
    towards_start = -400 if move is Browser.wheel else 400  # a finger pulls the text along
    for css, distance in [(first, towards_start), (last, -towards_start)]:
        for _ in range(40):
            if tab.run(f"return {in_view(css)}"):
                break
            before = tab.run(f"return {PANE}.scrollTop")
            move(tab, ".transcript", distance)
            tab.wait(f"{PANE}.scrollTop !== {before}")
        assert tab.run(f"return {in_view(css)}")


def test_the_newest_text_stays_in_view_unless_the_reader_scrolled_up(tab: Browser, fake: Fake) -> None:
    ask(tab, "say " + "A line.\n\n" * 40)
    wait_for_answer(tab)
    ask(tab, "slowly")
    at_end = f"{PANE}.scrollHeight - {PANE}.clientHeight - {PANE}.scrollTop <= 2"
    grown = f"document.querySelector('{ANSWER}').textContent.length"
    height = tab.run(f"return {PANE}.scrollHeight")
    tab.wait(f"{PANE}.scrollHeight > {height} + 100")
    tab.wait(at_end)
    tab.wheel(".transcript", -500)
    tab.wait(f"!({at_end})")
    tab.wait("document.getAnimations().length === 0")
    before, length = tab.run(f"return [{PANE}.scrollTop, {grown}]")
    tab.wait(f"{grown} > {length} + 500")
    assert tab.run(f"return {PANE}.scrollTop") == before  # the text under the reader's eyes does not move
    for _ in range(20):  # to where the end was, and perhaps is no more
        tab.wheel(".transcript", 5000)
        if tab.run(f"return {at_end}"):
            break
    length = tab.run(f"return {grown}")
    tab.wait(f"{grown} > {length} + 500")
    tab.wait(at_end)
    tab.press("Escape")
    wait_for_answer(tab)
    tab.wheel(".transcript", -500)
    tab.wait(f"!({at_end})")
    ask(tab, "say " + "A line.\n\n" * 40)  # the reader wants to see the answer to that
    wait_for_answer(tab)
    tab.wait(at_end)


@pytest.mark.parametrize("width, height", SIZES)
def test_the_page_opens_at_its_top_with_the_prompt_in_view(tab: Browser, fake: Fake, width: int, height: int) -> None:
    tab.open(fake.url, width, height)
    tab.wait("document.querySelector('#pool canvas')?.ariaLabel")
    assert tab.run("return scrollY") == 0
    top, bottom = tab.run(
        "const {top, bottom} = document.querySelector('#composer').getBoundingClientRect(); return [top, bottom]"
    )
    assert 0 < top < bottom <= height
    assert tab.run("return document.activeElement.id") == "prompt"


def test_a_completion_goes_on_as_far_as_the_slider_says(tab: Browser, fake: Fake) -> None:
    tab.click("[value=completion] + span")
    ask(tab, "one two three")
    wait_for_answer(tab)
    tab.clear("[name=max_tokens]")
    tab.type("[name=max_tokens]", "40")
    ask(tab, "four")
    wait_for_answer(tab)
    # All the way up: where the context ends, which is three tokens less after three words.
    assert [body["max_tokens"] for body in fake.bodies] == [CONTEXT - 3, 40]


def test_a_reload_keeps_both_conversations(tab: Browser, fake: Fake) -> None:
    ask(tab, "one")
    wait_for_answer(tab)
    ask(tab, "refuse")
    wait_for_answer(tab)
    stats = tab.text(".turn .stats")
    tab.click("[value=completion] + span")
    ask(tab, "It was ")
    wait_for_answer(tab)
    tab.reload()
    tab.wait("document.querySelector('#model').textContent")
    assert tab.run("return document.querySelector(':checked').value") == "completion"
    assert tab.text("#completion .asked") + tab.text("#completion .answer") == f"It was {TEXT}"
    ask(tab, " And then")
    tab.wait("document.querySelectorAll('#completion .turn').length === 2 && !document.querySelector('.busy')")
    assert fake.bodies[-1]["prompt"] == f"It was {TEXT} And then"
    tab.click("[value=chat] + span")
    assert tab.text("#chat .answer") == TEXT
    assert tab.text("#chat .stats") == stats
    assert "is wrong" in tab.text("#chat .turn:last-child .error")
    ask(tab, "two")
    tab.wait("document.querySelectorAll('#chat .turn').length === 3 && !document.querySelector('.busy')")
    assert [message["content"] for message in fake.bodies[-1]["messages"]] == ["one", TEXT, "two"]
    tab.click("#clear")
    tab.reload()
    assert tab.run("return document.querySelectorAll('#chat .turn').length") == 0
    assert tab.run("return document.querySelectorAll('#completion .turn').length") == 2
    tab.click("[value=completion] + span")
    tab.click("#clear")
    assert tab.run("return localStorage.length") == 0


def test_a_tab_keeps_what_another_tab_saved(tab: Browser, fake: Fake) -> None:
    ask(tab, "one")
    wait_for_answer(tab)
    tab.wait("!document.querySelector('.busy') && localStorage.length")
    kept = tab.run("return localStorage.getItem('jaxvllm.conversations')")
    tab.forget(fake.url)
    tab.reload()  # now a tab that was open before the other one got its answer
    tab.run("localStorage.setItem('jaxvllm.conversations', arguments[0])", kept)
    tab.click("[value=completion] + span")
    ask(tab, "It was ")
    wait_for_answer(tab)
    tab.wait("!document.querySelector('.busy')")
    tab.reload()
    assert tab.run("return [...document.querySelectorAll('#chat .asked')].map(asked => asked.textContent)") == ["one"]
    assert tab.text("#completion .asked") == "It was "
    tab.click("#clear")
    tab.reload()
    assert tab.run("return document.querySelectorAll('#chat .turn').length") == 1


def test_a_reload_keeps_the_mode_before_the_first_question(tab: Browser, fake: Fake) -> None:
    tab.click("[value=completion] + span")
    tab.reload()
    assert tab.run("return document.querySelector('#modes :checked').value") == "completion"


def test_a_reload_keeps_what_came_of_an_answer(tab: Browser, fake: Fake) -> None:
    ask(tab, "slowly")
    tab.wait(f"document.querySelector('{ANSWER}')?.textContent.length > 20")
    tab.reload()
    assert tab.text(ANSWER).startswith("word word word")
    assert tab.text(".turn .asked") == "slowly"


@pytest.mark.parametrize(
    "kept",
    [
        "not JSON",
        "null",
        '{"version": 99, "mode": "chat", "chat": [], "completion": []}',
        '{"version": 1, "mode": "chat", "chat": [{"prompt": 7}], "completion": []}',
        '{"version": 1, "mode": "nothing", "chat": [], "completion": []}',
        '{"version": 1, "mode": "chat", "chat": [null], "completion": {}}',
    ],
)
def test_what_another_version_kept_does_no_harm(tab: Browser, fake: Fake, kept: str) -> None:
    tab.run("localStorage.setItem('jaxvllm.conversations', arguments[0])", kept)
    tab.reload()
    ask(tab, "hello")
    assert wait_for_answer(tab) == TEXT
    assert tab.run("return document.querySelectorAll('.turn').length") == 1
    tab.reload()
    assert tab.text(ANSWER) == TEXT


def test_a_browser_that_keeps_nothing_is_no_obstacle(tab: Browser, fake: Fake) -> None:
    denied = """for (const name of ['localStorage', 'sessionStorage'])
        Object.defineProperty(window, name, { get() { throw new DOMException('denied', 'SecurityError') } })"""
    with tab.before_pages(denied):
        fake.wants_key = True
        tab.reload()
        tab.type("[name=key]", KEY)
        tab.click("#prompt")
        tab.wait("document.querySelector('#model').textContent")
        ask(tab, "hello")
        tab.wait(f"document.querySelector('{ANSWER}')?.textContent.startsWith('Once')")


def test_a_conversation_without_room_in_the_browser_goes_on(tab: Browser, fake: Fake) -> None:
    ask(tab, "one")
    wait_for_answer(tab)
    fill = """for (let size = 1 << 23; size; size >>= 1)
        for (let i = 0; i < 2; i++) try { localStorage.setItem(`${size} ${i}`, 'x'.repeat(size)) } catch { }"""
    tab.run(fill)
    ask(tab, "two")
    assert wait_for_answer(tab) == TEXT
    tab.wait("!document.querySelector('#send').hidden")
    tab.reload()
    assert tab.run("return [...document.querySelectorAll('.asked')].map(asked => asked.textContent)") == ["one"]


# ---- a context that is full ----


def test_a_context_that_is_full_loses_its_oldest_turns(tab: Browser, fake: Fake) -> None:
    for text in ("one", "two", "three", "four"):
        ask(tab, text)
        wait_for_answer(tab)
    fake.context_messages = 4  # nine would be sent; without the older half of the turns five, then three
    ask(tab, "five")
    assert "maximum context length is 512 tokens" in wait_for_answer(tab)
    assert [tab.name_of(".offer button", i) for i in range(2)] == ["Drop the oldest turns, ask again", "Clear"]
    tab.click(".drop-oldest")
    tab.wait("document.querySelectorAll('.turn').length === 2")
    assert wait_for_answer(tab) == TEXT
    assert [message["content"] for message in fake.bodies[-1]["messages"]] == ["four", TEXT, "five"]
    assert tab.run("return document.querySelectorAll('.offer').length") == 0
    tab.reload()
    assert tab.text(".turn .asked") == "four"


def test_a_question_that_alone_is_too_long_offers_to_clear(tab: Browser, fake: Fake) -> None:
    fake.context_messages = 0
    ask(tab, "one")
    wait_for_answer(tab)
    assert tab.run("return document.querySelectorAll('.offer button').length") == 1
    tab.click(".offer .clear")
    assert tab.run("return document.querySelectorAll('.turn').length") == 0


def test_an_answer_that_filled_the_context_says_so(tab: Browser, fake: Fake) -> None:
    ask(tab, "one")
    wait_for_answer(tab)
    fake.prompt_tokens = CONTEXT - 10
    ask(tab, "two")
    wait_for_answer(tab)
    assert tab.text(STATS).endswith("10 out · context full")
    assert "context is full" in tab.text(".turn:last-child .offer")
    fake.prompt_tokens = 9
    tab.click(".drop-oldest")
    tab.wait("document.querySelectorAll('.turn').length === 1")
    wait_for_answer(tab)
    assert [message["content"] for message in fake.bodies[-1]["messages"]] == ["two"]


def test_a_completion_keeps_something_to_go_on_with(tab: Browser, fake: Fake) -> None:
    tab.click("[value=completion] + span")
    ask(tab, "It was ")
    wait_for_answer(tab)
    fake.prompt_tokens = CONTEXT - 10
    tab.press("Enter")
    tab.wait("document.querySelector('.offer')")
    assert tab.run("return [...document.querySelectorAll('.offer button')].map(b => b.textContent)") == ["Clear"]
    tab.press("Enter")
    tab.wait("document.querySelectorAll('.turn').length === 3 && document.querySelectorAll('.offer').length === 2")
    tab.click(".turn:last-child .drop-oldest")
    tab.wait("document.querySelectorAll('.turn').length === 2")
    wait_for_answer(tab)
    assert fake.bodies[-1]["prompt"] == TEXT


# ---- a message's buttons ----


@pytest.mark.parametrize("has_clipboard", [True, False], ids=["https", "http"])
def test_an_answer_and_its_code_are_copied(tab: Browser, fake: Fake, has_clipboard: bool) -> None:
    if not has_clipboard:  # as on a page over plain http from another machine
        tab.run("Object.defineProperty(navigator, 'clipboard', { value: undefined })")
    answer = "So **do** this:\n\n```sh\nls -l\n\tcd ~\n```"
    ask(tab, f"say {answer}")
    wait_for_answer(tab)
    for button, text in [(".copy", answer.replace("\\n", "\n")), (".copy-code", "ls -l\n\tcd ~")]:
        tab.click(button)
        tab.wait(f"document.querySelector('{button}').textContent === 'Copied'")
        tab.clear("#prompt")
        tab.run("document.querySelector('#prompt').focus()")
        tab.press("Control", "v")
        assert tab.run("return document.querySelector('#prompt').value") == text


def test_a_question_is_changed_and_asked_again(tab: Browser, fake: Fake) -> None:
    for text in ("one", "two", "three"):
        ask(tab, text)
        wait_for_answer(tab)
    tab.hover(".turn:nth-child(2) .asked")
    tab.click(".turn:nth-child(2) .edit")
    assert tab.run("return document.activeElement.value") == "two"
    tab.press("Escape")  # as it was
    assert tab.text(".turn:nth-child(2) .asked") == "two"
    tab.click(".turn:nth-child(2) .edit")
    tab.type(".editing textarea", " and a half")
    tab.press("Enter")
    tab.wait("document.querySelectorAll('.turn').length === 2")
    wait_for_answer(tab)
    expected = ["one", TEXT, "two and a half"]
    assert [message["content"] for message in fake.bodies[-1]["messages"]] == expected
    assert tab.text(".turn:last-child .asked") == "two and a half"


def test_a_completions_text_is_changed(tab: Browser, fake: Fake) -> None:
    tab.click("[value=completion] + span")
    ask(tab, "It was ")
    wait_for_answer(tab)
    ask(tab, " And then")
    wait_for_answer(tab)
    tab.click(".turn:last-child .edit")
    tab.type(".editing textarea", " came")
    tab.click(".editing .again")
    tab.wait("document.querySelectorAll('.turn').length === 2 && !document.querySelector('.editing')")
    wait_for_answer(tab)
    assert fake.bodies[-1]["prompt"] == f"It was {TEXT} And then came"


# ---- Markdown ----


MARKDOWN = r"""# A *title* #
A **bold** and *italic*, ***both***, ~~not~~, `co*d*e`, snake_case_name, 2 * 3 * 4 and 5\* _a_
<b>no tag</b> &amp; <img src=x onerror=alert(1)>

- one
- two
  1. inner
     more
  2. next

- three

7) seven
8) eight
> quoted
> > twice

```python
def f(a):
    return "**a**"

# end
```
| a | b |
|---|:-:|
| 1 | `x\|y` |
---
[good](https://example.org/a_(b)?x=1 "Title") <https://example.org/> (see http://example.org/b.)
[bad](javascript:alert(1)) [file](file:///etc/passwd) [path](/docs) ![pic](https://example.org/p.png)
[**loud**](https://example.org/c) and **unclosed"""


def link(address: str, text: str) -> str:
    return f"<a href='{address}' title='{address}' target='_blank' rel='noopener noreferrer'>{text}</a>"


HTML = f"""\
<h3>A <em>title</em></h3>\
<p>A <strong>bold</strong> and <em>italic</em>, <strong><em>both</em></strong>, <del>not</del>, <code>co*d*e</code>, \
snake_case_name, 2 * 3 * 4 and 5* <em>a</em>
&lt;b&gt;no tag&lt;/b&gt; &amp;amp; &lt;img src=x onerror=alert(1)&gt;</p>\
<ul><li><p>one</p></li><li><p>two</p><ol start='1'><li><p>inner
more</p></li><li><p>next</p></li></ol></li><li><p>three</p></li></ul>\
<ol start='7'><li><p>seven</p></li><li><p>eight</p></li></ol>\
<blockquote><p>quoted</p><blockquote><p>twice</p></blockquote></blockquote>\
<div class='code'><div class='bar'>python<button class='copy-code' type='button'>Copy</button></div>\
<pre tabindex='0'><code>def f(a):
    return "**a**"

# end</code></pre></div>\
<div class='table'><table><thead><tr><th style='text-align: left;'>a</th><th style='text-align: center;'>b</th></tr>\
</thead><tbody><tr><td style='text-align: left;'>1</td><td style='text-align: center;'><code>x|y</code></td></tr>\
</tbody></table></div><hr>\
<p>{link("https://example.org/a_(b)?x=1", "good")} {link("https://example.org/", "https://example.org/")} \
(see {link("http://example.org/b", "http://example.org/b")}.)
[bad](javascript:alert(1)) [file](file:///etc/passwd) [path](/docs) {link("https://example.org/p.png", "pic")}
{link("https://example.org/c", "<strong>loud</strong>")} and **unclosed</p>""".replace("'", '"')


def test_answers_are_markdown(tab: Browser, fake: Fake) -> None:
    ask(tab, "say " + MARKDOWN)
    wait_for_answer(tab)
    # Piece by piece, as it came, and all at once, as a reload brings it back.
    assert tab.run("return document.querySelector('.markdown').innerHTML") == HTML
    tab.reload()
    assert tab.run("return document.querySelector('.markdown').innerHTML") == HTML


@pytest.mark.parametrize(
    "text",
    ["*a _b ~~c " * 4000, "> " * 20000, "[a](https://b(" * 4000, "`" * 20000, "- " * 9000, "a** " * 9000, "|-" * 9000]
    + ["~" * 9000 + "`", "~" * 20000 + " x" * 9000, " " * 20000 + "x"],
)
def test_no_answer_keeps_the_page_busy(tab: Browser, fake: Fake, text: str) -> None:
    script = """return import(location.href + 'playground/static/markdown.js').then(({ MarkdownText }) => {
        const start = performance.now();
        new MarkdownText().update(arguments[0]);
        return performance.now() - start;
    })"""
    assert tab.run(script, text) < 2000  # milliseconds: it takes a few, unless the time grows with the text's square


def test_probabilities_and_markdown_take_turns(tab: Browser, fake: Fake) -> None:
    tab.click("[name=probabilities]")
    ask(tab, "say a **bold** text")
    assert wait_for_answer(tab) == "a **bold** text"
    assert tab.run("return document.querySelectorAll('.answer .token').length") > 1
    tab.click("[name=probabilities]")
    assert tab.text(".answer strong") == "bold"
    assert tab.run("return document.querySelectorAll('.answer .token').length") == 0
    tab.click("[name=probabilities]")
    tab.hover(".token:nth-child(2)")
    assert not tab.run("return document.querySelector('#alternatives').hidden")


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
def test_it_runs_on_the_real_server(tab: Browser, server: Server) -> None:
    tab.console()
    tab.open(server.url + "/")
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
    # The slider is all the way up: the text goes on until the story or the context ends.
    tab.clear("[name=max_tokens]")
    tab.type("[name=max_tokens]", "512")
    tab.click("#prompt")
    tab.press("Enter")
    last = "#completion .turn:nth-child(2)"
    tab.wait(f"document.querySelector('{last} .stats')?.textContent && !document.querySelector('.busy')", 60)
    numbers = re.search(r"(\d+) in .* (\d+) out(?: · (.*))?", tab.text(f"{last} .stats"))
    assert numbers is not None
    assert int(numbers[2]) > 20 and numbers[3] in (None, "context full"), numbers[0]
    tab.wait("document.querySelector('#steps-summary').textContent.includes('padding')")
    tab.wait("document.querySelector('#pool-summary').textContent === '0 of 199 pages · 0 running · 0 waiting'")
    assert tab.console() == []


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
