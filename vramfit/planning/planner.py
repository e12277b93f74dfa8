"""The one planner: the fastest plan that fits a wish and a machine, with a reason for each decision; or WontFit.

Pure: no torch, no clock, no network. The panel's preview, the command line and the training process all call it.
Decisions that stand alone are in `start.py`, the search in `search.py`, its words in `reasons.py` and `remedies.py`.
"""

from __future__ import annotations

import dataclasses

from vramfit.config import RunConfig
from vramfit.errors import DataError
from vramfit.hardware.devices import Machine
from vramfit.models.architecture import Architecture
from vramfit.planning.abilities import ENGINE, Abilities
from vramfit.planning.plan import Forecast, Workload
from vramfit.planning.reasons import alternatives, assumptions, reasons
from vramfit.planning.remedies import check_host_and_disk, wont_fit
from vramfit.planning.search import Candidate, Search, quickest
from vramfit.planning.start import checkpoints_written, total_steps


def forecast_run(
    config: RunConfig,
    *,
    architecture: Architecture,
    machine: Machine,
    workload: Workload,
    abilities: Abilities = ENGINE,
) -> Forecast:
    """The fastest plan that fits, what it needs and how long it takes.

    Raises ConfigError (a wish this device or model cannot honour), HardwareError (no such device), DataError (0
    sequences or tokens, or none that carries loss), WontFit (with the number that breaks, in device memory, RAM or
    disk, and changes that would help, each checked).
    """
    if workload.sequences < 1 or workload.longest_tokens < 1 or not workload.mean_tokens > 0:
        what = f"{max(0, workload.sequences)} sequences" if workload.sequences < 1 else "0 tokens"
        raise DataError(f"There are {what} to train on", "Give data with at least one row that can be used.")
    if not 0 < workload.trained_share <= 1:
        raise DataError(
            f"{max(0.0, workload.trained_share):.0%} of the tokens carry loss, so there is nothing to learn",
            "Give data with answers, or train on everything (data.trained_on).",
        )
    search = Search.of(config, architecture, machine, workload, abilities=abilities)
    found = search.best()
    if found is None:
        beside = quickest([one for one in search.bests if one.fits_device and one.fits_ram])  # all but the disk
        if beside is not None:
            check_host_and_disk(search, _forecast(search, beside))
        least = search.least()
        told = dataclasses.replace(least.plan, reasons=tuple(assumptions(search)))  # the other reasons say that it fits
        forecast = dataclasses.replace(_forecast(search, least), plan=told)
        if least.fits_device:
            check_host_and_disk(search, forecast)
        raise wont_fit(search, forecast)
    forecast = _forecast(search, found)
    check_host_and_disk(search, forecast)
    return forecast


def _forecast(search: Search, found: Candidate) -> Forecast:
    """What is known of a candidate, with the reasons for its decisions."""
    found = _with_copy(search, found)
    steps = total_steps(search.config, search.workload)
    return Forecast(
        plan=dataclasses.replace(found.plan, reasons=tuple(reasons(search, found))),
        memory=found.memory,
        speed=found.speed,
        workload=search.workload,
        steps=steps,
        seconds=steps * found.speed.step_seconds,
        alternatives=tuple(alternatives(search, found)),
        checkpoints=checkpoints_written(search.config, steps),
        model=search.architecture.name,
        card=search.device.name,
    )


def _with_copy(search: Search, found: Candidate) -> Candidate:
    """Where RAM has room for a copy of what trains, checkpoints are written from that: steps need not wait."""
    memory, on_cpu = found.memory, found.plan.device == "cpu"
    room = found.plan.budget_bytes - memory.device_bytes if on_cpu else found.ram_bytes - memory.host_bytes
    if not 0 < memory.save_copy_bytes <= room:
        return found
    host = memory.host_bytes + memory.save_copy_bytes
    return dataclasses.replace(found, memory=dataclasses.replace(memory, host_bytes=host, saves_aside=True))
