"""Lists the NVIDIA cards that CUDA shows, as JSON on the last line: python -m vramfit.hardware.nvidia_cards.

A process of its own, so that a driver that hangs, or ends whoever asks it, takes neither panel nor queue with it.
"""

from __future__ import annotations

import dataclasses
import json
import os

from vramfit.hardware.devices import import_nvml, nvidia_cards

if __name__ == "__main__":
    notes: list[str] = []
    cards = nvidia_cards(import_nvml(), os.environ, notes)
    print(json.dumps({"cards": [dataclasses.asdict(card) for card in cards], "notes": notes}))
