"""`EngineModule`: a flax module whose parameters are the arrays of an engine, so that a trainer changes what it serves.

It needs `pip install jaxvllm[flax]`.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jax.typing import DTypeLike

from jaxvllm.engine.llm import LLM
from jaxvllm.model_name import resolve
from jaxvllm.models import checkpoint
from jaxvllm.models.declaration import ParamDecl
from jaxvllm.models.families import find_family, model_spec
from jaxvllm.models.forms import Matrix
from jaxvllm.models.heads.head import DRAFT
from jaxvllm.models.hf_export import HfExport, write_checkpoint
from jaxvllm.models.params import Params, activation_dtype, declare_layer, layer_stacks
from jaxvllm.models.spec import ModelSpec
from jaxvllm.models.trained_model import TrainedModel
from jaxvllm.runtime.recipe import COMPILER_OPTIONS
from pallas_kernels.backend import REFERENCE, Backend
from pallas_kernels.extras import install_command
from sharding.mesh import MeshShape
from sharding.placement import make_mesh

try:
    from flax import nnx
except ImportError as error:
    raise ImportError(f"jaxvllm.flax needs flax, which is not here: {install_command('flax')}") from error


class EngineModule(nnx.Module):
    """A decoder as a flax module. Make one with `of` or with `load`.

    `weights` is a tree like `LLM.weights`, of `nnx.Param` in the place of arrays; scales and numbers that are not
    trained are `nnx.Variable`. A matrix may have its numbers in another order than a checkpoint, as kernels read them
    (`jaxvllm.models.forms`). An optimizer that treats each number alike need not know that. `tensors` has them in the
    usual order.
    """

    def __init__(self, weights: Params, model: TrainedModel, directory: Path):
        """Holds `weights` as they are, those of the model in `directory`, of which nothing is read before `save`."""
        structure: Any = jax.tree.structure(weights)
        self.model = model
        self.directory = directory
        self._structure = structure  # tells the forms
        self.weights = _held_layers(weights, model.spec)

    @classmethod
    def of(cls, llm: LLM) -> Self:
        """Returns the module whose parameters are the arrays of the engine's first replica, none of them copied.

        It computes with the engine's kernels, and its derivatives are those of plain XLA. Call
        `llm.update_weights(module.tree())` after a change: an array that has its place already is used as it is.
        Never donate the arrays that an engine still serves.

        Raises ValueError where the engine keeps rounded matrices, and NotImplementedError for a model or mesh that
        cannot be trained.
        """
        weights = {name: node for name, node in llm.weights.items() if name != DRAFT}
        first = jax.tree.leaves(weights)[0]
        mesh: Any = first.sharding.mesh
        dtype = np.dtype(activation_dtype(weights))
        backend = Backend.of_device(llm.config.attention_backend, mesh.devices.flat[0], dtype)
        model = TrainedModel.of(weights, llm.engine.spec, mesh, backend)
        return cls(weights, model, resolve(llm.config.model))

    @classmethod
    def load(cls, model: str | Path, *, dtype: DTypeLike = "float32", mesh: str = "1x1") -> Self:
        """Returns the module of the checkpoint in a directory, or of a name as `LLM` takes it, without an engine.

        XLA computes all of it. A mesh of DxM divides the rows of a batch by D and each layer by M, as engines do.
        """
        directory = resolve(str(model))
        config = checkpoint.read_config(directory)
        spec, devices = model_spec(config), make_mesh(MeshShape.parse(mesh), jax.devices())
        layout: Any = "separate" if devices.devices.flat[0].platform == "cpu" else "stacked"
        weights = checkpoint.load(directory, spec, dtype=dtype, layout=layout, mesh=devices)
        return cls(weights, TrainedModel.of(weights, spec, devices, REFERENCE), directory)

    @property
    def spec(self) -> ModelSpec:
        return self.model.spec

    @property
    def mesh(self) -> Mesh:
        return self.model.mesh

    @property
    def compiler_options(self) -> dict[str, Any]:
        """The options with which an engine compiles: a trainer's program needs them for the same bits.

        Give them to `jax.jit(..., compiler_options=module.compiler_options)`. Without them XLA adds up numbers in
        another order on CPUs.
        """
        return dict(COMPILER_OPTIONS.get(self.mesh.devices.flat[0].platform, {}))

    def __call__(
        self, tokens: jax.Array, positions: jax.Array | None = None, segment_ids: jax.Array | None = None
    ) -> jax.Array:
        """Is `logits`."""
        return self.logits(tokens, positions, segment_ids)

    def logits(
        self, tokens: jax.Array, positions: jax.Array | None = None, segment_ids: jax.Array | None = None
    ) -> jax.Array:
        """Returns the logits f32[.., S, V] after each token.

        tokens, positions  # i32[S] or i32[B, S]. None: positions begin at 0 with each row or segment
        segment_ids  # bool: False for padding, on either side of a row. i32: the numbers of sequences that share a row,
        from 1 on, one after the other; 0 for padding. None: a row is one sequence. A token sees those of its own only

        With one sequence in a row, and `compiler_options` for the program, each logit has the same bits as in an engine
        whose kernels give a token the same bits in any batch, as those for CPUs do. Padding has arbitrary logits.
        """
        if tokens.ndim not in (1, 2):
            raise ValueError(f"tokens must be [S] or [B, S], not {tokens.shape}")
        for name, given in (("positions", positions), ("segment_ids", segment_ids)):
            if given is not None and given.shape != tokens.shape:
                raise ValueError(f"{name} must have the shape {tokens.shape} of the tokens, not {given.shape}")
        rows = tokens.reshape(-1, tokens.shape[-1])
        is_one_each = segment_ids is None or segment_ids.dtype == jnp.bool_
        segments = jnp.ones_like(rows) if segment_ids is None else segment_ids.reshape(rows.shape).astype(jnp.int32)
        at = _positions(segments) if positions is None else positions.reshape(rows.shape)
        logits = self.model.logits(self.tree(), rows, at, segments, is_one_each)
        return logits.reshape(*tokens.shape, -1)

    def logprobs(
        self, tokens: jax.Array, positions: jax.Array | None = None, segment_ids: jax.Array | None = None
    ) -> jax.Array:
        """Returns log p of each token but the first of a row, f32[.., S - 1], as an engine reports it.

        The arguments are those of `logits`. The first token of a segment that is not the first has an arbitrary one.
        """
        logits = self.logits(tokens, positions, segment_ids)[..., :-1, :]
        values = jax.nn.log_softmax(logits, axis=-1)
        return jnp.take_along_axis(values, tokens[..., 1:, None], axis=-1)[..., 0]

    def tree(self) -> Params:
        """Returns the arrays as `LLM.update_weights` takes them. None is copied."""
        tree: Params = _arrays(self._structure.unflatten(range(self._structure.num_leaves)), self.weights)
        return tree

    def tensors(self) -> dict[str, np.ndarray]:
        """Returns the weights on the host, by the names that a checkpoint of this model has.

        An engine that rounds its weights takes these: `llm.update_weights(module.tensors())`.
        """
        family = find_family(checkpoint.read_config(self.directory))
        return HfExport.of(self.model.spread, family).tensors(self.tree())

    def save(self, output: str | Path) -> None:
        """Writes a checkpoint in Hugging Face format, with the config and tokenizer of the model that was loaded.

        Raises ValueError if `output` has anything in it, and NotImplementedError for a family that has no writer.
        """
        write_checkpoint(self.tree(), self.model.spread, self.directory, Path(output))


def _positions(segments: jax.Array) -> jax.Array:
    """Returns the place i32[B, S] of each token in its segment."""
    numbers = jnp.arange(segments.shape[1], dtype=jnp.int32)
    is_first = jnp.concatenate([jnp.ones_like(segments[:, :1], bool), segments[:, 1:] != segments[:, :-1]], axis=1)
    return numbers - jax.lax.cummax(jnp.where(is_first, numbers, 0), axis=1)


def _held_layers(weights: Params, spec: ModelSpec) -> Any:
    """Returns a tree of parameters for all weights of a model."""
    layers = weights["layers"]
    held: Any
    if isinstance(layers, list):
        held = nnx.List([_held_dict(layer, declare_layer(spec, number)) for number, layer in enumerate(layers)])
    else:
        held = _held_dict(layers, {name: stack.decl for name, stack in layer_stacks(spec).items()})
    others = {name: _held(node) for name, node in weights.items() if name != "layers"}
    return nnx.Dict(others | {"layers": held})


def _held_dict(arrays: Mapping[str, Any], decls: Mapping[str, ParamDecl]) -> Any:
    return nnx.Dict({name: _held(node, decls[name].is_trained) for name, node in arrays.items()})


def _held(node: Any, is_trained: bool = True) -> Any:
    """Returns a tree of parameters for a tree of arrays, of which integers are never trained."""
    if isinstance(node, Matrix):
        return _held(node.arrays, is_trained)
    if isinstance(node, dict):
        return nnx.Dict({name: _held(one, is_trained) for name, one in node.items()})
    if isinstance(node, list):
        return nnx.List([_held(one, is_trained) for one in node])
    return (nnx.Param if is_trained and jnp.issubdtype(node.dtype, jnp.floating) else nnx.Variable)(node)


def _arrays(like: Any, held: Any) -> Any:
    """Returns the tree of arrays, in the forms of the tree `like`."""
    if isinstance(like, Matrix):
        return Matrix(like.form, _arrays(like.arrays, held))
    if isinstance(like, dict):
        return {name: _arrays(one, held[name]) for name, one in like.items()}
    if isinstance(like, list):
        return [_arrays(one, own) for one, own in zip(like, held, strict=True)]
    return held.get_value()
