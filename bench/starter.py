"""Which starter reads best after two minutes: trains candidate shapes for a CPU-second budget and compares them.

    python bench/starter.py                      the chosen shape and its neighbours, 60 CPU-seconds each
    python bench/starter.py --budget 240 --only chosen --samples 20
    python bench/starter.py --judge DIR/runs/0001-first-stories/export --samples 40
    python bench/starter.py --only "vocab=1536 hidden=128 layers=4 mlp=384 lr=4e-3 batch=16"

Loss is per character, so that vocabularies can be compared; the information of the grammar's choices per character is
about what no model can go below. Time is CPU-seconds of this process (all threads). Waiting
threads sleep instead of spinning (OMP_WAIT_POLICY): on cores shared with other programs spinning was 40 times slower.
The loop here is the plain one (transformers' own loss, torch's AdamW): it compares shapes, not engines.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))

from vramfit.starter import tokenizer as bpe
from vramfit.starter.reading import read
from vramfit.starter.stories import Chance, tell

HELD_OUT_SEED = 10_007
HELD_OUT_STORIES = 128
PROMPTS = ("Once there was a", "Long ago, a", "There once was a", "Mia was a", "Tom was a")


@dataclass(frozen=True, kw_only=True)
class Trial:
    """One candidate. `batch` is stories in a step, each padded to the longest; `std` the initial deviation."""

    vocab: int = 1536
    hidden: int = 128
    layers: int = 4
    heads: int = 4
    kv: int = 0
    mlp: int = 384
    lr: float = 4e-3
    batch: int = 16
    beta2: float = 0.99
    decay: float = 0.01
    std: float = 0.02
    warmup: float = 0.05
    pack: int = 0
    seed: int = 42


def main() -> None:
    options = _options()
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # read once, when torch is imported
    import torch

    torch.set_num_threads(options.threads)
    if options.judge:
        print(json.dumps(judge(options)))
        return
    trials = [_parse(text) for text in options.only] or _default_trials()
    for trial in trials:
        result = run_trial(trial, options)
        print(json.dumps({**_changed(trial), **result}), flush=True)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--budget", type=float, default=60.0, help="CPU-seconds of training per trial")
    parser.add_argument("--steps", type=int, default=0, help="train so many steps instead: for a busy machine")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--only", nargs="*", default=[], metavar="TRIAL", help="`chosen`, or `name=value ...`")
    parser.add_argument("--samples", type=int, default=10, help="stories generated and checked per prompt")
    parser.add_argument("--judge", metavar="FOLDER", help="only judge a finished run's export, train nothing")
    parser.add_argument("--show", type=int, default=2, help="stories printed per trial")
    parser.add_argument("--temperature", type=float, default=0.7)
    return parser.parse_args()


def _parse(text: str) -> Trial:
    if text == "chosen":
        return chosen()
    kinds = {field.name: type(field.default) for field in fields(Trial)}
    given = dict(part.split("=", 1) for part in text.split())
    return replace(Trial(), **{name: kinds[name](value) for name, value in given.items()})


def chosen() -> Trial:
    """The shape and recipe that ship."""
    from vramfit.starter.recipe import starter_run
    from vramfit.starter.shape import MODEL_CONFIG

    schedule = starter_run().schedule
    return Trial(
        vocab=bpe.VOCAB_SIZE,
        hidden=MODEL_CONFIG["hidden_size"],
        layers=MODEL_CONFIG["num_hidden_layers"],
        heads=MODEL_CONFIG["num_attention_heads"],
        mlp=MODEL_CONFIG["intermediate_size"],
        kv=MODEL_CONFIG["num_key_value_heads"],
        lr=starter_run().learning_rate,
        batch=schedule.sequences_per_step,
        beta2=schedule.beta2,
        decay=schedule.weight_decay,
        std=MODEL_CONFIG["initializer_range"],
        warmup=schedule.warmup_share,
    )


def _default_trials() -> list[Trial]:
    base = chosen()
    return [base, replace(base, layers=base.layers - 1), replace(base, vocab=1024), replace(base, lr=base.lr / 2)]


def _changed(trial: Trial) -> dict[str, Any]:
    plain = asdict(Trial())
    return {name: value for name, value in asdict(trial).items() if value != plain[name]}


def run_trial(trial: Trial, options: argparse.Namespace) -> dict[str, Any]:
    """Train within the budget, then measure: loss per character, tokens/s, and how the samples read."""
    import torch

    torch.manual_seed(trial.seed)
    tokenizer = bpe.train(bpe.training_texts(), vocab_size=trial.vocab)
    model = _model(trial, tokenizer.get_vocab_size())
    trained = _train(model, tokenizer, trial, options)
    nats_per_char, floor = _held_out(model, tokenizer)
    samples = _samples(model, tokenizer, options)
    for text in samples[: options.show]:
        print("   |", text)
    return {
        "params": sum(p.numel() for p in model.parameters()),
        **trained,
        "nats_per_char": round(nats_per_char, 4),
        "floor": round(floor, 4),
        **_judged(samples),
    }


def judge(options: argparse.Namespace) -> dict[str, Any]:
    """The same measures for the exported model of a real run."""
    from tokenizers import Tokenizer
    from transformers import LlamaForCausalLM

    folder = Path(options.judge)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    model = LlamaForCausalLM.from_pretrained(folder)
    nats_per_char, floor = _held_out(model, tokenizer)
    samples = _samples(model, tokenizer, options)
    for text in samples[: options.show]:
        print("   |", text)
    return {"nats_per_char": round(nats_per_char, 4), "floor": round(floor, 4), **_judged(samples)}


def _model(trial: Trial, vocab: int) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=vocab,
            hidden_size=trial.hidden,
            num_hidden_layers=trial.layers,
            num_attention_heads=trial.heads,
            num_key_value_heads=trial.kv or trial.heads,
            intermediate_size=trial.mlp,
            max_position_embeddings=512,
            tie_word_embeddings=True,
            initializer_range=trial.std,
            pad_token_id=0,
            bos_token_id=None,
            eos_token_id=2,
        )
    )


def _batches(tokenizer: Any, trial: Trial) -> Iterator[tuple[Any, Any, int]]:
    """Endless new stories: input ids, labels and trained tokens. `pack` > 0 cuts one long stream into rows."""
    import torch

    chance, stream = Chance(trial.seed), []
    while True:
        if trial.pack:
            while len(stream) < trial.batch * trial.pack:
                stream += [*tokenizer.encode(tell(chance).text).ids, 2]
            size = trial.batch * trial.pack
            ids = torch.tensor(stream[:size]).view(trial.batch, trial.pack)
            stream = stream[size:]
            yield ids, ids, size
            continue
        encoded = tokenizer.encode_batch([tell(chance).text for _ in range(trial.batch)])
        rows = [[*item.ids, 2] for item in encoded]
        longest = max(map(len, rows))
        ids = torch.tensor([row + [0] * (longest - len(row)) for row in rows])
        labels = torch.tensor([row + [-100] * (longest - len(row)) for row in rows])
        yield ids, labels, sum(map(len, rows))


def _train(model: Any, tokenizer: Any, trial: Trial, options: argparse.Namespace) -> dict[str, Any]:
    """Cosine over the budget itself, so that every trial ends at rate 0 whatever its speed."""
    import torch

    decayed = [p for p in model.parameters() if p.dim() > 1]
    others = [p for p in model.parameters() if p.dim() < 2]
    groups = [{"params": decayed, "weight_decay": trial.decay}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=trial.lr, betas=(0.9, trial.beta2), fused=True)
    batches = _batches(tokenizer, trial)
    begun, wall, steps, tokens, loss = time.process_time(), time.perf_counter(), 0, 0, math.nan

    def used_share() -> float:
        return steps / options.steps if options.steps else (time.process_time() - begun) / options.budget

    while (used := used_share()) < 1:
        rate = trial.lr * min(1.0, (used + 1e-3) / trial.warmup) * (0.5 + 0.5 * math.cos(math.pi * used))
        for group in optimizer.param_groups:
            group["lr"] = max(rate, 1e-6)
        ids, labels, count = next(batches)
        loss = model(input_ids=ids, labels=labels).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        steps, tokens = steps + 1, tokens + count
    spent = time.process_time() - begun
    return {
        "steps": steps,
        "cpu_s": round(spent),
        "wall_s": round(time.perf_counter() - wall),
        "tokens": tokens,
        "tokens_per_cpu_s": round(tokens / spent),
        "last_loss": round(float(loss), 3),
    }


def _held_out(model: Any, tokenizer: Any) -> tuple[float, float]:
    """Nats per character of held-out stories, and the grammar's own information as the floor."""
    import torch

    chance = Chance(HELD_OUT_SEED)
    texts = [tell(chance).text for _ in range(HELD_OUT_STORIES)]
    chars, nats = sum(map(len, texts)), 0.0
    with torch.no_grad():
        for text in texts:
            ids = torch.tensor([[*tokenizer.encode(text).ids, 2]])
            nats += float(model(input_ids=ids, labels=ids).loss) * (ids.shape[1] - 1)
    return nats / chars, chance.bits * math.log(2) / chars


def _samples(model: Any, tokenizer: Any, options: argparse.Namespace) -> list[str]:
    """Stories the model tells, sampled from each prompt."""
    import torch

    texts = []
    for prompt in PROMPTS[: max(1, min(len(PROMPTS), options.samples))]:
        ids = torch.tensor([tokenizer.encode(prompt).ids] * options.samples)
        with torch.no_grad():
            out = model.generate(
                input_ids=ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=350,
                do_sample=True,
                temperature=options.temperature,
                top_k=0,
                use_cache=True,
            )
        texts += [tokenizer.decode([token for token in row.tolist() if token > 2]) for row in out]
    return texts


def _judged(samples: list[str]) -> dict[str, Any]:
    """How the samples read, in shares: sentences the grammar could say; stories that agree on name, place and all."""
    readings = [read(text) for text in samples]
    count = max(1, len(readings))
    disagreeing = Counter(fact for reading in readings for fact in reading.contradicted)
    sentences = sum(reading.sentences for reading in readings)
    return {
        "samples": len(readings),
        "sentences_ok": round(sum(reading.understood for reading in readings) / max(1, sentences), 3),
        "names_agree": round(sum("name" not in reading.contradicted for reading in readings) / count, 3),
        "places_agree": round(
            sum(not reading.contradicted & {"spot", "home", "back"} for reading in readings) / count, 3
        ),
        "whole": round(sum(reading.whole for reading in readings) / count, 3),
        "disagreeing": dict(disagreeing.most_common(6)),
    }


if __name__ == "__main__":
    main()
