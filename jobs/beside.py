"""What is left of this machine's RAM beside the runs that are at work on its other devices."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import psutil

from jobs import processes
from jobs.job import Job
from vramfit.hardware.devices import Machine
from vramfit.units import format_bytes


def left_beside(machine: Machine, others: Sequence[Job]) -> tuple[Machine, list[str]]:
    """The machine with the RAM that the plans of `others` take left to them, and a sentence for each that takes some.

    Of what is free now, only what they do not have yet is taken off: the rest is no longer free.
    """
    told, planned, still = [], 0, 0
    for job in others:
        host = planned_ram(job)
        if host <= 0:
            continue
        more = max(0, host - _resident(job))
        planned, still = planned + host, still + more
        where = f" on {job.device}" if job.device else ""
        told.append(
            f"Run {job.id}{where} takes {format_bytes(host)} of RAM by its plan, {format_bytes(more)} of that still to "
            "come; that is left to it."
        )
    if not told:
        return machine, []
    devices = tuple(
        dataclasses.replace(
            device,
            memory_bytes=max(0, device.memory_bytes - planned),
            free_bytes=max(0, device.free_bytes - still),
        )
        if device.kind == "cpu"
        else device
        for device in machine.devices
    )
    beside = dataclasses.replace(
        machine,
        devices=devices,
        ram_bytes=max(0, machine.ram_bytes - planned),
        ram_free_bytes=max(0, machine.ram_free_bytes - still),
    )
    return beside, told


def planned_ram(job: Job) -> int:
    """RAM that a job's plan takes, bytes; 0 while it has none."""
    memory: dict[str, Any] = (job.forecast or {}).get("memory", {})
    return int(memory.get("host_bytes") or 0)


def _resident(job: Job) -> int:
    """What its process has now."""
    if job.owner is None or not processes.alive(job.owner):
        return 0
    try:
        return int(psutil.Process(processes.pid_of(job.owner)).memory_info().rss)
    except psutil.Error:
        return 0
