"""Programs on disk: a later start loads them and traces nothing. Whatever is wrong with an entry, it still starts."""

import hashlib
import logging
import os
import pickle
import threading
import zlib
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxvllm import SamplingParams
from jaxvllm.models.ops import biased
from jaxvllm.runtime.program_cache import use_persistent_cache
from jaxvllm.runtime.recipe import COMPILER_OPTIONS, Recipe
from jaxvllm.runtime.stored_programs import StoredPrograms
from sharding.axis import ModelAxis
from sharding.rules import MODEL
from tests.engine.tiny import random_prompts, tiny_llm, write_tiny_checkpoint
from tests.quick import earlier_emitters

type Count = Callable[[], AbstractContextManager]
X = np.arange(4, dtype=np.float32)


def add(*devices: int, spec: Any = (), **changes: Any) -> Recipe:
    """The recipe of a sum of two vectors."""
    mesh = Mesh(np.array([jax.devices()[i] for i in devices or (0,)]), (MODEL,))
    struct = jax.ShapeDtypeStruct((4,), jnp.float32, sharding=NamedSharding(mesh, PartitionSpec(*spec)))
    return replace(Recipe(biased, (struct, struct), mesh), **changes)


def stored(directory: Path) -> Path:
    """The one entry of `directory`."""
    [path] = directory.iterdir()
    return path


def entry(payload: bytes) -> bytes:
    """An entry that is whole."""
    packed = zlib.compress(payload)
    return hashlib.sha256(packed).digest() + packed


def traces(events: list[str]) -> Callable[..., None]:
    return lambda event, seconds, **details: events.append(event) if "trace" in event else None


def test_a_later_start_loads_it_and_traces_nothing(tmp_path: Path, compilations: Count) -> None:
    first = StoredPrograms(tmp_path / "programs").make(add())
    events: list[str] = []
    listen = traces(events)
    jax.monitoring.register_event_duration_secs_listener(listen)
    with compilations() as seen:
        loaded = StoredPrograms(tmp_path / "programs").make(add())
        assert seen.count == 0 and events == []
        np.testing.assert_array_equal(loaded(X, X), first(X, X))
    jax.monitoring.unregister_event_duration_listener(listen)
    assert loaded.memory_analysis().output_size_in_bytes == first.memory_analysis().output_size_in_bytes  # type: ignore[union-attr]


def test_a_loaded_program_takes_what_is_donated_in_place(tmp_path: Path) -> None:
    for _ in range(2):
        program = StoredPrograms(tmp_path / "programs").make(add(donates=(0,)))
        given = jax.device_put(jnp.ones(4), add().arguments[0].sharding)
        place = given.unsafe_buffer_pointer()
        assert program(given, X).unsafe_buffer_pointer() == place
        assert given.is_deleted()


def _sorted_sum(x: jax.Array, bias: jax.Array) -> jax.Array:
    return jnp.sort(x) + bias


@pytest.mark.usefixtures("no_cache")
def test_a_program_that_is_in_jaxs_cache_is_stored_so_that_it_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """XLA on CPU cannot store what it has loaded from there: a function of this program would not be found."""
    assert use_persistent_cache(tmp_path / "cache")
    monkeypatch.setattr(_sorted_sum, "__module__", "sharding.axis")  # as if it were ours
    recipe = add(run=_sorted_sum)
    recipe.compile()
    assert list((tmp_path / "cache").iterdir())
    for directory in ("programs", "others"):
        for _ in range(2):
            jax.clear_caches()  # as a new process
            if directory == "others":
                recipe.compile()  # for an engine that stores no programs: jax loads this one and remembers it
            program = StoredPrograms(tmp_path / directory).make(recipe)
            np.testing.assert_array_equal(program(X[::-1].copy(), X), 2 * X)


def _sum(x: jax.Array, bias: jax.Array, axis: ModelAxis) -> jax.Array:
    return axis.sum(x + bias)


@pytest.mark.parametrize("devices", [(3,), (2, 5)])
def test_programs_of_other_devices_and_of_meshes(
    tmp_path: Path, devices: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_sum, "__module__", "sharding.axis")  # as if it were ours
    run = partial(_sum, axis=ModelAxis(len(devices)))
    for spec in ((), (MODEL,)):
        recipe = add(*devices, spec=spec, run=run, out_specs=PartitionSpec() if len(devices) > 1 else None)
        for count in (0, 1):
            assert len(list((tmp_path / str(spec)).glob("*"))) == count
            given = [jax.device_put(X, argument.sharding) for argument in recipe.arguments]
            result = StoredPrograms(tmp_path / str(spec)).make(recipe)(*given)
            assert result.devices() == set(recipe.mesh.devices.flat)
            parts = np.split(2 * X, len(devices)) if spec else [2 * X] * len(devices)
            np.testing.assert_array_equal(result, np.sum(parts, axis=0))


class Malicious:
    """Writes a file when it is unpickled."""

    def __init__(self, path: Path):
        self.path = path

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.path),)


@pytest.mark.parametrize(
    "damage",
    [
        lambda content: b"",
        lambda content: content[:10],
        lambda content: content[: len(content) // 2],
        lambda content: content[:-1] + bytes([content[-1] ^ 1]),
        lambda content: entry(b"no pickle"),
        lambda content: entry(pickle.dumps(("another", "version's entry"))),
        lambda content: entry(pickle.dumps(({}, b"no program", None, None))),
    ],
    ids=["empty", "short", "truncated", "a bit", "no pickle", "another form", "no program"],
)
def test_a_damaged_entry_is_replaced(
    tmp_path: Path, damage: Callable[[bytes], bytes], caplog: pytest.LogCaptureFixture, compilations: Count
) -> None:
    programs = StoredPrograms(tmp_path / "programs")
    programs.make(add())
    path = stored(tmp_path / "programs")
    path.write_bytes(damage(path.read_bytes()))
    with caplog.at_level(logging.WARNING, "jaxvllm"):
        np.testing.assert_array_equal(programs.make(add())(X, X), 2 * X)
    [record] = caplog.records
    assert "has damaged programs: they are compiled and stored again" in record.getMessage()
    with compilations() as seen:
        np.testing.assert_array_equal(programs.make(add())(X, X), 2 * X)
    assert seen.count == 0


@pytest.mark.parametrize("mode", [0o770, 0o707, 0o777])
def test_what_others_can_write_to_is_not_read(tmp_path: Path, mode: int, caplog: pytest.LogCaptureFixture) -> None:
    directory = tmp_path / "programs"
    StoredPrograms(directory).make(add())
    stored(directory).write_bytes(entry(pickle.dumps(Malicious(tmp_path / "harm"))))
    directory.chmod(mode)
    with caplog.at_level(logging.WARNING, "jaxvllm"):
        np.testing.assert_array_equal(StoredPrograms(directory).make(add())(X, X), 2 * X)
    assert "chmod 700" in caplog.text and len(caplog.records) == 1
    assert not (tmp_path / "harm").exists()
    directory.chmod(0o700)
    StoredPrograms(directory).make(add())
    assert (tmp_path / "harm").exists(), "or this test would prove nothing"


def grant(path: Path) -> None:
    """Lets everybody write to a file, as one of another user's may be."""
    path.chmod(0o666)


def give_away(path: Path) -> None:
    if os.getuid():
        pytest.skip("only root can give a file to another user")
    os.chown(path, 12345, -1)


def point_elsewhere(path: Path) -> None:
    path.rename(path.parent.parent / "elsewhere")
    path.symlink_to(path.parent.parent / "elsewhere")


def grant_directory(path: Path) -> None:
    path.parent.chmod(0o777)


@pytest.mark.parametrize("harm", [grant, give_away, point_elsewhere, grant_directory])
def test_each_file_is_asked_whose_it_is_before_it_is_unpickled(
    tmp_path: Path, harm: Callable[[Path], None], caplog: pytest.LogCaptureFixture
) -> None:
    """The directory was private when the engine started."""
    programs = StoredPrograms(tmp_path / "programs")
    programs.make(add())
    path = stored(tmp_path / "programs")
    path.write_bytes(entry(pickle.dumps(Malicious(tmp_path / "harm"))))
    harm(path)
    np.testing.assert_array_equal(programs.make(add())(X, X), 2 * X)
    assert not (tmp_path / "harm").exists()
    assert len(caplog.records) == 1
    if harm is grant_directory:
        path.parent.chmod(0o700)
    np.testing.assert_array_equal(StoredPrograms(tmp_path / "programs").make(add())(X, X), 2 * X)
    assert not (tmp_path / "harm").exists(), "it was not replaced"


def test_a_program_is_read_again_whatever_the_umask(tmp_path: Path, compilations: Count) -> None:
    before = os.umask(0)
    try:
        StoredPrograms(tmp_path / "programs").make(add())
    finally:
        os.umask(before)
    with compilations() as seen:
        StoredPrograms(tmp_path / "programs").make(add())
    assert seen.count == 0


def test_another_users_directory_is_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    StoredPrograms(tmp_path / "programs").make(add())
    stored(tmp_path / "programs").write_bytes(entry(pickle.dumps(Malicious(tmp_path / "harm"))))
    monkeypatch.setattr("os.geteuid", lambda: os.getuid() + 1)
    StoredPrograms(tmp_path / "programs").make(add())
    assert not (tmp_path / "harm").exists()


def test_the_directory_is_private_whatever_the_umask(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        StoredPrograms(tmp_path / "a" / "programs").make(add())
    finally:
        os.umask(before)
    assert (tmp_path / "a" / "programs").stat().st_mode & 0o777 == 0o700


def test_a_disk_that_takes_nothing_costs_one_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    programs = StoredPrograms(tmp_path / "programs")

    def full(*_: Any) -> None:
        raise OSError("No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("os.replace", full)
        for bias in (None, 1.0):
            programs.make(add(run=partial(biased, bias=bias), arguments=add().arguments[:1]))
    (tmp_path / "file").write_text("")
    np.testing.assert_array_equal(StoredPrograms(tmp_path / "file" / "programs").make(add())(X, X), 2 * X)
    assert not list((tmp_path / "programs").iterdir())
    written, made = caplog.records
    assert "cannot be written" in written.getMessage() and "cannot be stored" in made.getMessage()


def test_programs_with_functions_of_a_user_are_not_stored(tmp_path: Path) -> None:
    def of_a_user(factor: int) -> Callable[..., jax.Array]:
        return lambda x, bias: x * factor + bias

    for factor in (2, 3):
        program = StoredPrograms(tmp_path / "programs").make(add(run=of_a_user(factor)))
        np.testing.assert_array_equal(program(X, X), (factor + 1) * X)
    assert not list((tmp_path / "programs").iterdir())


def test_starts_at_the_same_time_do_not_meet(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    together = threading.Barrier(3)
    results = []

    def start() -> None:
        programs = StoredPrograms(tmp_path / "programs")
        together.wait()
        results.append(programs.make(add())(X, X))

    threads = [threading.Thread(target=start) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for result in results:
        np.testing.assert_array_equal(result, 2 * X)
    assert len(results) == 3 and stored(tmp_path / "programs") and not caplog.records


@pytest.mark.usefixtures("no_cache")
@pytest.mark.slow
@earlier_emitters()
def test_an_engine_that_starts_again_traces_no_step_and_says_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(COMPILER_OPTIONS["cpu"], "xla_backend_optimization_level", 0)  # compiles faster
    checkpoint = write_tiny_checkpoint(tmp_path / "model")
    prompts = random_prompts(12, longest=40, seed=1)
    params = [SamplingParams(temperature=t, seed=3, max_tokens=9, logprobs=2) for t in (0, 0.8, 1.3)] * 4
    answers, traced, starts = [], [], []
    for _ in range(2):
        names: list[str] = []

        def listen(event: str, seconds: float, names: list[str] = names, **details: Any) -> None:
            names.append(str(details.get("fun_name"))) if "trace" in event else None

        jax.monitoring.register_event_duration_secs_listener(listen)
        with tiny_llm(checkpoint, compilation_cache=str(tmp_path / "cache")) as llm:
            outputs = llm.generate(prompts, params, use_tqdm=False)
            report = llm.engine.startup()
            starts.append((report.num_loaded, report.num_compiled))
        jax.monitoring.unregister_event_duration_listener(listen)
        answers.append([(out.outputs[0].token_ids, out.outputs[0].logprobs) for out in outputs])
        traced.append(names)
    assert answers[0] == answers[1]
    (loaded, compiled), (loaded_later, compiled_later) = starts
    assert (loaded, compiled_later) == (0, 0) and loaded_later == compiled > 5
    steps = {"forward", "decode", "sample_rows", "distribute", "pick_rows", "fork_slots", "admit", "admit_rare"}
    assert steps <= set(traced[0]) and not steps & set(traced[1])
