"""Makes the proposer of a `SpeculativeConfig`, and puts its parameters on the devices."""

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import jax
import ml_dtypes
import numpy as np
from jax.sharding import Mesh

from jaxvllm.core.speculative_config import SpeculativeConfig
from jaxvllm.engine.resolved_config import ResolvedConfig
from jaxvllm.model_name import resolve
from jaxvllm.models import checkpoint
from jaxvllm.models.families import model_spec
from jaxvllm.models.forms import PLAIN, Form, Forms
from jaxvllm.models.heads.draft_model import DraftModel
from jaxvllm.models.heads.files import read_eagle, read_eagle3, read_medusa, read_mtp
from jaxvllm.models.heads.kinds import check_kind, method_of
from jaxvllm.models.params import Params
from jaxvllm.runtime.proposers import Proposer
from jaxvllm.runtime.proposers.autoregressive import AutoregressiveProposer
from jaxvllm.runtime.proposers.medusa import MedusaProposer
from jaxvllm.runtime.proposers.ngram import NgramProposer
from jaxvllm.runtime.proposers.suffix import SuffixProposer
from sharding.placement import mesh_of, place

# Arrays of heads by which matmuls multiply; others are norms, biases and tables.
_MATRICES = frozenset({"fc", "qkv", "o", "gate_up", "down", "lm_head", "lm_heads", "weight"})


@dataclass(frozen=True)
class Drafting:
    """A proposer, and its parameters on the host, or None if it has none."""

    proposer: Proposer
    params: Params | None = None

    @classmethod
    def of(
        cls, config: SpeculativeConfig, target: ResolvedConfig, target_directory: Path, form: Form = PLAIN
    ) -> "Drafting":
        """Reads what `config` names, for the model `target`, and keeps its matrices in `form`.

        Raises ValueError where they do not go together.
        """
        if config.method == "ngram":
            return cls(NgramProposer(config.prompt_lookup_min, config.prompt_lookup_max))
        if config.method == "suffix":
            depth, factor = config.suffix_decoding_max_tree_depth, config.suffix_decoding_max_spec_factor
            return cls(SuffixProposer(depth, factor))
        directory = target_directory if config.model is None else resolve(config.model)
        hf_config = target.hf_config if config.model is None else checkpoint.read_config(directory)
        method = config.method or method_of(Path(config.model or "").name, hf_config)
        if method != "mtp":  # whose head is a part of the model
            check_kind(method, directory, hf_config)
        if method == "draft_model":
            return cls._of_model(directory, hf_config, target, form)
        proposer: Proposer
        if method == "mtp":
            heads, params = read_mtp(directory, hf_config, target.spec, config.num_speculative_tokens)
            proposer = AutoregressiveProposer(heads)
        elif method == "medusa":
            medusa, params = read_medusa(directory, hf_config, target.spec)
            proposer = MedusaProposer(medusa)
        else:
            eagle, params = (read_eagle if method == "eagle" else read_eagle3)(directory, hf_config, target.spec)
            proposer = AutoregressiveProposer((eagle,))
        return cls(proposer, _kept(jax.tree.map(partial(_in_dtype, dtype=target.dtype), params), form))

    @classmethod
    def _of_model(cls, directory: Path, hf_config: dict[str, Any], target: ResolvedConfig, form: Form) -> "Drafting":
        spec = model_spec(hf_config)
        if spec.max_position < target.max_model_len:
            raise ValueError(
                f"draft model {directory} has {spec.max_position} positions, and max_model_len is "
                f"{target.max_model_len}: lower it, or take another draft"
            )
        host = mesh_of(jax.local_devices()[0])
        forms = Forms(form, form, form)
        params = checkpoint.load(directory, spec, dtype=target.dtype, layout=target.layout, mesh=host, forms=forms)
        return cls(AutoregressiveProposer((DraftModel(spec),)), jax.tree.map(np.asarray, params))

    def place(self, mesh: Mesh) -> Params | None:
        """Returns the parameters on every device of `mesh`."""
        if self.params is None:
            return None

        def placed(array: np.ndarray) -> jax.Array:
            everywhere = place(mesh)((None,) * array.ndim)
            return jax.make_array_from_callback(array.shape, everywhere, lambda index: array[index])

        params: Params = jax.tree.map(placed, self.params)
        return params


def _in_dtype(array: np.ndarray, dtype: Any) -> np.ndarray:
    """Casts what is no integer."""
    is_float = array.dtype == ml_dtypes.bfloat16 or np.issubdtype(array.dtype, np.floating)
    return np.asarray(array.astype(dtype) if is_float else array)


def _kept(tree: Any, form: Form, name: str = "") -> Any:
    """Returns the parameters of a head with its matrices in `form`."""
    if isinstance(tree, dict):
        return {key: _kept(value, form, key) for key, value in tree.items()}
    if isinstance(tree, list):
        return [_kept(value, form, name) for value in tree]
    return form.wrapped(form.keep(tree, {})) if name in _MATRICES else tree
