"""`TrainedModel`: the forward pass of a model whose weights are trained, over whole sequences and with derivatives."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any, Self

import jax
from jax.sharding import Mesh, PartitionSpec

from jaxvllm.models.declaration import ParamDecl
from jaxvllm.models.decoder import (
    begin_layers,
    embed_for_layers,
    embed_tokens,
    end_layers,
    final_norm,
    project_logits,
    run_part,
)
from jaxvllm.models.experts import ExpertsFfn
from jaxvllm.models.forms import PLAIN, Matrix
from jaxvllm.models.forms.differentiable import Differentiable
from jaxvllm.models.forms.plain import MATRIX
from jaxvllm.models.latent_attention import LatentAttention
from jaxvllm.models.layer_input import no_recur
from jaxvllm.models.params import Params, declare_layer, layer_stacks
from jaxvllm.models.recomputed_layers import over_recomputed_layers
from jaxvllm.models.sequence_attention import SequenceAttention
from jaxvllm.models.spec import ModelSpec
from jaxvllm.models.spread import Spread
from pallas_kernels.backend import REFERENCE, Backend
from sharding.axis import ModelAxis
from sharding.rules import DATA, MODEL, STAGE


@dataclass(frozen=True)
class TrainedModel:
    """A model spread over `mesh`, which computes as an engine with `backend` does, and has derivatives.

    Its weights are those of such an engine, in the same forms. Where kernels compute, they do so here as well, and the
    derivatives are those of plain XLA. `specs` says how devices share each array, in the order of the tree's leaves.

    Raises NotImplementedError for models and meshes that cannot be trained.
    """

    spec: ModelSpec
    mesh: Mesh
    backend: Backend
    specs: tuple[PartitionSpec, ...] = field(repr=False)

    def __post_init__(self) -> None:
        if (problem := _problem(self.spec, self.mesh)) is not None:
            raise NotImplementedError(f"{problem} cannot be trained yet")

    @classmethod
    def of(cls, params: Params, spec: ModelSpec, mesh: Mesh, backend: Backend) -> Self:
        """Returns the model whose weights are placed as these are. Raises ValueError where they are rounded."""
        for node in _matrices(params):
            jax.eval_shape(node.form.plain, node.arrays)
        leaves = jax.tree.leaves(params)
        return cls(spec, mesh, backend, tuple(leaf.sharding.spec for leaf in leaves) if mesh.size > 1 else ())

    def logits(
        self, params: Params, tokens: jax.Array, positions: jax.Array, segments: jax.Array, is_one_each: bool
    ) -> jax.Array:
        """Returns the logits f32[B, S, V] after each of `tokens` i32[B, S], at `positions`: see `SequenceAttention`.

        On a mesh, devices share the rows out, which must divide, and the logits of the vocabulary.
        """

        run = self._own_logits if self.mesh.size == 1 else self._logits_on_mesh
        return run(params, tokens, positions, segments, is_one_each)[..., : self.spec.vocab_size]

    @cached_property
    def _logits_on_mesh(self) -> Callable[..., jax.Array]:
        """The function like `_own_logits` that returns the logits of all devices.

        It is one program, also for a caller who compiles nothing: XLA:CPU of jax 0.11.2 ends the process by a fault
        where layers that are computed again run in a shard_map outside of any program.
        """

        def logits(
            params: Params, tokens: jax.Array, positions: jax.Array, segments: jax.Array, is_one_each: bool
        ) -> jax.Array:
            rows = PartitionSpec(DATA)
            run = jax.shard_map(
                partial(self._own_logits, is_one_each=is_one_each),
                mesh=self.mesh,
                in_specs=(jax.tree.unflatten(jax.tree.structure(params), self.specs), rows, rows, rows),
                out_specs=PartitionSpec(DATA, None, MODEL),
                check_vma=False,  # Pallas calls do not say over which axes their outputs vary
            )
            return run(params, tokens, positions, segments)

        return jax.jit(logits, static_argnums=4)

    def _own_logits(
        self, params: Params, tokens: jax.Array, positions: jax.Array, segments: jax.Array, is_one_each: bool
    ) -> jax.Array:
        """Returns this device's share of the logits."""
        params = _differentiable(params, self.spec)
        (B, S), axis, spec = tokens.shape, ModelAxis(self.mesh.shape[MODEL]), self.spread.shard
        ids, at = tokens.reshape(-1), positions.reshape(-1)
        attention = SequenceAttention.of(positions, segments, is_one_each, self.backend)
        x = embed_tokens(params, spec, ids, at, axis)
        embeddings = embed_for_layers(params, spec, ids, x, axis)
        kv = attention.begin(spec, B * S, x.dtype)
        is_real = (segments > 0).reshape(-1)
        x = begin_layers(params, spec, x)
        x, _, _ = run_part(
            params,
            spec,
            x,
            at,
            kv,
            attention.attend,
            axis,
            (),
            embeddings,
            no_recur,
            is_real,
            None,
            None,
            REFERENCE,  # what chooses experts has derivatives there, and chooses the same
            over=over_recomputed_layers,
        )
        hidden = final_norm(params, spec, end_layers(params, spec, x))
        return project_logits(params, spec, hidden).reshape(B, S, -1)

    @cached_property
    def spread(self) -> Spread:
        return Spread.on(self.spec, self.mesh)


def _matrices(params: Params) -> Sequence[Matrix]:
    nodes = jax.tree.leaves(params, is_leaf=lambda node: isinstance(node, Matrix))
    return [node for node in nodes if isinstance(node, Matrix)]


def _differentiable(params: Params, spec: ModelSpec) -> Params:
    """Returns the tree whose matrices have products with derivatives.

    XLA's product with one array has some already, but not that with experts, which is a loop.
    """

    def of(node: Any, decl: ParamDecl | None = None) -> Any:
        if isinstance(node, Matrix):
            return Matrix(Differentiable(node.form), node.arrays)
        if decl is not None and decl.storage == "experts":
            return Matrix(Differentiable(PLAIN), {MATRIX: node})
        return node

    layers = params["layers"]
    found: Any
    if isinstance(layers, list):
        decls = (declare_layer(spec, number) for number in range(len(layers)))
        found = [
            {key: of(node, own[key]) for key, node in held.items()} for held, own in zip(layers, decls, strict=True)
        ]
    else:
        stacks = layer_stacks(spec)
        found = {key: of(node, stacks[key].decl) for key, node in layers.items()}
    return {key: of(node) for key, node in params.items()} | {"layers": found}


def _problem(spec: ModelSpec, mesh: Mesh) -> str | None:
    """Returns what of a model on a mesh cannot be trained, or None."""
    if mesh.shape[STAGE] > 1:
        return "a mesh of several stages"
    if spec.part_of is not None:
        return "one stage of a model"
    spread = Spread.on(spec, mesh)
    if spread.kv_copies > 1 or spread.zero_heads:
        return f"a mesh of {mesh.shape[MODEL]} devices, which keep copies of KV heads or heads of zeros,"
    ffns = [ffn for layer in spec.layers for ffn in (layer.ffn, layer.late) if isinstance(ffn, ExpertsFfn)]
    if any(ffn.num_redundant is not None or ffn.num_replicas > 1 for ffn in ffns):
        return "a model whose experts move, or which replicas share,"
    if any(layer.keeps_state for layer in spec.layers):
        return "a model with layers that keep a state"
    attentions = [layer.attention for layer in spec.layers]
    if any(isinstance(one, LatentAttention) and one.indexer is not None for one in attentions):
        return "a model whose layers choose positions by an index"
    return None
