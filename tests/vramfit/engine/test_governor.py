from __future__ import annotations

import json
import random

import pytest
import torch

from tests.vramfit.engine.pseudo_card import PseudoCard
from vramfit.config import ScheduleChoice
from vramfit.engine.governor import MOST_CALM_STEPS, Governor, Reading, StepCost, build_governor
from vramfit.engine.optimizers import build_optimizer
from vramfit.engine.resident import ResidentExecutor

MIB = 2**20
WEIGHS = {"keep": 100, "compress": 55, "recompute": 20, "offload": 8}  # MiB of activations a block
SLOWS = {"keep": 1.0, "compress": 1.1, "recompute": 1.3, "offload": 1.35}  # seconds a block
REST = 200


class Machine:
    """Steps of a model whose memory and time are known: what the governor's decisions do to them."""

    def __init__(self, budget: int, *, blocks: int = 4, **options) -> None:
        self.applied: list[tuple[str, ...]] = []
        self.emptied, self.step, self.reserved, self.reach, self.more = 0, 0, 0, 0, 1.0
        self.governor = Governor(
            modes=["keep"] * blocks, apply=self.apply, empty_cache=self.empty, budget_bytes=budget * MIB, **options
        )
        self.messages: list[str] = []

    def apply(self, modes) -> None:
        self.applied.append(tuple(modes))

    def empty(self) -> None:
        self.emptied += 1

    def run(self, steps: int, *, tokens: int = 1000) -> list[str]:
        told = []
        for _ in range(steps):
            self.step += 1
            modes = self.governor.modes
            used = REST + sum(WEIGHS[mode] for mode in modes) * self.more * tokens / 1000
            reading = Reading(
                allocated=int(used * MIB),
                reserved=max(int(used * MIB), self.reserved),
                at_rest=REST * MIB,
                reach=self.reach,
            )
            seconds = sum(SLOWS[mode] for mode in modes) * tokens / 1000
            cost = StepCost(step=self.step, seconds=seconds, tokens=tokens, largest_tokens=tokens)
            told += [action.message for action in self.governor.after_step(reading, cost)]
        self.messages += told
        return told


def test_it_climbs_one_block_at_a_step_and_stops_below_the_high_watermark():
    machine = Machine(650)  # 600 of 650 is 92 %; the watermark is at 520
    machine.run(10)
    assert machine.applied == [("recompute", "keep", "keep", "keep")]  # 520 is not above it
    machine.more = 1.5
    machine.run(10)
    assert [modes.count("recompute") for modes in machine.applied] == [1, 2, 3]


def test_every_move_is_told_with_what_it_freed_and_what_it_cost():
    machine = Machine(650)
    told = machine.run(3)
    assert told == [
        "Memory was at 92% of 650 MiB at step 1: block 1 now recomputes its activations. That freed 80 MiB; a step as "
        "long as the last took 4 s before and 4.3 s after."
    ]


def test_a_move_nobody_could_measure_is_told_at_the_end():
    machine = Machine(650)
    machine.run(1)
    told = machine.governor.end(1)
    assert len(told) == 1 and "ended before it was measured" in told[0].message
    assert machine.governor.end(1) == []


def test_it_goes_along_all_notches_and_says_when_there_is_no_further_one():
    machine = Machine(220, allowed=("keep", "compress", "recompute", "offload"))
    machine.run(30)
    assert machine.governor.modes == ["offload"] * 4
    assert machine.applied[3] == ("compress",) * 4 and machine.applied[7] == ("recompute",) * 4
    assert sum("no block can hold less" in message for message in machine.messages) == 1


def test_without_permission_nothing_is_compressed():
    machine = Machine(220)
    machine.run(30)
    assert machine.governor.modes == ["recompute"] * 4
    assert all("compress" not in modes for modes in machine.applied)


def test_below_the_low_watermark_it_comes_back_block_by_block_but_not_in_haste():
    machine = Machine(650)
    machine.more = 2.0
    machine.run(10)
    assert machine.governor.modes.count("recompute") == 3  # 200 + 2 * (3 * 20 + 100) is 520
    machine.more = 0.5
    machine.run(7)
    assert machine.governor.modes.count("recompute") == 3
    machine.run(40)
    assert machine.governor.modes == ["keep"] * 4
    assert [modes.count("recompute") for modes in machine.applied[-3:]] == [2, 1, 0]
    assert any("That took 40 MiB" in message for message in machine.messages)


def test_it_does_not_go_back_where_that_would_bring_it_above_again():
    """What a block frees was measured on the way up: no trial is needed to know."""
    machine = Machine(650, low=0.79)
    machine.run(300)
    assert len(machine.applied) == 1


def test_a_notch_that_had_to_be_taken_again_waits_longer():
    """The need comes and goes with what else the card does; each time around, going back takes twice as long."""
    machine = Machine(650)
    waited = []
    for _ in range(4):
        machine.more = 1.4  # 760 MiB
        machine.run(12)
        assert "recompute" in machine.governor.modes
        machine.more, begun = 0.5, machine.step
        while "recompute" in machine.governor.modes[-2:] or machine.governor.modes.count("recompute") > 2:
            machine.run(1)
        waited.append(machine.step - begun)
    assert waited[0] < waited[1] < waited[2] < waited[3]


def test_it_never_oscillates_quickly():
    noise = random.Random(3)
    machine = Machine(650)
    for _ in range(2000):
        machine.more = 1 + noise.random()
        machine.run(1)
    assert len(machine.applied) < 60
    assert max(machine.governor._patience.values(), default=0) <= MOST_CALM_STEPS


def test_short_batches_are_no_reason_to_go_back():
    """A run of short sequences says little of what the longest will need."""
    machine = Machine(650, most_tokens=1000)
    machine.run(5)
    applied = len(machine.applied)
    machine.run(60, tokens=100)
    assert len(machine.applied) == applied


def test_a_plan_that_was_expected_to_fill_the_card_is_trusted():
    machine = Machine(650, expected_bytes=610 * MIB)
    machine.run(20)
    assert machine.applied == []
    machine.more = 1.05  # 620 MiB
    machine.run(20)
    assert len(machine.applied) == 1
    full = Machine(605, expected_bytes=640 * MIB)  # 97 % of 605 is 587
    full.run(1)
    assert len(full.applied) == 1


def test_what_other_programs_take_counts():
    machine = Machine(10_000)
    machine.run(5)
    assert machine.applied == []
    machine.reach = 650 * MIB
    machine.run(5)
    assert len(machine.applied) == 1


def test_what_a_person_chose_is_not_undone():
    machine = Machine(10_000, least=("recompute",) * 4)
    machine.governor.modes = ["recompute"] * 4
    machine.run(200)
    assert machine.applied == []
    free = Machine(10_000)
    free.governor.modes = ["recompute"] * 4
    free.run(200)
    assert free.governor.modes == ["keep"] * 4


def test_gaps_are_closed_when_they_are_large_and_memory_is_short_and_more_rarely_where_that_helps_little():
    machine = Machine(650, blocks=3)  # 500 used
    machine.reserved = 590 * MIB
    machine.run(1)
    assert machine.emptied == 0  # 90 MiB are less than 15 % of 650
    machine.reserved = 640 * MIB
    told = machine.run(1)
    assert machine.emptied == 1 and "640 MiB for 500 MiB of tensors: 140 MiB in gaps" in told[0]
    machine.run(100)
    assert machine.emptied == 4  # again after 8, 16 and 32 steps and so on
    roomy = Machine(10_000, blocks=3)
    roomy.reserved = 5_000 * MIB
    roomy.run(5)
    assert roomy.emptied == 0


def test_relief_inside_a_step_takes_all_blocks_and_is_kept_for_the_run():
    machine = Machine(10_000)
    assert "4 blocks" in machine.governor.relieve()
    assert machine.governor.modes == ["recompute"] * 4
    machine.run(300)
    assert machine.governor.modes == ["recompute"] * 4
    assert machine.governor.relieve() == ""


def test_what_relieved_a_run_is_where_the_next_one_begins_and_stays():
    earlier, machine, third = Machine(10_000), Machine(10_000), Machine(10_000)
    assert earlier.governor.relieved_to == ""
    earlier.governor.relieve()
    assert earlier.governor.relieved_to == "recompute"
    assert machine.governor.begin_at("recompute") == "4 blocks, each of which recomputes its activations"
    machine.run(300)
    assert machine.governor.modes == ["recompute"] * 4 and machine.governor.relieved_to == "recompute"
    assert machine.governor.begin_at("recompute") == "" and len(machine.applied) == 1
    assert third.governor.begin_at("offload") == third.governor.begin_at("no such") == ""  # not of this machine's
    assert third.governor.modes == ["keep"] * 4 and third.governor.relieved_to == ""


def test_a_model_without_blocks_has_nothing_to_move():
    machine = Machine(100, blocks=0)
    told = machine.run(5)
    assert len(told) == 1 and machine.applied == [] and machine.governor.relieve() == ""


def test_its_state_is_plain_and_a_resumed_one_decides_the_same():
    def course(machine: Machine, steps: int) -> None:
        for _ in range(steps):
            machine.more = 1.6 if machine.step % 40 < 12 else 0.5
            machine.run(1)

    whole, half = Machine(650), Machine(650)
    course(whole, 120)
    course(half, 61)
    state = json.loads(json.dumps(half.governor.state()))
    resumed = Machine(650)
    resumed.governor.load_state(state, modes=state["modes"])
    resumed.step = 61
    course(resumed, 59)
    assert resumed.governor.state() == whole.governor.state()
    assert [*half.applied, *resumed.applied] == whole.applied
    other = Machine(650, blocks=7)
    other.governor.load_state(state, modes=["keep"] * 7)
    assert other.governor.modes == ["keep"] * 7


@pytest.mark.parametrize(
    ("device", "compress", "allowed"),
    [
        ("cpu", False, ("keep", "recompute")),
        ("cpu", True, ("keep", "compress", "recompute")),
        ("cuda:0", False, ("keep", "recompute", "offload")),
        ("mps", True, ("keep", "compress", "recompute")),
    ],
)
def test_ram_is_a_notch_only_beside_a_card_and_8_bits_only_where_wished(device, compress, allowed):
    governor = build_governor(["keep"], device=torch.device(device), apply=print, budget_bytes=1, may_compress=compress)
    assert governor.allowed == allowed


# ---- with a real model, on a card made of RAM ----


def governed(tiny, *, budget: int, dropout: float = 0.2, **plan):
    model = tiny.build("llama", num_hidden_layers=4, attention_dropout=dropout)
    plan = tiny.plan(**plan)
    executor = ResidentExecutor(model, plan=plan, optimizer=build_optimizer(model, ScheduleChoice(), plan))
    governor = build_governor(["keep"] * 4, device=executor.device, apply=executor.set_activations, budget_bytes=budget)
    executor.govern(governor)
    return executor


def stepped(tiny, executor, card, *, seed: int):
    batch = tiny.pad(tiny.sequences(30, 28, 30, 25, seed=seed))
    card.forget_peak()
    with card:
        result = executor.step([batch], 1e-2)
    reading = Reading(allocated=card.forget_peak(), reserved=0, at_rest=card.allocated, reach=0)
    cost = StepCost(step=seed, seconds=1.0, tokens=result.padded_tokens, largest_tokens=result.largest_tokens)
    actions = executor.governor.after_step(reading, cost)
    return result, reading, [action.message for action in actions]


def test_a_real_run_climbs_below_the_watermark_and_comes_back_with_the_losses_of_a_run_let_alone(tiny):
    free = governed(tiny, budget=2**40)
    torch.manual_seed(5)
    card = PseudoCard(free.model)
    wanted = [stepped(tiny, free, card, seed=step) for step in range(1, 28)]
    assert free.governor.modes == ["keep"] * 4
    usual = wanted[5][1].allocated

    executor = governed(tiny, budget=int(usual / 0.9))
    torch.manual_seed(5)
    card = PseudoCard(executor.model)
    found = [stepped(tiny, executor, card, seed=step) for step in range(1, 16)]
    climbed = executor.governor.modes.count("recompute")
    assert 1 <= climbed < 4 and found[-1][1].allocated <= 0.8 * executor.governor.budget_bytes
    told = [message for _, _, messages in found for message in messages]
    assert len(told) == climbed and all("freed" in message and "KiB" in message for message in told)
    executor.governor.budget_bytes = 2**40
    found += [stepped(tiny, executor, card, seed=step) for step in range(16, 28)]
    assert executor.governor.modes.count("recompute") < climbed
    assert [result.loss for result, _, _ in found] == [result.loss for result, _, _ in wanted]  # dropout is on


def test_a_sequence_that_fits_only_recomputed_is_trained_recomputed(tiny):
    """Memory runs out with one sequence at a time; what is left to do is to hold less of it."""
    batch = tiny.pad(tiny.sequences(60, 58))
    plain = governed(tiny, budget=2**40)
    plain.recovery.most_rows = 1
    plain.step([batch], 1e-2)  # the optimizer's states are there from now on
    state = {name: tensor.clone() for name, tensor in plain.state()[0].items()}
    lean = governed(tiny, budget=2**40, recompute=4)
    lean.recovery.most_rows = 1
    lean.load_state(state, {"most_rows": 1})
    with PseudoCard(lean.model) as most:
        wanted = lean.step([batch], 1e-2)

    executor = governed(tiny, budget=2**40)
    executor.load_state(state, {"most_rows": 2})
    with PseudoCard(executor.model, budget_bytes=most.peak_bytes + 4096) as card:
        result = executor.step([batch], 1e-2)
    assert card.raised == 2 and executor.recovery.most_rows == 1
    assert "4 blocks went on to another way: each recomputes its activations" in result.recovered
    assert (result.loss, result.grad_norm) == (wanted.loss, wanted.grad_norm)
    for name, tensor in lean.state()[0].items():
        assert torch.equal(tensor, executor.state()[0][name])


def test_its_decisions_are_in_the_checkpoint(tiny):
    executor = governed(tiny, budget=100_000)
    card = PseudoCard(executor.model)
    for step in (1, 2, 3):
        stepped(tiny, executor, card, seed=step)
    tensors, values = executor.state()
    other = governed(tiny, budget=100_000)
    other.load_state({name: tensor.clone() for name, tensor in tensors.items()}, json.loads(json.dumps(values)))
    assert other.governor.state() == executor.governor.state()
    assert list(other.activations) == list(executor.activations) == executor.governor.modes != ["keep"] * 4


def test_without_a_card_a_changed_plan_is_measured_anew(tiny):
    """The peak of torch's own CPU allocator is followed again after a move, and falls."""
    executor = governed(tiny, budget=2**40)
    batch = tiny.pad(tiny.sequences(60, 60, 60, 60))
    for _ in range(3):
        executor.step([batch], 1e-2)
    before = executor.reading()
    executor.set_activations(["recompute"] * 4)
    executor.step([batch], 1e-2)
    after = executor.reading()
    assert before.at_rest == after.at_rest > 0 and after.allocated < before.allocated - 50_000
    assert after.reach > after.at_rest
