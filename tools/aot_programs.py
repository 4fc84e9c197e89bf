"""The programs that every chip must compile: kernels on each realistic batch, and the engine's step around them."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jax.typing import DTypeLike

from jaxvllm.config import EngineConfig
from jaxvllm.core.speculative_config import SpeculativeConfig
from jaxvllm.models.causal_conv import CausalConv
from jaxvllm.models.declaration import ParamDecl
from jaxvllm.models.families import model_spec
from jaxvllm.models.forms import Forms, Matrix
from jaxvllm.models.forms.choice import FewBitsForms
from jaxvllm.models.forms.few_bits import StoredAs
from jaxvllm.models.forms.plain import MATRIX
from jaxvllm.models.gated_delta import GatedDelta
from jaxvllm.models.heads.eagle import Eagle3Head
from jaxvllm.models.heads.head import DRAFT
from jaxvllm.models.kimi_delta import ChannelDelta
from jaxvllm.models.mamba import ChannelScan
from jaxvllm.models.mamba2 import SelectiveScan
from jaxvllm.models.ops import InStack, project, project_grouped, project_grouped_gated
from jaxvllm.models.params import abstract_params
from jaxvllm.models.recurrence import CHANNELS, RecurrentRule
from jaxvllm.models.short_conv import WindowAlone
from jaxvllm.models.spec import ModelSpec
from jaxvllm.models.state_kernel import state_kernel
from jaxvllm.models.state_memory import StateMemory
from jaxvllm.runtime.buckets import Bucket
from jaxvllm.runtime.cache_shape import CacheShape
from jaxvllm.runtime.proposers.autoregressive import AutoregressiveProposer
from jaxvllm.runtime.proposers.ngram import NgramProposer
from jaxvllm.runtime.proposers.suffix import SuffixProposer
from jaxvllm.runtime.state import state_bytes
from jaxvllm.runtime.step_program import StepCompiler
from pallas_kernels.backend import REFERENCE, Backend
from pallas_kernels.chips import Chip, GpuChip, TpuChip
from pallas_kernels.grouped_matmul.cases import SERVING as EXPERTS_SERVING
from pallas_kernels.grouped_matmul.cases import GroupedCase
from pallas_kernels.linear_attention.cases import (
    CHANNEL_SERVING,
    CONV_SIZE,
    SCAN_SERVING,
    WINDOW_SERVING,
    ChannelCase,
    DeltaCase,
    ScanCase,
    StateCase,
)
from pallas_kernels.linear_attention.cases import SERVING as STATES_SERVING
from pallas_kernels.mosaic_gpu import matrix_unit_of
from pallas_kernels.quantized_matmul.cases import SERVING as QUANTIZED_SERVING
from pallas_kernels.quantized_matmul.cases import QuantizedCase
from pallas_kernels.ragged_paged_attention import (
    NO_WINDOW,
    AbstractPages,
    KVPages,
    RaggedRows,
    backend_for,
    kv_pages_struct,
    plan_rows,
    ragged_paged_attention,
)
from pallas_kernels.ragged_paged_attention.cases import CASES, SERVING, RaggedCase
from pallas_kernels.ragged_paged_attention.layout import takes_warps
from sharding.mesh import MeshShape
from tools.aot_outcome import Kind

DTYPE = jnp.dtype(jnp.bfloat16)
LAYERS = 2
SPECULATION = SpeculativeConfig("ngram")
DRAFTS = SPECULATION.num_speculative_tokens
# The number of pages. Nothing is allocated, and no row looks up a page. The pool is so large that a copy of it cannot
# hide among other temporaries, and small enough for every chip.
POOL_BYTES = 2**30


def _llama(hidden_size: int, intermediate_size: int, num_heads: int, vocab_size: int, num_layers: int) -> ModelSpec:
    return model_spec(
        {
            "architectures": ["LlamaForCausalLM"],
            "vocab_size": vocab_size,
            "hidden_size": hidden_size,
            "intermediate_size": intermediate_size,
            "num_hidden_layers": num_layers,
            "num_attention_heads": num_heads,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "max_position_embeddings": 8192,
        }
    )


@dataclass(frozen=True)
class StepModel:
    """A model whose step is compiled, and the size of its pool on each device."""

    suffix: str  # of the program's name
    spec: ModelSpec
    pool_bytes: int
    mixed_tokens: int  # of the step that also computes prompts
    head: ModelSpec | None = None  # whose first layer an EAGLE-3 head has; None: this model

    @property
    def forms(self) -> dict[str, Callable[[StepCompiler], jax.stages.Compiled]]:
        """The forms of the program that the engine runs.

        A decode step, several in one program, several with drafts of n-grams, with so few that rows divide them, with
        drafts of suffixes and of an EAGLE-3 head, the first half of one whose rows wait for masks, the halves of a step
        with prompts, which a head may see or an index of suffixes learn, and the forks of beam search.
        """
        rows = 8

        drafted = Bucket(rows * (1 + DRAFTS), rows, width=EngineConfig.max_decode_burst, num_drafts=DRAFTS)

        def drafts(step: StepCompiler) -> jax.stages.Compiled:
            return step.compile_begin(drafted)

        return {
            "decode": lambda step: step.compile_begin(Bucket(rows, rows)),
            "burst": lambda step: step.compile_begin(Bucket(rows, rows, width=EngineConfig.max_decode_burst)),
            "drafts": drafts,
            "drafts-divided": lambda step: step.compile_begin(replace(drafted, num_tokens=2 * rows)),
            "suffix": lambda step: drafts(self.with_suffixes(step)),
            "suffix-learns": lambda step: self.with_suffixes(step).compile_begin(Bucket(self.mixed_tokens, rows)),
            "eagle3": lambda step: drafts(self.with_eagle3(step)),
            "eagle3-follows": lambda step: self.with_eagle3(step).compile_begin(Bucket(self.mixed_tokens, rows)),
            "split": lambda step: step.compile_begin(Bucket(rows, rows, is_split=True)),
            "mixed": lambda step: step.compile_begin(Bucket(self.mixed_tokens, rows)),
            "sample": lambda step: step.compile_sampler(rows),
            "fork": lambda step: step.compile_fork(),
        }

    @staticmethod
    def with_suffixes(step: StepCompiler) -> StepCompiler:
        """Returns `step` with an index of suffixes in its state."""
        proposer = SuffixProposer(
            SPECULATION.suffix_decoding_max_tree_depth, SPECULATION.suffix_decoding_max_spec_factor
        )
        return replace(step, shape=replace(step.shape, has_index=True), proposer=proposer)

    def with_eagle3(self, step: StepCompiler) -> StepCompiler:
        """Returns `step` with an EAGLE-3 head: one layer, a quarter of the model's vocabulary, and pages."""
        like = self.head or self.spec
        spec = replace(like, layers=like.layers[0].in_windows([None]))
        depths, vocab_size = (0, 1, self.spec.num_layers), spec.vocab_size
        own = frozenset() if self.head is None else frozenset({"embed"})
        head = Eagle3Head(spec, depths, self.spec.hidden_size, vocab_size // 4, vocab_size, own)
        proposer = AutoregressiveProposer((head,))
        shape, everywhere = replace(step.shape, draft=proposer.cache), NamedSharding(step.mesh, PartitionSpec())

        def array(decl: ParamDecl) -> jax.ShapeDtypeStruct:
            return jax.ShapeDtypeStruct(decl.shape, decl.dtype_in(DTYPE), sharding=everywhere)

        params = step.params | {DRAFT: jax.tree.map(array, head.declare())}
        return replace(
            step, params=params, kv=shape.pages(self.spec, step.backend, step.mesh), shape=shape, proposer=proposer
        )

    @property
    def smallest_matrix_bytes(self) -> int:
        """The bytes of the smallest matrix of a layer, its output projection."""
        return math.prod(self.spec.layers[0].declare()["o"].shape) * DTYPE.itemsize


# The layers of Llama 3 70B. Every matrix is larger than XLA:GPU's 32 MiB of cuBLASLt workspace and a small step's
# activations together, so temporaries smaller than every matrix mean that none was copied within HBM.
WIDE = StepModel("", _llama(8192, 28672, 64, 4096, LAYERS), POOL_BYTES, mixed_tokens=256)
# On a TPU a copy may also go to VMEM, where it is not a temporary. This model's matrices and its pages of one layer fit
# there: they take 16 to 32 MiB, and VMEM is 64 or 128. Everything else that XLA keeps there is smaller than any of
# them: the LM head, which XLA fetches before its use, is 4 MiB, the matrices of an EAGLE-3 head, which it fetches too,
# are 6 MiB at most, and the activations of a mixed step 1 MiB. So an array of 16 MiB in VMEM is a copy. WIDE can hardly
# tell, because its matrices are 64 MiB and more. In HBM no temporary of a step with an EAGLE-3 head is larger than 1
# MiB, but there are 13 MiB of them on v5p, in some 300 values, the smallest of which take 16 KiB each.
NARROW = StepModel(
    "-narrow",
    _llama(2048, 4096, 32, 1024, 4),
    64 * 2**20,
    mixed_tokens=64,
    head=_llama(512, 1024, 8, 1024, 1),
)


def _qwen3_moe(hidden_size: int, expert_size: int, num_heads: int, num_layers: int) -> ModelSpec:
    return model_spec(
        {
            "architectures": ["Qwen3MoeForCausalLM"],
            "vocab_size": 1024,
            "hidden_size": hidden_size,
            "intermediate_size": 4096,
            "moe_intermediate_size": expert_size,
            "num_experts": 32,
            "num_experts_per_tok": 8,
            "norm_topk_prob": True,
            "num_hidden_layers": num_layers,
            "num_attention_heads": num_heads,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "max_position_embeddings": 8192,
        }
    )


# A model with experts, whose down projections XLA keeps turned, because their inner size is no multiple of 128. The
# stacks of a layer's experts have 24 and 48 MiB, and its other matrices 16 MiB at least, but for the router. Tokens are
# eight rows of experts each, of which three arrays of 2 MiB are on their way in a mixed step.
EXPERTS = StepModel("-experts", _qwen3_moe(2048, 192, 32, 4), 64 * 2**20, mixed_tokens=64)
# The same for GPUs. The stacks of a layer's experts have 64 and 128 MiB, and its other matrices 64 MiB at least.
WIDE_EXPERTS = StepModel("-experts", _qwen3_moe(4096, 256, 64, LAYERS), POOL_BYTES, mixed_tokens=64)
EXPERTS_FORMS = ("decode", "mixed")
# The attention of DeepSeek V3 with all of its heads, in dense layers, for chips with kernels. Its queries are larger
# than its smallest matrix (W_k, 16 MiB), so what its temporaries tell is that no layer's pages, and no output
# projection, is copied.
LATENT = StepModel(
    "-latent",
    model_spec(
        {
            "architectures": ["DeepseekV3ForCausalLM"],
            "vocab_size": 4096,
            "hidden_size": 7168,
            "intermediate_size": 18432,
            "num_hidden_layers": LAYERS,
            "first_k_dense_replace": LAYERS,
            "num_attention_heads": 128,
            "num_key_value_heads": 128,
            "q_lora_rank": 1536,
            "kv_lora_rank": 512,
            "qk_nope_head_dim": 128,
            "qk_rope_head_dim": 64,
            "v_head_dim": 128,
            "num_experts_per_tok": 8,
            "max_position_embeddings": 8192,
        }
    ),
    POOL_BYTES,
    mixed_tokens=256,
)
LATENT_FORMS = ("decode", "mixed")
# The layers of Llama 3 70B, whose smallest matrix takes 128 MiB in 16 bits, 32 in int4, and 64 in FP8.
QUANTIZED_FORMS = ("decode", "mixed")
# One chip of each compiler has all forms of the step, and some with the reference. The others have those whose kernels
# are their own: what is around the kernels is the same. All are on two devices, which have what one has and collectives
# beside it. On more devices, a weight's share would no longer be larger than the workspace beside it.
ALL_STEPS = ("h200", "v5e")
SPLIT = MeshShape(1, 2)
# What XLA copies in a loop within another, and around latents, is its own matter and not a kernel's. So a TPU for each
# size of matrix units has steps in stages and those of LATENT, as H200 and B200 do, and those of NARROW.
NARROW_STEPS = ("v5e", "v7x")
MORE_STEPS = (*NARROW_STEPS, "h200", "b200")
FEW_STEPS = ("decode", "mixed", "sample")
# GPUs of one generation differ in their numbers of multiprocessors and in their caches: one of each has all programs. A
# GB10 differs from an RTX PRO 6000 in nothing else, either.
ALL_OF_GENERATION = ("h200", "b200", "a100", "rtx3090", "l4", "t4", "pro6000")
# Attention has three ways to copy on GPUs whose matrix units work for a warp, and on an A100 blocks of twice as many
# tokens and no instruction for float8. The others are like one of these, and their steps like those of a GPU that
# copies as they do: what XLA makes around a kernel is the same on an L4 as on an A100.
ALL_OF_ATTENTION = ("h200", "b200", "t4", "a100", "l4", "pro6000")
ALL_OF_STEPS = ("h200", "b200", "t4", "a100", "pro6000")
# What masks, sinks, slopes and soft caps make of a kernel is the same for one of these as for others with its kernel:
# on TPUs for matrix units 128 or 256 wide, on GPUs for warpgroups or warps. So the others have FEW_CASES.
ALL_CASES = ("v5e", "v7x", "h200", "a100")
FEW_CASES = ("decode-gqa", "mixed-sinks")
# One chip of each compiler has batches of every size; the others have the largest of a kind of heads or latents.
ALL_BATCHES = ("v5e", "h200")
# GPUs that are like another one have these, whose tiles depend on such numbers: of attention a batch that decodes and
# two prompts. Those in int8 spill first.
SOME_PROGRAMS = (
    "attention/decode-64x4096-heads-int8/",
    "attention/prefill-2048-heads-int8/",
    "attention/prefill-8192-q32-d128/",
    "experts/qwen3-30b-decode-64/",
    "quantized/qwen3-8b-gate-up-int4-decode-16/",
    "quantized/qwen3-8b-down-awq-decode-16/",
    "states/qwen3-next-decode-64/",
    "step/decode-int4/",
)
# In stages too, the forms whose layers run in a loop within another loop, where compilers might copy. Not of NARROW:
# where weights fit in VMEM, XLA keeps them there from tick to tick (both layers of a stage, 32 MiB, on v5e).
STAGES, STAGED_FORMS = MeshShape(1, 1, stages=2), ("decode", "burst", "mixed")


@dataclass(frozen=True)
class Program:
    """Compiles for a mesh. Each device must update `in_place_bytes` in place and copy nothing of `copy_bytes` or more.

    A copy would be one of its temporaries or, on a TPU, an array in VMEM. None of its kernels for GPUs may spill
    registers, unless it `may_spill`. One that `needs_kernel` must not be left to XLA.
    """

    name: str
    mesh: MeshShape
    in_place_bytes: int  # of pages and of the slots' state
    copy_bytes: int
    compile: Callable[[Mesh], jax.stages.Compiled]
    may_spill: bool = False
    needs_kernel: bool = False


def dtype_for(backend: Backend) -> jnp.dtype:
    """Returns the dtype of 16 bits that the chip multiplies."""
    return DTYPE if backend.computes(DTYPE) else jnp.dtype(jnp.float16)


def programs(chip: Chip, kind: Kind) -> tuple[Program, ...]:
    """Returns the programs of one kind that `chip` must compile: all, or some where another of its generation has all.

    Where no kernel of ours does what a kind is about, that is left to the step, in plain XLA.
    """
    every = _programs(chip, kind)
    has_all = {"attention": ALL_OF_ATTENTION, "step": ALL_OF_STEPS}
    if isinstance(chip, TpuChip) or chip.name in has_all.get(kind, ALL_OF_GENERATION):
        return every
    return tuple(program for program in every if program.name.startswith(SOME_PROGRAMS))


def _programs(chip: Chip, kind: Kind) -> tuple[Program, ...]:
    backend = Backend.of_chip(chip)
    has_copy_engine = isinstance(chip, TpuChip) or chip.has_copy_engine
    if kind == "attention":
        return tuple(_attention_program(case, backend) for case in _attention_cases(backend))
    if kind == "experts":
        return tuple(_experts_program(case, backend) for case in EXPERTS_SERVING) if has_copy_engine else ()
    if kind == "quantized":
        found = (_quantized_program(case, backend) for case in QUANTIZED_SERVING)
        return tuple(program for program in found if program is not None)
    if kind == "states":
        if not has_copy_engine:
            return ()
        # The kernel for GPUs takes no matrices wider than a page.
        scans = [case for case in SCAN_SERVING if backend.kind == "tpu" or case.state_size <= 128]
        return (
            *(_channel_program(case, backend) for case in CHANNEL_SERVING),
            *(_window_program(case, backend) for case in WINDOW_SERVING),
            *(_scan_program(case, backend) for case in scans),
            *(_delta_program(case, backend) for case in STATES_SERVING),
        )
    forms = WIDE.forms if chip.name in ALL_STEPS else FEW_STEPS
    wide = tuple(_step_program(WIDE, form, backend, SPLIT) for form in forms)
    if chip.name in MORE_STEPS:
        wide += tuple(_step_program(WIDE, form, backend, STAGES) for form in STAGED_FORMS)
        wide += tuple(_step_program(LATENT, form, backend, MeshShape(1, 1)) for form in LATENT_FORMS)
    if chip.name in ALL_STEPS:
        wide += tuple(_step_program(WIDE, form, REFERENCE, MeshShape(1, 1)) for form in STAGED_FORMS)
    # Tokens in FP8 have a kernel for GPUs, because XLA would copy each layer's matrix.
    quantizations = ("int4", "fp8_w8a8") if isinstance(chip, GpuChip) else ("int4",)
    wide += tuple(
        _step_program(WIDE, form, backend, MeshShape(1, 1), quantization)
        for quantization in quantizations
        for form in QUANTIZED_FORMS
    )
    experts = [(EXPERTS if isinstance(chip, TpuChip) else WIDE_EXPERTS, form) for form in EXPERTS_FORMS]
    # XLA enters tokens into the index in VMEM, where its 8 MiB would look like a copy of pages or of a weight.
    narrow = [(NARROW, form) for form in NARROW.forms if chip.name in NARROW_STEPS and form != "suffix-learns"]
    return wide + tuple(_step_program(model, form, backend, MeshShape(1, 1)) for model, form in narrow + experts)


def _attention_cases(backend: Backend) -> tuple[RaggedCase, ...]:
    """Returns the cases of attention whose programs differ.

    A kernel for heads of one kind is compiled for those batches of `SERVING` that change it. On H200 and B200 each took
    as many registers, spills and bytes of shared memory for 1 row as for 256, of 512 to 32,768 tokens. On TPUs the
    number of tokens changed what it took of VMEM, and the context changed that by 11% at most and spills never
    (aot-2026-11-21-1712b10).
    """
    chip = backend.chip
    assert isinstance(chip, TpuChip | GpuChip)
    has_all = chip.name in ALL_CASES
    largest: dict[tuple[bool, int, RaggedCase], RaggedCase] = {}
    for case in SERVING:
        by_size = chip.name in ALL_BATCHES and (isinstance(chip, TpuChip) or case.latent_size is not None)
        size = case.num_tokens if by_size else 0
        kind = case.is_decode, size, replace(case, name="", num_tokens=0, rows=())
        if kind not in largest or case.num_tokens >= largest[kind].num_tokens:
            largest[kind] = case
    cases = (*(case for case in CASES if has_all or case.name in FEW_CASES), *largest.values())
    # What plain XLA makes of latents is the same before Hopper and on desks, and an A100 has it.
    has_latents = isinstance(chip, TpuChip) or not takes_warps(chip) or chip.name == "a100"
    return tuple(case for case in cases if case.latent_size is None or has_latents)


def _attention_program(case: RaggedCase, backend: Backend) -> Program:
    dtype, backend = dtype_for(backend), backend_for(case.head_size, backend, case.latent_size)

    def pool(num_pages: int) -> AbstractPages:
        sizes = LAYERS, num_pages, case.page_size, case.num_kv_heads, case.head_size
        return kv_pages_struct(*sizes, dtype, backend, case.latent_size, case.quantization)

    # Scales are a small part of their pages. Those of latents must not fit the VMEM of a TPU, even all of them, and
    # others must be more than a prompt's queries and outputs.
    pool_bytes = POOL_BYTES * ((12 if case.latent_size else 2) if case.by_token else 1)
    pages = pool(pool_bytes // _num_bytes(pool(1)))

    def compile_for(mesh: Mesh) -> jax.stages.Compiled:
        return _compile_attention(case, pages, backend, dtype, mesh)

    # A copy of one layer's pages is half the pool; 8192 tokens of 64 heads are an eighth of it, in float32 a quarter.
    name, (codes, *scales) = f"attention/{case.name}/{backend.kind}", map(_num_bytes, jax.tree.leaves(pages))
    # Scales of tokens are few, and of all layers they are more than activations.
    copy_bytes = min(codes // LAYERS, *scales, codes)
    # Heads of 128 in codes, and latents, keep all of their registers on Hopper, and all do on GPUs whose matrix units
    # work for a warp. docs/kernels.md says what others spill.
    keeps_all = False
    if isinstance(backend.chip, GpuChip):
        keeps_on_hopper = case.latent_size or (case.kv_dtype and case.head_size == 128)
        is_hopper = matrix_unit_of(backend.chip) == "wgmma"
        keeps_all = takes_warps(backend.chip) or bool(is_hopper and keeps_on_hopper)
    return Program(name, MeshShape(1, 1), _num_bytes(pages), copy_bytes, compile_for, may_spill=not keeps_all)


def _compile_attention(
    case: RaggedCase, pages: AbstractPages, backend: Backend, dtype: jnp.dtype, mesh: Mesh
) -> jax.stages.Compiled:
    """Compiles a scan over layers like the decoder's. Each layer attends with the output of the one before it."""
    T, R, H, K, D = case.num_tokens, len(case.rows), case.num_heads, case.num_kv_heads, case.head_size

    def attend(
        q: jax.Array,
        k: jax.Array,
        v: jax.Array | None,
        kv_pages: KVPages,
        page_table: jax.Array,
        starts: jax.Array,
        lengths: jax.Array,
        sinks: jax.Array | None,
        slopes: jax.Array | None,
        kv_scales: jax.Array | None,
    ) -> tuple[jax.Array, KVPages]:
        rows = RaggedRows.build(page_table, starts, lengths, T)
        plan = plan_rows(rows, kv_pages, num_heads=H, dtype=dtype, backend=backend, latent_size=case.latent_size)

        def layer(carry: tuple[jax.Array, KVPages], xs: tuple[jax.Array, jax.Array]) -> tuple[tuple, None]:
            # A model may have windows in some layers only, so the window is a scalar on the device.
            (q, kv_pages), (number, window) = carry, xs
            out, kv_pages = ragged_paged_attention(
                q,
                k,
                v,
                kv_pages,
                number,
                rows,
                scale=case.scale,
                soft_cap=case.soft_cap,
                window=NO_WINDOW if case.window == NO_WINDOW else window,
                sinks=sinks,
                slopes=slopes,
                quantization=case.quantization,
                kv_scales=kv_scales,
                plan=plan,
                backend=backend,
                latent_size=case.latent_size,
            )
            # A value may be smaller than a query.
            return (jnp.pad(out, ((0, 0), (0, 0), (0, D - case.value_size))), kv_pages), None

        layers = jnp.arange(LAYERS, dtype=jnp.int32), jnp.full(LAYERS, case.window, jnp.int32)
        return jax.lax.scan(layer, (q, kv_pages), layers)[0]

    def on_device(shape: tuple[int, ...], dtype: jnp.dtype) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, PartitionSpec()))

    i32, f32 = jnp.dtype(jnp.int32), jnp.dtype(jnp.float32)
    lowered = jax.jit(attend, donate_argnums=3).lower(
        on_device((T, H, D), dtype),
        on_device((T, K, D), dtype),
        None if case.latent_size else on_device((T, K, D), dtype),
        jax.tree.map(lambda x: on_device(x.shape, x.dtype), pages),
        on_device((R, case.max_pages), i32),
        on_device((R,), i32),
        on_device((R,), i32),
        on_device((H,), f32) if case.sinks else None,
        on_device((H,), f32) if case.slopes else None,
        on_device((2, K), f32) if case.kv_dtype and not case.by_token else None,
    )
    return lowered.compile()


def _experts_program(case: GroupedCase, backend: Backend) -> Program:
    """Compiles a scan over the experts of layers, whose stacks must not be copied."""
    num_groups, inner, outer = len(case.counts), case.size_out, case.size_in
    form = Forms.chosen(None, backend, may_turn=False).experts
    shapes = (2, inner, outer), (outer, inner)

    def compile_for(mesh: Mesh) -> jax.stages.Compiled:
        everywhere = NamedSharding(mesh, PartitionSpec())

        def on_device(shape: tuple[int, ...], dtype: jnp.dtype) -> jax.ShapeDtypeStruct:
            return jax.ShapeDtypeStruct(shape, dtype, sharding=everywhere)

        def run(x: jax.Array, gate_up: Matrix, down: Matrix, starts: jax.Array) -> jax.Array:
            def layer(x: jax.Array, number: jax.Array) -> tuple[jax.Array, None]:
                h = project_grouped_gated(x, InStack(gate_up, number), starts, "silu")
                return project_grouped(h, InStack(down, number), starts), None

            return jax.lax.scan(layer, x, jnp.arange(LAYERS, dtype=jnp.int32))[0]

        stacks = [form.wrapped({MATRIX: on_device((LAYERS, num_groups, *shape), DTYPE)}) for shape in shapes]
        rows, starts = on_device((sum(case.counts), outer), DTYPE), on_device((num_groups + 1,), jnp.dtype(jnp.int32))
        return jax.jit(run).lower(rows, *stacks, starts).compile()

    name = f"experts/{case.name}/{backend.kind}"
    return Program(name, MeshShape(1, 1), 0, num_groups * outer * inner * DTYPE.itemsize, compile_for)


def _quantized_program(case: QuantizedCase, backend: Backend) -> Program | None:
    """Compiles a scan over the matrices of layers, or returns None where no kernel multiplies by their codes."""
    group = None if case.group == case.size_in else case.group
    stored = StoredAs(case.code, group, case.scale_dtype, case.has_zeros, case.rounds_tokens)
    form = FewBitsForms(backend).of(stored, group)
    if form is None or not form.reads_stacks:
        return None

    dtype = dtype_for(backend)

    def compile_for(mesh: Mesh) -> jax.stages.Compiled:
        everywhere = NamedSharding(mesh, PartitionSpec())

        def on_device(decl: ParamDecl) -> jax.ShapeDtypeStruct:
            return jax.ShapeDtypeStruct((LAYERS, *decl.shape), decl.dtype_in(dtype), sharding=everywhere)

        def run(x: jax.Array, stack: Matrix) -> jax.Array:
            def layer(x: jax.Array, number: jax.Array) -> tuple[jax.Array, None]:
                return jnp.resize(project(x, InStack(stack, number)), x.shape), None

            return jax.lax.scan(layer, x, jnp.arange(LAYERS, dtype=jnp.int32))[0]

        matrix = ParamDecl((case.size_out, case.size_in), (None, None), "ones")
        stack = form.wrapped({name: on_device(decl) for name, decl in form.declare(matrix).items()})
        x = jax.ShapeDtypeStruct((case.num_rows, case.size_in), dtype, sharding=everywhere)
        return jax.jit(run).lower(x, stack).compile()

    # Nothing else than rows of activations: those that come, in the order of the codes, and those that go.
    activations = case.num_rows * 2 * (case.size_in + case.size_out) * DTYPE.itemsize
    name = f"quantized/{case.name}/{backend.kind}"
    return Program(name, MeshShape(1, 1), 0, case.num_bytes + activations, compile_for, needs_kernel=True)


def _delta_program(case: DeltaCase, backend: Backend) -> Program:
    r, size = case.values_per_key, case.size
    delta = GatedDelta(r, size, size) if case.decays == 1 else ChannelDelta(size)
    rule = RecurrentRule(CausalConv(case.num_channels, CONV_SIZE), delta)
    gates = {"g": (r,), "beta": (r,)} if case.decays == 1 else {"g": (size,), "beta": ()}
    return _states_program(case, StateMemory(case.num_heads, rule), {}, gates, backend)


def _scan_program(case: ScanCase, backend: Backend) -> Program:
    scan = SelectiveScan(case.num_heads, case.head_size, case.state_size)
    memory = StateMemory(case.num_groups, RecurrentRule(CausalConv(scan.channels, CONV_SIZE, has_bias=True), scan))
    weights, gates = {"bias": (scan.channels,), "skip": (scan.num_heads,)}, {"g": (scan.num_heads,)}
    program = _states_program(case, memory, weights, gates | {"dt": gates["g"]}, backend)
    # Where one group has all heads (Granite 4), ptxas spills 400 bytes for RTX PRO 6000, and none for H200.
    on_desk = isinstance(backend.chip, GpuChip) and backend.chip.compute_capability >= (12, 0)
    return replace(program, may_spill=on_desk)


def _channel_program(case: ChannelCase, backend: Backend) -> Program:
    S, C = case.size, case.num_channels
    memory = StateMemory(case.num_heads, RecurrentRule(None, ChannelScan(C, S)))
    return _states_program(case, memory, {"pace": (S, C), "skip": (C,)}, {"dt": (C,), "b": (S,), "c": (S,)}, backend)


def _window_program(case: ChannelCase, backend: Backend) -> Program:
    conv = CausalConv(case.num_channels, case.size + 1, has_activation=False)
    return _states_program(case, StateMemory(case.num_heads, RecurrentRule(conv, WindowAlone())), {}, {}, backend)


def _states_program(
    case: StateCase,
    memory: StateMemory,
    weights: Mapping[str, tuple[int, ...]],
    gates: Mapping[str, tuple[int, ...]],
    backend: Backend,
) -> Program:
    """Compiles a scan over layers that keep a state, whose pages are updated in place.

    weights: what the rule has beside the taps of its convolution, if it has one, by the shape for a head
    gates: what a token has beside its channels, in the same way
    """
    states = state_kernel(memory, backend)
    assert states is not None and isinstance(memory.rule, RecurrentRule)
    K, T, conv = memory.num_kv_heads, case.num_tokens, memory.rule.conv
    num_channels = memory.rule.parts[0][-1] if conv is None else conv.channels

    def pool(num_pages: int) -> jax.ShapeDtypeStruct:
        return memory.pages(LAYERS, num_pages, case.page_size, DTYPE, backend)

    pages = pool(POOL_BYTES // _num_bytes(pool(1)))

    def compile_for(mesh: Mesh) -> jax.stages.Compiled:
        everywhere = NamedSharding(mesh, PartitionSpec())

        def on_device(*shape: int, dtype: DTypeLike = jnp.float32) -> jax.ShapeDtypeStruct:
            return jax.ShapeDtypeStruct(shape, dtype, sharding=everywhere)

        def run(
            pages: jax.Array, page_table: jax.Array, weights: dict[str, jax.Array], tokens: dict[str, jax.Array]
        ) -> tuple[jax.Array, jax.Array]:
            plan: Any = states.plan(case.ragged(page_table), case.page_size)

            def layer(pages: jax.Array, number: jax.Array) -> tuple[jax.Array, jax.Array]:
                own = {name: stacked[number] for name, stacked in weights.items()}
                read, pages = states(pages, number, plan, own, tokens)
                return pages, read.astype(DTYPE)

            return jax.lax.scan(layer, pages, jnp.arange(LAYERS, dtype=jnp.int32))

        stacks = weights if conv is None else {"taps": (conv.size, conv.channels), **weights}
        tokens = {name: on_device(T, K, *part) for name, part in gates.items()}
        tokens[CHANNELS] = on_device(T, K, num_channels, dtype=DTYPE)
        arguments = (
            on_device(*pages.shape),
            on_device(len(case.rows), case.columns, dtype=jnp.int32),
            {name: on_device(LAYERS, K, *part) for name, part in stacks.items()},
            tokens,
        )
        return jax.jit(run, donate_argnums=0).lower(*arguments).compile()

    size = _num_bytes(pages)
    return Program(f"states/{case.name}/{backend.kind}", MeshShape(1, 1), size, size // LAYERS, compile_for)


def _step_program(
    model: StepModel, form: str, backend: Backend, mesh: MeshShape, quantization: str | None = None
) -> Program:
    page_size, spec, dtype = 16, model.spec, dtype_for(backend)
    max_pages = spec.max_position // page_size
    shape = CacheShape(1, page_size, num_slots=64, max_pages=max_pages, dtype=dtype, step_tokens=model.mixed_tokens)
    shape = replace(shape, has_drafts=True)

    def pool(num_pages: int) -> AbstractPages:
        memory = spec.layers[0].shard(mesh.model).memory
        return memory.pages(spec.num_layers // mesh.stages, num_pages, page_size, dtype, backend)

    shape = replace(shape, num_pages=model.pool_bytes // _num_bytes(pool(1)))

    def compile_for(mesh: Mesh) -> jax.stages.Compiled:
        forms = Forms.chosen(quantization, backend, may_turn=False, shards=mesh.size)
        params = abstract_params(spec, dtype, "stacked", mesh, forms)
        pages = shape.pages(spec, backend, mesh)
        proposer = NgramProposer(SPECULATION.prompt_lookup_min, SPECULATION.prompt_lookup_max)
        return model.forms[form](StepCompiler(params, pages, spec, shape, backend, mesh, proposer=proposer))

    of_codes = "" if quantization is None else f"-{quantization}"
    name = f"step/{form}{model.suffix}{of_codes}/{backend.kind}{f'/{mesh}' if mesh.num_devices > 1 else ''}"
    pages_bytes, state = _num_bytes(pool(shape.num_pages)), state_bytes(shape.sizes(spec))
    copy_bytes = min(model.smallest_matrix_bytes // mesh.model, pages_bytes * mesh.stages // spec.num_layers)
    # The smallest matrix in int4 has a quarter of these bytes, beside activations of 50 MiB in a mixed step. Before
    # Hopper XLA turns products, and they are 74 MiB; a matrix in 16 bits would be found there all the same.
    turns = isinstance(backend.chip, GpuChip) and not backend.chip.has_copy_engine
    if quantization is not None and not (turns and form == "mixed"):
        copy_bytes //= 2
    return Program(name, mesh, state if form == "sample" else state + pages_bytes, copy_bytes, compile_for)


def _num_bytes(pages: AbstractPages) -> int:
    return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(pages))
