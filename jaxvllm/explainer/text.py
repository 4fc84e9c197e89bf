"""Explanations as text for a terminal: colours where it has them, and the same words where it has none."""

import math
from collections.abc import Iterator, Sequence

from rich.cells import cell_len
from rich.console import Group
from rich.padding import Padding
from rich.text import Text

from jaxvllm.core.explanation import ExplainedStep, Explanation, KVWrite, OutputToken, TokenCandidate
from jaxvllm.explainer.timeline import Column, columns, mark, notes
from jaxvllm.explainer.words import count, listed, milliseconds, padded, percent, positions, spelled

BAR = 20  # characters of a probability of 1
MOST_PROMPT_TOKENS = 200  # told one by one; of a longer prompt the middle is left out
LEAST = 0.001  # the probability of a candidate that is told beside the chosen token
MOST_RUNS = 4  # places of keys and values that are told of a step
TOKEN_WIDTH = 14
PROMPT_WIDTH = 110  # of the lines with the prompt's tokens
_KINDS = {"prefill": ("PREFILL", "bold cyan"), "decode": ("DECODE", "bold green"), "forced": ("FORCED", "bold magenta")}
_ORIGINS = {"sampled": "", "draft": "accepted draft", "forced": "forced by the grammar", "imported": "elsewhere"}
_LEGEND = """\
A step is one run of the model for a batch of requests. Its program was compiled for a bucket, a fixed number of tokens:
padding fills what the batch lacks. A page holds the keys and values of some neighbouring tokens, and the page table
says which page of the pool has which tokens. The place of a position is page * page_size + offset in the page.
Probabilities are the model's, before temperature, top_p and other filters. docs/explain.md explains every word."""


def report(explanations: Sequence[Explanation], texts: Sequence[str]) -> Group:
    """Returns the whole report. `texts` are the completions as their callers get them."""
    parts: list[Text | Padding] = []
    if len(explanations) > 1:
        parts += _timeline(explanations)
    for index, (explanation, text) in enumerate(zip(explanations, texts, strict=True)):
        name = f"[{index}] " if len(explanations) > 1 else ""
        parts += _request(explanation, text, name)
    return Group(*parts, Text(_LEGEND, style="dim"))


# ---- one request ----


def _request(explanation: Explanation, text: str, name: str) -> Iterator[Text | Padding]:
    shown = "".join(token.text or "" for token in explanation.prompt)
    yield Text.assemble((f"{name}REQUEST ", "bold"), (spelled(_cut(shown, 200)), "cyan"))
    yield _fact("prompt", f"{count(len(explanation.prompt), 'token')}, {_found(explanation)}")
    yield from _prompt_tokens(explanation)
    ended = {"stop": "the model ended it", "length": "it reached max_tokens", "abort": "it was aborted"}
    reason = ended.get(explanation.finish_reason or "", str(explanation.finish_reason))
    if explanation.stop_reason is not None:
        reason = f"it met the stop {explanation.stop_reason!r}"
    yield _fact("answer", spelled(_cut(text, 400)), "green")
    yield _fact("", f"{count(len(explanation.tokens), 'token')}; {reason}")
    yield _fact("times", _times(explanation))
    for step in explanation.steps:
        yield Text()
        yield from _step(explanation, step)
    if explanation.num_steps_left_out:
        yield Text(f"\n... and {count(explanation.num_steps_left_out, 'more step')}, which are not kept", style="dim")
    yield Text()


def _found(explanation: Explanation) -> str:
    if not explanation.num_cached_tokens:
        return "none of them in the prefix cache"
    return f"{explanation.num_cached_tokens} of them in the prefix cache"


def _times(explanation: Explanation) -> str:
    told = [
        (explanation.queued_seconds, "in the queue"),
        (explanation.first_token_seconds, "to the first token"),
        (explanation.total_seconds, "in all"),
    ]
    return ", ".join(f"{milliseconds(seconds)} {words}" for seconds, words in told if seconds is not None)


def _prompt_tokens(explanation: Explanation) -> Iterator[Text]:
    """Yields lines that break between tokens."""
    prompt, cached = explanation.prompt, explanation.num_cached_tokens
    half = MOST_PROMPT_TOKENS // 2
    line = Text(" " * 11)
    for position, token in enumerate(prompt):
        if len(prompt) > MOST_PROMPT_TOKENS and half <= position < len(prompt) - half:
            if position == half:
                line.append(f"... {len(prompt) - 2 * half} more ...  ", style="dim")
            continue
        word, number = spelled(token.text), f":{token.token_id}  "
        if cell_len(line.plain) + cell_len(word + number) > PROMPT_WIDTH:
            yield line
            line = Text(" " * 11)
        line.append(word, style="cyan dim" if position < cached else "cyan")
        line.append(number, style="dim")
    yield line


def _step(explanation: Explanation, step: ExplainedStep) -> Iterator[Text | Padding]:
    word, style = _KINDS[step.kind]
    yield Text.assemble(f"step {step.batch.number:<5}", (word, style), "  ", (_what(explanation, step), "bold"))
    yield _fact("batch", _batch(step))
    if (pages := _pages(explanation, step)) is not None:
        yield _fact("pages", pages)
    if step.writes:
        yield _fact("KV", _places(step.writes, explanation.page_size))
    if step.num_allowed is not None:
        yield _fact("mask", f"the grammar allows {step.num_allowed} of {explanation.vocab_size} tokens")
    if step.num_refused:
        yield _fact("grammar", f"refuses {count(step.num_refused, 'token')} that came without a mask")
    if step.num_drafted:
        yield _fact("drafts", f"{step.num_drafted} guessed, {step.num_accepted} accepted")
    yield from _tokens(explanation, step)


def _what(explanation: Explanation, step: ExplainedStep) -> str:
    span = positions(step.start, step.query_length)
    if step.is_dropped and step.writes:
        return f"its token is ignored, since the grammar forces what comes there; its keys and values stay, {span}"
    if step.is_dropped:
        return "computed for nothing: its row was preempted, or sent back to an earlier token, meanwhile"
    if step.kind == "prefill":
        whole = step.admitted is not None and step.num_tokens
        known = len(explanation.prompt) if step.start + step.query_length <= len(explanation.prompt) else 0
        of = "tokens, the prompt and what came before a preemption" if not known else f"of {known} tokens of the prompt"
        part = "the whole prompt" if whole and step.query_length == known else f"{step.query_length} {of}"
        return f"{part}, {span}; the last query sees {count(step.kv_length, 'token')}"
    if step.kind == "forced":
        came = explanation.tokens[step.first_output : step.first_output + step.num_tokens]
        num_forced = sum(token.origin == "forced" for token in came)
        if not num_forced:
            return f"the last token again, {span}, since the grammar refused what came after it"
        return f"{count(num_forced, 'token')} that the grammar leaves no choice about, computed at once, {span}"
    if len(step.decodes) == 1:
        return f"the query is the token at {span}; it sees {count(step.decodes[0].kv_length, 'token')}"
    first, last = step.decodes[0], step.decodes[-1]
    seen = f"{first.kv_length} to {last.kv_length} tokens"
    return f"{len(step.decodes)} decode steps in one program, {span}; they see {seen}"


def _batch(step: ExplainedStep) -> str:
    batch = step.batch
    chunks = batch.num_rows - batch.num_decode_rows
    kinds = [(batch.num_decode_rows, "decode"), (chunks, "chunk" if chunks == 1 else "chunks")]
    rows = [f"{number} {kind}" for number, kind in kinds if number]
    padding = f"{batch.num_padding} padding" if batch.num_padding else "no padding"
    times = f"planned in {milliseconds(batch.host_seconds)}, computed in {milliseconds(batch.device_seconds)}"
    return (
        f"{count(batch.num_rows, 'row')} ({', '.join(rows)}): {count(batch.num_tokens, 'token')} in a bucket of "
        f"{batch.bucket_tokens} ({padding}); {times}"
    )


def _pages(explanation: Explanation, step: ExplainedStep) -> str | None:
    of = "" if explanation.num_groups == 1 else f" (of the first of {explanation.num_groups} groups of layers)"
    if step.admitted is not None:
        cached, pages = step.admitted.num_cached_tokens // explanation.page_size, step.admitted.pages
        parts = [f"{listed(pages[:cached])} from the prefix cache"] if cached else []
        parts += [f"{listed(pages[cached:])} new"] if step.new_pages else []
        again = f"after preemption {step.admitted.num_preemptions}, " if step.admitted.num_preemptions else ""
        return f"{again}slot {step.slot} gets a page table{of}: page {' and page '.join(parts)}"
    if step.new_pages:
        return f"opens page {listed(step.new_pages)} as column {step.first_column} of its table{of}"
    return None


def _places(writes: Sequence[KVWrite], page_size: int) -> str:
    told = []
    for write in writes[:MOST_RUNS]:
        last = write.first_place + write.num_tokens - 1
        first_page, last_page = write.first_place // page_size, last // page_size
        pages = positions(first_page, last_page - first_page + 1, "page")
        told.append(
            f"{positions(write.first_position, write.num_tokens)} -> "
            f"{positions(write.first_place, write.num_tokens, 'place')} ({pages})"
        )
    if len(writes) > MOST_RUNS:
        told.append(f"and {len(writes) - MOST_RUNS} more runs")
    return "; ".join(told)


def _tokens(explanation: Explanation, step: ExplainedStep) -> Iterator[Text | Padding]:
    tokens = explanation.tokens[step.first_output : step.first_output + step.num_tokens]
    if not tokens:
        if step.num_tokens:
            yield _fact("tokens", "none that is told: they are after a stop string, or the prompt is only scored")
        return
    if len(tokens) == 1 and len(tokens[0].candidates) > 1:
        yield _fact("token", f"{step.first_output}{_by(tokens[0])}")
        chosen, *others = tokens[0].candidates
        shown = [chosen, *(other for other in others if math.exp(other.logprob) >= LEAST)]
        for candidate in sorted(shown, key=lambda one: -one.logprob):
            yield _candidate(candidate, is_chosen=candidate is chosen)
        return
    for index, token in enumerate(tokens, step.first_output):
        yield _token(index, token)


def _by(token: OutputToken) -> str:
    return f", {_ORIGINS[token.origin]}" if _ORIGINS[token.origin] else ""


def _candidate(candidate: TokenCandidate, is_chosen: bool) -> Text:
    style = "bold green" if is_chosen else "dim"
    sign = "> " if is_chosen else "  "
    share = math.exp(candidate.logprob)
    bar = "#" * round(BAR * share)
    return Text.assemble(
        f"{'':9}{sign}",
        (padded(spelled(candidate.text), TOKEN_WIDTH) + f"{percent(candidate.logprob):>7}  ", style),
        (bar, "green" if is_chosen else "dim"),
    )


def _token(index: int, token: OutputToken) -> Text:
    line = Text(f"{'':11}{index:>4}  ")
    line.append(padded(spelled(token.text), TOKEN_WIDTH), style="bold green")
    if token.candidates:
        chosen, *others = token.candidates
        line.append(f"{percent(chosen.logprob):>7}")
        likely = [other for other in others[:3] if math.exp(other.logprob) >= LEAST]
        near = ", ".join(f"{spelled(other.text)} {percent(other.logprob)}" for other in likely)
        line.append(f"   else {near}" if near else "", style="dim")
    line.append(_by(token).replace(", ", "   ", 1), style="magenta")
    return line


# ---- several requests ----


def _timeline(explanations: Sequence[Explanation], width: int = 16) -> Iterator[Text | Padding]:
    yield Text("THE BATCH AT WORK", style="bold")
    yield Text(
        "  Pn: a chunk of n prompt tokens; n: so many new tokens, ndm: of which m were drafts;\n"
        "  Fn: n tokens that a grammar forced; x: ignored; .: waits",
        style="dim",
    )
    found = columns(explanations)
    for first in range(0, len(found), width):
        yield Text()
        yield from _block(explanations, found[first : first + width], found)
    yield Text()
    yield from (Text(f"  {note}") for note in notes(explanations))
    yield Text()


def _block(explanations: Sequence[Explanation], shown: Sequence[Column], found: Sequence[Column]) -> Iterator[Text]:
    has_replicas = len({column.batch.replica for column in found}) > 1
    heads = [f"{c.batch.replica}:{c.batch.number}" if has_replicas else str(c.batch.number) for c in shown]
    yield Text(f"  {'step':22}" + "".join(f"{head:>6}" for head in heads), style="dim")
    for index, explanation in enumerate(explanations):
        own = [place for place, column in enumerate(found) if index in column.steps]
        at = found.index(shown[0])
        line = Text("  " + padded(f"[{index}] " + spelled(_cut(_prompt(explanation), 12)), 22))
        for place, column in enumerate(shown, at):
            step = column.steps.get(index)
            if step is not None:
                line.append(f"{mark(step):>6}", style=_KINDS[step.kind][1])
            else:
                is_here = not has_replicas or column.batch.replica == _replica(explanation)
                waits = bool(own) and place < own[-1] and is_here
                line.append(f"{'.' if waits else '':>6}", style="dim")
        yield line
    for name, values in (
        ("tokens", [column.batch.num_tokens for column in shown]),
        ("bucket", [column.batch.bucket_tokens for column in shown]),
    ):
        yield Text(f"  {name:22}" + "".join(f"{value:>6}" for value in values), style="dim")


def _replica(explanation: Explanation) -> int:
    return explanation.steps[0].batch.replica


def _prompt(explanation: Explanation) -> str:
    return "".join(token.text or "" for token in explanation.prompt)


# ---- words ----


def _fact(name: str, text: str, style: str = "") -> Padding:
    return Padding(Text.assemble((padded(name, 9), "dim"), (text, style), overflow="fold"), (0, 0, 0, 2), expand=False)


def _cut(text: str, length: int) -> str:
    return text if len(text) <= length else text[:length] + "..."
