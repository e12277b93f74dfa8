"""The learning rate of every step, as a pure function: the panel draws it, the loop uses it. No torch."""

from __future__ import annotations

import math

from vramfit.config import ScheduleChoice


def learning_rate_at(step: int, *, total_steps: int, schedule: ScheduleChoice, peak: float) -> float:
    """Learning rate of optimizer step `step` (from 1 to `total_steps`).

    Warm-up rises linearly over `warmup_share` of the steps and reaches `peak` on its last one; a run without warm-up
    begins at the peak. From there the rate falls by the schedule's shape and is `peak * final_rate_share` on the very
    last step. A run of one step, or one that is all warm-up, ends at the peak: a rate of 0 would teach it nothing.
    """
    if not 1 <= step <= total_steps:
        raise AssertionError(f"step {step} is not one of 1..{total_steps}")
    warmup_steps = round(schedule.warmup_share * total_steps)
    if step < warmup_steps:
        return peak * step / warmup_steps
    first_at_peak = max(warmup_steps, 1)
    if schedule.shape == "constant" or total_steps == first_at_peak:
        return peak
    progress = (step - first_at_peak) / (total_steps - first_at_peak)
    fall = progress if schedule.shape == "linear" else 0.5 * (1.0 - math.cos(math.pi * progress))
    return peak * (1.0 - fall * (1.0 - schedule.final_rate_share))
