from __future__ import annotations

import math
import subprocess
import sys
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vramfit.config import ScheduleChoice
from vramfit.engine.schedule import learning_rate_at

SHAPES = ["cosine", "linear", "constant"]


def rates(total: int, **changes) -> list[float]:
    schedule = ScheduleChoice(**changes)
    return [learning_rate_at(step, total_steps=total, schedule=schedule, peak=1.0) for step in range(1, total + 1)]


def test_warm_up_rises_evenly_and_ends_at_the_peak():
    assert rates(100, warmup_share=0.05)[:5] == pytest.approx([0.2, 0.4, 0.6, 0.8, 1.0])


@pytest.mark.parametrize("shape", ["cosine", "linear"])
@pytest.mark.parametrize("final", [0.0, 0.1, 1.0])
@pytest.mark.parametrize("warmup", [0.0, 0.05, 0.5])
def test_the_last_step_has_the_promised_rate(shape, final, warmup):
    found = rates(40, shape=shape, final_rate_share=final, warmup_share=warmup)
    assert found[-1] == pytest.approx(final, abs=1e-12)
    assert max(found) == pytest.approx(1.0)


def test_the_cosine_is_half_way_down_in_the_middle():
    found = rates(101, warmup_share=0.0, final_rate_share=0.2)
    assert found[0] == 1.0 and found[50] == pytest.approx(0.6)
    assert found[25] == pytest.approx(0.2 + 0.8 * 0.5 * (1 + math.cos(math.pi / 4)))


def test_a_constant_rate_stays():
    assert set(rates(10, shape="constant", warmup_share=0.0)) == {1.0}


@pytest.mark.parametrize("shape", SHAPES)
def test_a_run_of_one_step_still_learns(shape):
    assert rates(1, shape=shape, final_rate_share=0.0) == [1.0]


@given(
    total=st.integers(1, 300),
    warmup=st.floats(0, 1),
    final=st.floats(0, 1),
    shape=st.sampled_from(SHAPES),
)
def test_rates_rise_then_fall_and_stay_within_bounds(total, warmup, final, shape):
    found = rates(total, warmup_share=warmup, final_rate_share=final, shape=shape)
    top = found.index(max(found))
    assert all(a <= b + 1e-12 for a, b in pairwise(found[: top + 1]))
    assert all(a >= b - 1e-12 for a, b in pairwise(found[top:]))
    assert found[0] > 0 and min(found) >= 0 and max(found) <= 1.0 + 1e-12


def test_the_panel_may_import_it():
    code = "import sys, vramfit.engine.schedule, vramfit.engine.optimizers; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
