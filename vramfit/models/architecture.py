"""What is being trained: shapes and exact parameter counts of a decoder, from its config.json alone. No weights."""

from __future__ import annotations

import dataclasses
import math
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Final, Literal, TypeVar

from vramfit.errors import ModelError
from vramfit.models import families
from vramfit.models.config_keys import ACTIVATIONS, known_keys, tidy
from vramfit.models.families import Family
from vramfit.sentences import say

_Value = TypeVar("_Value")

MOST_LAYERS: Final = 4096
MOST: Final = 2**31
"""No model has more blocks or a larger size; such a number is a damaged file's."""


@dataclass(frozen=True, kw_only=True)
class Experts:
    """Mixture-of-experts facts of the blocks that have them. Widths are of one branch of one expert.

    Blocks before `first_moe_layer`, those in `dense_layers`, and all but each `every`-th have a plain MLP. `modules`:
    every expert is a module with linears of its own, as libraries built them until 2025; now all experts of a block
    are one tensor, which neither adapters nor quantisers reach.
    """

    count: int
    active: int
    expert_width: int
    shared_width: int = 0
    first_moe_layer: int = 0
    every: int = 1
    dense_layers: tuple[int, ...] = ()
    shared_gate: bool = False
    router_bias: bool = False
    expert_bias: bool = False
    modules: bool = False

    def at(self, layer: int) -> bool:
        """Whether the block `layer` (from 0) has experts."""
        return layer >= self.first_moe_layer and (layer + 1) % self.every == 0 and layer not in self.dense_layers


@dataclass(frozen=True, kw_only=True)
class LatentAttention:
    """Multi-head latent attention (DeepSeek): ranks and head parts. A `q_rank` of 0 is a direct query projection."""

    q_rank: int
    kv_rank: int
    rope_dim: int
    nope_dim: int
    value_dim: int


@dataclass(frozen=True, kw_only=True)
class Linear:
    """One weight matrix of a block: `outputs` rows of `inputs` numbers, plus a bias, `copies` times.

    `module` is False for matrices that are not modules of their own (experts kept in one tensor, routers): adapters do
    not reach those.
    """

    name: str
    part: Literal["attention", "mlp", "expert", "shared", "router"]
    inputs: int
    outputs: int
    bias: bool = False
    copies: int = 1
    module: bool = True

    @property
    def weights(self) -> int:
        return self.inputs * self.outputs * self.copies

    @property
    def params(self) -> int:
        return self.weights + (self.outputs * self.copies if self.bias else 0)


@dataclass(frozen=True, kw_only=True)
class Architecture:
    """A decoder's shape. Widths are numbers of features, `vocab_size` is rows of the embedding as stored.

    `counted`: its family is not described, and `extra_block_params` of every block and `extra_params` outside of them
    make up for what the shape alone does not say. `sliding_layers` are the blocks that slide where the config says
    other ones than the family's usual. `notes` say what was assumed in reading it, one sentence each.
    """

    name: str
    family: str
    hidden_size: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    mlp_width: int
    vocab_size: int
    max_position: int
    mlp: Literal["gated", "plain"] = "gated"
    activation: str = "silu"
    norm: Literal["rmsnorm", "layernorm", "layernorm_nobias", "layernorm_noaffine"] = "rmsnorm"
    position: Literal["rope", "learned", "alibi"] = "rope"
    tied_embeddings: bool = False
    qkv_bias: bool = False
    out_bias: bool = False
    mlp_bias: bool = False
    head_bias: bool = False
    qk_norm: Literal["none", "per_head", "per_head_distinct", "full"] = "none"
    qk_norm_bias: bool = False
    norms_per_layer: int = 2
    parallel_residual: bool = False
    attn_sinks: bool = False
    final_norm: bool = True
    embed_norm: bool = False
    learned_positions: int = 0
    embed_proj_dim: int | None = None
    sliding_window: int | None = None
    sliding_layers: tuple[int, ...] | None = None
    logit_softcap: float | None = None
    attn_softcap: float | None = None
    experts: Experts | None = None
    latent: LatentAttention | None = None
    residual_dropout: bool | None = None
    counted: bool = False
    extra_params: int = 0
    extra_block_params: int = 0
    published_params: int | None = None
    notes: tuple[str, ...] = field(default=(), compare=False)

    @property
    def q_width(self) -> int:
        """Features of all query heads together."""
        if self.latent:
            return self.heads * (self.latent.nope_dim + self.latent.rope_dim)
        return self.heads * self.head_dim

    @property
    def kv_width(self) -> int:
        """Features of all key heads together (as many for the values)."""
        return self.q_width if self.latent else self.kv_heads * self.head_dim

    @property
    def attention_out_width(self) -> int:
        """Features that enter the attention's output projection."""
        return self.heads * self.latent.value_dim if self.latent else self.q_width

    @property
    def plain_logits(self) -> bool:
        """Whether logits are exactly the head's product, as fused kernels need them."""
        return self.logit_softcap is None and not self.scales_logits and self.chunked_logits

    @property
    def scales_logits(self) -> bool:
        """Whether the family multiplies what the head gives."""
        return self.family in families.SCALES_LOGITS

    @property
    def chunked_logits(self) -> bool:
        """Whether logits are the head's product, as it is, capped or scaled: then a loss can be computed from the head
        a piece at a time."""
        return self.family not in families.CHANGES_LOGITS

    @property
    def drops_out(self) -> bool:
        """Whether what a branch gives is dropped out in training: as the config says, else as its family does."""
        return self.family in families.DROPS_OUT if self.residual_dropout is None else self.residual_dropout

    @property
    def spreads_heads(self) -> bool:
        """Whether attention is given one key head for all queries, as it is."""
        return self.family in families.SPREADS_HEADS and self.kv_heads == 1 < self.heads

    def slides(self, layer: int) -> bool:
        """Whether block `layer` (from 0) looks back no further than the sliding window."""
        if self.sliding_window is None:
            return False
        if self.sliding_layers is not None:
            return layer in self.sliding_layers
        every = families.FULL_ATTENTION_EVERY.get(self.family, 0)
        return not (every and (layer + 1) % every == 0)

    @cached_property
    def mixtures(self) -> tuple[bool, ...]:
        """Of each block whether it has experts."""
        experts = self.experts
        return tuple(experts is not None and experts.at(layer) for layer in range(self.layers))

    @cached_property
    def windows(self) -> tuple[bool, ...]:
        """Of each block whether it slides."""
        return tuple(self.slides(layer) for layer in range(self.layers))

    def by_kind(self, value: Callable[[int], _Value], *, windows: bool = False, first: int = 0) -> tuple[_Value, ...]:
        """`value` of every block from `first` on, worked out once for those without experts and once for those with;
        with `windows`, also for those that slide and those that do not."""
        kinds = tuple(zip(self.mixtures, self.windows, strict=True)) if windows else self.mixtures
        found = {kind: value(kinds.index(kind, first)) for kind in dict.fromkeys(kinds[first:])}
        return tuple([found[kind] for kind in kinds[first:]])

    @cached_property
    def moe_layers(self) -> int:
        """How many blocks have experts."""
        return sum(self.mixtures)

    @cached_property
    def shape(self) -> Architecture:
        """Itself without its name, so that what is worked out for equal shapes is worked out once."""
        return dataclasses.replace(self, name="", published_params=None)

    @cached_property
    def params(self) -> int:
        """All parameters, a tied head counted once."""
        return self.outside_params + sum(self.by_kind(self.params_of_block))

    @cached_property
    def active_params(self) -> int:
        """Parameters that one token passes: all but the experts it is not sent to."""
        return self.params - self.moe_layers * self._sleeping_params

    @cached_property
    def block_params(self) -> int:
        """Parameters of the largest block: the unit of streaming and recompute."""
        return max(self.by_kind(self.params_of_block))

    @property
    def embedding_params(self) -> int:
        """The token embedding."""
        return self.vocab_size * (self.embed_proj_dim or self.hidden_size)

    @property
    def head_params(self) -> int:
        """The matrix that makes logits, whether or not it is the embedding's own."""
        return self.vocab_size * (self.embed_proj_dim or self.hidden_size)

    def params_of_block(self, layer: int) -> int:
        """Parameters of block `layer` (from 0)."""
        linears = sum(linear.params for linear in self.linears(layer))
        return linears + self._norm_params_of_block + self.extra_block_params

    def linears(self, layer: int) -> tuple[Linear, ...]:
        """Every weight matrix of block `layer`, in the order of the forward pass."""
        return self._moe_linears if self.experts and self.experts.at(layer) else self._dense_linears

    @cached_property
    def _dense_linears(self) -> tuple[Linear, ...]:
        return self._attention_linears + self._mlp_linears(self.mlp_width, "mlp")

    @cached_property
    def _moe_linears(self) -> tuple[Linear, ...]:
        return self._attention_linears + self._expert_linears()

    @property
    def _sleeping_params(self) -> int:
        """Expert parameters of one block that a token does not pass."""
        if self.experts is None:
            return 0
        own = sum(linear.params for linear in self._moe_linears if linear.part == "expert")
        return own // self.experts.count * (self.experts.count - self.experts.active)

    @cached_property
    def _attention_linears(self) -> tuple[Linear, ...]:
        hidden, names = self.hidden_size, families.family(self.family)
        out = Linear(
            name=names.out, part="attention", inputs=self.attention_out_width, outputs=hidden, bias=self.out_bias
        )
        if self.latent:
            return (*self._latent_linears(self.latent), out)
        widths = (self.q_width, self.kv_width, self.kv_width)
        if len(names.qkv) == 1:
            widths = (sum(widths),)  # type: ignore[assignment]
        return (
            *(
                Linear(name=name, part="attention", inputs=hidden, outputs=width, bias=self.qkv_bias)
                for name, width in zip(names.qkv, widths, strict=True)
            ),
            out,
        )

    def _latent_linears(self, latent: LatentAttention) -> tuple[Linear, ...]:
        """q through a low rank or directly; one low rank for keys and values, with the shared rotary part beside it."""
        hidden, bias = self.hidden_size, self.qkv_bias

        def linear(name: str, inputs: int, outputs: int, bias: bool = False) -> Linear:
            return Linear(name=name, part="attention", inputs=inputs, outputs=outputs, bias=bias)

        query = (linear("q_proj", hidden, self.q_width),)
        if latent.q_rank:
            query = (
                linear("q_a_proj", hidden, latent.q_rank, bias),
                linear("q_b_proj", latent.q_rank, self.q_width),
            )  # type: ignore[assignment]
        key_value_width = self.heads * (latent.nope_dim + latent.value_dim)
        return (
            *query,
            linear("kv_a_proj_with_mqa", hidden, latent.kv_rank + latent.rope_dim, bias),
            linear("kv_b_proj", latent.kv_rank, key_value_width),
        )

    def _mlp_linears(
        self, width: int, part: Literal["mlp", "expert", "shared"], *, bias: bool | None = None, copies: int = 1
    ) -> tuple[Linear, ...]:
        hidden, names = self.hidden_size, families.family(self.family)
        bias = self.mlp_bias if bias is None else bias
        branches = 2 if self.mlp == "gated" else 1
        up = names.up if len(names.up) <= branches else names.up[1:]
        each = width * branches // len(up)
        fused = part == "expert" and not (self.experts and self.experts.modules)
        return (
            *(
                Linear(
                    name=name,
                    part=part,
                    inputs=hidden,
                    outputs=each,
                    bias=bias,
                    copies=copies,
                    module=not fused,
                )
                for name in up
            ),
            Linear(
                name=names.down, part=part, inputs=width, outputs=hidden, bias=bias, copies=copies, module=not fused
            ),
        )

    def _expert_linears(self) -> tuple[Linear, ...]:
        experts = self.experts
        if experts is None:
            raise AssertionError("only blocks with experts have expert matrices")
        router = Linear(
            name="gate",
            part="router",
            inputs=self.hidden_size,
            outputs=experts.count,
            bias=experts.router_bias,
            module=False,
        )
        own = self._mlp_linears(experts.expert_width, "expert", bias=experts.expert_bias, copies=experts.count)
        if not experts.shared_width:
            return (router, *own)
        shared = self._mlp_linears(experts.shared_width, "shared")
        gate = Linear(name="shared_expert_gate", part="shared", inputs=self.hidden_size, outputs=1)
        return (router, *own, *shared, *((gate,) if experts.shared_gate else ()))

    def _norm_width(self, width: int) -> int:
        """Parameters of one norm over `width` features."""
        return {"rmsnorm": 1, "layernorm": 2, "layernorm_nobias": 1, "layernorm_noaffine": 0}[self.norm] * width

    @property
    def _norm_params_of_block(self) -> int:
        block = self.norms_per_layer * self._norm_width(self.hidden_size)
        qk = {
            "none": 0,
            "per_head": 2 * self.head_dim,
            "per_head_distinct": self.q_width + self.kv_width,
            "full": self.q_width + self.kv_width,
        }[self.qk_norm]
        latent = (self.latent.q_rank + self.latent.kv_rank) if self.latent else 0
        return block + qk * (2 if self.qk_norm_bias else 1) + latent + (self.heads if self.attn_sinks else 0)

    @property
    def after_params(self) -> int:
        """What comes after the blocks: the last norm, what leads to the embedding's width, and the head where it is
        not the embedding's own matrix."""
        narrowed = self.hidden_size * self.embed_proj_dim if self.embed_proj_dim else 0
        norm = self._norm_width(self.hidden_size) if self.final_norm else 0
        head = 0 if self.tied_embeddings else self.head_params
        return narrowed + norm + head + (self.vocab_size if self.head_bias else 0)

    @cached_property
    def outside_params(self) -> int:
        """Everything that is not in a block."""
        hidden = self.hidden_size
        projections = 2 * hidden * self.embed_proj_dim if self.embed_proj_dim else 0
        norms = (self.final_norm + self.embed_norm) * self._norm_width(hidden)
        head = 0 if self.tied_embeddings else self.head_params
        bias = self.vocab_size if self.head_bias else 0
        positions = self.learned_positions * hidden
        return self.embedding_params + positions + projections + norms + head + bias + self.extra_params


def from_config(values: Mapping[str, Any], name: str) -> Architecture:
    """The architecture a config.json describes. `name` is how messages call the model.

    A key that is missing means what `transformers` takes it for, and `notes` say so. The five sizes without which
    nothing is known may be missing in a part of a larger model's file only: there `transformers` itself leaves out
    what is as in the family's first model.

    Raises ModelError: no or unknown model_type, a size that is missing, a field that is no positive number, a
    checkpoint whose weights are stored in a form that cannot be trained (GPTQ, AWQ), or a model that is not a decoder.
    """
    if not isinstance(values, Mapping):
        raise ModelError(f"config.json of {name} holds no settings", "Download the model's folder again.")
    _refuse_untrainable(values, name)
    nested = isinstance(values.get("text_config"), Mapping)
    values = decoder_values(values)
    if nested:
        _refuse_untrainable(values, name)
    model_type = values.get("model_type")
    values = _with_falcon_keys(values) if model_type in _REFINED_WEB else values
    family_name = families.ALIASES.get(str(model_type), str(model_type))
    if family_name not in families.FAMILIES:
        raise _unknown_family(model_type, name)
    return _Reader(values, family_name, name, nested=nested).architecture()


def decoder_values(values: Mapping[str, Any]) -> Mapping[str, Any]:
    """The settings of the decoder: of a multimodal model those of its text part, and what only the whole one says."""
    part = values.get("text_config")
    if not isinstance(part, Mapping):
        return values
    outer = {key: values[key] for key in ("model_type", "tie_word_embeddings") if key in values}
    return {**outer, **part}


def is_described(values: object) -> bool:
    """Whether `from_config` can say all about a config.json, its complaints included. A decoder whose model_type has no
    row, and that loads without code of its own, must be counted; and a multimodal model: `transformers` alone knows
    whether it loads the decoder, the whole, or nothing of it as a language model."""
    if not isinstance(values, Mapping):
        return True
    decoder = decoder_values(values)
    if any(one.get("is_encoder_decoder") is True or _quantised_with(one) for one in (values, decoder)):
        return True
    if decoder is not values and isinstance(values.get("model_type"), str):
        return False
    model_type = decoder.get("model_type")
    if not isinstance(model_type, str) or (model_type in families.ENCODERS and not decoder.get("is_decoder")):
        return True
    name = families.ALIASES.get(model_type, model_type)
    return name in families.FAMILIES or name in families.OWN_CODE


def _refuse_untrainable(values: Mapping[str, Any], name: str) -> None:
    if values.get("is_encoder_decoder") is True:
        raise ModelError(
            f"{name} is an encoder-decoder, and VRAMFit trains decoders", "Choose a decoder such as Llama or Qwen."
        )
    method = _quantised_with(values)
    if method is None:
        return
    raise ModelError(
        f"{name} is stored quantised with {method}: numbers of so few bits have no gradient, so they cannot be trained",
        "Choose a 16-bit copy of the model; for little memory choose the method qlora, which quantises it itself.",
    )


def _quantised_with(values: Mapping[str, Any]) -> str | None:
    """How weights are stored that cannot be trained on; bitsandbytes' can."""
    quantization = values.get("quantization_config")
    if not isinstance(quantization, Mapping) or not is_quantised(values):
        return None
    method = quantization.get("quant_method")
    if method is None:
        return None if any(quantization.get(key) for key in _LOADS_BITS) else "a method it does not name"
    return None if str(method).lower() == "bitsandbytes" else str(method).upper()


_LOADS_BITS: Final = ("load_in_4bit", "load_in_8bit")
"""What bitsandbytes' own settings say, also where the method is not named."""


def is_quantised(values: Mapping[str, Any]) -> bool:
    """Whether a config.json says that weights are stored in few bits: nothing named and no bits means no."""
    quantization = values.get("quantization_config")
    if not isinstance(quantization, Mapping):
        return False
    return any(quantization.get(key) for key in ("quant_method", "bits", "w_bit", *_LOADS_BITS))


_REFINED_WEB: Final = ("RefinedWeb", "RefinedWebModel")
_REFINED_WEB_KEYS: Final = {
    "n_layer": "num_hidden_layers",
    "n_head": "num_attention_heads",
    "n_head_kv": "num_kv_heads",
}


def _with_falcon_keys(values: Mapping[str, Any]) -> dict[str, Any]:
    """Falcon's first files, from before `transformers` had the family, as it writes them. RefinedWeb is the 40B's."""
    given = {_REFINED_WEB_KEYS[key]: value for key, value in values.items() if key in _REFINED_WEB_KEYS}
    return {"new_decoder_architecture": values["model_type"] == "RefinedWeb", **given, **values}


def _unknown_family(model_type: object, name: str) -> ModelError:
    if not isinstance(model_type, str):
        return ModelError(
            f"config.json of {name} does not say its model_type", "Give a folder in Hugging Face format of a decoder."
        )
    if model_type in families.OWN_CODE:
        return needs_own_code(model_type, name)
    if model_type in families.ENCODERS:
        return ModelError(
            f"{name} has model_type {model_type!r}, an encoder, and VRAMFit trains decoders",
            "Choose a decoder such as Llama or Qwen.",
        )
    known = ", ".join(sorted(families.FAMILIES))
    return ModelError(
        f"{name} has model_type {model_type!r}, which VRAMFit does not know", f"Choose a model of one of: {known}."
    )


def needs_own_code(model_type: str, name: str) -> ModelError:
    """The refusal of a model that `transformers` does not have itself."""
    return ModelError(
        f"{name} has model_type {model_type!r}, which only loads with code from its own folder, and VRAMFit never "
        "runs that",
        "Choose a converted copy in Llama format, or another model.",
    )


class _Reader:
    """Reads one family's config.json, naming the field in every complaint and noting what is assumed."""

    def __init__(self, values: Mapping[str, Any], family_name: str, name: str, *, nested: bool) -> None:
        self.family_name, self.name, self.nested = family_name, name, nested
        self.family: Family = families.FAMILIES[family_name]
        self.known = known_keys(family_name)
        self.values = self.known.renamed(values)
        self.assumed: dict[str, Any] = {}

    def architecture(self) -> Architecture:
        """All fields, then what only this family has."""
        hidden, layers, heads = self.size("hidden_size"), self.size("layers"), self.size("heads")
        vocab_size = self.size("vocab_size")
        special = _SPECIAL.get(self.family_name, _nothing)(self, hidden)
        fields: dict[str, Any] = {
            "kv_heads": heads if "kv_heads" in special else self._kv_heads(heads),
            "head_dim": self._head_dim(hidden, heads),
            "mlp_width": 0 if "mlp_width" in special else self._mlp_width(hidden),
            "max_position": self.number("max_position", default=2048),
            "activation": self._activation(),
            "tied_embeddings": self.switch("tie_word_embeddings", self.family.tied),
            "sliding_window": self._sliding_window(),
            "sliding_layers": self._sliding_layers(layers),
            "residual_dropout": self._dropout(),
            "logit_softcap": self._cap("final_logit_softcapping"),
            "attn_softcap": self._cap("attn_logit_softcapping"),
            "latent": self._latent() if self.family.latent else None,
            "experts": self._experts(self.family.experts, layers) if self.family.experts else None,
            **self.family.facts,
            **{field: self.switch(key, default) for field, (key, default) in self.family.switches.items()},
            **special,
        }
        architecture = Architecture(
            name=self.name,
            family=self.family_name,
            hidden_size=hidden,
            layers=layers,
            heads=heads,
            vocab_size=vocab_size,
            notes=self._notes(),
            **fields,
        )
        self._check_heads(architecture)
        return architecture

    def key(self, field: str) -> str:
        """The config.json key of an Architecture field; "" when this family has none."""
        return self.family.keys.get(field, families.USUAL_KEYS[field])

    def size(self, field: str) -> int:
        """One of the sizes that a file must have. Those of a larger model's part may be left out."""
        key = self.key(field)
        if self.nested and key not in self.values and self.known.defaults.get(key) is not None:
            return self.at(key)
        return self._whole(key, self.values.get(key)) if self.values.get(key) is not None else self._missing(key)

    def number(self, field: str, *, default: int) -> int:
        """A positive whole number under the family's key for `field`; `default` where it has no such key."""
        key = self.key(field)
        return self.at(key, default=default) if key else default

    def at(self, key: str, *, default: int | None = None, zero: bool = False) -> int:
        """A whole number above 0 (or 0 and up) under `key`.

        Absent means the family's default, and where that is null, or the file says null, `default`: what null means.
        """
        value = self.value(key)
        if value is None:
            found = self._missing(key) if default is None else default
        else:
            found = self._whole(key, value, zero=zero)
        if key not in self.values:
            self.assumed[key] = found
        return found

    def value(self, key: str) -> Any:
        """What the file says, else the family's default, which is noted. Null where the family allows it."""
        if key not in self.values:
            if key not in self.known.defaults:
                return None
            self.assumed[key] = self.known.defaults[key]
            return self.known.defaults[key]
        found = self.values[key]
        if found is None and self.known.needs_value(key):
            raise self.wrong(key, "is null, and it must have a value")
        return found

    def _whole(self, key: str, value: Any, *, zero: bool = False) -> int:
        if isinstance(value, bool) or not isinstance(value, (int, float)) or abs(value) == math.inf or value != value:
            raise self.wrong(key, f"is {tidy(value)}, not a number")
        most = MOST_LAYERS if key == self.key("layers") else MOST
        if not (0 if zero else 1) <= value <= most or value != int(value):
            least = "a whole number from 0" if zero else "a whole number above 0"
            raise self.wrong(key, f"is {tidy(value)}, and it must be {least}, at most {most:,}")
        return int(value)

    def _missing(self, key: str) -> Any:
        raise self.wrong(key, "is missing")

    def switch(self, key: str, default: bool) -> bool:
        """A yes-or-no setting; null and absent mean `default` where the family's class has no such key."""
        value = self.value(key)
        if value is None:
            return default
        if value not in (False, True) or isinstance(value, float):  # some files write 0 and 1
            raise self.wrong(key, f"is {tidy(value)}, not true or false")
        return bool(value)

    def _notes(self) -> tuple[str, ...]:
        """What the file does not say, in a sentence or two."""
        both: dict[bool, list[str]] = {True: [], False: []}
        for key, value in sorted(self.assumed.items()):
            both[key in self.known.defaults].append(f"{key} ({'none' if value is None else tidy(value)})")
        names = {True: "assumed.keys", False: "assumed.ours"}
        return tuple(say(names[known], keys=", ".join(keys)) for known, keys in both.items() if keys)

    def _kv_heads(self, heads: int) -> int:
        return self.number("kv_heads", default=heads)

    def _activation(self) -> str:
        value = self.value(self.key("activation"))
        if value is None:
            return self.family.activation
        if not isinstance(value, str) or value not in ACTIVATIONS:
            raise self.wrong(self.key("activation"), f"is {tidy(value)}, which is no activation's name")
        return value

    def _cap(self, key: str) -> float | None:
        """A bound of scores or logits; null and absent mean none, unless the family has one."""
        value = self.value(key)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value <= sys.float_info.max:
            raise self.wrong(key, f"is {tidy(value)}, and it must be a number above 0, or null")
        return float(value)

    def _mlp_width(self, hidden: int) -> int:
        """Only in some families does a missing width mean something, and then this; in Llama's it is a broken file."""
        if self.family_name in families.FOUR_TIMES_WIDE:
            return self.number("mlp_width", default=4 * hidden)
        return self.size("mlp_width")

    def wrong(self, key: str, problem: str) -> ModelError:
        if self.assumed.get(key) is not None:
            problem = f"is missing, and as transformers takes it {problem}"
        return ModelError(
            f"config.json of {self.name} ({self.family_name}): {key} {problem}",
            "Download the model's folder again, or correct the file.",
        )

    def _head_dim(self, hidden: int, heads: int) -> int:
        key = self.key("head_dim")
        if self.family.latent:
            return self.at("qk_nope_head_dim") + self.at("qk_rope_head_dim")
        if self.value(key) is not None:
            return self.at(key)
        if hidden % heads:
            raise self.wrong(self.key("hidden_size"), f"is {hidden}, which {heads} heads do not divide")
        return self.at(key, default=hidden // heads) if key in self.known.defaults else hidden // heads

    def _check_heads(self, architecture: Architecture) -> None:
        if architecture.heads % architecture.kv_heads:
            raise self.wrong(
                self.key("kv_heads") or "kv heads",
                f"is {architecture.kv_heads}, which does not divide the {architecture.heads} heads",
            )
        experts = architecture.experts
        if experts and self.family.experts and experts.active > experts.count:
            raise self.wrong(self.family.experts.active, f"is {experts.active}, but there are {experts.count} experts")

    def _dropout(self) -> bool | None:
        """Whether any of the usual keys names a share above 0; None where the family has none."""
        there = [key for key in families.DROPOUT_KEYS if key in self.known.defaults or key in self.values]
        return any(self._share(key) > 0 for key in there) if there else None

    def _share(self, key: str) -> float:
        value = self.value(key)
        if value is None:
            return 0.0
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value <= 1:
            raise self.wrong(key, f"is {tidy(value)}, and it must be 0 to 1")
        return float(value)

    def _sliding_window(self) -> int | None:
        given, used = self.value("sliding_window"), self.switch("use_sliding_window", True)
        if given is None or not used:
            return None
        return self.at("sliding_window", zero=True) or None

    def _sliding_layers(self, layers: int) -> tuple[int, ...] | None:
        """The blocks that slide as the file says, by name or by a pattern; None where they are the family's usual."""
        kinds = self._kinds("layer_types", layers, ("full_attention", "sliding_attention"))
        usual = families.FULL_ATTENTION_EVERY.get(self.family_name, 0)
        every = usual
        if self.family_name in families.READS_WINDOW_PATTERN and self.values.get(_PATTERN) is not None:
            every = self._whole(_PATTERN, self.values[_PATTERN])
        if self.family_name not in families.READS_LAYER_TYPES or self._sliding_window() is None:
            return None
        rule = families.SLIDES.get(self.family_name)
        if kinds is None and rule is None and every == usual:
            return None
        bound = self.at("max_window_layers", default=families.MAX_WINDOW_LAYERS, zero=True) if rule else 0

        def slides(layer: int) -> bool:
            if kinds is not None:
                return kinds[layer] == "sliding_attention"
            return rule(layer, bound) if rule is not None else (layer + 1) % every != 0

        found = tuple(filter(slides, range(layers)))
        return None if rule is None and found == _usual_windows(usual, layers) else found

    def _kinds(self, key: str, layers: int, allowed: tuple[str, ...]) -> list[str] | None:
        """A list with a word for each block; None where the file has none."""
        kinds = self.values.get(key)
        if kinds is None:
            return None
        if not isinstance(kinds, list):
            raise self.wrong(key, f"is {tidy(kinds)}, not a list of {' or '.join(allowed)}, one for each block")
        unknown = [kind for kind in kinds if kind not in allowed]
        if unknown:
            raise self.wrong(key, f"holds {tidy(unknown[0])}, not {' or '.join(allowed)}")
        if len(kinds) != layers:
            raise self.wrong(key, f"has {len(kinds):,} entries, and there are {layers:,} blocks")
        return kinds

    def _latent(self) -> LatentAttention:
        return LatentAttention(
            q_rank=self.at("q_lora_rank", default=0, zero=True),  # null: queries are projected directly
            kv_rank=self.at("kv_lora_rank"),
            rope_dim=self.at("qk_rope_head_dim"),
            nope_dim=self.at("qk_nope_head_dim"),
            value_dim=self.at("v_head_dim"),
        )

    def _experts(self, keys: families.ExpertKeys, layers: int) -> Experts | None:
        count_key = next((key for key in (keys.count, *_EXPERT_COUNTS) if key in self.values), keys.count)
        count = self.at(count_key, zero=True)
        if count == 0:
            return None
        width = self.at(keys.width)
        shared = self.at(keys.shared_width, default=0, zero=True) if keys.shared_width else 0
        if keys.shared_count:
            shared = width * self.at(keys.shared_count, default=0, zero=True)
        return Experts(
            count=count,
            active=self.at(keys.active),
            expert_width=width,
            shared_width=shared,
            first_moe_layer=self._first_with_experts(keys.first_dense, layers),
            every=self.at(keys.every, default=1) if keys.every else 1,
            dense_layers=self._layer_list(keys.dense_layers, layers),
            **keys.facts,
        )

    def _first_with_experts(self, key: str, layers: int) -> int:
        """How many blocks come before the first with experts: newer files name each block's kind."""
        kinds = self._kinds("mlp_layer_types", layers, ("dense", "sparse"))
        if kinds is None:
            return self.at(key, default=0, zero=True) if key else 0
        if sorted(kinds) != kinds:
            raise self.wrong("mlp_layer_types", f"is {tidy(kinds)}, not a list of dense blocks and then sparse ones")
        return kinds.count("dense")

    def _layer_list(self, key: str, layers: int) -> tuple[int, ...]:
        """Numbers of blocks, from 0; null and absent mean none."""
        given = self.value(key) if key else None
        if given is None:
            return ()
        if not isinstance(given, list) or any(isinstance(one, bool) or not isinstance(one, int) for one in given):
            raise self.wrong(key, f"is {tidy(given)}, not a list of numbers of blocks")
        outside = [one for one in given if not 0 <= one < layers]
        if outside:
            raise self.wrong(key, f"holds {tidy(outside[0])}, and the {layers:,} blocks are numbered from 0")
        return tuple(given)


_EXPERT_COUNTS = ("num_experts", "num_local_experts", "n_routed_experts")
"""The same number under the names that newer and older writers of a family give it."""


_PATTERN: Final = "sliding_window_pattern"


def _usual_windows(every: int, layers: int) -> tuple[int, ...]:
    """The blocks that slide where each so many-th sees everything; all of them where `every` is 0."""
    return tuple(layer for layer in range(layers) if not (every and (layer + 1) % every == 0))


def _nothing(reader: _Reader, hidden: int) -> dict[str, Any]:
    return {}


def _gpt2(reader: _Reader, hidden: int) -> dict[str, Any]:
    if reader.switch("add_cross_attention", False):
        problem = "is true: its blocks look at an encoder's output, too, and VRAMFit trains decoders alone"
        raise ModelError(f"config.json of {reader.name}: add_cross_attention {problem}", "Choose a plain decoder.")
    return {"position": "learned", "learned_positions": reader.number("max_position", default=2048)}


def _gpt_bigcode(reader: _Reader, hidden: int) -> dict[str, Any]:
    multi_query = {"kv_heads": 1} if reader.switch("multi_query", True) else {}
    return {**_gpt2(reader, hidden), **multi_query}


def _opt(reader: _Reader, hidden: int) -> dict[str, Any]:
    """OPT's position table has two rows more; its 350M embeds in a narrower space and has no final norm."""
    narrow = reader.at("word_embed_proj_dim", default=hidden)
    before, removed = reader.switch("do_layer_norm_before", True), reader.switch("_remove_final_layer_norm", False)
    affine = reader.switch("layer_norm_elementwise_affine", True)
    return {
        "norm": "layernorm" if affine else "layernorm_noaffine",
        "position": "learned",
        "learned_positions": reader.number("max_position", default=2048) + 2,
        "embed_proj_dim": narrow if narrow != hidden else None,
        "final_norm": before and not removed,
    }


def _falcon(reader: _Reader, hidden: int) -> dict[str, Any]:
    """Three generations: one kv head; all heads (rw); grouped kv heads with two norms (40B and later). Beside each
    other branches share one norm unless exactly two are asked for, which is what null means in the new ones."""
    heads = reader.size("heads")
    new = reader.switch("new_decoder_architecture", False)
    beside = reader.switch("parallel_attn", True)
    kv_heads = 1 if reader.switch("multi_query", True) else heads
    norms = reader.at("num_ln_in_parallel_attn", default=2 if new else 1)
    return {
        "kv_heads": reader.at("num_kv_heads", default=heads) if new else kv_heads,
        "norms_per_layer": 2 if norms == 2 or not beside else 1,
        "parallel_residual": beside or new,
        "position": "alibi" if reader.switch("alibi", False) else "rope",
    }


def _mpt(reader: _Reader, hidden: int) -> dict[str, Any]:
    """transformers makes it four times as wide whatever `expansion_ratio` says."""
    return {"mlp_width": 4 * hidden}


def _phi(reader: _Reader, hidden: int) -> dict[str, Any]:
    if not reader.switch("qk_layernorm", False):
        return {}
    return {"qk_norm": "per_head", "qk_norm_bias": True}


def _stablelm(reader: _Reader, hidden: int) -> dict[str, Any]:
    parallel = reader.switch("use_parallel_residual", False)
    return {
        "parallel_residual": parallel,
        "norms_per_layer": 1 if parallel else 2,
        "qk_norm": "per_head_distinct" if reader.switch("qk_layernorm", False) else "none",
    }


def _cohere(reader: _Reader, hidden: int) -> dict[str, Any]:
    return {"qk_norm": "per_head_distinct" if reader.switch("use_qk_norm", False) else "none"}


def _glm4_moe(reader: _Reader, hidden: int) -> dict[str, Any]:
    return {"qk_norm": "per_head" if reader.switch("use_qk_norm", False) else "none"}


_SPECIAL = {
    "gpt2": _gpt2,
    "gpt_bigcode": _gpt_bigcode,
    "gpt_neo": _gpt2,
    "opt": _opt,
    "falcon": _falcon,
    "mpt": _mpt,
    "phi": _phi,
    "stablelm": _stablelm,
    "cohere": _cohere,
    "glm4_moe": _glm4_moe,
}
"""What a table of keys cannot say."""
