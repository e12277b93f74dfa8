"""Claims people meet about training big models on small cards, worked out by the planner: what is true, what is not.

Each claim becomes figures (all from estimates of plans) and a verdict. `bench/make_claims.py` writes them down.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Final, Literal

from vramfit.config import RunConfig
from vramfit.hardware.catalogue import machine_with
from vramfit.models import catalogue
from vramfit.models.architecture import Architecture
from vramfit.planning.abilities import DESIGNED
from vramfit.planning.plan import Plan, Workload
from vramfit.planning.rates import rates_of
from vramfit.planning.search import Candidate, Family, Search, quickest
from vramfit.planning.speed import KERNELS_OUTSIDE, estimate_speed, flops_per_token
from vramfit.planning.stored import weight_bytes
from vramfit.units import GIB

Verdict = Literal["true under a condition", "impossible", "true of another thing"]

KERNELS_CLAIMED: Final = (1200, 38)
CLAIMED_GIB: Final = 21e9 / GIB
"""21 GB as they are written; read as GiB they are more."""
_STREAMED: Final = "streaming from RAM"


@dataclass(frozen=True, kw_only=True)
class Figure:
    """One number of an answer, in the unit its words name."""

    words: str
    value: float
    digits: int = 1


@dataclass(frozen=True, kw_only=True)
class Answer:
    """A claim, what comes of working it out, and the best honest alternative."""

    claim: str
    verdict: Verdict
    figures: tuple[Figure, ...]
    condition: str
    alternative: str

    def figure(self, words: str) -> float:
        """The figure whose words begin so."""
        return next(figure.value for figure in self.figures if figure.words.startswith(words))


def answers() -> tuple[Answer, ...]:
    """All claims."""
    return (seventy_on_24(), hundred_thirty_per_second(), a770_against_others(), kernels_per_step())


def _model(name: str) -> Architecture:
    found = catalogue.find(name)
    if found is None:
        raise AssertionError(f"the catalogue lacks {name}")
    return found


def _search(
    model: Architecture,
    card: str,
    *,
    length: int,
    ram_gib: float,
    method: str = "qlora",
    budget_gib: float | None = None,
) -> Search:
    wish = {"method": method, "model": {"source": model.name}, "data": {"max_length": length}}
    config = RunConfig.parse({**wish, "memory": {"budget_gib": budget_gib}} if budget_gib else wish)
    work = Workload(sequences=10_000, mean_tokens=length, longest_tokens=length, exact=True)
    return Search.of(config, model, machine_with(card, ram_gib=ram_gib), work, abilities=DESIGNED)


def _best(search: Search, *, name: str) -> Candidate:
    found = quickest(search.fitting(_family(search, name)))
    if found is None:
        raise AssertionError(f"{search.architecture.name} does not fit by {name}")
    return found


def _family(search: Search, name: str) -> Family:
    return next(family for family in search.families if family.name == name)


def seventy_on_24() -> Answer:
    """70B in 21 GB on a 4090: within the card's own memory, within the 21 claimed, and with as little as there is."""
    model = _model("meta-llama/Meta-Llama-3-70B")
    search = _search(model, "RTX 4090", length=2048, ram_gib=96)
    streamed = _best(search, name=_STREAMED)
    claimed = _best(_search(model, "RTX 4090", length=2048, ram_gib=96, budget_gib=CLAIMED_GIB), name=_STREAMED)
    least = search.least(_family(search, _STREAMED))
    base = weight_bytes(model, streamed.plan)
    whole = search.least(search.families[0])
    return Answer(
        claim="70B in 21 GB on a 4090",
        verdict="true under a condition",
        figures=(
            Figure(words="GiB of the 4-bit base alone", value=base / GIB),
            Figure(words="GiB at the peak with everything on the card", value=whole.memory.device_bytes / GIB),
            Figure(words="GiB that a 4090 leaves to a run", value=search.start.plan.budget_bytes / GIB),
            Figure(words="GiB of the card when blocks stream", value=streamed.memory.device_bytes / GIB),
            Figure(words="GiB of RAM when blocks stream", value=streamed.memory.host_bytes / GIB),
            Figure(words="blocks of 80 that stay on the card", value=streamed.plan.resident_blocks, digits=0),
            Figure(words="tokens/s when blocks stream", value=streamed.speed.tokens_per_s, digits=0),
            Figure(words="GiB of the card with a budget of 21 GB, 19.6 GiB", value=claimed.memory.device_bytes / GIB),
            Figure(words="blocks of 80 that stay with 21 GB", value=claimed.plan.resident_blocks, digits=0),
            Figure(words="tokens/s with 21 GB", value=claimed.speed.tokens_per_s, digits=0),
            Figure(words="GiB of the card at the least", value=least.memory.device_bytes / GIB),
            Figure(words="tokens/s with the least", value=least.speed.tokens_per_s, digits=0),
        ),
        condition=(
            "True of QLoRA when the blocks live in RAM and visit the card one by one. With the base on the card it is "
            "impossible: the 4-bit weights alone are larger than the card. 21 GB are not even the least: with one "
            "sequence at a time and no block that stays half of them will do, a little slower."
        ),
        alternative="Stream the base from RAM, adapters and their optimizer stay on the card.",
    )


def hundred_thirty_per_second() -> Answer:
    """130B at 1.2 to 1.5 it/s."""
    model, card, tokens = _model("THUDM/glm-130b"), "RTX 4090", 2048
    search = _search(model, card, length=tokens, ram_gib=256)
    best = _best(search, name=_STREAMED)
    device = search.device
    link = 2 * weight_bytes(model, best.plan) / device.link_bandwidth
    one = dataclasses.replace(best.plan, micro_batch=1, accumulation=1)
    work = Workload(sequences=1000, mean_tokens=tokens, longest_tokens=tokens, exact=True)
    step = estimate_speed(model, one, device, work, sequences_per_step=1)
    flops = flops_per_token(model, one, length=tokens)
    compute = flops * tokens / (rates_of(device, "bf16").dense)
    return Answer(
        claim="130B at 1.2 to 1.5 it/s",
        verdict="impossible",
        figures=(
            Figure(
                words="seconds that arithmetic of one sequence of 2,048 tokens takes at the full dense rate",
                value=compute,
            ),
            Figure(words="seconds to bring the 4-bit blocks twice over the link", value=link, digits=2),
            Figure(words="it/s at most for any number of tokens, by the link", value=1 / link, digits=2),
            Figure(
                words="it/s estimated for one sequence of 2,048 tokens a step", value=1 / step.step_seconds, digits=3
            ),
            Figure(words="times too fast the claim is for that step", value=1.2 * step.step_seconds, digits=0),
            Figure(words="tokens/s when a step has 16 sequences", value=best.speed.tokens_per_s, digits=0),
        ),
        condition=(
            "Weights that do not fit the card must cross the link twice in every step, and that alone takes longer "
            "than the claim allows. It can only be meant of micro-batches of one step that share a visit, or of "
            "forward passes of a few tokens."
        ),
        alternative="Count tokens/s: more sequences per step share each visit of a block.",
    )


def a770_against_others() -> Answer:
    """A770 runs 65B 3 to 5 times faster."""
    model, length = _model("huggyllama/llama-65b"), 1024
    a770 = _best(_search(model, "A770", length=length, ram_gib=96), name=_STREAMED)
    other = _best(_search(model, "RTX 4060 Ti 16GB", length=length, ram_gib=96), name=_STREAMED)
    weights = weight_bytes(model, a770.plan)
    per_pass = 3 * weights / machine_with("A770").devices[0].link_bandwidth
    return Answer(
        claim="An A770 runs 65B 3 to 5 times faster",
        verdict="true under a condition",
        figures=(
            Figure(words="tokens/s of QLoRA on an A770, blocks streamed", value=a770.speed.tokens_per_s, digits=0),
            Figure(
                words="tokens/s of the same on a 4060 Ti with as much memory", value=other.speed.tokens_per_s, digits=0
            ),
            Figure(
                words="times faster than that card", value=a770.speed.tokens_per_s / other.speed.tokens_per_s, digits=2
            ),
            Figure(words="seconds to move all weights three times", value=per_pass),
            Figure(
                words="tokens of a pass below which that takes longer than computing",
                value=per_pass * a770.speed.tokens_per_s,
                digits=0,
            ),
            Figure(
                words="tokens of a pass at which a program that does so for every pass is 3 times slower",
                value=per_pass * a770.speed.tokens_per_s / 3,
                digits=0,
            ),
        ),
        condition=(
            "Against another card of the same memory the ratio is that of dense rates, and no factor of 3 exists. "
            "Against a program that moves all weights three times for every pass, only while a pass has few tokens: "
            "with more, computing takes longer than moving, and both are as fast."
        ),
        alternative="Compare tokens/s of the same step on the same card, with one visit per block and step.",
    )


def kernels_per_step() -> Answer:
    """1200 kernels to 38."""
    small, large = _model("HuggingFaceTB/SmolLM2-135M"), _model("meta-llama/Meta-Llama-3-8B")
    device = machine_with("RTX 4090").devices[0]
    work = Workload(sequences=1000, mean_tokens=512, longest_tokens=512, exact=True)
    bounds = {}
    for model in (small, large):
        plan = Plan(
            method="lora",
            device="cuda:0",
            budget_bytes=0,
            compute="bf16",
            weight_format="bf16",
            max_length=512,
            micro_batch=1,
            accumulation=1,
            recompute=0,
            loss="chunked",
            loss_chunk_tokens=128,
            lora_rank=8,
            lora_targets=("q_proj", "v_proj"),
        )
        bounds[model.name] = estimate_speed(model, plan, device, work, sequences_per_step=1)
    tiny, big = bounds[small.name], bounds[large.name]
    before, after = KERNELS_CLAIMED
    per_launch = rates_of(device, "bf16").forward_launch
    return Answer(
        claim="1200 kernels to 38",
        verdict="true of another thing",
        figures=(
            Figure(words="microseconds one launch costs the host", value=per_launch * 1e6),
            Figure(words="milliseconds that 1200 launches cost less 38", value=(before - after) * per_launch * 1e3),
            Figure(
                words="milliseconds a step of a 135M model waits for launches",
                value=1e3 * tiny.bounds.get("launch", 0.0),
            ),
            Figure(words="milliseconds that step takes", value=1e3 * tiny.step_seconds),
            Figure(
                words="milliseconds a step of an 8B model waits for launches", value=1e3 * big.bounds.get("launch", 0.0)
            ),
            Figure(words="milliseconds that step takes with 8B", value=1e3 * big.step_seconds),
            Figure(words="kernels outside the blocks", value=KERNELS_OUTSIDE, digits=0),
        ),
        condition=(
            "True of launches from the host when a graph replays them: the card still runs every kernel that was "
            "recorded. It saves time only where the host is behind, in small models and short sequences."
        ),
        alternative="Fuse what lies between products, and use graphs where the launch share of a step is large.",
    )
