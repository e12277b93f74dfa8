"""Text from a model as it is now: a short sample for the page, without disturbing the training."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from vramfit.config import Precision
from vramfit.data.rendering import Renderer, Request, TemplateRefusal
from vramfit.engine.evaluation import evaluation_mode
from vramfit.engine.precision import autocast
from vramfit.engine.randomness import own_randomness
from vramfit.errors import ModelError


def generate(
    model: Any,
    tokenizer: Any,
    prompt: str | Sequence[int],
    max_new_tokens: int,
    seed: int,
    *,
    device: torch.device,
    temperature: float = 0.7,
    top_p: float = 0.95,
    as_chat: bool = False,
    compute: Precision = "fp32",
    go_on: Callable[[int], bool] = lambda _: True,
) -> str:
    """What `model` writes after `prompt`, at most `max_new_tokens` tokens, without the prompt and special tokens.

    `device` is where the model computes. `prompt` is text, or token ids as they are; `as_chat` puts a text as a user's
    turn into the tokenizer's chat template. `temperature=0` takes the likeliest token always. The same seed gives the
    same text. `go_on` is asked after each token, with how many there are, and ends the text by False. Mode and random
    states of the run stay as they were. Raises ModelError when the model's output is not finite.
    """
    if max_new_tokens == 0:
        return ""
    tokens = prompt_tokens(tokenizer, prompt, as_chat=as_chat).to(device)
    options: dict[str, Any] = {"do_sample": False, "temperature": None, "top_p": None, "top_k": None}
    if temperature > 0:
        options = {"do_sample": True, "temperature": temperature, "top_p": top_p, "top_k": 0}
    ends = end_tokens(model, tokenizer)
    with evaluation_mode(model), own_randomness(device, seed), autocast(device, compute):
        written = _written(
            model,
            input_ids=tokens,
            attention_mask=torch.ones_like(tokens),
            max_new_tokens=max_new_tokens,
            eos_token_id=ends or None,
            pad_token_id=tokenizer.pad_token_id if tokenizer.pad_token_id is not None else (ends or [0])[0],
            use_cache=True,
            stopping_criteria=_ends_unless(go_on, tokens.shape[1]),
            **options,
        )
    text: str = tokenizer.decode(written[0, tokens.shape[1] :], skip_special_tokens=True)
    return text


def _ends_unless(go_on: Callable[[int], bool], prompt: int) -> list[Callable[..., torch.Tensor]]:
    """What `generate` of transformers asks after each token: [1] of whether that was the last."""

    def is_last(tokens: torch.Tensor, scores: Any, **_: Any) -> torch.Tensor:
        return torch.tensor([not go_on(tokens.shape[1] - prompt)], device=tokens.device)

    return [is_last]


def _written(model: Any, **options: Any) -> torch.Tensor:
    """The model's own `generate`, whose sampling stops at probabilities that are no numbers."""
    try:
        tokens: torch.Tensor = model.generate(**options)
    except RuntimeError as error:
        if "probability tensor contains" not in str(error):
            raise
        raise ModelError(
            "The model's output is not finite numbers, so it cannot write text",
            "Its weights are damaged or overflow in fp16: download it again, or choose fp32 or bf16.",
        ) from error
    return tokens


def prompt_tokens(tokenizer: Any, prompt: str | Sequence[int], *, as_chat: bool = False) -> torch.Tensor:
    """Token ids [1, S] of a prompt, at least one: an empty prompt begins as a text of the model's begins."""
    if not isinstance(prompt, str):
        ids = list(prompt)
    elif as_chat and tokenizer.chat_template:
        ids = tokenizer(_question(tokenizer, prompt), add_special_tokens=False)["input_ids"]
    else:
        ids = tokenizer(prompt)["input_ids"]
    if not ids:
        first = tokenizer.bos_token_id if tokenizer.bos_token_id is not None else tokenizer.eos_token_id
        ids = [first if first is not None else 0]
    return torch.tensor([ids])


def _question(tokenizer: Any, prompt: str) -> str:
    """The prompt as a chat's first question, by the model's own template. Raises DataError, ModelError."""
    asked = Request(messages=[{"role": "user", "content": prompt}], asks=True)
    [found] = Renderer(tokenizer).render([asked])
    if isinstance(found, TemplateRefusal):
        raise ModelError(f"The model's chat template cannot render a question: {found}", "Mend chat_template.jinja.")
    return found.text


def end_tokens(model: Any, tokenizer: Any) -> list[int]:
    """Every token that ends a text: the tokenizer's, and the model's own (chat models have several)."""
    settings = getattr(model, "generation_config", None)
    own = getattr(settings, "eos_token_id", None)
    ends = [tokenizer.eos_token_id, *(own if isinstance(own, list) else [own])]
    return sorted({int(end) for end in ends if end is not None})
