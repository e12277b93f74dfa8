"""What a person reads: binary units, one decimal, never "GB"."""

from __future__ import annotations

import pytest

from vramfit.units import GIB, format_bytes, format_count, format_duration


@pytest.mark.parametrize(
    ("size", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1 KiB"),
        (231 * 2**20, "231 MiB"),
        (27.4 * GIB, "27.4 GiB"),
        (-GIB, "-1.0 GiB"),
    ],
)
def test_bytes(size: float, text: str) -> None:
    assert format_bytes(size) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0, "0 s"), (-3, "0 s"), (59.4, "59 s"), (125, "2 min 05 s"), (12_000, "3 h 20 min"), (367_200, "4 d 06 h")],
)
def test_durations(seconds: float, text: str) -> None:
    assert format_duration(seconds) == text


@pytest.mark.parametrize(
    ("number", "text"),
    [(950, "950"), (18_700, "18.7 K"), (134_515_008, "134.5 M"), (6.74e9, "6.7 B"), (15e12, "15.0 T")],
)
def test_counts(number: float, text: str) -> None:
    assert format_count(number) == text
