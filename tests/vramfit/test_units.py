"""What a person reads: binary units, one decimal, never "GB"; TB only beside what drives are rated for."""

from __future__ import annotations

import pytest

from vramfit.units import (
    GIB,
    format_bytes,
    format_count,
    format_duration,
    format_needed,
    format_percent,
    format_terabytes,
    format_there,
    format_usd,
)


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


@pytest.mark.parametrize(
    ("share", "text"),
    [
        (0, "0 %"),
        (0.00005, "< 0.01 %"),
        (0.003, "0.3 %"),
        (0.052, "5.2 %"),
        (0.0996, "10 %"),
        (1.234, "123 %"),
        (98.7, "9,870 %"),
    ],
)
def test_shares(share: float, text: str) -> None:
    assert format_percent(share) == text


@pytest.mark.parametrize(
    ("size", "text"),
    [(10**9, "< 0.01 TB"), (327 * 10**9, "0.33 TB"), (176e12, "176 TB"), (2_400 * 10**12, "2,400 TB")],
)
def test_terabytes(size: float, text: str) -> None:
    assert format_terabytes(size) == text


@pytest.mark.parametrize("size", [1, 1023, 1025, 5.2 * 2**20, 2**30 + 1, 12.84 * 2**30, 12.86 * 2**30, 900.01 * 2**30])
def test_what_is_needed_is_rounded_up_and_what_is_there_down(size: float) -> None:
    def read(text: str) -> float:
        number, unit = text.split()
        return float(number) * {"B": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30}[unit]

    assert read(format_there(size)) <= size <= read(format_needed(size)) * 1.0000001
    assert format_needed(12.5 * 2**30) == format_there(12.5 * 2**30) == "12.5 GiB"


@pytest.mark.parametrize(
    ("dollars", "text"), [(0, "$0.00"), (0.004, "< $0.01"), (1.2, "$1.20"), (999.5, "$999.50"), (1250.4, "$1,250")]
)
def test_dollars(dollars: float, text: str) -> None:
    assert format_usd(dollars) == text
