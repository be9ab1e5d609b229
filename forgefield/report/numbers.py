"""Numbers as text: three significant digits, thousands separated, durations with units."""

from __future__ import annotations

import math

NOTHING = "–"
THIN = "\u2009"


def significant(value: float | None, digits: int = 3) -> str:
    """`3.21`, `41.0`, `12 300`, `1.2e-05`; a dash where there is no number."""
    if value is None or not math.isfinite(value):
        return NOTHING
    if value == 0:
        return "0"
    size = math.floor(math.log10(abs(float(f"{value:.{digits - 1}e}"))))
    if size < -4 or size > 8:
        written = f"{value:.{digits - 1}e}"
    else:
        written = f"{round(value, digits - 1 - size):,.{max(digits - 1 - size, 0)}f}".replace(",", THIN)
    return written.replace("-", "−", 1) if value < 0 else written


def count(value: float | None) -> str:
    """An integer with thousands separated."""
    if value is None or not math.isfinite(value):
        return NOTHING
    return f"{round(value):,}".replace(",", THIN)


def short_count(value: float | None) -> str:
    """`812`, `61.3 k`, `1.25 M`."""
    if value is None or not math.isfinite(value):
        return NOTHING
    for limit, letter in ((1e9, "G"), (1e6, "M"), (1e4, "k")):
        if abs(value) >= limit:
            return significant(value / (1e3 if letter == "k" else limit)) + THIN + letter
    return count(value) if abs(value) >= 100 or float(value).is_integer() else significant(value)


def duration(seconds: float | None) -> str:
    """`48 s`, `3 min 05 s`, `2 h 14 min`, `3 d 04 h`."""
    if seconds is None or not math.isfinite(seconds):
        return NOTHING
    if seconds < 10:
        return f"{significant(seconds, 2)} s"
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    if whole < 86400:
        return f"{whole // 3600} h {whole % 3600 // 60:02d} min"
    return f"{whole // 86400} d {whole % 86400 // 3600:02d} h"


def with_unit(name: str, unit: str) -> str:
    """`MAE, meV`; the name alone for a quantity without a unit."""
    return f"{name}, {unit}" if unit else name


def shorten(value: object, limit: int = 200) -> str:
    """The value as text of bounded length."""
    written = str(value)
    return written if len(written) <= limit else written[: limit - 1] + "…"
