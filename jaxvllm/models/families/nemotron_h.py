"""Nemotron-H and Nemotron 3: layers of one kind each, which are Mamba-2, attention without positions, or FFNs.

Such a layer is half of ours: an FFN and what stands before it are one layer here. FFNs and experts square a ReLU, and
have no gate. Steps have the limits that the config calls `time_step_limit`, as in the code of NVIDIA. Transformers 5.23
takes `time_step_min` for the lower one in prompts.
"""

from collections.abc import Mapping
from dataclasses import replace

from jaxvllm.models.block import Block
from jaxvllm.models.expert_router import ExpertGroups, ExpertRouter
from jaxvllm.models.families.family import Family
from jaxvllm.models.families.mamba2 import groups_and_scan, limited, mamba2_sources
from jaxvllm.models.families.usual import UsualParts
from jaxvllm.models.ffn import Ffn, PlainFfn
from jaxvllm.models.hf_config import HfConfig
from jaxvllm.models.mamba2 import Mamba2
from jaxvllm.models.norm import RmsNorm
from jaxvllm.models.params import declare_layer
from jaxvllm.models.plain_experts import PlainExpertsFfn
from jaxvllm.models.spec import ModelSpec
from jaxvllm.models.weight_names import OuterNames, Source, attention_sources, named_norms, whole, with_biases

# The letters of a pattern, and the names that a list of layers has for them.
_KINDS = {"M": ("linear_attention", "mamba"), "*": ("full_attention", "attention"), "E": ("moe",), "-": ("mlp",)}

_OLDER_NAMES = {
    "mamba_n_groups": "n_groups",
    "mamba_d_conv": "conv_kernel",
    "mamba_dt_limit": "time_step_limit",
    "mamba_conv_bias": "use_conv_bias",
}


def nemotron_h_spec(config: HfConfig) -> ModelSpec:
    defaults = {"head_dim": 128, "num_key_value_heads": 8, "num_attention_heads": 32, "max_position_embeddings": 4096}
    pattern = layer_pattern(config)
    # Older configs have other names, which transformers prefers.
    older = {new: config.values[old] for old, new in _OLDER_NAMES.items() if config.values.get(old) is not None}
    values = dict(config.values) | older | {"num_hidden_layers": len(pattern)}
    config = replace(config, values=values).with_defaults(**defaults)
    config.refuse({"attention_bias": (None, False), "sliding_window": (None,), "mamba_proj_bias": (None, False)})
    if "attention_head_dim" in config.values:  # transformers reads head_dim alone
        config.refuse({"attention_head_dim": (None, config.integer("head_dim"))})
    usual, norm = UsualParts(config), RmsNorm(config.number("layer_norm_epsilon", 1e-5))
    layers: list[Block] = []
    for number, kind in enumerate(pattern):
        if kind == "M":
            layers.append(Block(norm=norm, attention=mamba(config, norm), ffn=None))
        elif kind == "*":
            layers.append(Block(norm=norm, attention=usual.attention(norm), ffn=None))
        elif not layers or layers[-1].ffn is not None:
            raise ValueError(f"config layer {number} must not be {_KINDS[kind][0]}: it follows no Mamba-2 or attention")
        else:
            layers[-1] = replace(layers[-1], ffn=experts(config) if kind == "E" else mlp(config))
    return usual.model(layers, norm)


def layer_pattern(config: HfConfig) -> str:
    """Returns a letter for each layer of the checkpoint."""
    kinds, pattern = config.values.get("layers_block_type"), config.values.get("hybrid_override_pattern")
    letters = {name: letter for letter, names in _KINDS.items() for name in names}
    if kinds is None and isinstance(pattern, str) and pattern and set(pattern) <= set(_KINDS):
        return pattern
    if not isinstance(kinds, list) or not kinds or not all(isinstance(kind, str) and kind in letters for kind in kinds):
        raise ValueError(
            f"config layers_block_type must be a list of {', '.join(letters)}, or hybrid_override_pattern a text of "
            f"{' '.join(_KINDS)}, not {kinds!r} and {pattern!r}"
        )
    return "".join(letters[kind] for kind in kinds)


def mamba(config: HfConfig, norm: RmsNorm) -> Mamba2:
    config.refuse({"mamba_hidden_act": (None, "silu", "swish")})
    heads, size = config.integer("mamba_num_heads", 128), config.integer("mamba_head_dim", 64)
    mixer = Mamba2(
        config.integer("hidden_size"),
        *groups_and_scan(config, "n_groups", 8, heads, size, config.integer("ssm_state_size", 128)),
        conv_size=config.integer("conv_kernel", 4, least=2),
        norm=norm,
        has_conv_bias=config.flag("use_conv_bias", True),
        has_bias=config.flag("use_bias", False),
    )
    return limited(mixer, config)


def mlp(config: HfConfig) -> PlainFfn:
    activation, has_bias = config.activation("mlp_hidden_act", "relu2"), config.flag("mlp_bias", False)
    return PlainFfn(config.integer("hidden_size"), config.integer("intermediate_size", 21504), activation, has_bias)


def experts(config: HfConfig) -> Ffn:
    config.refuse({"mlp_bias": (None, False), "n_shared_experts": (None, 1)})
    plain = mlp(config)
    router = ExpertRouter(
        plain.hidden_size,
        config.integer("n_routed_experts", 8),
        config.integer("num_experts_per_tok", 2),
        scoring="sigmoid",
        is_normalized=config.flag("norm_topk_prob", True),
        added=1e-20,
        scale=config.number("routed_scaling_factor", 1.0),
        has_choice_bias=True,
        groups=ExpertGroups(config.integer("n_group", 1), config.integer("topk_group", 1)),
    )
    return PlainExpertsFfn(
        plain.hidden_size,
        config.integer("moe_intermediate_size", 7688),
        router,
        plain.activation,
        beside=replace(plain, size=config.integer("moe_shared_expert_intermediate_size", 7688)),
        latent_size=config.optional_integer("moe_latent_size"),
    )


def sources(spec: ModelSpec, layer: int, prefix: str) -> Mapping[str, tuple[Source, ...]]:
    """Returns the sources of a layer, which the checkpoint calls one layer, or two with an FFN."""
    decls, stem = declare_layer(spec, layer), prefix.removesuffix(f"{layer}.")
    number = sum(1 if before.ffn is None else 2 for before in spec.layers[:layer])
    start, ffn_start = f"{stem}{number}.", f"{stem}{number + 1}."
    found = named_norms(decls, start, {"attention_norm": "norm"}) | named_norms(decls, ffn_start, {"ffn_norm": "norm"})
    if isinstance(spec.layers[layer].attention, Mamba2):
        found |= mamba2_sources(spec, layer, start)
    else:
        found |= attention_sources(spec, layer, start, "mixer.o_proj", "mixer.")
    start = f"{ffn_start}mixer."
    if "router" not in decls:
        return found | with_biases(decls, start, {"up": "up_proj", "down": "down_proj"})
    names = {"shared_up": "shared_experts.up_proj", "shared_down": "shared_experts.down_proj"}
    names |= {"router": "gate", "experts_narrow": "fc1_latent_proj", "experts_widen": "fc2_latent_proj"}
    found |= with_biases(decls, start, names)
    found["router_choice"] = whole(f"{start}gate.e_score_correction_bias", decls["router_choice"].shape)
    for key, name in {"experts_up": "up_proj", "experts_down": "down_proj"}.items():
        count, *shape = decls[key].shape
        found[key] = tuple(
            Source(f"{start}experts.{expert}.{name}.weight", tuple(shape), (expert, 0, 0), (1, *shape))
            for expert in range(count)
        )
    return found


FAMILY = Family(
    "NemotronHForCausalLM",
    nemotron_h_spec,
    layer_sources=sources,
    names=OuterNames(embed="embeddings.weight", final_norm="norm_f"),
    prefixes=("backbone.", "model."),
    foreign=("mtp.",),
    understood=("num_local_experts",),
)
