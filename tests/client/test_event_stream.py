"""Events come out whole, however the bytes were cut."""

import pytest

from jaxvllm.client.errors import ServerError
from jaxvllm.client.event_stream import Event, EventReader, read_chunk

STREAM = (
    b": ping\r\n\r\n"
    b'data: {"choices":[{"text":"\xc3\xa4"}]}\n\n'
    b"id: 7\nevent: error\ndata:two\r\ndata: lines\r\n\r\n"
    b"event: empty\n\n"
    b"data: [DONE]\n\n"
    b"data: never ended"
)
EVENTS = [
    Event("message", b'{"choices":[{"text":"\xc3\xa4"}]}'),
    Event("error", b"two\nlines"),
    Event("message", b"[DONE]"),
]


@pytest.mark.parametrize("size", [1, 2, 3, 7, len(STREAM)])
def test_events_do_not_depend_on_how_the_stream_was_cut(size):
    reader = EventReader()
    assert [event for at in range(0, len(STREAM), size) for event in reader.feed(STREAM[at : at + size])] == EVENTS


def test_chunks_of_both_dialects():
    assert read_chunk(EVENTS[0]).choices[0].new_text == "ä"
    role = read_chunk(Event("message", b'{"id":"x","choices":[{"delta":{"role":"assistant","content":""},"index":0}]}'))
    word = read_chunk(Event("message", b'{"choices":[{"delta":{"role":"assistant","content":"a"}}]}'))
    last = read_chunk(Event("message", b'{"choices":[{"delta":{},"finish_reason":"stop"}],"usage":null}'))
    assert [chunk.choices[0].opens for chunk in (role, word, last)] == [True, False, False]
    assert [chunk.choices[0].new_text for chunk in (role, word, last)] == ["", "a", ""]


@pytest.mark.parametrize(
    ("event", "message"),
    [
        (Event("message", b'{"error":{"message":"out of\\npages","code":500}}'), "the server broke off: out of pages"),
        (Event("error", b'{"message":"dead"}'), "the server broke off: dead"),
        (Event("error", b"dead"), "the server broke off: dead"),
        (Event("message", b"<html>"), "the stream has data that is no chunk"),
        (Event("message", b'{"choices":3}'), "the stream has data that is no chunk"),
    ],
)
def test_errors_in_a_stream_are_one_line(event, message):
    with pytest.raises(ServerError) as raised:
        read_chunk(event)
    assert str(raised.value).startswith(message) and "\n" not in str(raised.value)
