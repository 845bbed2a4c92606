"""Random numbers with the same bits on every machine.

A counter-based integer generator (Philox, whose raw stream numpy guarantees), then exact operations only: integer
arithmetic, and fp64 operations that IEEE 754 rounds correctly.  No logarithm, cosine or exponential, which libraries round
differently.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

_BYTES, _PAIRS = np.uint64(0x00FF00FF00FF00FF), np.uint64(0x0000FFFF0000FFFF)
_MIX = np.uint64(0x9E3779B97F4A7C15)  # 2^64 / golden ratio: spreads the word over the bits taken for the fraction
_VARIANCE = 8 * (256**2 - 1) / 12 + 1 / 12  # of eight summed bytes and a uniform fraction
_CHUNK = 1 << 20


class Stream:
    """A named stream of a seed.  Equal (seed, name) give equal numbers; different ones are independent."""

    def __init__(self, seed: int, name: str) -> None:
        digest = hashlib.sha256(f"{seed}/{name}".encode()).digest()
        self._bits = np.random.Philox(key=[int.from_bytes(digest[i : i + 8], "little") for i in (0, 8)])

    def _raw(self, count: int) -> NDArray[np.uint64]:
        raw: NDArray[np.uint64] = self._bits.random_raw(count)
        return raw

    def normal(self, *shape: int) -> Tensor:
        """Close to N(0, 1): eight bytes summed plus a 24-bit fraction, |x| under 4.9, float32 of the given shape."""
        count = int(np.prod(shape, dtype=np.int64))
        values = np.empty(count, dtype=np.float32)
        for start in range(0, count, _CHUNK):
            word = self._raw(min(_CHUNK, count - start))
            total = (word & _BYTES) + ((word >> np.uint64(8)) & _BYTES)
            total = (total & _PAIRS) + ((total >> np.uint64(16)) & _PAIRS)
            total = (total + (total >> np.uint64(32))) & np.uint64(0xFFFF)
            fixed = (total << np.uint64(24)) + ((word * _MIX) >> np.uint64(40))
            centred = fixed.astype(np.int64) - np.int64(1020 * 2**24 + 2**23)
            values[start : start + _CHUNK] = centred * (2.0**-24 / math.sqrt(_VARIANCE))
        return torch.from_numpy(values.reshape(shape))

    def uniform(self, *shape: int) -> Tensor:
        """Uniform on [0, 1), float64."""
        count = int(np.prod(shape, dtype=np.int64))
        return torch.from_numpy(((self._raw(count) >> np.uint64(11)).astype(np.float64) * 2.0**-53).reshape(shape))

    def integers(self, low: int, high: int, count: int) -> Tensor:
        """`count` int64 in [low, high)."""
        return torch.from_numpy((self._raw(count) % np.uint64(high - low)).astype(np.int64) + low)

    def permutation(self, count: int) -> Tensor:
        """A permutation of range(count), int64."""
        return torch.from_numpy(np.argsort(self._raw(count), kind="stable"))

    def choice(self, options: Sequence[float], count: int) -> Tensor:
        """`count` of the options, float32."""
        return torch.tensor(options, dtype=torch.float32)[self.integers(0, len(options), count)]
