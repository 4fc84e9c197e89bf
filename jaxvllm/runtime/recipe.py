"""Recipes: all that a program is compiled from, and a name for it that changes whenever one of these things does."""

import hashlib
import os
import platform
import re
import sys
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, fields, is_dataclass
from enum import Enum
from functools import cache, partial
from pathlib import Path
from types import FunctionType
from typing import Any, Self

import jax
import jaxlib.version
import numpy as np
from jax.sharding import Mesh, PartitionSpec, Sharding

from jaxvllm.runtime.source_files import digest_of, source_files
from pallas_kernels.cpu.handlers import CodeStore, compiled_by_another_thread

COMPILER_OPTIONS: dict[str, dict[str, Any]] = {
    # For v7x XLA:TPU wants 16-bit weights tiled (16, 128), is given them tiled (8, 128), as everywhere else, and copies
    # all of them in every step: 3.3 GiB for two layers of Llama 3 70B (compiled HLO, libtpu 0.0.48.1).
    "tpu": {"xla_tpu_control_large_2nd_minor_layout_for_x16": False},
    # XLA:GPU's Triton matmuls copy the layer's slice of a stacked weight first, three times decode's memory traffic;
    # cuBLASLt reads it in place (compiled HLO, jax 0.11.2).
    "gpu": {"xla_gpu_enable_triton_gemm": False},
    "cpu": {
        # LLVM at -O1: a mixed bucket of an 8-layer model compiles in 3.2 s and not 5.7 s, and steps take the same time
        # (1, 16 and 128 tokens, 2 cores): the matmuls are library calls, the rest is bound by memory.
        "xla_backend_optimization_level": 1,
        # YNNPACK multiplies matrices and does nothing else. XLA would give it the reductions of large steps only, where
        # it sums in another order. In bfloat16 a norm's last bit became 0.03 in a log-probability of the demo model.
        "xla_cpu_experimental_ynn_fusion_type": "LIBRARY_FUSION_TYPE_INDIVIDUAL_DOT",
    },
}

# The packages whose code runs while a program is traced. Any change in them changes the name of every program, and so
# does one in a module outside them that they import: one of the core, the count of cores, or the reader of GGUF files.
# The scheduler is none of these.
TRACED_PACKAGES = ("jaxvllm/models", "jaxvllm/runtime", "pallas_kernels", "sharding")
# It begins with what is constant, which `re` finds in a seventh of the time that `^\s*` before it takes: 2 ms of all
# sources and not 14.
_CORE_IMPORT = re.compile(rb"from (jaxvllm\.(?:core\.\w+|cores|gguf_file)) import")
_ROOT = Path(__file__).parents[2]
# Functions of these modules are known by their names, as those of `traced_core` are: the sources of ours, and the
# versions of the others, are in the name of the program.
_KNOWN_MODULES = (*(package.replace("/", ".") for package in TRACED_PACKAGES), "jax", "numpy")
# What XLA and its plugins read beside jax's configuration. NPROC is the number of threads that XLA compiles for.
_ENVIRONMENT = ("XLA_FLAGS", "LIBTPU_INIT_ARGS", "NVIDIA_TF32_OVERRIDE", "NPROC")
_CPUINFO = Path("/proc/cpuinfo")


class NoName(Exception):
    """Something that a program is compiled from has no text that says all about it, such as a function of a user's."""


@dataclass(frozen=True)
class Recipe:
    """The parts from which a program is compiled, but for the surroundings, which are the same for all of a process."""

    run: Callable[..., Any]  # a function of ours, or a `partial` that gives it values
    arguments: tuple[Any, ...]  # trees of arrays or of their abstract shapes, with shardings
    mesh: Mesh
    donates: tuple[int, ...] = ()  # numbers of arguments
    out_specs: Any = None  # each device of the mesh runs it on its part, and these are the outputs' parts; or None
    out_shardings: Any = None  # where the outputs are; None leaves it to XLA

    @classmethod
    def changing(cls, run: Callable[..., Any], arguments: tuple[Any, ...], mesh: Mesh, count: int = 1) -> Self:
        """Returns the recipe of `run`, which returns its first `count` arguments changed. They are donated.

        Each device changes its own part of them, and sends nothing.
        """
        changed = arguments[0] if count == 1 else arguments[:count]
        specs = jax.tree.map(lambda x: x.sharding.spec, changed) if mesh.size > 1 else None
        return cls(run, arguments, mesh, donates=tuple(range(count)), out_specs=specs)

    def compile(self, kernels: CodeStore | None = None) -> jax.stages.Compiled:
        """Traces, lowers and compiles the program for the devices of the mesh.

        Kernels for CPUs come from `kernels`, or go there.
        """
        run = self.run
        if self.out_specs is not None:
            run = jax.shard_map(
                run,
                mesh=self.mesh,
                in_specs=jax.tree.map(lambda x: x.sharding.spec, self.arguments),
                out_specs=self.out_specs,
                check_vma=False,  # Pallas calls do not say over which axes their outputs vary
            )
        where = {} if self.out_shardings is None else {"out_shardings": self.out_shardings}
        program = jax.jit(run, donate_argnums=self.donates, **where)
        device = self.mesh.devices.flat[0]
        is_own_gpu = device.platform == "gpu" and device.process_index == jax.process_index()
        # Without a GPU, Pallas asks the mesh for its device, and Mosaic GPU asks the default device for its generation:
        # it lowered a B200's kernels for Hopper. See pallas_kernels/deviceless.py.
        with (
            jax.sharding.use_abstract_mesh(self.mesh.abstract_mesh),
            jax.default_device(device) if is_own_gpu else nullcontext(),
            compiled_by_another_thread(kernels) as handlers,
        ):
            lowered = program.lower(*self.arguments)
        compiled = lowered.compile(self.options)
        for handler in handlers:
            handler.result()
        return compiled

    @property
    def options(self) -> dict[str, Any] | None:
        """The compiler's options for these devices."""
        return COMPILER_OPTIONS.get(self.mesh.devices.flat[0].platform)

    def name(self) -> str:
        """Returns 64 hexadecimal digits that two recipes share only if they give the same program.

        Raises NoName when there are none: for functions that are not this project's, and where other processes have
        devices of the mesh.
        """
        devices = self.mesh.devices.flat
        if any(device.process_index != jax.process_index() for device in devices):
            raise NoName("other processes have devices of the mesh")
        parts = [
            _surroundings(devices[0].client),
            repr(self.mesh),
            *(f"{device.id} {device.platform} {device.device_kind}" for device in devices),
            repr(self.options),
            _text(self.run),
            _tree_text(self.arguments),
            repr(self.donates),
            _tree_text(self.out_specs),
            _tree_text(self.out_shardings),
        ]
        return hashlib.sha256("\n".join(parts).encode()).hexdigest()


def _tree_text(tree: Any) -> str:
    leaves, structure = jax.tree.flatten(tree)
    return "\n".join((str(structure), *map(_leaf_text, leaves)))


def _leaf_text(leaf: Any) -> str:
    if isinstance(leaf, Sharding | PartitionSpec):
        return repr(leaf)
    return f"{leaf.dtype}{list(leaf.shape)} {getattr(leaf, 'weak_type', False)} {leaf.format}"


def _text(value: Any) -> str:
    """Returns a text that two values share only if they are equal. Raises NoName for values of unknown types."""
    match value:
        case None | bool() | int() | float() | str() | bytes():
            return repr(value)
        case Enum():
            return f"{_full_name(type(value))}.{value.name}"
        case np.generic() | np.ndarray():
            return f"{value.dtype}{list(value.shape)}{value.tobytes().hex()}"
        case np.dtype():
            return f"dtype {value.name}"
        case jax.ShapeDtypeStruct():
            return f"array {value.dtype}{list(value.shape)}"
        case tuple() | list():
            return f"{type(value).__name__}({', '.join(map(_text, value))})"
        case dict():
            return f"dict({', '.join(f'{_text(key)}: {_text(one)}' for key, one in value.items())})"
        case partial():
            return f"partial{_text((value.func, value.args, value.keywords))}"
        case FunctionType() | type():
            return _full_name(value)
    if is_dataclass(value):
        of_fields = (f"{field.name}={_text(getattr(value, field.name))}" for field in fields(value))
        return f"{_full_name(type(value))}({', '.join(of_fields)})"
    raise NoName(f"{type(value).__qualname__} is not known here")


def _full_name(thing: Any) -> str:
    """Returns the name of a class or function that is defined at the top of a module that is known."""
    module, name = thing.__module__, thing.__qualname__
    is_known = any(module == known or module.startswith(f"{known}.") for known in _KNOWN_MODULES)
    if "<" in name or not (is_known or module in traced_core(_ROOT)):
        raise NoName(f"{module}.{name} is not known here")
    return f"{module}.{name}"


def _surroundings(client: Any) -> str:
    """Returns everything else that a program depends on: versions, sources, configuration, and this host's CPU."""
    settings = {name: value for name, value in jax.config.values.items() if "cache" not in name}
    parts = [
        f"python {sys.version}, jax {jax.__version__}, jaxlib {jaxlib.version.__version__}, numpy {np.__version__}",
        f"{client.platform} {client.platform_version}",
        sources_digest(),
        repr(sorted(settings.items())),
        repr([(name, os.environ.get(name)) for name in _ENVIRONMENT]),
        _host_cpu(),
    ]
    return "\n".join(parts)


@cache
def sources_digest() -> str:
    """Returns a digest of every file that is traced: 20 ms. Raises NoName where there are no sources."""
    return digest_of((*_traced_files(_ROOT), *traced_core(_ROOT).values()), _ROOT)


def _traced_files(root: Path) -> list[Path]:
    """Returns every file of the packages that are traced."""
    files = []
    for package in TRACED_PACKAGES:
        own = source_files(root / package)
        if not own:
            raise NoName(f"there are no sources of {package}")
        files += own
    return files


@cache
def traced_core(root: Path) -> dict[str, Path]:
    """Returns the modules outside them that the packages which are traced import, themselves or through others."""
    found: dict[str, Path] = {}
    unread = [path for path in _traced_files(root) if path.suffix == ".py"]
    while unread:
        names = {name.decode() for path in unread for name in _CORE_IMPORT.findall(path.read_bytes())}
        new = {name: root / f"{name.replace('.', '/')}.py" for name in sorted(names - found.keys())}
        found |= new
        unread = list(new.values())
    return found


@cache
def _host_cpu() -> str:
    """Returns the kind of this host's CPU with its features, and how many cores this process may use."""
    kind = f"{platform.machine()} {platform.processor()}"
    if _CPUINFO.is_file():
        wanted = ("vendor_id", "cpu family", "model", "flags", "Features")
        lines = _CPUINFO.read_text(encoding="utf-8").split("\n\n")[0].splitlines()
        kind = "\n".join([kind, *(line for line in lines if line.startswith(wanted))])
    return f"{kind}\n{os.cpu_count()} cores"
