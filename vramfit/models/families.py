"""How each model family writes its config.json: the one table of keys, fixed facts and module names.

Names on the left are fields of Architecture. Only what differs from the usual is written down; the usual keys are
Llama's. Families are called by their `model_type`. Source of every row: the configuration and modelling file of that
family in `transformers`; a test builds tiny models of these families and compares parameter counts.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

USUAL_KEYS: Final[Mapping[str, str]] = {
    "hidden_size": "hidden_size",
    "layers": "num_hidden_layers",
    "heads": "num_attention_heads",
    "kv_heads": "num_key_value_heads",
    "head_dim": "head_dim",
    "mlp_width": "intermediate_size",
    "vocab_size": "vocab_size",
    "max_position": "max_position_embeddings",
    "activation": "hidden_act",
}

GPT2_KEYS: Final[Mapping[str, str]] = {
    "hidden_size": "n_embd",
    "layers": "n_layer",
    "heads": "n_head",
    "kv_heads": "",
    "mlp_width": "n_inner",
    "max_position": "n_positions",
    "activation": "activation_function",
}


@dataclass(frozen=True, kw_only=True)
class ExpertKeys:
    """Where a mixture-of-experts family keeps its numbers; "" where it has no such key."""

    count: str = "num_experts"
    active: str = "num_experts_per_tok"
    width: str = "intermediate_size"
    shared_count: str = ""
    shared_width: str = ""
    first_dense: str = ""
    every: str = ""
    dense_layers: str = ""
    facts: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Family:
    """One model_type. `keys` renames, `facts` are fixed, `switches` are booleans of the config with their default.

    `tied` and `activation` are what holds when the file does not say. The last four are names of linear modules, as
    LoRA targets call them; one fused projection has one name.
    """

    keys: Mapping[str, str] = field(default_factory=dict)
    facts: Mapping[str, Any] = field(default_factory=dict)
    switches: Mapping[str, tuple[str, bool]] = field(default_factory=dict)
    tied: bool = False
    activation: str = "silu"
    experts: ExpertKeys | None = None
    latent: bool = False
    qkv: tuple[str, ...] = ("q_proj", "k_proj", "v_proj")
    out: str = "o_proj"
    up: tuple[str, ...] = ("gate_proj", "up_proj")
    down: str = "down_proj"


_BIASED: Final = {"qkv_bias": True, "out_bias": True, "mlp_bias": True}
_LAYERNORM_PLAIN: Final = {"norm": "layernorm", "mlp": "plain"}
_ATTENTION_BIAS: Final = {"qkv_bias": ("attention_bias", False), "out_bias": ("attention_bias", False)}
_LLAMA_SWITCHES: Final = {**_ATTENTION_BIAS, "mlp_bias": ("mlp_bias", False)}
_DEEPSEEK_EXPERTS: Final = ExpertKeys(
    count="n_routed_experts",
    width="moe_intermediate_size",
    shared_count="n_shared_experts",
    first_dense="first_k_dense_replace",
)
_DEEPSEEK_V3_EXPERTS: Final = ExpertKeys(
    count="n_routed_experts",
    width="moe_intermediate_size",
    shared_count="n_shared_experts",
    first_dense="first_k_dense_replace",
    facts={"router_bias": True},
)
_LOCAL_EXPERTS: Final = ExpertKeys(count="num_local_experts")

FAMILIES: Final[Mapping[str, Family]] = {
    "llama": Family(switches=_LLAMA_SWITCHES),
    "mistral": Family(),
    "ministral": Family(),
    "ministral3": Family(),
    "smollm3": Family(switches=_LLAMA_SWITCHES, tied=True),
    "seed_oss": Family(
        switches={
            "qkv_bias": ("attention_bias", True),
            "out_bias": ("attention_out_bias", False),
            "mlp_bias": ("mlp_bias", False),
        }
    ),
    "granite": Family(switches=_LLAMA_SWITCHES),
    "granitemoe": Family(switches=_ATTENTION_BIAS, experts=_LOCAL_EXPERTS),
    "qwen2": Family(facts={"qkv_bias": True}),
    "qwen3": Family(facts={"qk_norm": "per_head"}, switches=_ATTENTION_BIAS),
    "qwen2_moe": Family(
        switches={"qkv_bias": ("qkv_bias", True)},
        experts=ExpertKeys(
            width="moe_intermediate_size",
            shared_width="shared_expert_intermediate_size",
            every="decoder_sparse_step",
            dense_layers="mlp_only_layers",
            facts={"shared_gate": True},
        ),
    ),
    "qwen3_moe": Family(
        facts={"qk_norm": "per_head"},
        switches=_ATTENTION_BIAS,
        experts=ExpertKeys(width="moe_intermediate_size", every="decoder_sparse_step", dense_layers="mlp_only_layers"),
    ),
    "mixtral": Family(experts=_LOCAL_EXPERTS),
    "olmoe": Family(facts={"qk_norm": "full"}, switches=_ATTENTION_BIAS, experts=ExpertKeys()),
    "phimoe": Family(
        facts={"norm": "layernorm"},
        switches={**_ATTENTION_BIAS, "head_bias": ("lm_head_bias", False)},
        experts=_LOCAL_EXPERTS,
    ),
    "gpt_oss": Family(
        facts={"attn_sinks": True},
        switches={"qkv_bias": ("attention_bias", True), "out_bias": ("attention_bias", True)},
        experts=ExpertKeys(count="num_local_experts", facts={"router_bias": True, "expert_bias": True}),
    ),
    "deepseek_v2": Family(switches=_LLAMA_SWITCHES, latent=True, experts=_DEEPSEEK_EXPERTS),
    "deepseek_v3": Family(switches=_ATTENTION_BIAS, latent=True, experts=_DEEPSEEK_V3_EXPERTS),
    "glm4_moe_lite": Family(switches=_ATTENTION_BIAS, latent=True, experts=_DEEPSEEK_V3_EXPERTS),
    "glm4_moe": Family(switches={"qkv_bias": ("attention_bias", False)}, experts=_DEEPSEEK_V3_EXPERTS),
    "glm": Family(switches={"qkv_bias": ("attention_bias", False)}, up=("gate_up_proj",)),
    "glm4": Family(
        facts={"norms_per_layer": 4}, switches={"qkv_bias": ("attention_bias", False)}, up=("gate_up_proj",)
    ),
    "gemma": Family(
        activation="gelu_pytorch_tanh", tied=True, switches=_ATTENTION_BIAS, keys={"activation": "hidden_act"}
    ),
    "gemma2": Family(
        activation="gelu_pytorch_tanh",
        tied=True,
        facts={"norms_per_layer": 4},
        switches=_ATTENTION_BIAS,
        keys={"activation": "hidden_activation"},
    ),
    "gemma3_text": Family(
        activation="gelu_pytorch_tanh",
        tied=True,
        facts={"norms_per_layer": 4, "qk_norm": "per_head"},
        switches=_ATTENTION_BIAS,
        keys={"activation": "hidden_activation"},
    ),
    "phi": Family(
        activation="gelu_new",
        facts={**_LAYERNORM_PLAIN, **_BIASED, "head_bias": True, "norms_per_layer": 1, "parallel_residual": True},
        out="dense",
        up=("fc1",),
        down="fc2",
    ),
    "phi3": Family(qkv=("qkv_proj",), up=("gate_up_proj",)),
    "olmo": Family(facts={"norm": "layernorm_noaffine"}, switches=_ATTENTION_BIAS),
    "olmo2": Family(facts={"qk_norm": "full"}, switches=_ATTENTION_BIAS),
    "olmo3": Family(facts={"qk_norm": "full"}, switches=_ATTENTION_BIAS),
    "cohere": Family(
        tied=True,
        facts={"norm": "layernorm_nobias", "norms_per_layer": 1, "parallel_residual": True},
        switches=_ATTENTION_BIAS,
    ),
    "cohere2": Family(
        tied=True,
        facts={"norm": "layernorm_nobias", "norms_per_layer": 1, "parallel_residual": True},
        switches=_ATTENTION_BIAS,
    ),
    "stablelm": Family(facts={"norm": "layernorm"}, switches={"qkv_bias": ("use_qkv_bias", False)}),
    "starcoder2": Family(
        activation="gelu_pytorch_tanh",
        tied=True,
        facts=_LAYERNORM_PLAIN,
        switches={"qkv_bias": ("use_bias", True), "out_bias": ("use_bias", True), "mlp_bias": ("use_bias", True)},
        up=("c_fc",),
        down="c_proj",
    ),
    "nemotron": Family(activation="relu2", facts=_LAYERNORM_PLAIN, switches=_LLAMA_SWITCHES, up=("up_proj",)),
    "gpt2": Family(
        activation="gelu_new",
        tied=True,
        keys=GPT2_KEYS,
        facts={**_LAYERNORM_PLAIN, **_BIASED},
        qkv=("c_attn",),
        out="c_proj",
        up=("c_fc",),
        down="c_proj",
    ),
    "gpt_bigcode": Family(
        activation="gelu_pytorch_tanh",
        tied=True,
        keys=GPT2_KEYS,
        facts={**_LAYERNORM_PLAIN, **_BIASED},
        qkv=("c_attn",),
        out="c_proj",
        up=("c_fc",),
        down="c_proj",
    ),
    "gptj": Family(
        activation="gelu_new",
        keys=GPT2_KEYS,
        facts={
            **_LAYERNORM_PLAIN,
            "mlp_bias": True,
            "head_bias": True,
            "norms_per_layer": 1,
            "parallel_residual": True,
        },
        out="out_proj",
        up=("fc_in",),
        down="fc_out",
    ),
    "gpt_neo": Family(
        activation="gelu_new",
        tied=True,
        keys={"layers": "num_layers", "heads": "num_heads", "kv_heads": "", "activation": "activation_function"},
        facts={**_LAYERNORM_PLAIN, "out_bias": True, "mlp_bias": True},
        out="out_proj",
        up=("c_fc",),
        down="c_proj",
    ),
    "gpt_neox": Family(
        activation="gelu",
        facts={**_LAYERNORM_PLAIN, "mlp_bias": True},
        keys={"kv_heads": ""},
        switches={
            "qkv_bias": ("attention_bias", True),
            "out_bias": ("attention_bias", True),
            "parallel_residual": ("use_parallel_residual", True),
        },
        qkv=("query_key_value",),
        out="dense",
        up=("dense_h_to_4h",),
        down="dense_4h_to_h",
    ),
    "opt": Family(
        activation="relu",
        tied=True,
        keys={"mlp_width": "ffn_dim", "kv_heads": "", "activation": "activation_function"},
        facts=_LAYERNORM_PLAIN,
        switches={
            "qkv_bias": ("enable_bias", True),
            "out_bias": ("enable_bias", True),
            "mlp_bias": ("enable_bias", True),
        },
        out="out_proj",
        up=("fc1",),
        down="fc2",
    ),
    "bloom": Family(
        activation="gelu",
        tied=True,
        keys={"layers": "n_layer", "heads": "n_head", "kv_heads": "", "mlp_width": "", "max_position": "seq_length"},
        facts={**_LAYERNORM_PLAIN, **_BIASED, "embed_norm": True, "position": "alibi"},
        qkv=("query_key_value",),
        out="dense",
        up=("dense_h_to_4h",),
        down="dense_4h_to_h",
    ),
    "falcon": Family(
        activation="gelu",
        tied=True,
        keys={"kv_heads": "", "head_dim": "", "mlp_width": "ffn_hidden_size", "activation": "activation"},
        facts=_LAYERNORM_PLAIN,
        switches={"qkv_bias": ("bias", False), "out_bias": ("bias", False), "mlp_bias": ("bias", False)},
        qkv=("query_key_value",),
        out="dense",
        up=("dense_h_to_4h",),
        down="dense_4h_to_h",
    ),
    "mpt": Family(
        activation="gelu",
        tied=True,
        keys={
            "hidden_size": "d_model",
            "layers": "n_layers",
            "heads": "n_heads",
            "kv_heads": "",
            "mlp_width": "",
            "max_position": "max_seq_len",
        },
        facts={"norm": "layernorm_nobias", "mlp": "plain", "position": "alibi"},
        qkv=("Wqkv",),
        out="out_proj",
        up=("up_proj",),
        down="down_proj",
    ),
}

ALIASES: Final[Mapping[str, str]] = {"RefinedWeb": "falcon", "RefinedWebModel": "falcon", "gemma3": "gemma3_text"}
"""model_types that older or multimodal checkpoints write, and the family whose decoder they hold."""

OWN_CODE: Final = frozenset({"baichuan", "chatglm", "internlm", "internlm2", "qwen", "minicpm", "deepseek", "glm130b"})
"""model_types that only load with code from the model's own folder, which VRAMFit never runs."""

ENCODERS: Final = frozenset(
    [
        *("bert", "bert-generation", "big_bird", "camembert", "data2vec-text", "electra", "ernie", "megatron-bert"),
        *("rembert", "roberta", "roberta-prelayernorm", "roc_bert", "roformer", "xlm-roberta", "xlm-roberta-xl"),
        "xmod",
    ]
)
"""model_types whose tokens look at those behind them, too, unless their config.json says `is_decoder`."""

OWN_CODE_NAMES: Final[Mapping[str, Family]] = {
    "baichuan": Family(qkv=("W_pack",)),
    "chatglm": Family(qkv=("query_key_value",), out="dense", up=("dense_h_to_4h",), down="dense_4h_to_h"),
    "internlm2": Family(qkv=("wqkv",), out="wo", up=("w1", "w3"), down="w2"),
    "qwen": Family(qkv=("c_attn",), out="c_proj", up=("w1", "w2"), down="c_proj"),
}
"""Module names of those, for the catalogue's estimates."""

FOUR_TIMES_WIDE: Final = frozenset({"gpt2", "gpt_bigcode", "gptj", "gpt_neo", "bloom", "falcon", "mpt"})
"""Families whose feed-forward is 4 times as wide as the model where the config does not say how wide."""

EAGER_ONLY: Final = frozenset({"gemma2", "gpt_oss", "gpt_neo", "mpt", "bloom"})
"""Families whose attention does more than a fused kernel can (capped scores, sinks, ALiBi in their own code):
`transformers` refuses them SDPA, so their scores are made in memory."""

WIDE_LAYER_NORM: Final[Mapping[str, str]] = {"olmo": "kernel", "cohere": "written", "cohere2": "written"}
"""Families whose LayerNorm works on an fp32 copy: by torch's kernel, or written out in Python."""

DROPS_OUT: Final = frozenset({"gpt2", "gpt_bigcode", "opt", "seed_oss"})
"""Families whose branches drop out a tenth unless their config says 0."""

DROPOUT_KEYS: Final = ("resid_pdrop", "resid_dropout", "residual_dropout", "hidden_dropout", "dropout")

SPREADS_HEADS: Final = frozenset({"falcon"})
"""Families that leave one key head to be spread over all queries by the kernel, which no fused one does."""

FULL_ATTENTION_EVERY: Final[Mapping[str, int]] = {
    "gemma2": 2,
    "gemma3_text": 6,
    "cohere2": 4,
    "olmo3": 4,
    "gpt_oss": 2,
}
"""Families with sliding windows in which each so many-th block looks at all positions; in the others all blocks slide.
A window no longer than the sequence is a mask, and with a mask no kernel is told that attention is causal."""

READS_LAYER_TYPES: Final = frozenset(
    [
        *FULL_ATTENTION_EVERY,
        *("ministral", "qwen2", "qwen2_moe", "qwen3", "smollm3"),
    ]
)
"""Families whose config names the blocks that slide (`layer_types`); in the others the key changes nothing."""

MAX_WINDOW_LAYERS: Final = 28
SLIDES: Final[Mapping[str, Callable[[int, int], bool]]] = {
    "qwen2": lambda layer, bound: layer >= bound,
    "qwen3": lambda layer, bound: layer >= bound,
    "qwen2_moe": lambda layer, bound: layer < bound and layer % 2 == 0,
}
"""Families whose blocks slide by `max_window_layers` (28 where it is missing) where the config does not name them."""

READS_WINDOW_PATTERN: Final = frozenset({"gemma3_text", "cohere2"})
"""Families whose config may say which blocks see everything by one number, `sliding_window_pattern`."""

NAMES_BRANCH: Final = frozenset({"gpt2", "gpt_bigcode", "gpt_neo"})
"""Families whose block keeps what attention gave in a variable until it returns."""

RETURNS_SCORES: Final = frozenset({"bloom", "mpt", "gpt_neo"})
"""Families whose blocks return attention's weights: those of one block are there until the next has returned."""

PLAIN_SOFTMAX: Final = frozenset({"gpt_neo"})
"""Families whose softmax says no format: autocast makes it fp32 on cards and leaves it in 16 bits on CPUs."""

MASK_OF_ALL_POSITIONS: Final[Mapping[str, str]] = {"gpt_neo": "blocks", "gpt_bigcode": "model"}
"""Families with a buffer of a byte for each pair of the positions they can have: in every block, or once."""

FP32_DISTANCES: Final = frozenset({"mpt"})
"""Families that add ALiBi's distances in fp32, so that the scores are in fp32 from there on."""

WEIGHS_IN_FP32: Final = frozenset({"mixtral", "phimoe", "deepseek_v2", "deepseek_v3", "glm4_moe", "glm4_moe_lite"})
"""Families with experts whose router gives fp32 weights, so that what experts give is weighted and summed in fp32."""

CLAMPS_GATE: Final = frozenset({"gpt_oss"})
"""Families with experts that limit the gate and what it opens for, each an operation of its own."""

FP32_NORM_WEIGHT: Final = frozenset({"gemma", "gemma2", "gemma3_text", "olmo2", "olmo3", "gpt_oss"})
"""Families whose RMSNorm multiplies with its weight in fp32 and casts last."""

SCALES_LOGITS: Final = frozenset({"cohere", "cohere2", "granite", "granitemoe"})
"""Families that scale what the head gives."""

CHANGES_LOGITS: Final = frozenset({"minicpm"})
"""Families whose logits only their own forward makes: they do something else between the last norm and the logits."""


def family(model_type: str) -> Family:
    """The row of a family, or the usual (Llama's) names for one that is only in the catalogue."""
    known = FAMILIES.get(model_type) or OWN_CODE_NAMES.get(model_type)
    return known or Family()
