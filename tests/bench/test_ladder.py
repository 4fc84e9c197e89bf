"""The figures, the table and the picture of `jaxvllm bench ladder`, without an engine."""

import json
import re
from collections.abc import Sequence
from dataclasses import fields, replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from jaxvllm.bench.ladder import measure, plot, report
from jaxvllm.bench.ladder.figures import (
    FIGURES,
    GAP,
    TOKENS_PER_SECOND,
    WASTED,
    Figure,
    MeasuredRung,
    Verdict,
)
from jaxvllm.bench.ladder.measure import DifferentTokens, Ladder, LadderOptions, check_tokens
from jaxvllm.bench.ladder.run import KVUse, RungRun, TimedAnswer, unused_share
from jaxvllm.bench.ladder.rung import RUNGS, Rung, Sizes, chosen_rungs
from jaxvllm.bench.ladder.workload import Chat, TimedChats
from jaxvllm.cli.bench import main
from jaxvllm.config import EngineConfig
from jaxvllm.core.page_groups import FullGroup
from jaxvllm.core.page_pool import PagePool
from jaxvllm.model_name import resolve
from jaxvllm.text.tokenizer import Tokenizer
from tests.commands import exit_code_of

SIZE = 4  # tokens of a page
OPTIONS = LadderOptions(requests=2, rounds=3)


def run(seconds: float = 1.0, tokens: Sequence[int] = (5, 6, 7), wasted: float | None = 0.5, calls: int = 9) -> RungRun:
    """Two answers that take `seconds`, of which the second comes a tenth of that later."""
    times = tuple(np.linspace(0.2, 1.0, len(tokens)) * seconds)
    first = TimedAnswer(0.0, tuple(tokens), times)
    return RungRun((first, TimedAnswer(0.1 * seconds, tuple(tokens), times)), calls, calls, wasted, 2)


def measured(rung: Rung, *seconds: float, wasted: float | None = 0.5) -> MeasuredRung:
    return MeasuredRung(rung, tuple(run(one, wasted=wasted) for one in seconds))


def ladder() -> Ladder:
    """All rungs: each takes three quarters of the time of the one below, but one takes longer, and one the same."""
    seconds = [80.0, 10.0, 7.5, 5.6, 5.6, 4.2, 3.2, 2.4, 1.8, 1.35, 3.0]
    wasted = [None, 0.7, 0.7, *[0.03] * 8]
    rungs = tuple(
        measured(rung, one, one * 1.01, one * 1.02, wasted=share)
        for rung, one, share in zip(RUNGS, seconds, wasted, strict=True)
    )
    return Ladder(OPTIONS, "a machine", 300, 6, rungs, 4.0, 60.0)


def shared_group(rng: np.random.Generator) -> tuple[FullGroup, np.ndarray]:
    """Slots that share full pages, and the computed tokens of each."""
    group, num_computed = FullGroup(PagePool(200, SIZE), 6, 12), np.zeros(6, np.int32)
    pages = list[int]()
    for slot in rng.permutation(6)[: rng.integers(7)]:
        # A prefix of the pages of the slot before it, which are full, and pages of its own.
        shared = pages[: rng.integers(len(pages) + 1)]
        num_tokens = int(rng.integers(len(shared) * SIZE + 1, 12 * SIZE + 1))
        group.take(int(slot), shared, len(shared), num_tokens)
        num_computed[slot] = rng.integers(len(shared) * SIZE, num_tokens + 1)
        pages = group.pages(int(slot)).tolist()[: num_computed[slot] // SIZE]
    return group, num_computed


def test_waste_is_what_counting_each_place_finds() -> None:
    rng = np.random.default_rng(0)
    seen = set[float]()
    for _ in range(200):
        group, num_computed = shared_group(rng)
        places, filled = set[tuple[int, int]](), set[tuple[int, int]]()
        for slot in range(6):
            for column, page in enumerate(group.pages(slot).tolist()):
                for place in range(SIZE):
                    places.add((page, place))
                    if column * SIZE + place < num_computed[slot]:
                        filled.add((page, place))
        expected = 1 - len(filled) / len(places) if places else 0.0
        assert unused_share(group, num_computed) == pytest.approx(expected)
        seen.add(expected)
    assert len(seen) > 50


def test_a_ladder_without_looks_wastes_nothing() -> None:
    assert KVUse().wasted == 0.0


def test_each_rung_adds_one_idea() -> None:
    """What differs between the engines of neighbours. Buckets follow from the budget."""
    expected = [
        set(),
        {"scheduler"},
        {"scheduler"},
        {"scheduler"},
        {"scheduler", "max_num_batched_tokens", "token_buckets"},
        {"async_scheduling"},
        {"enable_prefix_caching"},
        {"max_decode_burst"},
        {"speculation", "speculative_config"},
        set(),
    ]
    configs = [Sizes().config(rung) for rung in RUNGS]
    names = [field.name for field in fields(EngineConfig)]
    for (below, above), wanted in zip(pairwise(configs), expected, strict=True):
        assert {name for name in names if getattr(below, name) != getattr(above, name)} == wanted
    assert [rung.way for rung in RUNGS].count(RUNGS[1].way) == len(RUNGS) - 2
    assert len({rung.name for rung in RUNGS}) == len(RUNGS)


def test_rungs_are_chosen_by_name_and_keep_their_order() -> None:
    assert chosen_rungs(()) == RUNGS
    assert [rung.name for rung in chosen_rungs(["v1", "static"])] == ["static", "v1"]
    with pytest.raises(ValueError, match="--rungs takes no-cache,static,.*, not 'V1'"):
        chosen_rungs(["V1"])


def test_figures_of_a_run() -> None:
    one = RungRun((TimedAnswer(0.0, (1, 2, 3), (1.0, 1.0, 2.0)), TimedAnswer(0.5, (4,), (4.0,))), 7, 9, 0.25, 2)
    assert [figure.of(one) for figure in FIGURES[:3]] == [1.0, (1.0 + 3.5) / 2, 0.5]
    assert one.gaps == [0.0, 1.0] and one.seconds == 4.0
    assert [figure.of(one) for figure in FIGURES[-2:]] == [0.25, 7.0]
    alone = RungRun((TimedAnswer(0.0, (1,), (1.0,)),), 1, 1, None, 1)
    assert [figure.of(alone) for figure in FIGURES] == [1.0, 1.0, 0.0, 0.0, None, 1.0]


@pytest.mark.parametrize(
    ("below", "above", "figure", "text", "verdict"),
    [
        ((1.0, 1.1, 1.2), (0.5, 0.55, 0.6), TOKENS_PER_SECOND, "×2.0", Verdict.BETTER),
        ((1.0, 1.1, 1.2), (0.5, 0.55, 0.6), GAP, "÷2.0", Verdict.BETTER),
        ((1.0, 1.1, 1.2), (15.0, 16.5, 18.0), GAP, "×15", Verdict.WORSE),
        ((1.0, 1.1, 1.2), (0.5, 0.55, 1.0), GAP, "≈", Verdict.SAME),  # one run is like those below
        ((1.0, 1.0, 1.0), (1.05, 1.05, 1.05), GAP, "≈", Verdict.SAME),  # less than a tenth
        ((1.0, 1.1, 1.2, 9.0), (0.1, 0.5, 0.55, 1.1), GAP, "÷2.2", Verdict.BETTER),  # extremes do not count
    ],
)
def test_a_change_is_told_from_noise(
    below: Sequence[float], above: Sequence[float], figure: Figure, text: str, verdict: Verdict
) -> None:
    change = measured(RUNGS[2], *above).change(measured(RUNGS[1], *below), figure)
    assert change is not None
    assert (change.text, change.verdict) == (text, verdict)


def test_small_shares_are_alike() -> None:
    few, more = measured(RUNGS[4], 1.0, wasted=0.03), measured(RUNGS[5], 1.0, wasted=0.06)
    assert (change := more.change(few, WASTED)) is not None and change.verdict is Verdict.SAME
    assert few.change(measured(RUNGS[0], 1.0, wasted=None), WASTED) is None


@pytest.mark.parametrize(
    ("value", "text"),
    [(0.0123, "12.3 ms"), (0.123, "123 ms"), (1.23, "1.2 s"), (None, "-")],
)
def test_times_are_read_at_a_glance(value: float | None, text: str) -> None:
    assert GAP.text(value) == text


def test_other_tokens_are_an_error() -> None:
    check_tokens("static", run(), "paged", run(2.0))
    with pytest.raises(DifferentTokens, match=r"rung paged gives request 0 other .* static, from output token 1 on"):
        check_tokens("static", run(), "paged", run(tokens=(5, 8, 7)))
    with pytest.raises(DifferentTokens, match="from output token 2 on"):
        check_tokens("static", run(), "paged", run(tokens=(5, 6)))


def test_bars_beyond_the_others_are_cut() -> None:
    assert plot.bar_limit([1.0, 2.0, 5.0]) == 5.0
    assert plot.bar_limit([1.0, 2.0, 50.0]) == 2.5
    assert plot.bar_limit([0.0]) == plot.bar_limit([]) == 1.0


@pytest.fixture
def shown(monkeypatch: pytest.MonkeyPatch) -> Ladder:
    """What the command measures."""
    monkeypatch.setattr(measure, "measure_ladder", lambda *_: ladder())
    return ladder()


def test_the_command_tells_draws_and_writes(shown: Ladder, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    picture, file = tmp_path / "ladder.png", tmp_path / "ladder.json"
    assert main(["ladder", "--output", str(picture), "--json", str(file)]) == 0
    out = capsys.readouterr().out
    for rung in RUNGS:
        assert rung.idea in out and f"\n{rung.name} " in out
    assert "speculation  not clearly faster" not in out and RUNGS[4].limits in out and RUNGS[10].limits in out
    assert picture.read_bytes().startswith(b"\x89PNG") and picture.stat().st_size > 50_000
    result = json.loads(file.read_text())
    assert [one["name"] for one in result["rungs"]] == [rung.name for rung in RUNGS]
    assert {"date", "command", "device", "versions"} <= set(result)
    for one, of_rung in zip(result["rungs"], shown.rungs, strict=True):
        assert one["tokens_per_second"] == of_rung.value(TOKENS_PER_SECOND) and len(one["runs"]) == 3
    assert result["rungs"][0]["wasted_kv"] is None and result["identical_tokens"] is True


def test_texts_of_the_picture_do_not_meet(shown: Ladder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every text of the picture has a box of its own, whatever the figures are."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure as Canvas

    saved: list[Canvas] = []
    monkeypatch.setattr(Canvas, "savefig", lambda self, *_, **__: saved.append(self))
    plot.draw_ladder(shown, tmp_path / "ladder.png")
    [canvas] = saved
    renderer = FigureCanvasAgg(canvas).get_renderer()
    texts = [text for text in (*canvas.texts, *(t for axes in canvas.axes for t in axes.texts)) if text.get_text()]
    boxes = [text.get_window_extent(renderer) for text in texts]
    assert len(texts) > 150
    for index, (text, box) in enumerate(zip(texts, boxes, strict=True)):
        assert canvas.bbox.x0 <= box.x0 and box.x1 <= canvas.bbox.x1 and canvas.bbox.y0 <= box.y0, text
        for other, beside in zip(texts[:index], boxes[:index], strict=True):
            assert not box.overlaps(beside), f"{text.get_text()!r} meets {other.get_text()!r}"


def test_other_tokens_fail_the_command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def differs(*_: object) -> Ladder:
        raise DifferentTokens("rung paged gives request 0 other tokens")

    monkeypatch.setattr(measure, "measure_ladder", differs)
    assert main(["ladder"]) == 1
    captured = capsys.readouterr()
    assert captured.err == "jaxvllm bench: rung paged gives request 0 other tokens\n" and not captured.out


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--requests", "0"], "--requests: must be an integer from 1 to 10000000, not 0"),
        (["--rounds", "0"], "--rounds: must be an integer from 1 to 10000000, not 0"),
        (["--arrivals", "-1"], "--arrivals: must be a number from 0 to 3600, not -1"),
        (["--arrivals", "nan"], "--arrivals: must be a number from 0 to 3600, not nan"),
        (["--seed", "-1"], "--seed: must be an integer from 0 to 9223372036854775807, not -1"),
        (["--rungs", "static,slots"], "not 'slots'"),
        (["--output", "/no/such/place/x.png"], "must be a .png file in a directory that exists"),
        (["--output", "ladder.txt"], "must be a .png file"),
        (["--json", "/no/such/place/x.json"], "must be in a directory that exists"),
    ],
)
def test_a_mistake_is_one_line(argv: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert exit_code_of(main, ["ladder", *argv]) == 2
    err = capsys.readouterr().err
    assert err.startswith("jaxvllm bench") and message in err and err.count("\n") == 1


def test_a_missing_matplotlib_is_told_before_the_measurement(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr(plot, "find_spec", lambda _: None)
    assert main(["ladder", "--output", str(tmp_path / "x.png")]) == 2
    assert re.search("pip install .*matplotlib>=", capsys.readouterr().err)


def test_a_table_of_few_rungs_compares_those() -> None:
    some = replace(ladder(), rungs=ladder().rungs[1:4:2])
    [static, paged] = [line.split() for line in report.lines(some) if line.startswith(("static ", "paged "))][:2]
    assert static[0] == "static" and "×" not in "".join(static)
    assert paged[2] == "×1.8"  # beside static


def test_workloads_are_drawn_alike_and_arrive_in_order() -> None:
    tokenizer = Tokenizer.from_directory(resolve("demo"))
    drawn = TimedChats.draw(tokenizer, 24, seed=3, seconds=0.6)
    assert drawn == TimedChats.draw(tokenizer, 24, seed=3, seconds=0.6) != TimedChats.draw(tokenizer, 24, 4, 0.6)
    prompts = [chat.prompt_token_ids for chat in drawn.chats]
    assert len({prompt[:128] for prompt in prompts}) == 1, "they begin with one system prompt"
    assert len({prompt[128:] for prompt in prompts}) > 12
    assert sum(len(prompt) > 500 for prompt in prompts) == 3 and max(map(len, prompts)) < 800
    assert [chat.arrival for chat in drawn.chats] == pytest.approx([0.0] * 12 + [0.05 * n for n in range(1, 13)])
    with pytest.raises(ValueError, match="at least one request"):
        TimedChats(())
    with pytest.raises(ValueError, match="in the order of their arrival"):
        TimedChats((Chat(1.0, (1,), 0), Chat(0.5, (1,), 0)))
