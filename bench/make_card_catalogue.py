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
    "A100 80GB (SXM4/PCIe)": ["NVIDIA A100-SXM4-80GB", "NVIDIA A100 80GB PCIe", "A100 80GB", "A100"],
    "H100 SXM5 80GB": ["NVIDIA H100 80GB HBM3", "H100 SXM", "H100"],
    "H100 PCIe 80GB": ["NVIDIA H100 PCIe", "H100 PCIe"],
    "H200 SXM 141GB": ["NVIDIA H200", "H200 SXM", "H200"],
    "Instinct MI300X": ["AMD Instinct MI300X", "AMD Instinct MI300X OAM", "MI300X"],
}


def row(fact: dict[str, str]) -> dict[str, object]:
    """One card: GiB, bytes/s, dense FLOP/s with fp32 accumulation, watts, US dollars."""
    tera, giga = 1e12, 1e9
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
    }


def main(source: Path) -> None:
    with source.open(encoding="utf-8", newline="") as file:
        rows = [json.dumps(row(fact), ensure_ascii=False) for fact in csv.DictReader(file)]
    TARGET.write_text("[\n" + ",\n".join(rows) + "\n]\n", encoding="utf-8")
    print(f"{len(rows)} cards, {TARGET}")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
