"""Responses that are stored: requests that follow them, and the endpoints that show and delete them."""

from typing import Any

import pytest

from jaxvllm.server.config import ServerConfig
from jaxvllm.server.errors import ApiError
from jaxvllm.server.response_store import ResponseStore, StoredResponse
from tests.server.conftest import Server

PATH = "/v1/responses"
INPUT = "What is the capital of France?"
GREEDY: dict[str, Any] = dict(input=INPUT, temperature=0, max_output_tokens=40)


def test_a_request_follows_a_response(server: Server) -> None:
    first = server.answer(PATH, **GREEDY, instructions="Be brief.")
    body = GREEDY | dict(input="Thanks!")
    second = server.answer(PATH, **body, previous_response_id=first["id"])
    assert (second["previous_response_id"], second["store"]) == (first["id"], True)
    history = [{"role": "user", "content": INPUT}, *first["output"], {"role": "user", "content": "Thanks!"}]
    whole = server.answer(PATH, **body | {"input": history})
    assert second["usage"]["input_tokens"] == whole["usage"]["input_tokens"]  # without the first's instructions
    assert second["output"][0]["content"] == whole["output"][0]["content"]
    # A stream is stored as well, and may be followed.
    streamed = server.events(PATH, **body, previous_response_id=second["id"])[-1].data["response"]
    third = server.answer("/v1/responses/input_tokens", input="Bye!", previous_response_id=streamed["id"])
    assert third["input_tokens"] > streamed["usage"]["input_tokens"] > second["usage"]["input_tokens"]


def test_a_response_is_shown_and_deleted(server: Server) -> None:
    import openai

    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        first = client.responses.create(model="demo", **GREEDY)
        assert client.responses.retrieve(first.id).to_dict() == first.to_dict()
        second = client.responses.create(model="demo", **GREEDY | {"input": "Thanks!"}, previous_response_id=first.id)
        items = [item.to_dict() for item in client.responses.input_items.list(second.id, order="asc", limit=2)]
        assert [(item["role"], item["content"][0]["text"]) for item in items] == [
            ("user", INPUT),
            ("assistant", first.output_text),
            ("user", "Thanks!"),
        ]
        assert len({item["id"] for item in items}) == 3
        newest = client.responses.input_items.list(second.id, limit=1)
        assert newest.data[0].to_dict() == items[2]
        client.responses.delete(first.id)
        for asked in (client.responses.retrieve, client.responses.delete, client.responses.input_items.list):
            with pytest.raises(openai.NotFoundError):
                asked(first.id)
        with pytest.raises(openai.BadRequestError) as caught:
            client.responses.create(model="demo", **GREEDY, previous_response_id=first.id)
        assert (caught.value.code, caught.value.param) == ("previous_response_not_found", "previous_response_id")
        # What follows it has the whole conversation.
        assert client.responses.create(model="demo", **GREEDY, previous_response_id=second.id).status == "completed"


def test_a_response_that_is_not_to_be_stored(server: Server) -> None:
    answer = server.answer(PATH, **GREEDY, store=False)
    assert answer["store"] is False
    response = server.client.get(f"{PATH}/{answer['id']}")
    assert (response.status_code, response.json()["error"]["type"]) == (404, "not_found_error")


def test_no_key_sees_what_another_stored(server: Server) -> None:
    first, second = ({"authorization": f"Bearer {key}"} for key in ("a", "b"))
    answer = server.client.post(PATH, json=GREEDY, headers=first).json()
    path = f"{PATH}/{answer['id']}"
    for headers in (second, {}, first | {"x-api-key": "b"}):
        assert server.client.get(path, headers=headers).status_code == 404
        assert server.client.get(f"{path}/input_items", headers=headers).status_code == 404
        assert server.client.delete(path, headers=headers).status_code == 404
        body = GREEDY | {"previous_response_id": answer["id"]}
        assert server.client.post(PATH, json=body, headers=headers).status_code == 400
    assert server.client.get(path, headers={"x-api-key": "a"}).json() == answer


def test_several_processes_store_nothing(server: Server) -> None:
    config = ServerConfig(api_server_count=2)
    answer = server.ask(config, PATH, **GREEDY, store=True).json()
    assert answer["store"] is False
    refused = server.ask(config, PATH, **GREEDY, previous_response_id=answer["id"])
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "previous_response_id")
    assert "one API process" in refused.json()["error"]["message"]
    assert server.ask(config, f"{PATH}/{answer['id']}", method="GET").status_code == 404


def test_the_count_of_a_prompt(server: Server) -> None:
    tool = {"type": "custom", "name": "run_code"}
    for body in (GREEDY, GREEDY | dict(tools=[tool], instructions="Be brief.")):
        counted = server.answer("/v1/responses/input_tokens", **body)
        used = server.answer(PATH, **body)["usage"]["input_tokens"]
        assert counted == {"object": "response.input_tokens", "input_tokens": used}
    assert server.answer("/v1/responses/input_tokens", input="word " * 1000)["input_tokens"] > 1000


def test_an_item_is_referred_to_by_its_id(server: Server) -> None:
    """As the client of Vercel does, which sends no item again that a server stores."""
    first = server.answer(PATH, **GREEDY)
    [asked] = server.client.get(f"{PATH}/{first['id']}/input_items").json()["data"]
    [said] = first["output"]
    references = [{"type": "item_reference", "id": item["id"]} for item in (asked, said)]
    thanks = {"role": "user", "content": "Thanks!"}
    body = GREEDY | dict(input=[*references, thanks])
    second = server.answer(PATH, **body)
    whole = server.answer(PATH, **GREEDY | dict(input=[{"role": "user", "content": INPUT}, said, thanks]))
    assert second["usage"]["input_tokens"] == whole["usage"]["input_tokens"]
    assert second["output"][0]["content"] == whole["output"][0]["content"]
    # The items of a request are stored as they were meant.
    listed = server.client.get(f"{PATH}/{second['id']}/input_items", params={"order": "asc"}).json()["data"]
    assert [item["id"] for item in listed[:2]] == [asked["id"], said["id"]]
    # Another key has none of them, and neither has anybody after they are deleted.
    assert server.client.post(PATH, json=body, headers={"authorization": "Bearer other"}).status_code == 400
    for response in (first, second):
        server.client.delete(f"{PATH}/{response['id']}")
    status, error = server.error(PATH, **body)
    assert (status, error["param"]) == (400, "input") and asked["id"] in error["message"]


def test_nothing_is_cancelled_or_compacted(server: Server) -> None:
    answer = server.answer(PATH, **GREEDY)
    status, error = server.error(f"{PATH}/{answer['id']}/cancel")
    assert status == 400 and "background" in error["message"]
    assert server.error(f"{PATH}/resp_none/cancel")[0] == 404
    response = server.ask(ServerConfig(), f"{PATH}/compact", model="demo", input=INPUT)
    assert response.status_code == 404 and "compacted" in response.json()["error"]["message"]


@pytest.mark.parametrize(("headers", "status"), [({"sec-websocket-version": "13"}, 426), ({}, 405)])
def test_a_client_that_tries_a_websocket_falls_back(server: Server, headers: dict[str, str], status: int) -> None:
    response = server.ask(ServerConfig(), PATH, method="GET", headers=headers)
    assert response.status_code == status
    assert response.headers.get("allow") == (None if status == 426 else "POST")
    assert "POST" in response.json()["error"]["message"]


def test_the_beginning_of_a_prompt_that_is_too_long_may_go(server: Server) -> None:
    text = "word " * 600
    assert server.error(PATH, **GREEDY | dict(input=text))[0] == 400
    answer = server.answer(PATH, **GREEDY | dict(input=text, max_output_tokens=4), truncation="auto")
    assert answer["truncation"] == "auto" and answer["usage"]["input_tokens"] < 512


def test_fields_that_change_nothing(server: Server) -> None:
    plain = server.answer(PATH, **GREEDY)
    answer = server.answer(
        PATH,
        **GREEDY,
        client_metadata={"turn": "1"},
        prompt_cache_options={"mode": "implicit"},
        prompt_cache_retention="24h",
        include=["reasoning.encrypted_content", "web_search_call.results"],
        text={"verbosity": "low"},
        reasoning={"summary": "detailed"},
        max_tool_calls=3,
    )
    assert answer["output"][0]["content"] == plain["output"][0]["content"]


def test_penalties_count(server: Server) -> None:
    body = GREEDY | dict(ignore_eos=True)
    plain, other = (
        server.answer(PATH, **body | more) for more in ({}, {"frequency_penalty": 2, "presence_penalty": 2})
    )
    assert plain["output"][0]["content"] != other["output"][0]["content"]


# ---- the store ----


def stored(size: int) -> StoredResponse:
    return StoredResponse(b"r" * size, b"")


def test_the_oldest_make_room() -> None:
    store = ResponseStore(max_responses=3, max_bytes=100)
    for name in "abcd":
        store.add(b"me", name, stored(10))
    assert [store.find(b"me", name) is not None for name in "abcd"] == [False, True, True, True]
    store.add(b"me", "e", stored(85))
    assert [store.find(b"me", name) is not None for name in "bcde"] == [False, False, True, True]
    store.add(b"me", "f", stored(101))  # more than there may be in all
    assert store.find(b"me", "f") is None and store.get(b"me", "e") == stored(85)
    store.add(b"me", "e", stored(5))  # the room of the first is free again
    store.add(b"me", "g", stored(80))
    assert [store.find(b"me", name) is not None for name in "deg"] == [True, True, True]
    store.remove(b"me", "e")
    for owner, name in ((b"me", "e"), (b"you", "g")):
        with pytest.raises(ApiError, match="not found"):
            store.remove(owner, name)
        with pytest.raises(ApiError, match="not found"):
            store.get(owner, name)
