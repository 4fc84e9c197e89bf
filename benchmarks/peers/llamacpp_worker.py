"""Runs llama.cpp's server as a worker: JSON requests on stdin, one JSON answer a line on stdout.

It runs in the environment of `make .llamacpp/.stamp`, which has the server's program in build/bin, and imports nothing
of this repository.
Requests: `{"load": FILE, "threads": N, "dtype": D, "context": T, "requests": R}` names a GGUF file and answers with
versions and settings; `{"prompts": [[id, ...], ...], "max_tokens": [N, ...]}` generates greedily, end-of-text ignored,
and answers with seconds, mean seconds to the first token and the tokens of each prompt.

A server has as many slots as the prompts that come at once, and slots as long as the longest of them with its output.
It starts anew where that changes, which is not timed. Answers come whole, so that no time goes to streams. The server
says how long each request took from its first token to its last; so the first came that much before the answer.
"""

import http.client
import json
import os
import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

SERVER = Path(sys.prefix) / "build" / "bin" / "llama-server"
START_SECONDS = 300


class Server:
    """A server with so many slots of so many tokens, until `close`."""

    def __init__(self, request: dict[str, Any], slots: int, context: int) -> None:
        self.slots, self.context = slots, context
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self._port = probe.getsockname()[1]
        command = [str(SERVER), "--model", request["load"], "--host", "127.0.0.1", "--port", str(self._port)]
        command += ["--parallel", str(slots), "--ctx-size", str(slots * context), *settings(request)]
        self._process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        for _ in range(10 * START_SECONDS):
            if self._process.poll() is not None:
                raise RuntimeError(f"{command} ended with status {self._process.returncode}")
            if self._is_ready():
                return
            time.sleep(0.1)
        self.close()
        raise RuntimeError(f"{command} was not ready after {START_SECONDS} s")

    def complete(self, prompt: list[int], count: int) -> tuple[float, dict[str, Any]]:
        """Returns when the answer was there, and the answer."""
        body = {
            "prompt": prompt,
            "n_predict": count,
            "ignore_eos": True,
            "samplers": ["top_k"],
            "top_k": 1,
            "cache_prompt": False,
            "return_tokens": True,
        }
        connection = http.client.HTTPConnection("127.0.0.1", self._port)
        connection.request("POST", "/completion", json.dumps(body), {"Content-Type": "application/json"})
        response = connection.getresponse()
        text = response.read()
        end = time.perf_counter()
        connection.close()
        if response.status != 200:
            raise RuntimeError(f"llama-server answered {response.status}: {text.decode()}")
        return end, json.loads(text)

    def close(self) -> None:
        self._process.terminate()
        self._process.wait()

    def _is_ready(self) -> bool:
        connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=1)
        try:
            connection.request("GET", "/health")
            return connection.getresponse().status == 200
        except OSError:
            return False
        finally:
            connection.close()


def settings(request: dict[str, Any]) -> list[str]:
    """Returns the options of a server. Keys and values are in 16 bits, the default, except in float32."""
    options = ["--threads", str(request["threads"]), "--no-ui", "--no-slots", "--cache-ram", "0", "--no-kv-unified"]
    if request["dtype"] == "float32":
        options += ["--flash-attn", "off", "--cache-type-k", "f32", "--cache-type-v", "f32"]
    return options


def generate(server: Server, prompts: list[list[int]], max_tokens: list[int]) -> dict[str, Any]:
    with ThreadPoolExecutor(len(prompts)) as pool:
        start = time.perf_counter()
        answers = list(pool.map(server.complete, prompts, max_tokens))
    first = [end - start - answer["timings"]["predicted_ms"] / 1000 for end, answer in answers]
    return {
        "seconds": max(end for end, _ in answers) - start,
        "first_token_seconds": sum(first) / len(first),
        "tokens": [answer["tokens"] for _, answer in answers],
    }


def versions() -> dict[str, str]:
    """Returns what the server calls itself, and the version of the package that its source comes from."""
    done = subprocess.run([SERVER, "--version"], capture_output=True, text=True, check=True)
    lines = (done.stdout + done.stderr).splitlines()
    [package] = (Path(sys.prefix) / "source").glob("*.tar.gz")
    return {
        "llama.cpp": next(line for line in lines if line.startswith("version")).removeprefix("version: "),
        "llama-cpp-python": package.name.removeprefix("llama_cpp_python-").removesuffix(".tar.gz"),
    }


class Servers:
    """The server at work, which is replaced where another number or length of slots is needed."""

    def __init__(self) -> None:
        self._request: dict[str, Any] = {}
        self._server: Server | None = None

    def answer(self, request: dict[str, Any]) -> dict[str, Any]:
        if "load" in request:
            self._request = request
            return {"versions": versions(), "settings": settings(request)}
        prompts, max_tokens = request["prompts"], request["max_tokens"]
        # llama.cpp rounds the length of a slot up to a multiple of 256 itself. The token beyond is its own need.
        longest = max(len(prompt) + count for prompt, count in zip(prompts, max_tokens, strict=True))
        context = (longest // 256 + 1) * 256
        if self._server is None or (self._server.slots, self._server.context) != (len(prompts), context):
            self.close()
            self._server = Server(self._request, len(prompts), context)
        return generate(self._server, prompts, max_tokens)

    def close(self) -> None:
        if self._server is not None:
            self._server.close()
            self._server = None


def main() -> None:
    servers, answers = Servers(), os.fdopen(os.dup(1), "w")
    try:
        for line in sys.stdin:
            print(json.dumps(servers.answer(json.loads(line))), file=answers, flush=True)
    finally:
        servers.close()


if __name__ == "__main__":
    main()
