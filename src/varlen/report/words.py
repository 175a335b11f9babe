"""Numbers as readers want them: few digits, thousands apart, units beside them."""

from __future__ import annotations

import math


def count(value: float) -> str:
    """Write a whole number with thousands apart, rounded to three digits where it is a rate.

    >>> count(8912.4)
    '8,912'
    """
    return f"{value:,.0f}"


def times(value: float) -> str:
    """Write a ratio with two or three digits.

    >>> times(5.931), times(11.24), times(0.98)
    ('5.9×', '11.2×', '0.98×')
    """
    return f"{value:.2f}×" if value < 2 else f"{value:.1f}×"


def memory(value_bytes: float) -> str:
    """Write bytes in MB or GB of 10⁶ and 10⁹.

    >>> memory(431_000_000), memory(2_890_000_000)
    ('431 MB', '2.9 GB')
    """
    return f"{value_bytes / 1e6:,.0f} MB" if value_bytes < 1e9 else f"{value_bytes / 1e9:.1f} GB"


def difference(value: float) -> str:
    """Write a signed difference of losses.

    >>> difference(0.1234), difference(-0.02), difference(0.0)
    ('+0.123', '−0.020', '0.000')
    """
    if round(value, 3) == 0:
        return "0.000"
    return f"{'+' if value > 0 else '−'}{abs(value):.3f}"


def tiny(value: float) -> str:
    """Write a rounding difference as a power of ten, and zero as zero.

    >>> tiny(9.5e-7), tiny(0.0)
    ('9.5·10⁻⁷', '0')
    """
    if value == 0:
        return "0"
    exponent = math.floor(math.log10(value))
    raised = str(exponent).translate(str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹"))
    return f"{value / 10**exponent:.1f}·10{raised}"


def percent(value: float) -> str:
    """Write a share.

    >>> percent(0.284)
    '28 %'
    """
    return f"{100 * value:.0f} %"


def share(value: float) -> str:
    """Write a small share with the digits that tell it from none.

    >>> share(0.2274), share(0.0027), share(0.00004), share(0.0)
    ('22.7 %', '0.27 %', '<0.01 %', '0 %')
    """
    if 0 < value < 0.0001:
        return "<0.01 %"
    return "0 %" if value == 0 else f"{100 * value:.1f} %" if value >= 0.01 else f"{100 * value:.2f} %"


def fill(value: float) -> str:
    """Write how full packs are, rounded down, so that only full packs are called full.

    >>> fill(0.99996), fill(0.9423), fill(1.0), fill(0.28)
    ('99.99 %', '94.23 %', '100 %', '28.00 %')
    """
    return "100 %" if value >= 1 else f"{math.floor(10_000 * value + 1e-9) / 100:.2f} %"
