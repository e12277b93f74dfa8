"""What Start does with nothing touched, and how a trained starter learns to answer questions."""

from __future__ import annotations

from vramfit.config import STARTER_MODEL, STARTER_QUESTIONS, STARTER_STORIES, RunConfig
from vramfit.starter.questions import chats

STORY_TOKENS = 224
"""Longer than every text of the corpus (the longest has 222 tokens with its end), so that none is cut."""

CHAT_TOKENS = 256
PROMPT_SEED = 4_711


def starter_run() -> RunConfig:
    """From noise to little stories in about two minutes on two CPU cores. `bench/starter.py` chose the numbers."""
    return RunConfig.parse(
        {
            "name": "First stories",
            "method": "pretrain",
            "model": {"source": STARTER_MODEL},
            # One text a row: 10 % of it is padding, but packed rows need a mask between texts and attend over four
            # times the length: 7,400 tokens per CPU-second against 8,400 to 10,000.
            "data": {"paths": [STARTER_STORIES], "max_length": STORY_TOKENS, "packing": False, "eval_share": 0.02},
            "schedule": {
                "max_steps": 2900,
                "sequences_per_step": 4,
                "learning_rate": 6e-3,
                "warmup_share": 0.05,
                "beta2": 0.99,
            },
            "output": {
                "prompts": ["Once there was a shy fox named Mia.", "Long ago, a brave boy named Leo lived"],
                "sample_tokens": STORY_TOKENS,
                "evaluate_every": 290,
                "checkpoint_every": 725,
            },
        }
    )


def questions_run(model_folder: str) -> RunConfig:
    """LoRA on questions about stories, for the exported folder of a trained starter."""
    return RunConfig.parse(
        {
            "name": "Questions about stories",
            "method": "lora",
            "model": {"source": model_folder},
            "data": {"paths": [STARTER_QUESTIONS], "max_length": CHAT_TOKENS, "packing": False, "eval_share": 0.03},
            "adapter": {"rank": 16, "targets": "all-linear"},
            "schedule": {"max_steps": 360, "sequences_per_step": 8, "learning_rate": 5e-3, "beta2": 0.99},
            "output": {
                "prompts": [_question(), "Tell me a story about a shy fox named Mia."],
                "sample_tokens": STORY_TOKENS,
                "evaluate_every": 60,
            },
        }
    )


def _question() -> str:
    """A story with a question that neither data set holds."""
    return next(chat.user for chat in chats(PROMPT_SEED, 100) if chat.topic == "what")
