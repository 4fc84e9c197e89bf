"""Prompts of embeddings over HTTP: .npy files in base64, of any size that they claim, and nothing that is executed."""

import io
import pickle
from base64 import b64encode
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from jaxvllm.core.errors import ParameterError
from jaxvllm.server.protocol.npy import read_npy
from jaxvllm.worker import wire
from tests.server.conftest import Server
from tests.server.scripted import Says

ROWS = np.random.default_rng(2).normal(size=(7, 4)).astype(np.float32)
PATH = "/v1/completions"


def saved(array: NDArray[Any], **options: Any) -> str:
    file = io.BytesIO()
    np.save(file, array, **options)
    return b64encode(file.getvalue()).decode()


def with_header(header: str, rest: bytes = b"") -> str:
    """A file that claims what `header` says."""
    text = header.ljust(117) + "\n"
    return b64encode(b"\x93NUMPY\x01\x00" + len(text).to_bytes(2, "little") + text.encode() + rest).decode()


@pytest.mark.parametrize("dtype", ["<f2", "<f4", ">f4", "<f8"])
@pytest.mark.parametrize("order", ["C", "F"])
def test_what_numpy_saves_is_what_is_read(dtype: str, order: Any) -> None:
    array = np.asarray(ROWS, dtype, order=order)
    read = read_npy(saved(array), "field")
    assert read.dtype == array.dtype
    np.testing.assert_array_equal(read, array)


class Evil:
    def __reduce__(self) -> Any:
        return pytest.fail, ("code was executed",)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("*", "no base64"),
        ("é", "no base64"),
        ("", "base64 of a .npy file"),
        (b64encode(b"PK\x03\x04 of torch").decode(), "not a file of torch.save or numpy.savez"),
        (b64encode(pickle.dumps(Evil())).decode(), "magic string"),
        (saved(np.array([Evil()], object), allow_pickle=True), "for object of shape"),
        (b64encode(b"\x93NUMPY\x03\x00" + bytes(8)).decode(), r"version \(3, 0\)"),
        (saved(np.zeros((2, 2), "V2")), r"for \|V2 of shape"),
        (with_header("{'descr': '<f4', 'fortran_order': False, 'shape': (1000000000000, 4), }"), "this has 0 bytes"),
        (with_header("{'descr': '<f4', 'fortran_order': False, 'shape': (-1, 4), }", bytes(16)), "this has 16 bytes"),
        (with_header("{'descr': '<f4', 'fortran_order': False, 'shape': (0, 10**30), }"), "base64 of a .npy file"),
        (with_header(f"{{'descr': '<f4', 'fortran_order': False, 'shape': (0, {10**30}), }}"), "base64 of a .npy file"),
        (with_header("__import__('os')._exit(1)"), "base64 of a .npy file"),
        (with_header("(" * 110), "base64 of a .npy file"),
    ],
)
def test_other_files_are_refused(text: str, words: str) -> None:
    with pytest.raises(ParameterError, match=words) as told:
        read_npy(text, "prompt_embeds")
    assert told.value.param == "prompt_embeds"


def test_prompts_of_embeddings_come_before_those_of_text(says: Says) -> None:
    response, requests = says("x").post(PATH, prompt=["one", "two"], prompt_embeds=[saved(ROWS), saved(ROWS[:2])])
    assert response.status_code == 200 and len(response.json()["choices"]) == 4
    assert [len(request.prompt.side_inputs) for request in requests] == [1, 1, 0, 0]
    assert [request.prompt.text for request in requests[2:]] == ["one", "two"]
    prompt = requests[0].prompt
    np.testing.assert_array_equal(prompt.side_inputs[0].values, ROWS)
    assert prompt.token_ids.tolist() == [0] * 7
    for request in requests:  # as the engine's process gets it
        added = wire.decode_command(wire.encode(wire.Add(1, request)))
        assert isinstance(added, wire.Add) and added.request == request


@pytest.mark.parametrize("empty", [{}, {"prompt": ""}, {"prompt": []}, {"prompt": None}])
def test_an_empty_prompt_beside_them_is_none(says: Says, empty: dict[str, Any]) -> None:
    """vLLM's examples send an empty text, because OpenAI's client does not leave the prompt out."""
    response, requests = says("x").post(PATH, prompt_embeds=saved(ROWS), cache_salt="mine", **empty)
    assert response.status_code == 200, response.text
    [request] = requests
    assert len(request.prompt.side_inputs) == 1 and request.prompt.cache_salt == "mine"


@pytest.mark.parametrize(
    ("body", "param", "words"),
    [
        ({}, "prompt", "prompt is missing: give a text, token ids, or prompt_embeds"),
        ({"prompt_embeds": saved(ROWS)}, "prompt_embeds", "start with enable_prompt_embeds (--enable-prompt-embeds)"),
        ({"prompt_embeds": saved(ROWS), "echo": True}, "echo", "prompt_embeds has none"),
        ({"prompt_embeds": saved(ROWS[0])}, "prompt_embeds", "float32 of shape (4,)"),
        ({"prompt_embeds": saved(ROWS.astype(np.int64))}, "prompt_embeds", "an array of floats"),
        ({"prompt_embeds": saved(ROWS * np.inf)}, "prompt_embeds", "all must be finite"),
        ({"prompt_embeds": "nothing"}, "prompt_embeds", "base64 of a .npy file"),
        ({"prompt_embeds": ["AAAA"] * 1025}, "prompt_embeds", "1024 are the most"),
        ({"prompt_embeds": []}, "prompt", "prompt is missing"),
    ],
)
def test_wrong_ones_get_400_and_the_way_out(server: Server, body: dict[str, Any], param: str, words: str) -> None:
    response = server.client.post(PATH, json={"model": "demo", "max_tokens": 1} | body)
    error = response.json()["error"]
    assert (response.status_code, error["param"]) == (400, param), error
    assert words in error["message"]
