"""What a run writes to a drive, against what the drive is rated for: arithmetic and the one warning it gives."""

from __future__ import annotations

from typing import Final

from vramfit.planning.reasons import DRIVE_RATED_BYTES
from vramfit.units import format_bytes, format_percent, format_terabytes

WARNED_SHARE: Final = 0.05
"""Of what a drive is rated for: twenty such runs, and makers vouch for nothing more."""


def share_of_drive(written_bytes: float) -> float:
    """Written bytes as a share of what a consumer drive of 4 TB is rated for, 1.0 for all of it."""
    return written_bytes / DRIVE_RATED_BYTES


def wear_warning(written_per_step_bytes: int, *, steps: int) -> str | None:
    """What to tell before a run of `steps` steps; None where it writes no more than WARNED_SHARE of a drive's life."""
    written = written_per_step_bytes * steps
    if share_of_drive(written) <= WARNED_SHARE:
        return None
    return (
        f"The run will write {format_terabytes(written)} to disk, {format_bytes(written_per_step_bytes)} in each of "
        f"{steps:,} steps: that is {format_percent(share_of_drive(written))} of the "
        f"{format_terabytes(DRIVE_RATED_BYTES)} that a 4 TB consumer drive is rated for. Fewer steps, more RAM, or an "
        "adapter method (LoRA, QLoRA), which only reads, would spare the drive."
    )
