from __future__ import annotations

import pytest
import torch

from vramfit.errors import ModelError
from vramfit.models.generate import generate, prompt_tokens
from vramfit.models.load import load_model
from vramfit.models.tokenizer import load_tokenizer

CPU = torch.device("cpu")


@pytest.fixture
def pair(small, model_folder, tmp_path):
    config = small.config(model_folder, "lora", adapter={"dropout": 0.5})
    return load_model(config, small.plan(), cache=tmp_path).train(), load_tokenizer(config.model, tmp_path)


def test_the_same_seed_gives_the_same_text_and_another_another(pair):
    first, again, other = (generate(*pair, "once upon", 20, seed, device=CPU) for seed in (1, 1, 2))
    assert first == again != other


def test_greedy_text_is_the_likeliest_token_every_time(pair):
    """Against one forward pass per token without a cache."""
    model, tokenizer = pair
    written = generate(model, tokenizer, "once upon", 8, 0, device=CPU, temperature=0)
    model.eval()
    tokens = prompt_tokens(tokenizer, "once upon")
    start = tokens.shape[1]
    for _ in range(8):
        following = model(input_ids=tokens).logits[0, -1].argmax()
        if following == tokenizer.eos_token_id:
            break
        tokens = torch.cat([tokens, following.reshape(1, 1)], dim=1)
    assert written == tokenizer.decode(tokens[0, start:], skip_special_tokens=True)


def test_the_run_goes_on_as_if_nothing_had_been_written(pair):
    model, tokenizer = pair
    model.get_base_model().lm_head.eval()  # one module in another mode than its parent
    modes = [module.training for module in model.modules()]
    torch.manual_seed(4)
    wanted = torch.rand(3)
    torch.manual_seed(4)
    generate(model, tokenizer, "once upon", 5, 1, device=CPU)
    assert torch.equal(torch.rand(3), wanted)
    assert [module.training for module in model.modules()] == modes
    assert not any(parameter.grad is not None for parameter in model.parameters())


def test_an_end_token_ends_the_text(pair):
    model, tokenizer = pair
    with torch.no_grad():
        head = model.get_base_model().lm_head.weight
        head.zero_()
    # All logits are 0: the likeliest token is the first, which is made to be an end of the model's own.
    model.generation_config.eos_token_id = [0, tokenizer.eos_token_id]
    assert generate(model, tokenizer, "x", 50, 0, device=CPU, temperature=0) == ""


def test_whoever_is_asked_after_each_token_may_end_the_text(pair):
    model, tokenizer = pair
    heard: list[int] = []

    def go_on(tokens: int) -> bool:
        heard.append(tokens)
        return tokens < 3

    cut = generate(model, tokenizer, "once upon", 20, 1, device=CPU, go_on=go_on)
    assert heard == [1, 2, 3]
    assert cut == generate(model, tokenizer, "once upon", 3, 1, device=CPU)


def test_prompts_may_be_empty_or_turns_of_a_chat(pair):
    model, tokenizer = pair
    assert prompt_tokens(tokenizer, "").tolist() == [[tokenizer.eos_token_id]]
    chat = tokenizer.decode(prompt_tokens(tokenizer, "hello", as_chat=True)[0])
    assert chat == "<user>hello</s><assistant>"
    assert isinstance(generate(model, tokenizer, "", 3, 1, device=CPU), str)
    assert generate(model, tokenizer, "x", 0, 1, device=CPU) == ""


def test_output_that_is_not_finite_is_one_sentence(pair):
    model, tokenizer = pair
    with torch.no_grad():
        model.get_base_model().model.norm.weight.fill_(float("nan"))
    with pytest.raises(ModelError, match="not finite numbers"):
        generate(model, tokenizer, "once upon", 4, 1, device=CPU)
