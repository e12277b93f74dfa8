"""Writes vramfit/hardware/cards.json: graphics cards and their physical facts, from a table with sources.

    python bench/make_card_catalogue.py GPUS.csv

GPUS.csv is `gpus.csv` of the reference data. `DRIVER_NAMES` adds what each card's driver calls it.
"""

from __future__ import annotations

import csv
import json
import sys
from pathlib import Path

TARGET = Path(__file__).parent.parent / "vramfit" / "hardware" / "cards.json"
KINDS = {"NVIDIA": "cuda", "AMD": "rocm", "Intel": "xpu"}
DRIVER_NAMES = {
    "GeForce RTX 3060 12GB": ["NVIDIA GeForce RTX 3060", "3060"],
    "GeForce RTX 3090": ["NVIDIA GeForce RTX 3090", "3090"],
    "GeForce RTX 4060 Ti 16GB": ["NVIDIA GeForce RTX 4060 Ti", "4060 Ti"],
    "GeForce RTX 4070 Ti SUPER": ["NVIDIA GeForce RTX 4070 Ti SUPER", "4070 Ti SUPER"],
    "GeForce RTX 4080": ["NVIDIA GeForce RTX 4080", "4080"],
    "GeForce RTX 4090": ["NVIDIA GeForce RTX 4090", "4090"],
    "GeForce RTX 5080": ["NVIDIA GeForce RTX 5080", "5080"],
    "GeForce RTX 5090": ["NVIDIA GeForce RTX 5090", "5090"],
    "RTX A6000": ["NVIDIA RTX A6000", "A6000"],
    "RTX PRO 6000 Blackwell (Workstation)": ["NVIDIA RTX PRO 6000 Blackwell Workstation Edition", "RTX PRO 6000"],
    "Arc A770 16GB": ["Intel(R) Arc(TM) A770 Graphics", "A770"],
    "Arc B580": ["Intel(R) Arc(TM) B580 Graphics", "B580"],
    "Radeon RX 7900 XTX": ["AMD Radeon RX 7900 XTX", "7900 XTX"],
    "A100 PCIe 40GB": ["NVIDIA A100-PCIE-40GB", "NVIDIA A100-SXM4-40GB", "A100 40GB"],
    "A100 80GB (SXM4/PCIe)": [
        "NVIDIA A100-SXM4-80GB",
        "NVIDIA A100-SXM4-80G",
        "NVIDIA A100 80GB PCIe",
        "A100 80GB",
        "A100",
    ],
    "H100 SXM5 80GB": ["NVIDIA H100 80GB HBM3", "H100 SXM", "H100"],
    "H100 PCIe 80GB": ["NVIDIA H100 PCIe", "H100 PCIe"],
    "H200 SXM 141GB": ["NVIDIA H200", "H200 SXM", "H200"],
    "Instinct MI300X": ["AMD Instinct MI300X", "AMD Instinct MI300X OAM", "MI300X"],
}

UNITS_AND_PEERS = {
    # processors that share the tiles of a product (public specifications), and GB/s of one direction between two cards
    # where they are sold linked (NVLink, Infinity Fabric); a bridge one must buy does not count
    "GeForce RTX 3060 12GB": (28, 0),
    "GeForce RTX 3090": (82, 0),
    "GeForce RTX 4060 Ti 16GB": (34, 0),
    "GeForce RTX 4070 Ti SUPER": (66, 0),
    "GeForce RTX 4080": (76, 0),
    "GeForce RTX 4090": (128, 0),
    "GeForce RTX 5080": (84, 0),
    "GeForce RTX 5090": (170, 0),
    "RTX A6000": (84, 0),
    "RTX PRO 6000 Blackwell (Workstation)": (188, 0),
    "Arc A770 16GB": (32, 0),
    "Arc B580": (20, 0),
    "Radeon RX 7900 XTX": (96, 0),
    "A100 PCIe 40GB": (108, 0),
    "A100 80GB (SXM4/PCIe)": (108, 300),
    "H100 SXM5 80GB": (132, 450),
    "H100 PCIe 80GB": (114, 0),
    "H200 SXM 141GB": (132, 450),
    "Instinct MI300X": (304, 448),
}
REACH = {
    # What large products reach of the dense bf16 rate in a training. Best ones measured (github.com/mag-/gpu_benchmark:
    # A100 SXM 267.9 of 312, A100 PCIe 256.4, H100 SXM 792.1 of 989, H100 PCIe 499.5 of 756, MI300X 758.3 of 1307), less
    # USUAL: those are the best of thousands of shapes in bursts, training has the shapes it has and stays at the
    # power limit. RTX 4090: 178.5 of 165.2 in bursts, its clocks being above the data sheet's. A770: 85-91 of 137.6.
    "A100 80GB (SXM4/PCIe)": 0.86,
    "A100 PCIe 40GB": 0.82,
    "H100 SXM5 80GB": 0.80,
    "H200 SXM 141GB": 0.80,
    "H100 PCIe 80GB": 0.66,
    "Instinct MI300X": 0.58,
}
MEASURED_REACH = {"GeForce RTX 4090": 1.0, "Arc A770 16GB": 0.64, "Arc B580": 0.64}
USUAL = 0.93
HALVED, FULL = 0.95, 0.75
"""GeForce halves the rate with fp32 accumulation, so that its units reach nearly all of it (L20, the same chip family:
105 to 115 of 119.5). Others without a measurement: between the measured ones."""

HOPPER_ATTENTION = 0.45
"""Attention kernels against products, for cards whose fastest instructions PyTorch's flash kernel does not use
(FlashAttention-3's paper: version 2 reaches 35 to 40 % of an H100). Others: 0.84."""


def reach(name: str) -> float:
    """The share of the dense rate that large products reach in a training."""
    if name in MEASURED_REACH:
        return MEASURED_REACH[name]
    if name in REACH:
        return round(USUAL * REACH[name], 3)
    return HALVED if name.startswith("GeForce") else FULL


RENT = {
    # US dollars an hour and card, on demand, as seen in the sources of 2026 that the prices come from or public lists
    "GeForce RTX 3090": (0.22, "community cloud, 2026"),
    "GeForce RTX 4090": (0.34, "community cloud, 0.31-0.34 (Feb 2026, insiderllm)"),
    "A100 80GB (SXM4/PCIe)": (1.39, "specialised clouds about 1.2-1.6 (2026, not verified here)"),
    "H100 SXM5 80GB": (2.69, "specialised clouds about 2.0-3.0 (2026, not verified here)"),
}


def row(fact: dict[str, str]) -> dict[str, object]:
    """One card: GiB, bytes/s, dense FLOP/s with fp32 accumulation, watts, US dollars."""
    tera, giga = 1e12, 1e9
    name = fact["name"]
    units, peers = UNITS_AND_PEERS[name]
    rent = RENT.get(name, (0.0, "no price known"))
    return {
        "name": fact["name"],
        "kind": KINDS[fact["vendor"]],
        "names": DRIVER_NAMES[fact["name"]],
        "memory_gib": float(fact["vram_gib"]),
        "memory_bandwidth": float(fact["mem_bw_gbs"]) * giga,
        "flops": {
            "fp32": float(fact["fp32_tflops"]) * tera,
            "bf16": float(fact["bf16_tflops"]) * tera,
            "fp16": float(fact["fp16_tensor_tflops_dense_fp32acc"]) * tera,
        },
        "link_bandwidth": float(fact["pcie_gbs_realistic"]) * giga,
        "power_watts": float(fact["tdp_w"]),
        "bf16": fact["bf16"].startswith("yes"),
        "fp8": fact["fp8"].startswith("yes"),
        "price_usd": float(fact["price_usd"]),
        "price_note": fact["price_note"],
        "reach": reach(name),
        "attention_reach": HOPPER_ATTENTION if name.startswith(("H100", "H200")) else 0.84,
        "units": units,
        "peer_bandwidth": peers * giga,
        "rent_usd": rent[0],
        "rent_note": rent[1],
    }


def main(source: Path) -> None:
    with source.open(encoding="utf-8", newline="") as file:
        rows = [json.dumps(row(fact), ensure_ascii=False) for fact in csv.DictReader(file)]
    TARGET.write_text("[\n" + ",\n".join(rows) + "\n]\n", encoding="utf-8")
    print(f"{len(rows)} cards, {TARGET}")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
