"""Machine code on disk: all programs share it, and whatever is wrong with a file, the kernel is compiled again."""

from collections.abc import Callable
from pathlib import Path
from threading import Event
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh

from jaxvllm.runtime import stored_kernels
from jaxvllm.runtime.recipe import Recipe
from jaxvllm.runtime.stored_kernels import StoredKernels
from jaxvllm.runtime.stored_programs import StoredPrograms
from pallas_kernels.cpu import handlers
from pallas_kernels.cpu.emit import Emitter
from pallas_kernels.cpu.frame import Frame
from pallas_kernels.cpu.handlers import Handler, registered_code
from pallas_kernels.cpu.host import host_chip
from pallas_kernels.cpu.loaded_handler import LoadedHandler

emitted: list[int] = []


def adding_some(e: Emitter, frame: Frame, some: int) -> None:
    emitted.append(some)
    x, y = frame.argument(0), frame.result(0)
    with e.loop(0, x.size(0)) as i:
        e.store_int(y.data + i * 4, e.load_int(x.data + i * 4, 32) + some, 32)


type NewProcess = Callable[[], None]


@pytest.fixture
def new_process(monkeypatch: pytest.MonkeyPatch) -> NewProcess:
    """Forgets the kernels of this process. XLA's table does not, so what follows names kernels and calls none."""

    def begin() -> None:
        registered = handlers._Registered()
        monkeypatch.setattr(handlers, "_registered", lambda: registered)
        monkeypatch.setattr("jax.ffi.register_ffi_target", lambda *_, **__: None)
        emitted.clear()

    return begin


def struct(shape: tuple[int, ...]) -> Any:
    return jax.ShapeDtypeStruct(shape, jnp.int32)


def code_of(directory: Path, some: int) -> bytes:
    """Compiles a kernel, or finds it in `directory`, as a program does that names it."""
    handler = Handler(adding_some, (some,), host_chip())
    with handlers.compiled_by_another_thread(StoredKernels(directory)) as kernels:
        jax.eval_shape(lambda x: handler(struct(x.shape), x), np.zeros(4, np.int32))
    for kernel in kernels:
        kernel.result()
    return registered_code()[handler.target]


def test_a_kernel_is_compiled_once_for_all_starts(
    tmp_path: Path, new_process: NewProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    new_process()
    first = code_of(tmp_path, 1)
    assert code_of(tmp_path, 2) != first and emitted == [1, 2]
    new_process()
    assert code_of(tmp_path, 1) == first and emitted == []
    # Another compiler, or other sources.
    monkeypatch.setattr(stored_kernels, "_surroundings", lambda: "others")
    new_process()
    assert code_of(tmp_path, 1) == first and emitted == [1]
    assert len(list(tmp_path.iterdir())) == 3


@pytest.mark.parametrize(
    "damage", [lambda code: b"", lambda code: code[:-1], lambda code: bytes([code[0] ^ 1]) + code[1:]]
)
def test_a_damaged_file_is_compiled_again(
    tmp_path: Path, new_process: NewProcess, damage: Callable[[bytes], bytes]
) -> None:
    new_process()
    first = code_of(tmp_path, 1)
    [path] = tmp_path.iterdir()
    whole = path.read_bytes()
    path.write_bytes(damage(whole))
    new_process()
    assert code_of(tmp_path, 1) == first and emitted == [1]
    assert path.read_bytes() == whole


def test_a_file_under_the_name_of_another_kernel_is_compiled_again(tmp_path: Path, new_process: NewProcess) -> None:
    new_process()
    first = code_of(tmp_path, 1)
    [path] = tmp_path.iterdir()
    other = code_of(tmp_path, 2)
    [other_path] = set(tmp_path.iterdir()) - {path}
    path.write_bytes(other_path.read_bytes())
    new_process()
    assert code_of(tmp_path, 1) == first and emitted == [1]
    with pytest.raises(ValueError, match="has no function"):
        LoadedHandler(Handler(adding_some, (1,), host_chip()).target, other)


def test_nothing_is_stored_where_the_sources_are_no_files(
    tmp_path: Path, new_process: NewProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stored_kernels, "_SOURCES", tmp_path / "none")
    monkeypatch.setattr(stored_kernels, "_surroundings", stored_kernels._surroundings.__wrapped__)
    new_process()
    code_of(tmp_path, 1)
    new_process()
    code_of(tmp_path, 1)
    assert emitted == [1] and not any(tmp_path.iterdir())


def test_kernels_that_others_may_write_are_not_used(tmp_path: Path, new_process: NewProcess) -> None:
    new_process()
    code_of(tmp_path, 1)
    [path] = tmp_path.iterdir()
    path.chmod(0o666)
    new_process()
    code_of(tmp_path, 1)
    assert emitted == [1]


def _plus_three(x: jax.Array) -> jax.Array:
    result: jax.Array = Handler(adding_some, (3,), host_chip())(struct(x.shape), x)
    return result


def test_a_program_is_compiled_before_the_code_of_its_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    goes_on, compile_it = Event(), Handler.compile

    def late(handler: Handler) -> bytes:
        goes_on.wait()
        return compile_it(handler)

    monkeypatch.setattr(Handler, "compile", late)
    handler = Handler(adding_some, (4,), host_chip())
    try:
        with handlers.compiled_by_another_thread() as kernels:
            lowered = jax.jit(lambda x: handler(struct(x.shape), x)).lower(struct((4,)))
        program, [kernel] = lowered.compile(), kernels
        assert not kernel.done()
    finally:
        goes_on.set()
    kernel.result()
    np.testing.assert_array_equal(program(np.arange(4, dtype=np.int32)), [4, 5, 6, 7])


def test_programs_that_are_not_stored_find_their_kernels(tmp_path: Path) -> None:
    mesh = Mesh(np.array(jax.devices()[:1]), ("model",))
    recipe = Recipe(_plus_three, (struct((4,)),), mesh)
    program = StoredPrograms(tmp_path / "programs").make(recipe)
    np.testing.assert_array_equal(program(np.arange(4, dtype=np.int32)), [3, 4, 5, 6])
    [path] = (tmp_path / "programs").iterdir()
    assert path.name.endswith("-kernel")
