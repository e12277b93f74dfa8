"""Cards by the names drivers and people use, and machines to plan for."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest

from vramfit.errors import HardwareError
from vramfit.hardware import catalogue
from vramfit.units import GIB


@pytest.mark.parametrize(
    ("name", "card"),
    [
        ("NVIDIA GeForce RTX 4090", "GeForce RTX 4090"),
        ("rtx 4090", "GeForce RTX 4090"),
        ("4090", "GeForce RTX 4090"),
        ("RTX3090", "GeForce RTX 3090"),
        ("NVIDIA A100-SXM4-80GB", "A100 80GB (SXM4/PCIe)"),
        ("NVIDIA A100 80GB PCIe", "A100 80GB (SXM4/PCIe)"),
        ("NVIDIA A100-PCIE-40GB", "A100 PCIe 40GB"),
        ("NVIDIA H100 80GB HBM3", "H100 SXM5 80GB"),
        ("NVIDIA H100 PCIe", "H100 PCIe 80GB"),
        ("NVIDIA H200", "H200 SXM 141GB"),
        ("Intel(R) Arc(TM) A770 Graphics", "Arc A770 16GB"),
        ("AMD Radeon RX 7900 XTX", "Radeon RX 7900 XTX"),
        ("GeForce RTX 4060 Ti 16 GB", "GeForce RTX 4060 Ti 16GB"),
    ],
)
def test_a_card_is_found_by_the_names_it_has(name: str, card: str) -> None:
    found = catalogue.find(name)

    assert found is not None
    assert found.name == card


@pytest.mark.parametrize(
    "name",
    ["NVIDIA GeForce RTX 4090 Laptop GPU", "NVIDIA GeForce RTX 4090 D", "NVIDIA GeForce RTX 3090 Ti", "RTX 4080 SUPER"],
)
def test_a_variant_is_another_card(name: str) -> None:
    assert catalogue.find(name) is None


def test_a_card_with_other_memory_is_another_card() -> None:
    assert catalogue.find("NVIDIA GeForce RTX 4060 Ti", memory_bytes=8 * GIB) is None
    assert catalogue.find("NVIDIA GeForce RTX 4060 Ti", memory_bytes=int(15.99 * GIB)) is not None


def test_facts_are_those_of_the_reference(reference_data: Path) -> None:
    with (reference_data / "reference" / "gpus.csv").open(encoding="utf-8", newline="") as file:
        facts = list(csv.DictReader(file))

    assert [card.name for card in catalogue.cards()] == [fact["name"] for fact in facts]
    for card, fact in zip(catalogue.cards(), facts, strict=True):
        assert card.memory_gib == float(fact["vram_gib"])
        assert card.flops["bf16"] == float(fact["bf16_tflops"]) * 1e12
        assert card.memory_bandwidth == float(fact["mem_bw_gbs"]) * 1e9
        assert card.price_note


def test_a_machine_to_plan_for_has_the_cards_and_says_what_it_assumes() -> None:
    machine = catalogue.machine_with("RTX 4090", count=8)

    assert [device.torch_device for device in machine.devices] == [f"cuda:{index}" for index in range(8)]
    assert machine.devices[0].rates == "catalogue"
    assert any("64.0 GiB of RAM and 500.0 GiB of free disk are assumed" in note for note in machine.notes)
    assert catalogue.machine_with("A770", ram_gib=32).device("xpu:0").bf16
    assert catalogue.machine_with("A770", ram_gib=32).ram_bytes == 32 * GIB


def test_an_unknown_card_is_refused_with_those_there_are() -> None:
    with pytest.raises(HardwareError, match=r"19 cards has no 'Voodoo 2'.*GeForce RTX 4090"):
        catalogue.machine_with("Voodoo 2")
