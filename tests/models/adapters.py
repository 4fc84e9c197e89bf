"""Random adapters of low rank for tests, the files that PEFT would save of them, and models with them merged."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from jaxvllm.models.families import find_family, model_spec
from jaxvllm.models.lora_modules import LoraModule, lora_modules
from jaxvllm.models.outer_lora import EMBED
from tests.models.fixture import FIXTURES, Fixture
from tests.models.seeded_weights import seeded_weights


def modules_of(fixture: Fixture) -> dict[str, LoraModule]:
    """The modules of a fixture's checkpoint that adapters may change."""
    family = find_family(fixture.config)
    found = lora_modules(model_spec(fixture.config, fixture.max_model_len), family)
    # An LM head that is the embedding is not in the file.
    in_file = {f"{name}.weight" for name in found} & fixture.shapes.keys() | {"lm_head.weight"}
    return {name: module for name, module in found.items() if f"{name}.weight" in in_file}


def tensor_name(module: str, side: str, is_embedding: bool = False) -> str:
    """The name of A or B in PEFT's file."""
    return f"base_model.model.{module}.lora_" + (f"embedding_{side}" if is_embedding else f"{side}.weight")


@dataclass(frozen=True)
class RandomAdapter:
    """An adapter of `fixture` for the modules whose names end with one of `ends`."""

    fixture: Fixture
    seed: int
    ends: tuple[str, ...] = ("",)
    rank: int = 4
    alpha: float = 8
    size: float = 0.3  # of the numbers in B
    config: Mapping[str, Any] = field(default_factory=dict)  # beside what PEFT always saves
    tables: tuple[str, ...] = ()  # the names of the modules that it has whole

    def rank_of(self, name: str) -> int:
        pattern = self.config.get("rank_pattern", {})
        return next((rank for end, rank in pattern.items() if name.endswith(end)), self.rank)

    def scale_of(self, name: str) -> float:
        pattern, rank = self.config.get("alpha_pattern", {}), self.rank_of(name)
        alpha = next((alpha for end, alpha in pattern.items() if name.endswith(end)), self.alpha)
        return float(alpha / (np.sqrt(rank) if self.config.get("use_rslora") else rank))

    def matrices(self) -> dict[str, tuple[np.ndarray, np.ndarray]]:
        """A f32[r, in] and B f32[out, r] of each module."""
        random = np.random.default_rng(self.seed)
        return {
            name: (
                random.normal(0, module.in_size**-0.5, (self.rank_of(name), module.in_size)).astype(np.float32),
                random.normal(0, self.size, (module.out_size, self.rank_of(name))).astype(np.float32),
            )
            for name, module in modules_of(self.fixture).items()
            if name.endswith(self.ends)
            and name not in self.tables
            and not (self.has_magnitudes and (module.layer is None or module.index))
        }

    @property
    def has_magnitudes(self) -> bool:
        return bool(self.config.get("use_dora"))

    def magnitudes(self) -> dict[str, np.ndarray]:
        """The lengths of the rows of each module that DoRA has trained, f32[out]."""
        random = np.random.default_rng(self.seed + 1000)
        return {name: random.uniform(0.5, 2, len(up)).astype(np.float32) for name, (_, up) in self.matrices().items()}

    def saved(self) -> dict[str, np.ndarray]:
        """The tables that it has whole, f32[V, E], by the names of their modules."""
        random, modules = np.random.default_rng(self.seed + 2000), modules_of(self.fixture)
        shapes = {name: sorted((modules[name].in_size, modules[name].out_size), reverse=True) for name in self.tables}
        return {name: random.normal(0, size[1] ** -0.5, size).astype(np.float32) for name, size in shapes.items()}

    def merged(self, weights: Mapping[str, np.ndarray] | None = None) -> dict[str, np.ndarray]:
        """The weights of the checkpoint, or others, with what the adapter adds, and with its lengths of rows.

        They have an LM head of their own if the adapter changes it, or has a table whole.
        """
        merged = dict(self.fixture.weights() if weights is None else weights)
        magnitudes = self.magnitudes()
        if ("lm_head" in self.matrices() or self.tables) and "lm_head.weight" not in merged:
            [table] = (name for name, module in modules_of(self.fixture).items() if module.matrix == EMBED)
            merged["lm_head.weight"] = merged[f"{table}.weight"]
        merged |= {f"{name}.weight": table for name, table in self.saved().items()}
        for name, (down, up) in self.matrices().items():
            [source, *_] = modules_of(self.fixture)[name].sources
            tensor = merged[f"{name}.weight"].astype(np.float64)
            rows = tensor.T if source.is_turned else tensor
            rows = rows + self.scale_of(name) * up.astype(np.float64) @ down.astype(np.float64)
            if self.has_magnitudes:
                rows *= (magnitudes[name] / np.linalg.norm(rows, axis=1))[:, None]
            merged[f"{name}.weight"] = (rows.T if source.is_turned else rows).astype(np.float32)
        return merged

    def tensors(self) -> dict[str, np.ndarray]:
        """The tensors of PEFT's file."""
        found = {
            tensor_name(name, side, modules_of(self.fixture)[name].matrix == EMBED): matrix
            for name, pair in self.matrices().items()
            for side, matrix in zip("AB", pair, strict=True)
        }
        if self.has_magnitudes:
            found |= {f"base_model.model.{name}.lora_magnitude_vector": own for name, own in self.magnitudes().items()}
        return found | {f"base_model.model.{name}.weight": table for name, table in self.saved().items()}

    def write(self, directory: Path) -> Path:
        """Writes what PEFT saves."""
        directory.mkdir(parents=True, exist_ok=True)
        usual = {"peft_type": "LORA", "r": self.rank, "lora_alpha": self.alpha, "target_modules": ["q_proj"]}
        usual |= {"bias": "none", "modules_to_save": list(self.tables) or None}
        (directory / "adapter_config.json").write_text(json.dumps(usual | dict(self.config)))
        save_file(self.tensors(), directory / "adapter_model.safetensors")
        return directory


@dataclass(frozen=True)
class FusedAdapter(RandomAdapter):
    """An adapter of the parameters that have the matrices of all experts, of which the checkpoint stores each alone."""

    def matrices(self) -> dict[str, tuple[np.ndarray, np.ndarray]]:
        """A f32[X r, in] and B f32[out, r X] of each parameter, as PEFT has them."""
        random = np.random.default_rng(self.seed)
        found = {}
        for name, module in self._parameters().items():
            assert module.num_experts is not None
            width = self.rank * module.num_experts
            down = random.normal(0, module.in_size**-0.5, (width, module.in_size)).astype(np.float32)
            found[name] = down, random.normal(0, self.size, (module.out_size, width)).astype(np.float32)
        return found

    def _parameters(self) -> dict[str, LoraModule]:
        family = find_family(self.fixture.config)
        found = lora_modules(model_spec(self.fixture.config, self.fixture.max_model_len), family)
        start = family.prefixes[0]
        return {name: own for name, own in found.items() if own.num_experts is not None and name.startswith(start)}

    def merged(self, weights: Mapping[str, np.ndarray] | None = None) -> dict[str, np.ndarray]:
        merged = dict(self.fixture.weights() if weights is None else weights)
        for name, (down, up) in self.matrices().items():
            parent, _, parameter = name.rpartition(".")
            count = len(down) // self.rank
            for expert in range(count):
                own = up[:, expert::count] @ down[expert * self.rank :][: self.rank]
                halves = ["gate_proj", "up_proj"] if parameter == "gate_up_proj" else [parameter]
                for half, rows in zip(halves, np.split(self.alpha / self.rank * own, len(halves)), strict=True):
                    merged[f"{parent}.{expert}.{half}.weight"] = merged[f"{parent}.{expert}.{half}.weight"] + rows
        return merged

    def tensors(self) -> dict[str, np.ndarray]:
        """The tensors of PEFT's file: the module is wrapped twice, and the inner wrapper is the first's."""
        return {
            tensor_name(name.replace(".gate_up_proj", ".base_layer").removesuffix(".down_proj"), side): matrix
            for name, pair in self.matrices().items()
            for side, matrix in zip("AB", pair, strict=True)
        }


@dataclass(frozen=True)
class PeftFixture:
    """What tools/make_adapter_fixtures.py has written: an adapter of PEFT, and what it computes with that."""

    config: Mapping[str, Any]
    tensors: Mapping[str, np.ndarray]
    logits: np.ndarray  # f32[prompts, V], at the last position of each prompt of the fixture

    @classmethod
    def load(cls, name: str) -> "PeftFixture":
        record = json.loads((FIXTURES / name / "adapter.json").read_text())
        with np.load(FIXTURES / name / "adapter.npz") as arrays:
            return cls(record["config"], seeded_weights(record["shapes"], record["seed"], 0), arrays["logits"])

    def write(self, directory: Path) -> Path:
        """Writes what PEFT has saved."""
        directory.mkdir(parents=True, exist_ok=True)
        (directory / "adapter_config.json").write_text(json.dumps(dict(self.config)))
        save_file(dict(self.tensors), directory / "adapter_model.safetensors")
        return directory
