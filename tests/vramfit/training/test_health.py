"""Each thing is told at the step at which it happens, once, and quiet runs are left alone."""

from __future__ import annotations

import json
import math
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import pytest

from vramfit.data.conversations import Example
from vramfit.errors import UserError
from vramfit.training.health import (
    Alarm,
    Evaluations,
    Heat,
    LossSpikes,
    Plateau,
    Refusals,
    SpeedCollapse,
    Spill,
    Watches,
    middle_and_spread,
    named_rows,
    watches_of_machine,
)
from vramfit.training.metrics import StepMetrics, Telemetry
from vramfit.units import GIB


def metrics(step: int, *, loss: float = 2.0, tokens_per_s: float = 1000.0, rate: float = 1e-3) -> StepMetrics:
    return StepMetrics(
        step=step,
        time=float(step),
        loss=loss,
        learning_rate=rate,
        grad_norm=1.0,
        tokens=100,
        tokens_per_s=tokens_per_s,
        step_seconds=0.1,
        epoch=0.0,
        allocated_bytes=0,
        reserved_bytes=0,
        resident_bytes=0,
    )


def told_at(watch: object, steps: Sequence[StepMetrics]) -> list[int]:
    return [now.step for now in steps for _ in watch.step(now)]  # type: ignore[attr-defined]


def noisy(steps: int, level: Callable[[int], float], *, spread: float = 0.05, seed: int = 1) -> list[StepMetrics]:
    draw = random.Random(seed)
    return [metrics(step, loss=level(step) * (1 + draw.gauss(0, spread))) for step in range(1, steps + 1)]


# ---- alarms ---------------------------------------------------------------------------------------------------------


def test_an_alarm_goes_off_once_and_is_set_again_after_calm() -> None:
    alarm = Alarm(needs=2, calm=2)
    wrong, right, between = (True, False), (False, True), (False, False)
    seen = [wrong, between, wrong, wrong, wrong, right, wrong, right, right, wrong, wrong]
    heard = [alarm.sees(wrong=is_wrong, right=is_right) for is_wrong, is_right in seen]
    assert [number for number, rang in enumerate(heard) if rang] == [3, 10]


# ---- the loss -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("spike_at", [17, 40, 300])
def test_a_spike_at_step_k_is_told_at_step_k(spike_at: int) -> None:
    steps = noisy(400, lambda step: 2.0 if step != spike_at else 4.0)
    assert told_at(LossSpikes(), steps) == [spike_at]


def test_a_spike_that_lasts_is_told_once_and_the_next_one_again() -> None:
    steps = noisy(400, lambda step: 5.0 if 100 <= step < 110 or step == 200 else 2.0)
    assert told_at(LossSpikes(), steps) == [100, 200]


@pytest.mark.parametrize("seed", range(5))
def test_noise_falling_losses_and_a_slow_rise_are_no_spikes(seed: int) -> None:
    falling = noisy(2000, lambda step: 2 + 6 * math.exp(-step / 100), spread=0.1, seed=seed)
    rising = noisy(2000, lambda step: 2 + step / 2000, spread=0.05, seed=seed)
    assert told_at(LossSpikes(), falling) == told_at(LossSpikes(), rising) == []


def test_a_loss_that_hardly_varies_makes_no_alarm_of_its_last_digits() -> None:
    steps = noisy(200, lambda step: 2.0 if step != 100 else 2.1, spread=1e-6)
    assert told_at(LossSpikes(), steps) == []


def test_losses_that_are_no_numbers_are_left_to_others() -> None:
    steps = noisy(60, lambda step: math.nan if step in (5, 30) else 4.0 if step == 50 else 2.0)
    assert told_at(LossSpikes(), steps) == [50]


def test_the_message_has_the_numbers() -> None:
    watch = LossSpikes()
    told_at(watch, [metrics(step, loss=2.0 + 0.1 * (step % 2)) for step in range(1, 31)])
    [found] = list(watch.step(metrics(31, loss=9.0)))
    assert (found.level, found.kind) == ("warning", "loss-spike")
    assert "jumped to 9;" in found.message and "30 steps before is 2.05" in found.message


def test_a_plateau_is_told_once_after_two_blocks_that_did_not_fall() -> None:
    """Blocks of 100: falling to step 400, level from there. The fifth is below the fourth, the next two are not."""
    steps = noisy(1000, lambda step: 4 - 2 * min(step, 400) / 400, spread=0.002)
    assert told_at(Plateau(1000, peak_rate=1e-3), steps) == [700]


def test_after_falling_again_a_second_plateau_is_told() -> None:
    steps = noisy(1500, lambda step: 4.0 if step <= 500 else 2.0, spread=0.002)
    assert told_at(Plateau(1000, peak_rate=1e-3), steps) == [300, 800]


def test_a_loss_that_falls_is_no_plateau() -> None:
    assert told_at(Plateau(2000, peak_rate=1e-3), noisy(2000, lambda step: 4 - 3 * step / 2000)) == []


def test_coming_to_rest_at_a_low_rate_is_no_plateau() -> None:
    steps = [replace(step, learning_rate=1e-3 if step.step <= 100 else 1e-5) for step in noisy(1000, lambda _: 2.0)]
    assert told_at(Plateau(1000, peak_rate=1e-3), steps) == []


def test_a_run_resumed_at_a_low_rate_is_told_no_plateau() -> None:
    """Also from a checkpoint that knows nothing of it: the peak is the schedule's."""
    steps = [replace(step, learning_rate=5e-5) for step in noisy(1000, lambda _: 2.0)]
    assert told_at(Plateau(1000, peak_rate=1e-3), steps) == []


@pytest.mark.parametrize("cut", [3, 90, 99, 100, 106, 250, 320, 650, 701])
def test_a_resumed_run_is_told_what_the_whole_run_is(cut: int) -> None:
    """Spikes, plateaus and a collapse of speed, none twice, none begun anew."""

    def speed(step: int) -> float:
        return 300.0 if 95 <= step < 320 else 1000.0

    steps = [
        replace(each, tokens_per_s=speed(each.step))
        for each in noisy(900, lambda step: 6.0 if 98 <= step < 110 else 4 - 2 * min(step, 400) / 400, spread=0.002)
    ]

    def watches() -> Watches:
        return Watches.of_steps(1000, peak_rate=1e-3, where="a card, 4 rows")

    whole, first, second = watches(), watches(), watches()
    wanted = [(now.step, found.kind) for now in steps for found in whole.step(now)]
    heard = [(now.step, found.kind) for now in steps[:cut] for found in first.step(now)]
    second.load_state(json.loads(json.dumps(first.state())))
    heard += [(now.step, found.kind) for now in steps[cut:] for found in second.step(now)]
    assert heard == wanted
    assert {kind for _, kind in wanted} == {"loss-spike", "plateau", "slow"}


def test_what_is_usual_on_another_machine_is_found_out_anew() -> None:
    first, second = (
        Watches.of_steps(1000, peak_rate=1e-3, where="fast"),
        Watches.of_steps(1000, peak_rate=1e-3, where="slow"),
    )
    for step in range(1, 101):
        first.step(metrics(step, tokens_per_s=1000.0))
    second.load_state(first.state())
    assert [found for step in range(101, 201) for found in second.step(metrics(step, tokens_per_s=200.0))] == []


@pytest.mark.parametrize("values", [{}, {"LossSpikes": 3}, {"Plateau": {"block": None}}, {"SpeedCollapse": {}}])
def test_a_checkpoint_that_knows_nothing_of_it_is_watched_from_here_on(values: dict[str, object]) -> None:
    watches = Watches.of_steps(1000, peak_rate=1e-3)
    watches.load_state(values)
    steps = noisy(60, lambda step: 4.0 if step == 50 else 2.0)
    assert [now.step for now in steps for _ in watches.step(now)] == [50]


# ---- speed ----------------------------------------------------------------------------------------------------------


def test_a_collapse_of_speed_is_told_at_its_fifth_step_and_once() -> None:
    steps = [
        metrics(step, tokens_per_s=300.0 if 100 <= step < 200 or step >= 300 else 1000.0) for step in range(1, 401)
    ]
    assert told_at(SpeedCollapse(), steps) == [104, 304]


def test_a_few_slow_steps_and_a_slow_beginning_are_none() -> None:
    slow = {1, 2, 3, 50, 51, 52, 53}
    steps = [metrics(step, tokens_per_s=100.0 if step in slow else 1000.0) for step in range(1, 101)]
    assert told_at(SpeedCollapse(), steps) == []


# ---- the machine ----------------------------------------------------------------------------------------------------


def reading(number: int, *, hot: bool | None = False, used: int | None = None) -> Telemetry:
    return Telemetry(
        time=float(number),
        device_bytes=used,
        host_bytes=0,
        utilisation=None,
        power_watts=None,
        temperature_c=91.0,
        slowed_by_heat=hot,
    )


def test_heat_is_told_at_the_fifth_reading_and_again_only_after_half_a_minute_of_cool() -> None:
    hot = [False] * 3 + [True] * 20 + [False] * 10 + [True] * 20 + [False] * 30 + [True] * 5
    watch = Heat()
    told = [number for number, is_hot in enumerate(hot) for _ in watch.reading(reading(number, hot=is_hot), 0)]
    assert told == [7, 87]


def test_a_card_that_does_not_tell_is_not_watched() -> None:
    watch = Heat()
    assert [found for number in range(50) for found in watch.reading(reading(number, hot=None), 0)] == []


def spills(watch: Spill, used: Sequence[int | None], reserved: int) -> list[int]:
    return [number for number, size in enumerate(used) for _ in watch.reading(reading(number, used=size), reserved)]


def test_more_than_the_card_has_is_a_spill_anywhere() -> None:
    watch = Spill(24 * GIB, may_spill=False)
    assert spills(watch, [24 * GIB] * 20, 23 * GIB) == []
    assert spills(watch, [None] * 20, 25 * GIB) == [4]


def test_more_than_the_driver_shows_in_use_is_a_spill_where_drivers_do_that() -> None:
    """The run holds 14 GiB while everyone together has 10 GiB of the card: 4 GiB are somewhere else."""
    assert spills(Spill(24 * GIB, may_spill=True), [10 * GIB] * 20, 14 * GIB) == [4]
    assert spills(Spill(24 * GIB, may_spill=False), [10 * GIB] * 20, 14 * GIB) == []
    assert spills(Spill(24 * GIB, may_spill=True), [14 * GIB] * 20, 14 * GIB) == []
    assert spills(Spill(24 * GIB, may_spill=True), [10 * GIB] * 4 + [14 * GIB], 14 * GIB) == []


def test_without_a_card_nothing_spills() -> None:
    assert watches_of_machine(0).reading(reading(1), reserved_bytes=0) == []


# ---- what it costs, and that it never hurts -------------------------------------------------------------------------


def test_a_mistake_in_a_watch_ends_the_watch_and_not_the_run(capsys: pytest.CaptureFixture[str]) -> None:
    class Broken:
        def step(self, now: StepMetrics) -> list[object]:
            raise ZeroDivisionError("ours")

    watches = Watches([Broken(), LossSpikes()])
    found = [found.kind for now in noisy(60, lambda step: 4.0 if step == 50 else 2.0) for found in watches.step(now)]
    assert found == ["loss-spike"]
    assert capsys.readouterr().err.count("Broken ends watching") == 1


def test_watching_a_step_takes_less_than_a_hundredth_of_a_fast_one() -> None:
    """The fastest steps that are worth training take tens of milliseconds; a hundredth of 20 ms is 200 us."""
    watches, steps = Watches.of_steps(10_000, peak_rate=1e-3), noisy(2000, lambda step: 2.0)
    began = time.process_time()
    for now in steps:
        watches.step(now)
    assert (time.process_time() - began) / len(steps) < 200e-6


# ---- ends -----------------------------------------------------------------------------------------------------------


def test_refused_steps_in_a_row_end_the_run_and_name_the_rows() -> None:
    refusals = Refusals(3)
    for step, problem in enumerate(["not finite", "not finite", "", "not finite", "not finite"], start=1):
        refusals.count(step, problem, rows="row 1 of the data", collapsed=False)
    with pytest.raises(UserError, match=r"3 steps in a row up to step 6 .* \(last with rows 4, 9 of the data\)"):
        refusals.count(6, "not finite", rows="rows 4, 9 of the data", collapsed=False)


def test_a_collapsed_scale_ends_it_at_once() -> None:
    with pytest.raises(UserError, match="scale has fallen") as caught:
        Refusals(8).count(40, "fp16's loss scale has fallen", rows="row 1 of the data", collapsed=True)
    assert caught.value.remedy.startswith("Choose bf16 or fp32")


def test_patience_counts_evaluations_without_a_better_loss() -> None:
    evaluations = Evaluations(2)
    losses = [3.0, 2.0, 2.5, 1.9, 1.9, math.nan]
    heard = [(evaluations.hear(step, loss), evaluations.enough) for step, loss in enumerate(losses, start=1)]
    assert heard == [(True, False), (True, False), (False, False), (True, False), (False, False), (False, True)]
    assert (evaluations.best_loss, evaluations.best_step) == (1.9, 4)
    forever = Evaluations(0)
    assert not any(forever.hear(step, 1.0) and forever.enough for step in range(100))


def test_what_is_the_best_outlives_a_resume() -> None:
    for losses in ([], [2.0, 3.0], [math.nan]):
        before, after = Evaluations(5), Evaluations(5)
        for step, loss in enumerate(losses):
            before.hear(step, loss)
        after.load_state(json.loads(json.dumps(before.state(), allow_nan=False)))
        assert after == before


def test_rows_are_named_as_the_data_card_counts_them() -> None:
    def example(row: int, *packed: int) -> Example:
        return Example(np.zeros(1, np.int32), np.ones(1, bool), row, tuple(1 for _ in packed), packed)

    assert named_rows([example(4)]) == "row 5 of the data"
    assert named_rows([example(7), example(2, 2, 0)]) == "rows 1, 3, 8 of the data"
    assert named_rows([example(row) for row in range(1000, 1012)]).endswith("1,008 and 4 more of the data")


def test_the_spread_of_normal_numbers_is_their_deviation() -> None:
    draw = random.Random(0)
    middle, spread = middle_and_spread([draw.gauss(5, 2) for _ in range(20_000)])
    assert (middle, spread) == (pytest.approx(5, abs=0.05), pytest.approx(2, abs=0.05))
