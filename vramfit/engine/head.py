"""How a model makes its logits: which part is the decoder, which the head, and what happens to the head's product.

A loss that goes through the head in pieces needs all three. Whether they are read right is tried on three tokens: the
same kernels on the same numbers must give the bits of the model's own forward.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor, nn

from vramfit.engine.evaluation import evaluation_mode

_SCALES: Final = (  # what configs call a factor of the logits, and whether it multiplies or divides
    ("logit_scale", "times"),
    ("lm_head_multiplier", "times"),
    ("output_multiplier", "times"),
    ("logits_scaling", "over"),
    ("logits_scaling", "times"),
)
_CAPS: Final = ("final_logit_softcapping", "logits_soft_cap", "output_logit_soft_cap")


@dataclass(frozen=True, kw_only=True)
class LogitChange:
    """What a family does to the head's product u: cap * tanh(u * times / over / cap), without a cap of 0."""

    times: float = 1.0
    over: float = 1.0
    cap: float = 0.0

    def applied(self, product: Tensor) -> Tensor:
        """The logits of `product`, in its own format, in the order of operations that the libraries write."""
        if self.times != 1.0:
            product = product * self.times
        if self.over != 1.0:
            product = product / self.over
        return torch.tanh(product / self.cap) * self.cap if self.cap else product

    def apply_(self, product: Tensor) -> Tensor:
        """The same in the memory of `product`."""
        if self.times != 1.0:
            product.mul_(self.times)
        if self.over != 1.0:
            product.div_(self.over)
        return product.div_(self.cap).tanh_().mul_(self.cap) if self.cap else product

    def slope(self, logits: Tensor) -> Tensor | float:
        """d logits / d product, from the logits: 1 - (x / cap)^2 times the scale. One more tensor of their size under
        a cap."""
        scale = self.times / self.over
        return logits.div(self.cap).square_().neg_().add_(1.0).mul_(scale) if self.cap else scale


@dataclass(frozen=True, kw_only=True)
class Head:
    """A head whose product can be made in pieces: the module, and what is done to what it gives.

    `words` are logits per token. `weights` [V_i, H] and `biases` [V_i] are of its parts, one after another along the
    vocabulary, where it is nothing but matrices; none where only the module itself knows (adapters on it, a quantised
    one).
    """

    module: nn.Module
    words: int
    change: LogitChange = LogitChange()
    weights: tuple[Tensor, ...] = ()
    biases: tuple[Tensor | None, ...] = ()

    @classmethod
    def of(cls, module: nn.Module, words: int, change: LogitChange = LogitChange()) -> Head:
        parts = tuple(module.shards) if isinstance(module, ShardedHead) else (module,)
        if any(type(part) is not nn.Linear for part in parts):
            return cls(module=module, words=words, change=change)
        linears: Any = parts
        weights, biases = tuple(part.weight for part in linears), tuple(part.bias for part in linears)
        return cls(module=module, words=words, change=change, weights=weights, biases=biases)

    def logits(self, hidden: Tensor) -> Tensor:
        """All logits [N, V] of `hidden` [N, H] in fp32, changed in the format they are made in, as the model does."""
        return self.change.applied(self.module(hidden)).float()


class ShardedHead(nn.Module):
    """A head in parts along the vocabulary, each a linear: logits are their results side by side."""

    def __init__(self, shards: Sequence[nn.Linear]) -> None:
        super().__init__()
        self.shards = nn.ModuleList(shards)

    def forward(self, hidden: Tensor) -> Tensor:
        return torch.cat([shard(hidden) for shard in self.shards], dim=-1)


@dataclass(frozen=True, kw_only=True)
class LogitsWay:
    """A model's decoder and head; or neither, and `reason` says why only its own forward makes its logits."""

    decoder: Callable[..., Any] | None = None
    head: Head | None = None
    reason: str = ""


def base_model(model: Any) -> Any:
    """The model itself, out of the wrapper that adapters put around it."""
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def logits_way(model: nn.Module, device: torch.device) -> LogitsWay:
    """How `model` makes its logits. Runs it on three tokens on `device`, without gradients.

    The device is given because a model cannot be asked: its first parameter may be a table that is looked up elsewhere.
    """
    base = base_model(model)
    name = type(base).__name__
    module = base.get_output_embeddings() if hasattr(base, "get_output_embeddings") else None
    decoder = base.get_decoder() if hasattr(base, "get_decoder") else None
    if module is None or decoder is None or decoder is base:
        return LogitsWay(
            reason=f"{name} does not say what its decoder and its head are, so its own forward makes the logits"
        )
    module = _saved(module)
    found = _head_that_gives_the_same(base, decoder, module, device)
    if found is None:
        return LogitsWay(reason=f"{name} does more to its logits than is known, so its own forward makes them")
    return LogitsWay(decoder=decoder, head=found)


def _saved(module: Any) -> Any:
    """The head that peft trains whole beside adapters, out of the wrapper that chooses it."""
    copies: Any = getattr(module, "modules_to_save", None) or {}
    names = [name for name in getattr(module, "active_adapters", ()) if name in copies]
    return copies[names[0]] if len(names) == 1 and not module.disable_adapters else module


def _head_that_gives_the_same(base: Any, decoder: Any, module: Any, device: torch.device) -> Head | None:
    """The head with the change that gives the bits of the model's own forward on three tokens, if one does."""
    tokens = torch.arange(3, device=device).unsqueeze(0)
    with evaluation_mode(base):
        whole = base(input_ids=tokens, use_cache=False).logits
        hidden = getattr(decoder(input_ids=tokens, use_cache=False), "last_hidden_state", None)
        if hidden is None or hidden.shape[-1] != getattr(module, "in_features", hidden.shape[-1]):
            return None
        product = module(hidden).to(whole.dtype)
        if whole.abs().max().item() == 0:  # whatever is done to nothing gives nothing
            return None
        for change in _candidates(base.config):
            if torch.equal(change.applied(product), whole):
                return Head.of(module, whole.shape[-1], change)
    return None


def _candidates(config: Any) -> Iterator[LogitChange]:
    """What a config may mean, all of it first and nothing last: a family may have a field and not use it."""
    inner = config.get_text_config() if hasattr(config, "get_text_config") else config
    scales: list[dict[str, float]] = []
    for name, way in _SCALES:
        value = getattr(inner, name, None)
        if isinstance(value, int | float) and value not in (0, 1):
            scales.append({way: float(value)})
    caps = [float(cap) for name in _CAPS if isinstance(cap := getattr(inner, name, None), int | float) and cap > 0]
    for scale, cap in itertools.product([*scales, {}], [*caps, 0.0]):
        yield LogitChange(cap=cap, **scale)
