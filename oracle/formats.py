"""Number formats: the constants that the error bound is made of.

`u` is the relative error of rounding to nearest (half the distance between 1 and the next number), as in numerics.md 1.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Format:
    """A binary floating-point format."""

    name: str  # as written in records, cases and verdicts
    u: float  # unit roundoff, round to nearest
    smallest_normal: float
    smallest_subnormal: float
    largest: float  # largest finite value


FORMATS: dict[str, Format] = {
    f.name: f
    for f in (
        Format(name="fp32", u=2.0**-24, smallest_normal=2.0**-126, smallest_subnormal=2.0**-149, largest=3.4028234663852886e38),
        Format(name="fp16", u=2.0**-11, smallest_normal=2.0**-14, smallest_subnormal=2.0**-24, largest=65504.0),
        Format(name="bf16", u=2.0**-8, smallest_normal=2.0**-126, smallest_subnormal=2.0**-133, largest=3.3895313892515355e38),
        Format(name="e4m3", u=2.0**-4, smallest_normal=2.0**-6, smallest_subnormal=2.0**-9, largest=448.0),
    )
}

U32 = FORMATS["fp32"].u
