"""Lists the cards torch sees, as JSON on the last line: python -m vramfit.hardware.torch_devices.

A process of its own, so that the panel never imports torch and a driver that hangs can be stopped.
"""

from __future__ import annotations

import json
from typing import Any


def rows() -> list[dict[str, Any]]:
    """Fields of `hardware.devices.Device`, for AMD (torch calls them cuda), Intel and Apple devices."""
    import torch

    found: list[dict[str, Any]] = []
    if torch.version.hip and torch.cuda.is_available():
        found += [
            _accelerator(torch.cuda, "rocm", f"cuda:{index}", index) for index in range(torch.cuda.device_count())
        ]
    if torch.xpu.is_available():
        found += [_accelerator(torch.xpu, "xpu", f"xpu:{index}", index) for index in range(torch.xpu.device_count())]
    if torch.backends.mps.is_available():
        found.append(_apple(torch))
    return found


def _accelerator(module: Any, kind: str, torch_device: str, index: int) -> dict[str, Any]:
    properties = module.get_device_properties(index)
    total = int(properties.total_memory)
    try:
        free = int(module.mem_get_info(index)[0])
    except (RuntimeError, AttributeError):
        free = total  # not every Intel driver tells; the reserve of the budget covers the desktop
    return {
        "kind": kind,
        "name": properties.name,
        "torch_device": torch_device,
        "identity": str(getattr(properties, "uuid", "") or torch_device),
        "memory_bytes": total,
        "free_bytes": free,
        "bf16": bool(module.is_bf16_supported()),
        "fp16": True,
    }


def _apple(torch: Any) -> dict[str, Any]:
    """Apple's GPU shares the RAM; Metal says how much of it one process should use."""
    recommended = int(torch.mps.recommended_max_memory())
    return {
        "kind": "mps",
        "name": "Apple GPU",
        "torch_device": "mps",
        "identity": "mps",
        "memory_bytes": recommended,
        "free_bytes": max(0, recommended - int(torch.mps.driver_allocated_memory())),
        "bf16": False,  # autocast on MPS is complete in fp16 and fp32 only
        "fp16": True,
    }


if __name__ == "__main__":
    print(json.dumps(rows()))
