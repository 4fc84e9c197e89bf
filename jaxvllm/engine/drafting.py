"""Makes the proposer of a `SpeculativeConfig`, and puts its parameters on the devices."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from jaxvllm.core.speculative_config import SpeculativeConfig
from jaxvllm.engine.resolved_config import ResolvedConfig
from jaxvllm.model_name import resolve
from jaxvllm.models import checkpoint
from jaxvllm.models.declaration import ParamDecl
from jaxvllm.models.families import model_spec
from jaxvllm.models.forms import PLAIN_FORMS, Forms
from jaxvllm.models.heads.head import DRAFT
from jaxvllm.models.kv_scales import with_kv_scales
from jaxvllm.models.params import Params
from jaxvllm.runtime.proposers import Proposer
from jaxvllm.runtime.proposers.ngram import NgramProposer
from sharding.placement import mesh_of, place


@dataclass(frozen=True)
class Drafting:
    """A proposer, and its parameters on the host, or None if it has none."""

    proposer: Proposer
    params: Params | None = None

    @classmethod
    def of(
        cls, config: SpeculativeConfig, target: ResolvedConfig, target_directory: Path, forms: Forms = PLAIN_FORMS
    ) -> "Drafting":
        """Reads what `config` names, for the model `target`, and keeps its matrices in `forms`.

        Raises ValueError where they do not go together.
        """
        if config.method == "ngram":
            return cls(NgramProposer(config.prompt_lookup_min, config.prompt_lookup_max))
        if config.method == "suffix":
            from jaxvllm.runtime.proposers.suffix import SuffixProposer

            depth, factor = config.suffix_decoding_max_tree_depth, config.suffix_decoding_max_spec_factor
            return cls(SuffixProposer(depth, factor))
        return cls._of_weights(config, target, target_directory, forms)

    @classmethod
    def _of_weights(
        cls, config: SpeculativeConfig, target: ResolvedConfig, target_directory: Path, forms: Forms
    ) -> "Drafting":
        """Reads a model or heads. Their modules are imported here, because most engines guess without weights."""
        from jaxvllm.models.heads.files import read_eagle, read_eagle3, read_medusa
        from jaxvllm.models.heads.kinds import check_kind, method_of
        from jaxvllm.models.heads.mtp_files import read_mtp
        from jaxvllm.runtime.proposers.autoregressive import AutoregressiveProposer
        from jaxvllm.runtime.proposers.medusa import MedusaProposer

        directory = target_directory if config.model is None else resolve(config.model)
        hf_config = target.hf_config if config.model is None else checkpoint.read_config(directory)
        method = config.method or method_of(Path(config.model or "").name, hf_config)
        if method != "mtp":  # whose head is a part of the model
            check_kind(method, directory, hf_config)
        if method == "draft_model":
            return cls._of_model(directory, hf_config, target, forms)
        proposer: Proposer
        spec = with_kv_scales(target.spec, False)  # heads are not calibrated
        if method == "mtp":
            heads, params = read_mtp(directory, hf_config, spec, config.num_speculative_tokens)
            proposer, declared = AutoregressiveProposer(heads), {"heads": [head.declare() for head in heads]}
        elif method == "medusa":
            medusa, params = read_medusa(directory, hf_config, spec)
            proposer, declared = MedusaProposer(medusa), medusa.declare()
        else:
            eagle, params = (read_eagle if method == "eagle" else read_eagle3)(directory, hf_config, spec)
            proposer, declared = AutoregressiveProposer((eagle,)), eagle.declare()

        def kept(decl: ParamDecl, array: Any) -> Any:
            array = np.asarray(array.astype(decl.dtype_in(target.dtype)))
            form = forms.of(DRAFT, decl, layer=0)
            return form.wrapped(form.keep(array, {}))

        return cls(proposer, jax.tree.map(kept, declared, params))

    @classmethod
    def _of_model(cls, directory: Path, hf_config: dict[str, Any], target: ResolvedConfig, forms: Forms) -> "Drafting":
        from jaxvllm.models.heads.draft_model import DraftModel
        from jaxvllm.runtime.proposers.autoregressive import AutoregressiveProposer

        spec = model_spec(hf_config)
        if spec.max_position < target.max_model_len:
            raise ValueError(
                f"draft model {directory} has {spec.max_position} positions, and max_model_len is "
                f"{target.max_model_len}: lower it, or take another draft"
            )
        host = mesh_of(jax.local_devices()[0])
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
