"""What the suffix proposer guesses is what a table of Python's finds, whatever became of the slots meanwhile."""

from dataclasses import dataclass, field
from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxvllm.core.step_plan import Fork
from jaxvllm.runtime.forks import fork_slots, pack_forks
from jaxvllm.runtime.proposers.suffix import SuffixProposer
from jaxvllm.runtime.slot_fields import HISTORY, LENGTH, DeviceState, SlotSizes
from jaxvllm.runtime.state import RECALL_WORDS, new_state, recall, state_bytes
from jaxvllm.runtime.step_model import append
from jaxvllm.runtime.suffix_index import INDEX, MOST_ENTRIES, NGRAMS, _hashes, record

pytestmark = pytest.mark.usefixtures("quick_programs")

SIZES = SlotSizes(num_slots=5, max_pages=6, page_size=8, vocab_size=6, windows=(None,), has_index=True)
WIDTH = SIZES.max_tokens
CHUNK = 7  # tokens that one call records

store = jax.jit(record)
grow = jax.jit(append)
hashes_of = jax.jit(_hashes, static_argnums=1)


@partial(jax.jit, static_argnames=["proposer", "num_drafts"])
def propose(
    state: DeviceState, slots: jax.Array, lengths: jax.Array, proposer: SuffixProposer, num_drafts: int
) -> tuple[jax.Array, jax.Array]:
    drafts = proposer.look(state, slots, lengths, num_drafts)
    return drafts.tokens, drafts.counts


@cache
def _hash(tokens: tuple[int, ...], num_entries: int) -> int:
    padded = np.zeros((1, max(NGRAMS)), np.int32)
    padded[0, : len(tokens)] = tokens[::-1]
    return int(hashes_of(padded, num_entries)[0, NGRAMS.index(len(tokens))])


@dataclass
class Oracle:
    """The same in plain Python. All that it shares is which n-grams collide."""

    num_entries: int
    history: np.ndarray = field(default_factory=lambda: np.zeros((SIZES.num_slots + 1, WIDTH), np.int32))
    lengths: np.ndarray = field(default_factory=lambda: np.zeros(SIZES.num_slots + 1, np.int32))
    table: dict[int, tuple[int, int]] = field(default_factory=dict)

    def hash(self, tokens: list[int]) -> int:
        return _hash(tuple(tokens), self.num_entries)

    def store(self, slots: list[int], positions: list[int], tokens: list[int]) -> None:
        """Enters all of them at once: of two with the same hash the last slot and position stays."""
        for slot, position, token in zip(slots, positions, tokens, strict=True):
            self.history[slot, position] = token
        for slot, position in sorted(zip(slots, positions, strict=True)):
            for count in NGRAMS:
                if position >= count:
                    before = self.history[slot, position - count : position].tolist()
                    self.table[self.hash(before)] = (slot, position)

    def guess(self, slot: int, length: int, proposer: SuffixProposer, num_drafts: int) -> list[int]:
        row, best, guessed = self.history[slot, :length].tolist(), (0, 0), []
        for count in NGRAMS:
            if length < count or (place := self.table.get(self.hash(row[length - count :]))) is None:
                continue
            there, position = place
            text, same = self.history[there].tolist(), 0
            while same < min(proposer.deepest, position, length) and text[position - 1 - same] == row[-1 - same]:
                same += 1
            if there == slot and position < length:
                loop = row[position:]
                behind = (loop * num_drafts)[:num_drafts]
            else:
                behind = text[position : self.lengths[there] if position <= self.lengths[there] else None]
            drafts = behind[: min(num_drafts, int(proposer.factor * same))]
            if drafts and (same, len(drafts)) > best:
                best, guessed = (same, len(drafts)), drafts
        return guessed


@pytest.mark.parametrize("num_entries", [8, 2**16])
@pytest.mark.parametrize("proposer", [SuffixProposer(24, 1.0), SuffixProposer(3, 2.5)], ids=repr)
def test_guesses_what_followed_most_of_the_same_tokens(proposer: SuffixProposer, num_entries: int) -> None:
    """Tenants come and go, their tokens come in pieces, and guesses that were wrong stay behind them."""
    random = np.random.default_rng(num_entries + proposer.deepest)
    oracle, state = Oracle(num_entries), new_state(SIZES) | {INDEX: jnp.zeros(num_entries, jnp.int32)}
    loops = [random.integers(0, 3, 30) for _ in range(3)]
    num_guesses, num_drafts = 0, 5
    for _ in range(200):
        slots, positions, tokens = [], [], []
        for slot in random.permutation(SIZES.num_slots)[:2]:
            if oracle.lengths[slot] + CHUNK > WIDTH or random.random() < 0.1:
                oracle.lengths[slot] = 0  # the next tenant
            start, count = int(oracle.lengths[slot]), int(random.integers(0, CHUNK + 1))
            text = loops[random.integers(3)]
            at = random.integers(len(text) - CHUNK) if random.random() < 0.4 else start % (len(text) - CHUNK)
            slots += [slot] * count + [SIZES.num_slots + 1] * (CHUNK - count)  # past all
            positions += range(start, start + CHUNK)
            tokens += text[at : at + CHUNK].tolist()
            oracle.lengths[slot] = start + count
        kept = [index for index, slot in enumerate(slots) if slot <= SIZES.num_slots]
        oracle.store(*([x[index] for index in kept] for x in (slots, positions, tokens)))
        state = store(state, *(np.array(x, np.int32) for x in (slots, positions, tokens)))
        wrong = int(random.integers(SIZES.num_slots))
        behind = slice(oracle.lengths[wrong], oracle.lengths[wrong] + num_drafts)
        oracle.history[wrong, behind] = 2
        state |= {HISTORY.name: jnp.array(oracle.history), LENGTH.name: jnp.array(oracle.lengths)}
        asked = np.array([SIZES.num_slots, *range(SIZES.num_slots)], np.int32)
        tokens_of, counts = propose(state, asked, oracle.lengths[asked], proposer, num_drafts)
        got = [list(map(int, row[:count])) for row, count in zip(tokens_of, counts, strict=True)]
        assert got == [oracle.guess(int(s), int(oracle.lengths[s]), proposer, num_drafts) for s in asked]
        num_guesses += sum(map(len, got))
    assert num_guesses > 500


def histories(*texts: list[int]) -> DeviceState:
    """The state after rows that had these tokens one after the other, in slots 0, 1 ..."""
    state = new_state(SIZES)
    positions = np.arange(16, dtype=np.int32)
    for slot, text in enumerate(texts):
        slots = np.where(positions < len(text), slot, SIZES.num_slots + 1)  # past all
        state = store(state, slots, positions, np.array([*text, *[0] * (16 - len(text))], np.int32))
    lengths = [len(text) for text in texts] + [0] * (SIZES.num_slots + 1 - len(texts))
    return state | {LENGTH.name: jnp.array(lengths, jnp.int32)}


def guesses(state: DeviceState, slot: int, proposer: SuffixProposer, num_drafts: int = 4) -> list[int]:
    tokens, counts = propose(state, np.array([slot]), state[LENGTH.name][slot][None], proposer, num_drafts)
    return list(map(int, tokens[0, : int(counts[0])]))


LONG = [9, 8, 7, 6, 5, 4, 3, 2, 1, 0]


def test_a_row_goes_on_as_another_slot_did() -> None:
    state = histories(LONG, [9, 8, 7, 6])
    assert guesses(state, 1, SuffixProposer(24, 1.0)) == [5, 4, 3, 2]
    assert guesses(state, 1, SuffixProposer(24, 0.5)) == [5, 4], "half as many as are the same"
    assert guesses(state, 1, SuffixProposer(24, 0.0)) == []
    assert guesses(state, 1, SuffixProposer(2, 1.5)) == [5, 4, 3], "no more than two are compared"
    assert guesses(state, 1, SuffixProposer(24, 9.0), num_drafts=15) == [5, 4, 3, 2, 1, 0], "no more are known"
    assert guesses(state, 0, SuffixProposer(24, 1.0)) == []


def test_more_tokens_that_are_the_same_count_more_than_a_newer_place() -> None:
    texts = LONG, [1, 1, 7, 6, 0, 0]
    assert guesses(histories(*texts, [9, 8, 7, 6]), 2, SuffixProposer(24, 1.0)) == [5, 4, 3, 2]
    assert guesses(histories(*texts, [8, 7, 6]), 2, SuffixProposer(24, 1.0)) == [0, 0], "no three are looked for"


def test_a_loop_at_the_end_of_a_row_goes_on() -> None:
    assert guesses(histories([7, 4, 5, 4, 5, 4, 5]), 0, SuffixProposer(24, 1.0)) == [4, 5, 4, 5]
    state = histories([7, 4, 5, 4, 5, 4, 5], [7, 4, 5, 4, 5])
    assert guesses(state, 1, SuffixProposer(24, 9.0), num_drafts=5)[:2] == [4, 5]


def test_what_an_earlier_tenant_left_behind_is_still_known() -> None:
    state = histories(LONG, [6, 5, 4])
    state |= {LENGTH.name: state[LENGTH.name].at[0].set(3)}  # another tenant, who said the same so far
    assert guesses(state, 1, SuffixProposer(24, 9.0), 5) == [3, 2, 1, 0, 0], "the end of that tenant is not known"
    state |= {LENGTH.name: state[LENGTH.name].at[0].set(6)}
    assert guesses(state, 1, SuffixProposer(24, 9.0), 5) == [], "but where the tenant of the slot ends, it ends"


def test_an_entry_whose_tokens_are_others_now_is_ignored() -> None:
    state = histories(LONG, [9, 8, 7, 6])
    state |= {HISTORY.name: state[HISTORY.name].at[0, :9].set(-1)}
    assert guesses(state, 1, SuffixProposer(24, 1.0)) == []


def test_everything_that_has_tokens_enters_them() -> None:
    """Sampled ones and those of cached prefixes. A fork leaves the index alone."""
    state, slots = new_state(SIZES), jnp.array([1, SIZES.num_slots, 2])
    for first in range(0, len(LONG), 2):
        tokens = jnp.asarray([LONG[first : first + 3] + [0] * (3 - len(LONG[first : first + 3]))] * 3, jnp.int32)
        state = grow(state, slots, jnp.array([first] * 3), tokens, jnp.array([2, 0, 0]), jnp.zeros(3, jnp.bool_))
    assert state[HISTORY.name][1, : len(LONG)].tolist() == LONG and not state[HISTORY.name][2:].any()
    np.testing.assert_array_equal(state[INDEX], histories([], LONG)[INDEX])

    packed = np.zeros(RECALL_WORDS, np.int32)
    packed[:3], packed[3 : 3 + len(LONG)] = (1, 0, len(LONG)), LONG
    np.testing.assert_array_equal(recall(new_state(SIZES), jnp.asarray(packed))[INDEX], state[INDEX])

    state |= {INDEX: jnp.arange(len(state[INDEX]))}
    _, forked = fork_slots((), state, jnp.asarray(pack_forks([Fork(1, 0, 3, (None,))], SIZES)), SIZES)
    np.testing.assert_array_equal(forked[INDEX], state[INDEX])
    assert forked[HISTORY.name][0, : len(LONG)].tolist() == [*LONG[:-1], 3]


def test_ngrams_rarely_share_an_entry() -> None:
    """4,096 of each length, of few different tokens, over 64 times as many entries."""
    tokens = np.random.default_rng(0).integers(0, 5, (4096, max(NGRAMS))).astype(np.int32)
    hashes = np.asarray(hashes_of(tokens, 2**18))
    for number, count in enumerate(NGRAMS):
        num_ngrams = len(np.unique(tokens[:, :count], axis=0))
        assert len(np.unique(hashes[:, number])) > 0.97 * num_ngrams
    assert np.unique(hashes_of(tokens, 64)).tolist() == list(range(64))


def test_the_index_is_part_of_the_state_and_its_bytes() -> None:
    without = SlotSizes(5, 6, 8, 6, (None,))
    assert INDEX not in new_state(without)
    entries = len(new_state(SIZES)[INDEX])
    assert entries & (entries - 1) == 0 and entries / 2 < len(NGRAMS) * SIZES.num_slots * WIDTH <= entries
    assert state_bytes(SIZES) - state_bytes(without) == 4 * entries
    large = SlotSizes(256, 2048, 16, 1, (None,), has_index=True)
    assert jax.eval_shape(partial(new_state, large))[INDEX].shape == (MOST_ENTRIES,)
