"""The estimate says the planner's numbers, and what does not agree when nothing fits."""

from __future__ import annotations

import dataclasses
import html
import re

import pytest

from ui.estimate import error_card, forecast_card, notice_card, peak_parts, problems_card, segments
from ui.texts import texts_of
from vramfit.config import RunConfig
from vramfit.errors import HardwareError, ModelError, Problem, WontFit
from vramfit.hardware.catalogue import get as card_named
from vramfit.hardware.catalogue import machine_with
from vramfit.models import catalogue
from vramfit.planning.plan import Choice, Forecast, MemoryEstimate, PhaseMemory, Plan, SpeedEstimate, Workload
from vramfit.planning.planner import forecast_run
from vramfit.planning.reasons import ASSUMED
from vramfit.sentences import say
from vramfit.units import GIB, format_bytes

EN = texts_of("en")


def _forecast(*, budget_gib: float = 22.0, device: str = "cuda:0") -> Forecast:
    parts = {"weights": 4 * GIB, "gradients": GIB, "optimizer": 2 * GIB, "kept": 3 * GIB, "logits": GIB // 2}
    peak = PhaseMemory(name="backward", parts=parts)
    return Forecast(
        plan=Plan(
            method="lora",
            device=device,
            budget_bytes=int(budget_gib * GIB),
            compute="bf16",
            weight_format="bf16",
            max_length=512,
            micro_batch=2,
            accumulation=4,
            recompute=0,
            loss="fused",
            reasons=(Choice(setting="memory.loss", value="fused", reason="It keeps <b>no</b> logits.", fixed=True),),
        ),
        memory=MemoryEstimate(
            phases=(PhaseMemory(name="load", parts={"weights": 4 * GIB}), peak),
            device_bytes=11 * GIB,
            low_bytes=9 * GIB,
            high_bytes=12 * GIB,
            host_bytes=3 * GIB,
            disk_bytes=GIB,
        ),
        speed=SpeedEstimate(step_seconds=1, tokens_per_s=5200, bounds={}, flops_per_step=1, rate_source="catalogue"),
        workload=Workload(sequences=10, mean_tokens=100, longest_tokens=200),
        steps=1234,
        seconds=3700,
    )


def test_the_parts_sum_to_the_figure() -> None:
    parts = peak_parts(_forecast().memory)
    assert parts["overhead"] == GIB // 2
    assert sum(parts.values()) == 11 * GIB


def test_segments_lie_end_to_end_in_stacking_order() -> None:
    laid = segments({"kept": 3, "weights": 5}, scale_bytes=16)
    shown = [(part.kind, part.left, part.width) for part in laid if part.size]
    assert shown == [("weights", 0.0, 5 / 16), ("kept", 5 / 16, 3 / 16)]


def test_the_card_shows_every_number_with_its_unit() -> None:
    page = forecast_card(_forecast(), EN, device_name="RTX 4090")
    for text in ("11.0 GiB of 22.0 GiB budget", "Fits", "RTX 4090", "1 h 01 min", "5.2 K tokens/s", "1,234", "3.0 GiB"):
        assert text in page
    assert "Peak: backward" in page
    assert "width:18.182%" in page  # 4 GiB of weights in a bar 22 GiB wide
    assert re.search(r"Loss</th><td><b>fused</b> <em[^>]*>you</em>", page)


def test_the_speed_is_split_by_what_takes_it_with_energy_and_money() -> None:
    """3,700 s on one 4090 at its limit: 450 W x 0.85 and 150 W of the rest are 0.547 kWh, at 17 cents 9 cents."""
    speed = SpeedEstimate(
        step_seconds=4.0,
        tokens_per_s=5200,
        bounds={"compute": 3.0, "memory": 1.0, "launch": 0.0},
        flops_per_step=1,
        rate_source="catalogue",
        mfu=0.43,
        watts=450.0,
    )
    page = forecast_card(dataclasses.replace(_forecast(), speed=speed, card="RTX 4090"), EN, device_name="RTX 4090")
    assert "vf-bound-compute" in page and "width:75.000%" in page and "left:75.000%" in page
    assert "vf-bound-launch" not in page
    for text in (
        "A step takes 4.00 s",
        "<b>43%</b>",
        "<b>0.25</b>",
        "0.547 kWh",
        "$0.09 at $0.17 a kWh",
        "an hour a card",
    ):
        assert text in page
    without = forecast_card(dataclasses.replace(_forecast(), speed=speed, card="CPU"), EN, device_name="CPU")
    assert "kWh" not in without and "<b>43%</b>" in without


def test_what_is_written_to_disk_is_one_line() -> None:
    memory = dataclasses.replace(_forecast().memory, written_per_step_bytes=GIB, written_per_checkpoint_bytes=10 * GIB)
    found = dataclasses.replace(_forecast(), memory=memory, steps=100, checkpoints=5)
    line = "Written to disk: 1.0 GiB a step, 10.0 GiB a checkpoint (5), 150.0 GiB in all."
    assert line in forecast_card(found, EN, device_name="RTX 4090")


def test_saving_is_among_the_phases_with_its_copy_where_ram_is_the_device() -> None:
    phases = (PhaseMemory(name="save", parts={"weights": 4 * GIB}), *_forecast().memory.phases)
    memory = dataclasses.replace(_forecast().memory, phases=phases, save_copy_bytes=3 * GIB, saves_aside=True)
    for device, size in (("cpu", "7.0 GiB"), ("cuda:0", "4.0 GiB")):
        page = forecast_card(dataclasses.replace(_forecast(device=device), memory=memory), EN, device_name="x")
        assert f"saving a checkpoint</th><td><b>{size}</b>" in page


def test_nothing_from_the_planner_can_become_markup() -> None:
    assert "<b>no</b>" not in forecast_card(_forecast(), EN, device_name="<script>")
    assert "<script>" not in forecast_card(_forecast(), EN, device_name="<script>")


def test_more_than_the_budget_does_not_fit_and_the_budget_is_marked_inside_the_bar() -> None:
    page = forecast_card(_forecast(budget_gib=5.5), EN, device_name="small card")
    assert 'data-state="wontfit"' in page
    assert "Does not fit" in page
    assert 'class="vf-budget" style="left:50.000%"' in page


def test_a_machine_without_a_card_speaks_of_ram() -> None:
    assert "no card: RAM" in forecast_card(_forecast(device="cpu"), EN, device_name="CPU")


def test_wontfit_shows_both_numbers_and_each_way_out() -> None:
    error = WontFit(
        "The optimizer step needs 27.4 GiB, this card has 23.1 GiB free",
        needed_bytes=int(27.4 * GIB),
        available_bytes=int(23.1 * GIB),
        suggestions=("Choose QLoRA.", "Set the sequence length to 512."),
        forecast=_forecast(budget_gib=5.0),
    )
    page = error_card(error, EN)
    assert f"{format_bytes(_forecast().memory.device_bytes)} needed, 5.0 GiB budget" in page
    assert 'data-state="wontfit"' in page
    assert "vf-part-optimizer" in page
    assert "<li>Choose QLoRA.</li><li>Set the sequence length to 512.</li>" in page
    assert "optimizer step" in page


def test_other_errors_are_two_sentences() -> None:
    page = error_card(ModelError("There is no model 'x'", "Check the name."), EN)
    assert "There is no model &#x27;x&#x27;.</p><p>Check the name.</p>" in page


def test_a_problem_names_its_field_for_the_page() -> None:
    page = problems_card([Problem(field="data.paths.0", what="a.txt is empty", remedy="Choose another")], EN)
    assert 'data-field="data.paths">a.txt is empty. Choose another</li>' in page


@pytest.mark.parametrize("remedy", ["", "Free some disk."])
def test_a_notice_says_what_and_what_to_do(remedy: str) -> None:
    page = notice_card(ModelError("The disk is full", remedy), EN)
    assert page.count("<p>") == 1 + bool(remedy)
    assert 'role="alert"' in page


def test_what_was_assumed_is_in_sight_and_in_the_page_s_language() -> None:
    found = _forecast()
    note = say("assumed.ram", ram="64.0 GiB", disk="500.0 GiB")
    choices = (*found.plan.reasons, Choice(setting=ASSUMED, value="machine", reason=note))
    told = dataclasses.replace(found, plan=dataclasses.replace(found.plan, reasons=choices))
    page = forecast_card(told, EN, device_name="RTX 4090")
    assert "vf-assumed" not in forecast_card(found, EN, device_name="RTX 4090")
    assert page.index("64.0 GiB of RAM and 500.0 GiB of free disk are assumed") < page.index("<details")
    assert page.count("64.0 GiB of RAM") == 1
    assert "假设有 64.0 GiB 内存" in forecast_card(told, texts_of("zh"), device_name="RTX 4090")


@pytest.mark.parametrize(("tier", "words"), [("disk", "needed of disk"), ("host", "needed of RAM")])
def test_what_fits_the_card_and_not_what_is_beside_it_does_not_fit(tier: str, words: str) -> None:
    error = WontFit(
        "Too large", needed_bytes=90 * GIB, available_bytes=60 * GIB, tier=tier, suggestions=(), forecast=_forecast()
    )

    shown = error_card(error, EN)

    assert 'data-state="wontfit"' in shown and "vf-badge-wontfit" in shown
    assert f"90.0 GiB {words}" in shown and "60.0 GiB" in shown


REFUSALS: dict[str, tuple[dict[str, object], str, dict[str, object]]] = {
    "device": ({"method": "full", "memory": {"micro_batch": 16}}, "RTX 3060", {}),
    "free another wish": ({"method": "lora", "memory": {"activations": "keep", "loss": "full"}}, "RTX 3060", {}),
    "ram": ({"method": "qlora"}, "RTX 3060", {"ram_bytes": 2 * GIB}),
    "disk": ({"method": "full", "output": {"keep_checkpoints": 3}}, "H100", {"disk_free_bytes": 9 * GIB}),
}


@pytest.mark.parametrize("kind", REFUSALS)
def test_a_refusal_is_said_in_chinese_with_the_same_numbers(kind: str) -> None:
    wish, card, lacks = REFUSALS[kind]
    machine = dataclasses.replace(machine_with(card, ram_gib=8), **lacks)  # type: ignore[arg-type]
    architecture = catalogue.find("Qwen/Qwen3-8B")
    assert architecture is not None
    with pytest.raises(WontFit) as raised:
        forecast_run(
            RunConfig.parse({"model": {"source": architecture.name}, "data": {"max_length": 8192}, **wish}),
            architecture=architecture,
            machine=machine,
            workload=Workload(sequences=100, mean_tokens=8192, longest_tokens=8192),
        )
    english, chinese = error_card(raised.value, EN), error_card(raised.value, texts_of("zh"))

    for sentence in (raised.value.what, *raised.value.suggestions):
        told = texts_of("zh").said(sentence)
        assert html.escape(EN.said(sentence)) in english and html.escape(told) in chinese
        assert re.search("[\u4e00-\u9fff]", told) and not re.search(r"\b(would|needs?|with|of|free|instead)\b", told)
        assert sorted(re.findall(r"[\d.]+ GiB", told)) == sorted(re.findall(r"[\d.]+ GiB", sentence))


def test_a_missing_device_is_said_in_the_readers_language() -> None:
    with pytest.raises(HardwareError) as raised:
        machine_with(card_named("RTX 4090")).device("cuda:3")
    shown = error_card(raised.value, texts_of("zh"))
    assert "本机没有设备“cuda:3”，只有：cuda:0" in shown and "no device" not in shown
    assert "请选择其中之一" in notice_card(raised.value, texts_of("zh"))
    assert "This machine has no device" in error_card(raised.value, EN)
