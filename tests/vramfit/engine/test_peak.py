from __future__ import annotations

import time

import torch

from vramfit.engine.peak import PeakMeter


def watched(meter, tokens, allocate) -> int:
    with meter.watch(tokens):
        allocate()
    return meter.read()[0]


def test_it_counts_what_lies_there_and_the_highest_rise_inside_a_step():
    model = torch.nn.Linear(1000, 1000, bias=False)  # 4,000,000 bytes
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    meter = PeakMeter(model, optimizer, torch.device("cpu"))

    def step() -> None:
        torch.empty(3_000_000)  # freed at once, and larger than anything after
        model.weight.grad = torch.zeros(1000, 1000)
        optimizer.step()
        model.weight.grad = None

    first = watched(meter, 10, step)
    assert abs(first - (4_000_000 + 12_000_000)) < 10_000  # two moments and a gradient, 12 MB, equal the 12 MB before
    second = watched(meter, 10, step)
    assert abs(second - (12_000_000 + 12_000_000)) < 10_000


def test_later_steps_are_followed_only_when_they_are_larger():
    model = torch.nn.Linear(10, 10)
    meter = PeakMeter(model, torch.optim.SGD(model.parameters()), torch.device("cpu"))
    for _ in range(2):
        watched(meter, 10, lambda: torch.empty(1000))
    small = meter.read()[0]
    assert watched(meter, 10, lambda: torch.empty(1_000_000)) == small
    assert watched(meter, 11, lambda: torch.empty(1_000_000)) >= small + 3_990_000
    assert meter.read()[1] == 0


def test_an_unwatched_step_costs_nothing():
    model = torch.nn.Linear(10, 10)
    meter = PeakMeter(model, torch.optim.SGD(model.parameters()), torch.device("cpu"))
    for _ in range(2):
        watched(meter, 10, lambda: None)
    began = time.perf_counter()
    for _ in range(1000):
        watched(meter, 10, lambda: None)
    assert time.perf_counter() - began < 0.1


def test_it_says_nothing_on_the_terminal(capfd):
    model = torch.nn.Linear(10, 10)
    watched(PeakMeter(model, torch.optim.SGD(model.parameters()), torch.device("cpu")), 10, lambda: torch.empty(10))
    assert capfd.readouterr() == ("", "")
