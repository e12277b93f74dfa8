"""What a step waited for: the link, the optimizer, the disk; and what it wrote there."""

from __future__ import annotations

from typing import NamedTuple


class Waits(NamedTuple):
    """Seconds in which nothing was computed, and bytes written to a tier on disk."""

    link_seconds: float = 0.0
    optimizer_seconds: float = 0.0
    disk_seconds: float = 0.0
    written_bytes: int = 0

    def since(self, before: Waits) -> Waits:
        return Waits(
            self.link_seconds - before.link_seconds,
            self.optimizer_seconds - before.optimizer_seconds,
            self.disk_seconds - before.disk_seconds,
            self.written_bytes - before.written_bytes,
        )
