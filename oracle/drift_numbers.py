"""How a drift report writes numbers, estimates and foreign text, in every form alike."""

from __future__ import annotations

import math
from collections.abc import Callable

from oracle.checkpoints.figures import Estimate

NAMED = {"\n": "↵", "\t": "→", "\u00a0": " "}  # what a reader should see of them
EIGHTHS = " ▏▎▍▌▋▊▉"


def visible(text: str) -> str:
    """`text` on one line, every character that is not printable as a sign or an escape: safe for a terminal and for XML."""
    return "".join(c if c.isprintable() else NAMED.get(c) or c.encode("unicode_escape").decode() for c in text)


def number(value: float, digits: int = 3) -> str:
    """`value` with so many significant digits, its zeros at the end kept; "0" means exactly 0."""
    if value == 0:
        return "0"
    if not math.isfinite(value):
        return f"{value:g}"
    rounded = float(f"{value:.{digits - 1}e}")
    if 10 ** (digits - 1) <= abs(rounded) < 1e6:
        return f"{rounded:,.0f}"
    return f"{value:#.{digits}g}"


def signed(value: float) -> str:
    """`number` with a plus sign where it is above 0."""
    return f"{'+' if value > 0 else ''}{number(value)}"


def percent(share: float) -> str:
    """A share as per cent; never rounded up to the whole."""
    text = number(100 * share)
    return "> 99.9 %" if text == "100" and share < 1 else f"{text} %"


def half(e: Estimate) -> str:
    """Half of the 95 % interval, with two significant digits; "?" where there is no interval."""
    width = (e.high - e.low) / 2
    return number(width, 2) if math.isfinite(width) else "?"


def plus_minus(e: Estimate) -> str:
    """Value and half interval."""
    return f"{number(e.value)} ± {half(e)}"


def ends(e: Estimate, shown: Callable[[float], str] = number) -> str:
    """Both ends of its 95 % interval."""
    return f"[{shown(e.low)}, {shown(e.high)}]"


def bar(share: float, width: int = 16) -> str:
    """A bar of `share` of `width` characters, to an eighth of one; what is not in 0..1, or is NaN, is drawn as the nearer end."""
    eighths = round(8 * width * min(max(share, 0.0), 1.0)) if share == share else 8 * width
    whole, rest = divmod(eighths, 8)
    return ("█" * whole + EIGHTHS[rest].strip()).ljust(width)


def count(number_of: int, what: str) -> str:
    """So many of them, in the plural where it is due."""
    return f"{number_of:,} {what}{'' if number_of == 1 else 's'}"
