from vramfit.starter.recipe import CHAT_TOKENS, STORY_TOKENS
from vramfit.starter.shape import MODEL_CONFIG, architecture


def test_architecture_counts_what_the_model_has() -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    model = LlamaForCausalLM(LlamaConfig.from_dict(MODEL_CONFIG))
    assert architecture().params == sum(parameter.numel() for parameter in model.parameters())
    assert model.lm_head.weight is model.model.embed_tokens.weight


def test_longest_rows_fit_the_positions() -> None:
    assert max(STORY_TOKENS, CHAT_TOKENS) <= architecture().max_position
