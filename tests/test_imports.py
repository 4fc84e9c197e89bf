"""The arrows of docs/structure.md hold, and the product keeps away from what it must not use."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGES = ("jaxvllm", "pallas_kernels", "sharding")

# What each layer must not import, itself or below. Longest matching layer wins; a layer that is not here
# has no rule. `jax` stands for every module that pulls it in.
DEVICE = ("jax", "jaxlib", "pallas_kernels", "sharding")
# A module in a package of device code that has none itself, so that all packages may import it.
WITHOUT_DEVICES = "pallas_kernels.extras"
# What talks to a server over HTTP knows nothing of what is in it.
CLIENT = (
    *DEVICE,
    "jaxvllm.core",
    "jaxvllm.text",
    "jaxvllm.runtime",
    "jaxvllm.models",
    "jaxvllm.engine",
    "jaxvllm.worker",
    "jaxvllm.planner",
    "jaxvllm.simulator",
    "jaxvllm.server",
    "jaxvllm.cli",
)
# Of the server, what answers HTTP requests; the packages beside it know nothing of the API.
API = (
    "jaxvllm.server.app",
    "jaxvllm.server.exchange",
    "jaxvllm.server.generation",
    "jaxvllm.server.http_doc",
    "jaxvllm.server.lifecycle",
    "jaxvllm.server.protocol",
    "jaxvllm.server.routes",
    "jaxvllm.server.serve",
    "jaxvllm.server.service",
)
# The server runs beside the engine's process, and never in it.
SERVER = (
    "jax",
    "jaxlib",
    "jaxvllm.grammar",
    "jaxvllm.runtime",
    "jaxvllm.models",
    "jaxvllm.engine.engine",
    "jaxvllm.engine.llm",
    "jaxvllm.planner",
    "jaxvllm.simulator",
    "jaxvllm.client",
    "jaxvllm.bench",
    "jaxvllm.cli",
)
ABOVE_ENGINE = (
    "jaxvllm.explainer",
    "jaxvllm.planner",
    "jaxvllm.simulator",
    "jaxvllm.server",
    "jaxvllm.client",
    "jaxvllm.bench",
    "jaxvllm.cli",
)
# In the process that holds an engine's process. Of the engine it sees values alone.
WORKER_CLIENT = (
    *ABOVE_ENGINE,
    *DEVICE,
    "jaxvllm.grammar",
    "jaxvllm.runtime",
    "jaxvllm.models",
    "jaxvllm.engine.engine",
    "jaxvllm.engine.llm",
)
FORBIDDEN = {
    "jaxvllm.core": (
        *DEVICE,
        "jaxvllm.text",
        "jaxvllm.grammar",
        "jaxvllm.runtime",
        "jaxvllm.models",
        "jaxvllm.engine",
        "jaxvllm.worker",
        *ABOVE_ENGINE,
    ),
    "jaxvllm.text": (
        *DEVICE,
        "jaxvllm.grammar",
        "jaxvllm.runtime",
        "jaxvllm.models",
        "jaxvllm.engine",
        "jaxvllm.worker",
        *ABOVE_ENGINE,
    ),
    "jaxvllm.grammar": (
        *DEVICE,
        "jaxvllm.runtime",
        "jaxvllm.models",
        "jaxvllm.engine",
        "jaxvllm.worker",
        *ABOVE_ENGINE,
    ),
    "jaxvllm.runtime": ("jaxvllm.text", "jaxvllm.grammar", "jaxvllm.engine", "jaxvllm.worker", *ABOVE_ENGINE),
    "jaxvllm.models": (
        "jaxvllm.core",
        "jaxvllm.text",
        "jaxvllm.runtime",
        "jaxvllm.engine",
        "jaxvllm.worker",
        *ABOVE_ENGINE,
    ),
    "jaxvllm.engine": ("jaxvllm.worker", *ABOVE_ENGINE),
    "jaxvllm.worker": WORKER_CLIENT,
    "jaxvllm.worker.command_loop": ABOVE_ENGINE,  # runs in the engine's process
    "jaxvllm.planner": ("jaxvllm.simulator", "jaxvllm.server", "jaxvllm.cli"),
    "jaxvllm.simulator": ("jaxvllm.worker", "jaxvllm.server", "jaxvllm.cli"),
    # Reports although jax may fail: only the process that it starts imports jax.
    "jaxvllm.environment": CLIENT,
    "jaxvllm.environment.devices": ("jaxvllm",),
    "jaxvllm.explainer": (*DEVICE, "jaxvllm.worker", "jaxvllm.server", "jaxvllm.client", "jaxvllm.cli"),
    "jaxvllm.server": SERVER,
    "jaxvllm.server.http": (
        *DEVICE,
        "jaxvllm.core",
        "jaxvllm.text",
        "jaxvllm.runtime",
        "jaxvllm.models",
        "jaxvllm.engine",
        "jaxvllm.worker",
        "jaxvllm.server.metrics",
        *API,
        "jaxvllm.planner",
        "jaxvllm.client",
        "jaxvllm.bench",
        "jaxvllm.cli",
    ),
    "jaxvllm.server.metrics": (*SERVER, "jaxvllm.text", "jaxvllm.server.http", *API),
    # Before servers, and of their code only what answers HTTP for any application.
    "jaxvllm.router": (
        *DEVICE,
        "jaxvllm.text",
        "jaxvllm.grammar",
        "jaxvllm.runtime",
        "jaxvllm.models",
        "jaxvllm.engine",
        "jaxvllm.server.app",
        "jaxvllm.server.config",
        "jaxvllm.server.exchange",
        "jaxvllm.server.generation",
        "jaxvllm.server.metrics",
        "jaxvllm.server.protocol",
        "jaxvllm.server.routes",
        "jaxvllm.server.serve",
        "jaxvllm.server.service",
        "jaxvllm.planner",
        "jaxvllm.simulator",
        "jaxvllm.client",
        "jaxvllm.bench",
    ),
    "jaxvllm.client": (*CLIENT, "jaxvllm.bench"),
    "jaxvllm.bench": CLIENT,
    "jaxvllm.bench.offline": ("jaxvllm.worker", "jaxvllm.server", "jaxvllm.client", "jaxvllm.cli"),
    "jaxvllm.bench.ladder": ("jaxvllm.worker", "jaxvllm.server", "jaxvllm.client", "jaxvllm.cli"),
    "jaxvllm.bench.kernels": ("jaxvllm.engine", "jaxvllm.worker", "jaxvllm.server", "jaxvllm.client", "jaxvllm.cli"),
    "jaxvllm.bench.__main__": (),  # is the command
    "pallas_kernels": ("jaxvllm", "sharding"),
    "sharding": ("jaxvllm", "pallas_kernels"),
}
# Heavy or foreign: nowhere in the product, at no time.
FORBIDDEN_ANYWHERE = (
    "torch",
    "transformers",
    "tensorflow",
    "flax",
    "optax",
    "pickle",
    "cPickle",
    "dill",
    "cloudpickle",
    "marshal",
)
FORBIDDEN_CALLS = ("eval", "exec", "torch.load", "numpy.load", "np.load", "yaml.load")
ALLOWED_IN = {
    # It may fall back on transformers, inside a function and with its own error.
    "transformers": ("jaxvllm.text.tokenizer",),
    # It reads what this user's earlier start has written, where nobody else may write: a compiled program, which is
    # code in any case.
    "pickle": ("jaxvllm.runtime.stored_programs",),
    # They are for trainers, and nothing else imports them.
    "flax": ("jaxvllm.flax", "jaxvllm.tunix", "jaxvllm.tunix_models"),
}


def module_name(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def product_files() -> list[Path]:
    return sorted(path for package in PACKAGES for path in (ROOT / package).rglob("*.py"))


def imports(module: str, is_package: bool, tree: ast.AST) -> Iterator[str]:
    """Full names of everything imported anywhere in the file, inside functions and TYPE_CHECKING too."""
    parents = module.split(".")
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                kept = len(parents) - node.level + is_package
                base = ".".join([*parents[:kept], *([base] if base else [])])
            yield from (f"{base}.{alias.name}" for alias in node.names)


def under(name: str, layer: str) -> bool:
    return name == layer or name.startswith(layer + ".")


def broken_arrows(module: str, is_package: bool, tree: ast.AST) -> list[str]:
    layers = [layer for layer in FORBIDDEN if under(module, layer)]
    banned = (*FORBIDDEN_ANYWHERE, *(FORBIDDEN[max(layers, key=len)] if layers else ()))
    banned = tuple(name for name in banned if module not in ALLOWED_IN.get(name, ()))
    return [
        f"{module} imports {name}"
        for name in imports(module, is_package, tree)
        if any(under(name, layer) for layer in banned) and not under(name, WITHOUT_DEVICES)
    ]


def test_imports_point_one_way() -> None:
    files = product_files()
    assert {module_name(path).split(".")[0] for path in files} == set(PACKAGES)
    broken = []
    for path in files:
        tree = ast.parse(path.read_text(), str(path))
        broken += broken_arrows(module_name(path), path.name == "__init__.py", tree)
    assert not broken, "\n".join(broken)


@pytest.mark.parametrize(
    ("module", "is_package", "source"),
    [
        ("jaxvllm.core.step_plan", False, "import jax.numpy as jnp"),
        ("jaxvllm.core.step_plan", False, "def f():\n    from jaxvllm import runtime"),
        ("jaxvllm.core.step_plan", False, "from ..runtime.runner import Runner"),
        ("jaxvllm.core", True, "from ..engine import llm"),
        ("jaxvllm.runtime.step", False, "from jaxvllm.engine import outputs"),
        ("jaxvllm.models.decoder", False, "import jaxvllm.core.step_plan"),
        ("jaxvllm.engine.loop", False, "import jaxvllm.server"),
        ("jaxvllm.engine.loop", False, "from jaxvllm.worker import wire"),
        ("jaxvllm.text.tokenizer", False, "import jax"),
        ("jaxvllm.grammar.compiler", False, "from jaxvllm.engine import outputs"),
        ("jaxvllm.text.tokenizer", False, "from jaxvllm.engine import outputs"),
        ("jaxvllm.worker.async_llm", False, "from jaxvllm.engine.engine import Engine"),
        ("jaxvllm.worker.command_loop", False, "from jaxvllm.server import service"),
        ("jaxvllm.server.http.connection", False, "from jaxvllm.server.service import Service"),
        ("jaxvllm.server.http.connection", False, "from jaxvllm.worker.async_llm import AsyncLLM"),
        ("jaxvllm.router.proxy", False, "from jaxvllm.server.service import Service"),
        ("jaxvllm.server.metrics.prometheus", False, "from jaxvllm.server.http.auth import Auth"),
        ("sharding.mesh", False, "import jaxvllm"),
        ("pallas_kernels.op.api", False, "from sharding import rules"),
        ("jaxvllm.models.checkpoint", False, "import pickle"),
        ("jaxvllm.runtime.stored_programs", False, "import dill"),
        ("jaxvllm.runtime.stored_programs", False, "from jaxvllm.engine import outputs"),
        ("jaxvllm.models.checkpoint", False, "from transformers import AutoModel"),
        ("jaxvllm.models.trained_model", False, "from flax import nnx"),
    ],
)
def test_a_wrong_import_is_seen(module: str, is_package: bool, source: str) -> None:
    assert broken_arrows(module, is_package, ast.parse(source))


def test_every_source_that_is_traced_is_part_of_the_names_of_stored_programs() -> None:
    from jaxvllm.runtime.recipe import TRACED_PACKAGES, traced_core

    traced = (*(package.replace("/", ".") for package in TRACED_PACKAGES), *traced_core(ROOT))
    found = [
        f"{module_name(path)} imports {name}"
        for path in product_files()
        if any(under(module_name(path), package) for package in traced)
        for name in imports(module_name(path), path.name == "__init__.py", ast.parse(path.read_text()))
        if name.split(".")[0] in PACKAGES and not any(under(name, package) for package in traced)
        if name != "jaxvllm"  # imports nothing by itself
    ]
    assert not found, "\n".join(found)


def test_nothing_is_executed_or_unpickled() -> None:
    found = [
        f"{path.relative_to(ROOT)}:{node.lineno} calls {ast.unparse(node.func)}"
        for path in product_files()
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call) and ast.unparse(node.func) in FORBIDDEN_CALLS
    ]
    assert not found, "\n".join(found)


def loaded_by(statement: str) -> set[str]:
    """The modules that a fresh interpreter holds after the statement."""
    program = f"{statement}\nimport sys\nprint(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    return set(done.stdout.split())


@pytest.mark.parametrize("module", ["jaxvllm", "jaxvllm.config", "jaxvllm.cli"])
def test_import_is_cheap(module: str) -> None:
    heavy = {
        "jax",
        "jaxlib",
        "tokenizers",
        "safetensors",
        "huggingface_hub",
        "jinja2",
        "transformers",
        "torch",
    }
    assert sorted(loaded_by(f"import {module}") & heavy) == []


def test_an_engine_imports_nothing_that_few_requests_need() -> None:
    """Chat templates, progress bars, connections to other engines and grammars take 0.05 s of each start.

    What other models and other devices need takes 0.08 s.
    """
    rare = {"jinja2", "tqdm", "zmq", "llguidance"}
    models = "families.llama", "forms.cpu_groups", "forms.gpu_groups", "gpu_states", "heads.eagle", "mamba", "peft"
    rare |= {f"jaxvllm.models.{name}" for name in (*models, "published.awq", "published.gguf_tensors")}
    assert sorted(loaded_by("import jaxvllm.engine.llm") & rare) == []


@pytest.mark.parametrize("package", ["core", "text", "grammar"])
def test_the_scheduler_and_text_run_without_jax(package: str) -> None:
    modules = ", ".join(module_name(path) for path in (ROOT / "jaxvllm" / package).glob("*.py"))
    assert sorted(loaded_by(f"import {modules}") & {"jax", "jaxlib"}) == []


@pytest.mark.parametrize(
    "module",
    ["jaxvllm.server.serve", "jaxvllm.server.app", "jaxvllm.worker.async_llm", "jaxvllm.cli.chat", "jaxvllm.bench"],
)
def test_the_server_and_its_clients_run_without_jax(module: str) -> None:
    assert sorted(loaded_by(f"import {module}") & {"jax", "jaxlib"}) == []


def test_the_version_is_the_installed_one() -> None:
    import tomllib

    import jaxvllm

    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert jaxvllm.__version__ == project["version"]


def tracked_files() -> list[Path]:
    """What git tracks or would track: caches and environments are ignored there, so they are here."""
    listing = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        capture_output=True,
        text=True,
        check=True,
        cwd=ROOT,
    )
    return [path for name in listing.stdout.split("\0") if name and (path := ROOT / name).is_file()]


def test_no_file_names_a_registry() -> None:
    # Spelled in halves, or this file would be the first to break the rule.
    hosts = [
        (first + second).encode()
        for first, second in [
            ("pypi", ".org"),
            ("pythonhosted", ".org"),
            ("download.py", "torch.org"),
            ("registry.npm", "js.org"),
            ("deb.deb", "ian.org"),
            ("conda.ana", "conda.org"),
            ("crat", "es.io"),
        ]
    ]
    found = [
        f"{path.relative_to(ROOT)} names {host.decode()}"
        for path in tracked_files()
        if path.suffix not in (".safetensors", ".npz")
        for host in hosts
        if host in path.read_bytes()
    ]
    assert not found, "\n".join(found)


def test_every_module_has_a_noun_for_a_name() -> None:
    vague = {"utils", "util", "helpers", "common", "misc"}
    assert not [path for path in product_files() if path.stem in vague]
