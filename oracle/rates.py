"""What a device can do at most, measured: the rate of its matrix product and the bandwidth of its copy."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from oracle.timing import Work

SIZES = {"cpu": 1024, "cuda": 8192}  # of the square matrices
COPIED = {"cpu": 2**27, "cuda": 2**30}  # bytes of a copy at least
CACHE = Path("/sys/devices/system/cpu/cpu0/cache")
ASSUMED_CACHE = 2**26  # bytes, where the machine does not say


@dataclass(frozen=True, slots=True, kw_only=True)
class Ceiling:
    """Work that nothing on the device does faster, and how much of it one call does."""

    work: Work
    amount: float  # FLOPs, or bytes read and written


def products(dtype: torch.dtype, device: str) -> Ceiling:
    """A product of two square matrices of N(0, 1) numbers in `dtype`."""
    size = SIZES[device]
    a, b = (torch.randn(size, size, device=device, dtype=dtype) for _ in range(2))
    into = torch.empty_like(a)
    return Ceiling(work=lambda: torch.matmul(a, b, out=into), amount=2.0 * size**3)


def copies(device: str) -> Ceiling:
    """A copy of random bytes from one tensor to another, four caches large or more."""
    size = max(COPIED[device], 4 * cache_bytes(device)[0])
    source = torch.randint(0, 256, (size,), device=device, dtype=torch.uint8)
    into = torch.empty_like(source)
    return Ceiling(work=lambda: into.copy_(source), amount=2.0 * size)


def cache_bytes(device: str) -> tuple[int, str]:
    """(bytes of the device's largest cache, where that is from)."""
    if device == "cuda":
        return int(torch.cuda.get_device_properties(torch.cuda.current_device()).L2_cache_size), "the device's properties"
    sizes = [file.read_text().strip() for file in CACHE.glob("index*/size")]
    units = {"K": 2**10, "M": 2**20}
    known = [int(size[:-1]) * units[size[-1]] for size in sizes if size[-1:] in units]
    return (max(known), str(CACHE)) if known else (ASSUMED_CACHE, "assumed")
