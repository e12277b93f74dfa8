"""Bytes inside the code, GiB at the edge: the one place that turns numbers into what a person reads."""

from __future__ import annotations

import math
from collections.abc import Callable

KIB = 2**10
MIB = 2**20
GIB = 2**30


def format_bytes(size: float) -> str:
    """Bytes as a short text in binary units: `27.4 GiB`, `231 MiB`, `12 KiB`, `0 B`."""
    return _in_units(size, lambda number: number)


def format_needed(size: float) -> str:
    """Bytes that must be there, rounded up: who has as much as it says has enough."""
    return _in_units(size, math.ceil)


def format_there(size: float) -> str:
    """Bytes that are there, rounded down."""
    return _in_units(size, math.floor)


def _in_units(size: float, rounded: Callable[[float], float]) -> str:
    magnitude = abs(size)
    if magnitude >= GIB:
        return f"{rounded(10 * size / GIB) / 10:.1f} GiB"
    if magnitude >= MIB:
        return f"{rounded(size / MIB):.0f} MiB"
    if magnitude >= KIB:
        return f"{rounded(size / KIB):.0f} KiB"
    return f"{size:.0f} B"


def format_duration(seconds: float) -> str:
    """Seconds as a short text: `45 s`, `2 min 05 s`, `3 h 20 min`, `4 d 06 h`."""
    whole = round(max(seconds, 0.0))
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    if whole < 86400:
        return f"{whole // 3600} h {whole % 3600 // 60:02d} min"
    return f"{whole // 86400} d {whole % 86400 // 3600:02d} h"


def format_count(number: float) -> str:
    """A count as a short text: `950`, `18.7 K`, `134.5 M`, `6.7 B`."""
    for limit, letter in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "K")):
        if abs(number) >= limit:
            return f"{number / limit:.1f} {letter}"
    return f"{number:.0f}"


def format_usd(dollars: float) -> str:
    """US dollars: `< $0.01`, `$1.20`, `$1,250`."""
    if 0 < dollars < 0.01:
        return "< $0.01"
    return f"${dollars:,.2f}" if dollars < 1000 else f"${dollars:,.0f}"


def format_terabytes(size: float) -> str:
    """Bytes in the decimal unit that drives are rated in, to two figures: `0.33 TB`, `2,400 TB`, `< 0.01 TB`."""
    return f"{_two_figures(size / 1e12)} TB"


def format_percent(share: float) -> str:
    """A share to two figures, 1.0 being all of it: `0.3 %`, `5.2 %`, `123 %`, `< 0.01 %`."""
    return f"{_two_figures(100 * share)} %"


def _two_figures(number: float) -> str:
    """A number that is not negative, never in powers of ten; whole from 10 on."""
    if 0 < number < 0.01:
        return "< 0.01"
    return f"{number:.2g}" if number < 9.95 else f"{number:,.0f}"
