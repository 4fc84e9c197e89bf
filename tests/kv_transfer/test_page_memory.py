"""The memory of pages forgets the one that was used longest ago first, and none that is held."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxvllm.kv_transfer.page_format import Page, PageFormat
from jaxvllm.kv_transfer.page_memory import PageMemory
from tests.kv_transfer.conftest import some_page


def name(number: int) -> bytes:
    return bytes([number])


def test_the_oldest_goes_first_and_use_makes_young(form: PageFormat) -> None:
    pages = [some_page(form, number) for number in range(4)]
    memory = PageMemory(3 * pages[0].nbytes)
    for number in range(3):
        memory.put(name(number), pages[number])
    assert memory.get(name(0)) is pages[0]
    memory.put(name(3), pages[3])
    assert [number for number in range(4) if name(number) in memory] == [0, 2, 3]
    assert memory.count([name(2), name(3), name(1), name(0)]) == 2


def test_what_is_held_stays_beyond_the_limit(form: PageFormat) -> None:
    pages = [some_page(form, number) for number in range(3)]
    memory = PageMemory(pages[0].nbytes)
    memory.hold([name(0), name(1)])
    for number in range(3):
        memory.put(name(number), pages[number])
    assert name(0) in memory and name(1) in memory and memory.is_full
    memory.let_go([name(0), name(1)])
    assert len(memory) == 1 and not memory.is_full


def test_all_is_forgotten_and_what_is_held_may_come_again(form: PageFormat) -> None:
    page = some_page(form, 0)
    memory = PageMemory(page.nbytes)
    memory.hold([name(0)])
    memory.put(name(0), page)
    memory.clear()
    assert (len(memory), memory.num_bytes, memory.get(name(0))) == (0, 0, None)
    memory.put(name(0), page)
    memory.let_go([name(0)])
    memory.check_invariants()
    assert memory.get(name(0)) is page


OPERATIONS = st.lists(st.tuples(st.sampled_from(["put", "get", "hold", "let_go"]), st.integers(0, 5)), max_size=60)


@settings(max_examples=200, deadline=None)
@given(operations=OPERATIONS, room=st.integers(0, 4))
def test_it_is_what_a_list_in_the_order_of_use_would_be(operations: list[tuple[str, int]], room: int) -> None:
    page = Page((np.zeros(8, np.int8),))
    memory = PageMemory(room * page.nbytes)
    order: list[int] = []
    holds: list[int] = []

    def shrink() -> None:
        for number in [one for one in order if one not in holds]:
            if len(order) <= room:
                break
            order.remove(number)

    for operation, number in operations:
        match operation:
            case "put":
                memory.put(name(number), page)
                if number in order:
                    order.remove(number)
                    order.append(number)
                else:
                    order.append(number)
                    shrink()
            case "get":
                assert (memory.get(name(number)) is not None) == (number in order)
                if number in order:
                    order.remove(number)
                    order.append(number)
            case "hold":
                memory.hold([name(number)])
                holds.append(number)
            case "let_go" if number in holds:
                memory.let_go([name(number)])
                holds.remove(number)
                shrink()
        memory.check_invariants()
        assert [one for one in range(6) if name(one) in memory] == sorted(order)
