"""python -m vramfit estimate: VRAM, RAM, disk, time and tokens/s of a run, before it starts."""

from __future__ import annotations

import argparse
import dataclasses
import json
from collections.abc import Iterator
from typing import Any, Final

from vramfit.commands import wish
from vramfit.errors import ConfigError, Problem, WontFit
from vramfit.planning.abilities import missing
from vramfit.planning.cost import cost_of_run
from vramfit.planning.other_programs import Run, elsewhere
from vramfit.planning.plan import Forecast, Plan, SpeedEstimate
from vramfit.planning.program import OURS, PROGRAMS
from vramfit.planning.reasons import ASSUMED
from vramfit.planning.start import sequences_of_step
from vramfit.units import format_bytes, format_count, format_duration, format_usd

SHARDINGS: Final = ("ddp", "zero1", "zero2", "zero3", "fsdp")
_COSTS: Final = ("hours", "kwh", "electricity_usd", "wear_usd", "rented_usd")
RECOMPUTES: Final = ("none", "selective", "all")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    wish.add_arguments(parser)
    parser.add_argument(
        "--program", metavar="NAME", help="the same run in another trainer, such as transformers, unsloth or litgpt"
    )
    parser.add_argument(
        "--sharding",
        choices=SHARDINGS,
        help="with --program and --cards: how that program shares the run among all cards",
    )
    parser.add_argument(
        "--recompute", choices=RECOMPUTES, help="with --program: what backward computes again, instead of the best"
    )


def run(options: argparse.Namespace) -> None:
    """Print the estimate as text or JSON. Raises UserError; WontFit after printing what the least plan would need."""
    if options.program or options.sharding or options.recompute:
        _show_elsewhere(options)
        return
    try:
        forecast = wish.forecast_from(options)
    except WontFit as error:
        if options.json:
            print_json({**(values_of(error.forecast) if error.forecast else {}), **refusal(error)})
        elif error.forecast is not None:
            print(describe(error.forecast))
        raise
    if options.json:
        print_json(values_of(forecast))
    else:
        print(describe(forecast))


def _show_elsewhere(options: argparse.Namespace) -> None:
    """The same run in another program, whether it fits or not. Raises UserError."""
    forecast = elsewhere_from(options)
    needs = missing(forecast.plan) if options.program == OURS.name else ()
    if options.json:
        print_json({**values_of(forecast), "program": options.program, "needs": needs})
        return
    print(f"Program         {options.program}, {_way(forecast.plan)}")
    if needs:
        print(f"Needs           {', '.join(needs)}: not in this version")
    print(describe(forecast))


def elsewhere_from(options: argparse.Namespace) -> Forecast:
    """What another program would make of our plan; where we have none that fits, of the least. Raises UserError."""
    _check_program(options)
    asked = wish.asked_from(options)
    try:
        forecast = asked.forecast()
    except WontFit as error:
        if error.forecast is None:
            raise
        forecast = error.forecast
    plan, memory = forecast.plan, asked.config.memory
    if options.sharding:
        plan = dataclasses.replace(plan, cards=options.cards, sharding=options.sharding)
    if options.recompute:
        count = 0 if options.recompute == "none" else plan.trained_layers(asked.architecture.layers)
        plan = dataclasses.replace(plan, recompute=count, selective=options.recompute == "selective")
    found = elsewhere(
        options.program,
        plan,
        Run(
            architecture=asked.architecture,
            device=asked.machine.device(asked.config.device),
            workload=asked.workload,
            sequences=sequences_of_step(asked.config, asked.workload),
            ram_bytes=asked.machine.ram_bytes,
        ),
        keeps_micro_batch=memory.micro_batch != "auto",
        keeps_recompute=bool(options.recompute) or memory.activations != "auto",
    )
    told = tuple(choice for choice in plan.reasons if choice.setting == ASSUMED)
    return dataclasses.replace(
        forecast,
        plan=dataclasses.replace(found.plan, reasons=told),
        memory=found.memory,
        speed=found.speed,
        seconds=forecast.steps * found.speed.step_seconds,
        alternatives=(),
    )


def _check_program(options: argparse.Namespace) -> None:
    """Raises ConfigError for a name without a record, and for flags that go with another."""
    what, remedy = "", ""
    if not options.program:
        flag = "--sharding" if options.sharding else "--recompute"
        what, remedy = f"{flag} is for another program", f"Name it with --program, one of: {', '.join(PROGRAMS)}."
    elif options.program not in PROGRAMS:
        what = f"--program {options.program[:60]} is none of the {len(PROGRAMS)} programs with a record"
        remedy = f"Choose from: {', '.join(PROGRAMS)}."
    elif options.sharding and options.cards < 2:
        what, remedy = (
            f"--sharding {options.sharding} shares a run among {options.cards} card",
            "Give --cards 2 or more.",
        )
    if what:
        raise ConfigError([Problem(field="", what=what, remedy=remedy)])


def _way(plan: Plan) -> str:
    """Micro-batches and what is recomputed, and how cards share the run."""
    again = "selective recompute" if plan.selective and plan.recompute else "recompute"
    parts = [f"micro-batch {plan.micro_batch} x {plan.accumulation}", again if plan.recompute else "no recompute"]
    parts += [f"{plan.cards} cards ({plan.sharding.upper()})"] if plan.cards > 1 else []
    return ", ".join([*parts, f"{plan.loss} loss"])


def values_of(forecast: Forecast) -> dict[str, Any]:
    """The forecast as plain values, with what its run costs where prices are known."""
    costs = cost_of_run(forecast)
    known = None if costs is None else {key: getattr(costs, key) for key in _COSTS}
    return {**forecast.to_json(), "cost": known}


def print_json(values: dict[str, Any]) -> None:
    print(json.dumps(values, ensure_ascii=False, indent=1))


def refusal(error: WontFit) -> dict[str, Any]:
    """What `--json` says where nothing fits: the numbers that do not agree, and what would help."""
    return {
        "fits": False,
        "message": str(error),
        "needed_bytes": error.needed_bytes,
        "available_bytes": error.available_bytes,
        "tier": error.tier,
        "phase": str(error.phase),
        "suggestions": [str(suggestion) for suggestion in error.suggestions],
    }


def describe(forecast: Forecast) -> str:
    """The estimate in a few lines of text."""
    memory, speed, plan = forecast.memory, forecast.speed, forecast.plan
    workload, where = forecast.workload, "RAM" if plan.device == "cpu" else "Device memory"
    on = f" on {forecast.card}" if forecast.card else ""
    lines = [
        f"Run             {forecast.model}, {plan.method}{on}",
        f"Data            {workload.sequences:,} sequences of {workload.mean_tokens:,.0f} tokens on average, "
        f"the longest {workload.longest_tokens:,}{'' if workload.exact else ' (estimated)'}",
        f"{where:<16}{format_bytes(memory.device_bytes)} of {format_bytes(plan.budget_bytes)} "
        f"({'fits' if forecast.fits else 'does not fit'})",
        f"  peak          {format_bytes(memory.peak_bytes)} allocated, in the phase {memory.peak.name} "
        f"({format_bytes(memory.low_bytes)} to {format_bytes(memory.high_bytes)})",
    ]
    lines += [f"    {kind:<12}{format_bytes(size)}" for kind, size in memory.peak.parts.items() if size]
    lines += [
        *([] if plan.device == "cpu" else [f"Host RAM        {format_bytes(memory.host_bytes)}"]),
        f"Disk            {format_bytes(memory.disk_bytes)}",
        f"Written         {format_bytes(memory.written_per_step_bytes)} a step, "
        f"{format_bytes(memory.written_per_checkpoint_bytes)} a checkpoint ({forecast.checkpoints}), "
        f"{format_bytes(forecast.written_bytes)} in all",
        f"Speed           {format_count(speed.tokens_per_s)} tokens/s, {speed.step_seconds:.2f} s a step, "
        f"{speed.steps_per_s:.3g} steps/s, MFU {speed.mfu:.0%} (rates: {speed.rate_source})",
        *_bounds(speed),
        f"Time            {format_duration(forecast.seconds)} for {forecast.steps} steps",
        *_energy(forecast),
    ]
    lines += [f"Assumed         {choice.reason.rstrip('.')}" for choice in plan.reasons if choice.setting == ASSUMED]
    return "\n".join(lines)


def _bounds(speed: SpeedEstimate) -> Iterator[str]:
    """Seconds of a step by what takes them."""
    for name, seconds in speed.bounds.items():
        if seconds >= 0.0005 * speed.step_seconds:
            yield f"  {name:<14}{seconds:.3g} s ({seconds / speed.step_seconds:.1%})"


def _energy(forecast: Forecast) -> Iterator[str]:
    """Energy and money, where the card's watts and prices are known."""
    costs = cost_of_run(forecast)
    if costs is None:
        return
    setup = costs.setup
    rented = (
        ""
        if costs.rented_usd is None
        else f"; rented {format_usd(costs.rented_usd)} at ${setup.rent_usd:g} an hour a card"
    )
    yield (
        f"Energy          {costs.kwh:.3g} kWh, the machine's rest included: {format_usd(costs.electricity_usd)} at "
        f"${setup.electricity_usd:g} a kWh{rented}"
    )
