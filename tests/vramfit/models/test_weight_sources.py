"""Parameters that are made from several stored tensors."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file

from vramfit.models import weight_sources as sources
from vramfit.models.weight_sources import weight_sources

EXPERTS = 4


def test_experts_with_tensors_of_their_own_are_put_together_one_by_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Never are all of a block's held beside the place they go to."""
    shape = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = transformers.MixtralConfig(**shape, num_key_value_heads=1, num_local_experts=EXPERTS, vocab_size=64)
    model = transformers.MixtralForCausalLM(config)
    model.save_pretrained(tmp_path)
    assert any(".experts.3." in name for name in load_file(tmp_path / "model.safetensors"))  # each has its own
    taken: list[int] = []

    def take(self: sources._Together, name: str, own=sources._Together.take) -> torch.Tensor:
        taken.append(self.nbytes)
        return own(self, name)

    monkeypatch.setattr(sources._Together, "take", take)
    found = weight_sources(model, tmp_path)

    for name, parameter in model.named_parameters():
        read = torch.full_like(parameter, torch.nan)
        assert found[name].read_into(read) == parameter.nbytes
        assert torch.equal(read, parameter), name
    assert len(taken) == 2 * 2 * EXPERTS  # of each block what goes up with its gate, and what comes down
    assert max(taken) == 2 * 24 * 16 * 4
