"""What devices reach: shapes, measured rates, links."""

from __future__ import annotations

import dataclasses

import pytest

from vramfit.hardware.catalogue import machine_with
from vramfit.hardware.devices import Device, ProductRate
from vramfit.planning.rates import rates_of


def card(name: str, **changes: object) -> Device:
    return dataclasses.replace(machine_with(name).devices[0], **changes)  # type: ignore[arg-type]


def test_products_need_rows_and_width() -> None:
    rates = rates_of(card("A100"), "bf16")

    by_rows = [rates.product_rate(rows, 4096, 4096) for rows in (16, 128, 1024, 8192)]
    by_width = [rates.product_rate(8192, width, width) for width in (256, 768, 4096, 8192)]
    assert by_rows == sorted(by_rows)
    assert by_width == sorted(by_width)
    assert by_rows[-1] < rates.dense


def test_half_a_wave_of_tiles_is_lost() -> None:
    """1,024 x 4,096 results on 108 units: 256 tiles and half a wave of 54."""
    device = card("A100")
    rates = rates_of(device, "bf16")

    assert rates.product_rate(1024, 4096, 4096) == pytest.approx(312e12 * device.reach * 256 / (256 + 54))


def test_few_rows_are_bound_by_reading_the_matrix() -> None:
    rates = rates_of(card("A100"), "bf16")

    assert rates.product_seconds(1, 8192, 8192, size=2) == pytest.approx(2 * 8192**2 / rates.bandwidth, rel=1e-3)


def test_widths_that_are_no_multiple_of_8_halve_the_rate() -> None:
    rates = rates_of(card("A100"), "bf16")
    odd, even = (rates.product_seconds(8192, 4096, width, size=2) for width in (50257, 50264))

    assert odd / even == pytest.approx(2, rel=1e-3)


def test_attention_gains_with_length_and_wide_heads() -> None:
    rates = rates_of(card("A100"), "bf16")

    assert 90e12 < rates.attention_rate(1024, 64) < rates.attention_rate(4096, 64) < rates.attention_rate(4096, 128)
    assert rates.attention_rate(4096, 128) < 200e12


def test_measured_products_take_the_place_of_the_form() -> None:
    measured = tuple(
        ProductRate(dtype="bf16", rows=rows, width=width, flops=flops)
        for rows, width, flops in ((64, 1024, 10e12), (4096, 1024, 40e12), (64, 4096, 20e12), (4096, 4096, 80e12))
    )
    rates = rates_of(card("A100", products=measured), "bf16")

    assert rates.product_rate(64, 1024, 1024) == pytest.approx(10e12)
    assert rates.product_rate(512, 1024, 1024) == pytest.approx(20e12)  # half way, in the logarithm
    assert rates.product_rate(64, 2048, 2048) == pytest.approx((10e12 * 20e12) ** 0.5)
    assert rates.product_rate(10**6, 10**5, 10**5) == pytest.approx(80e12)
    assert rates.product_rate(32, 4096, 4096) == pytest.approx(10e12)  # no quicker than with 64 rows
    assert rates_of(card("A100", products=measured), "fp16").measured == ()


def test_cards_without_a_link_of_their_own_go_through_ram() -> None:
    assert rates_of(card("RTX 4090"), "bf16").collective == 0.5 * card("RTX 4090").link_bandwidth
    assert rates_of(card("A100"), "bf16").collective == 0.75 * 300e9


def test_what_is_unknown_is_assumed_and_said() -> None:
    rates = rates_of(card("RTX 4090", flops={}, memory_bandwidth=0.0, link_bandwidth=0.0), "bf16")

    assert rates.source == "assumed"
    assert min(rates.dense, rates.bandwidth, rates.link, rates.collective, rates.disk_read, rates.ram) > 0
