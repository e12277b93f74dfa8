"""Three steps, saved through the files' formats, loaded into a new executor, three more: six steps, bit for bit."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load, save

from vramfit.config import ScheduleChoice
from vramfit.engine import bitsandbytes_states
from vramfit.engine.optimizers import build_optimizer
from vramfit.engine.resident import ResidentExecutor
from vramfit.errors import CheckpointError

BF16 = {"compute": "bf16", "trained_format": "bf16", "weight_format": "bf16"}
PLANS = [
    {},
    {"optimizer_bits": 8},
    {"optimizer_bits": 4},
    {"optimizer": "adafactor"},
    {"optimizer": "lion"},
    {"optimizer": "lion", "optimizer_bits": 8},
    {"optimizer": "muon"},
    {"optimizer": "sgd"},
    BF16,
    {"optimizer_bits": 8, **BF16},
    {"optimizer_bits": 4, **BF16},
    {"optimizer": "adafactor", **BF16},
    {"optimizer_tier": "host"},
    {"optimizer_tier": "host", "optimizer_bits": 8},
    {"optimizer_tier": "host", **BF16},
    {"optimizer_in_backward": True, "clip_passes": 2},
    {"optimizer_in_backward": True, "clip_passes": 1},
    {"optimizer_in_backward": True, "clip_passes": 1, "optimizer_bits": 8, **BF16},
]


def named(plan: dict[str, object]) -> str:
    return " ".join(f"{key.removeprefix('optimizer_')}={value}" for key, value in plan.items()) or "adamw"


def executor_for(tiny, plan: dict[str, object], optimizer=None) -> ResidentExecutor:
    """A model just large enough that its embedding (128 x 32) has low-bit states."""
    model = tiny.build("llama", intermediate_size=16, num_hidden_layers=1, attention_dropout=0.1)
    if plan.get("trained_format") == "bf16":
        model = model.bfloat16()
    made = tiny.plan(**plan)
    optimizer = optimizer(model) if optimizer else build_optimizer(model, ScheduleChoice(), made, seed=11)
    return ResidentExecutor(model, plan=made, optimizer=optimizer, max_grad_norm=0.5)


def train(executor, tiny, steps: range) -> ResidentExecutor:
    for step in steps:
        executor.step([tiny.pad(tiny.sequences(7, 4, seed=step))], 1e-2)
    return executor


def through_files(state):
    tensors, values = state
    return load(save({name: value.contiguous().cpu() for name, value in tensors.items()})), json.loads(
        json.dumps(values)
    )


def check_resume(tiny, plan, optimizer=None) -> None:
    torch.manual_seed(5)
    whole = train(executor_for(tiny, plan, optimizer), tiny, range(6))
    torch.manual_seed(5)
    kept = through_files(train(executor_for(tiny, plan, optimizer), tiny, range(3)).state())
    torch.manual_seed(99)
    resumed = executor_for(tiny, plan, optimizer)
    resumed.load_state(*kept)
    train(resumed, tiny, range(3, 6))
    (wanted, values), (found, own_values) = whole.state(), resumed.state()
    assert own_values == values and found.keys() == wanted.keys()
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)


@pytest.mark.parametrize("plan", PLANS, ids=named)
def test_a_resumed_run_is_the_same_bit_for_bit(tiny, plan):
    check_resume(tiny, plan)


@pytest.mark.parametrize(("kind", "bits"), [("adamw", 8), ("lion", 8)])
def test_so_is_one_with_bitsandbytes_states(tiny, kind, bits):
    pytest.importorskip("bitsandbytes")
    options = {"betas": (0.9, 0.99)}

    def build(model):
        groups = [{"params": list(model.parameters()), "weight_decay": 0.01}]
        return bitsandbytes_states.build(groups, kind=kind, bits=bits, paged=False, options=options)

    check_resume(tiny, {"optimizer": kind, "optimizer_bits": bits}, build)


def test_low_bit_states_are_saved_as_they_are(tiny):
    tensors, values = train(executor_for(tiny, {"optimizer_bits": 4}), tiny, range(1)).state()
    name = "optimizer.model.embed_tokens.weight"
    assert tensors[f"{name}.exp_avg_codes"].dtype == torch.uint8
    assert tensors[f"{name}.exp_avg_codes"].numel() == 128 * 32 // 2
    assert tensors[f"{name}.exp_avg_scales"].numel() == 128 * 32 // 128
    assert values["optimizer"]["kind"] == "adamw in 4 bits"


def test_states_of_another_optimizer_are_refused(tiny):
    state = train(executor_for(tiny, {"optimizer": "lion"}), tiny, range(1)).state()
    with pytest.raises(CheckpointError, match=r"lion in 32 bits.*adamw in 32 bits"):
        executor_for(tiny, {}).load_state(*state)


def test_states_may_move_between_the_device_and_ram(tiny):
    state = through_files(train(executor_for(tiny, {}), tiny, range(2)).state())
    here, there = executor_for(tiny, {}), executor_for(tiny, {"optimizer_tier": "host"})
    for executor in (here, there):
        executor.load_state(*state)
        train(executor, tiny, range(2, 4))
    wanted, found = here.state()[0], there.state()[0]
    assert found.keys() == wanted.keys() and all(torch.equal(found[name], wanted[name]) for name in wanted)


@pytest.mark.parametrize("optimizer", ["adamw", "lion"])
@pytest.mark.parametrize(("then", "now"), [(32, 8), (8, 32), (8, 4), (4, 8), (32, 4), (4, 32)])
def test_states_of_other_bits_are_converted(tiny, optimizer, then, now):
    """To what the new format can say of them: going to 32 bits nothing is lost, to fewer half a level at most."""
    if optimizer == "lion" and 4 in (then, now):
        pytest.skip("lion has no 4-bit states")
    batch = [tiny.pad(tiny.sequences(9, 12))]
    old = executor_for(tiny, {"optimizer": optimizer, "optimizer_bits": then})
    for _ in range(3):
        old.step(batch, 1e-3)
    tensors, values = old.state()
    new = executor_for(tiny, {"optimizer": optimizer, "optimizer_bits": now})
    new.load_state({name: each.clone() for name, each in tensors.items()}, json.loads(json.dumps(values)))

    for name, parameter in new.model.named_parameters():
        wanted, found = in_fp32(old, old.model.get_parameter(name), then), in_fp32(new, parameter, now)
        assert found.keys() == wanted.keys()
        for key, value in wanted.items():
            if now == 32:
                assert torch.equal(found[key], value)
            else:
                span = value.abs().max().item()
                assert (found[key] - value).abs().max() <= {8: 0.02, 4: 0.2}[now] * span
    losses = []
    for executor in (new, old):
        torch.manual_seed(4)  # dropout
        losses.append(executor.step(batch, 1e-3).loss)
    assert losses[0] == losses[1]


def in_fp32(executor, parameter, bits):
    from vramfit.engine.low_bit import LowBit

    state, found = executor.optimizer.state[parameter], {}
    for key, value in state.items():
        if key.endswith("_codes"):
            name = key.removesuffix("_codes")
            stored = LowBit.on(value.device, bits, signed=name != "exp_avg_sq")
            found[name] = stored.read(value, state[f"{name}_scales"], 0, parameter.numel()).view(parameter.shape)
        elif not key.endswith("_scales"):
            found[key] = value
    return found
