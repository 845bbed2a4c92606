"""The attention layer types that TileLang kernels are generated for: a family is a row here, never a branch in the generator.

A thread block owns 64 x `row_groups` query rows of one kv head.  A *row group* is 64 query rows, whose softmax one warpgroup
(128 threads), its leader, computes.  Its output columns are split over `column_groups` warpgroups: where an output row is too
wide for the registers of one, followers take the leader's weights and produce the other columns.  Two warpgroups compute and
one, the producer, copies.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

ROWS = 64  # query rows of a row group: what one wgmma takes
PANEL = 64  # columns of 16 bits that lie side by side in shared memory: 128 bytes, what a TMA box and a swizzle span
COMPUTING = 2  # warpgroups that compute; the third copies
SHARED = 232_448  # bytes of shared memory that a thread block of sm_90 can have, 227 KiB


def _hold(name: str, rules: Mapping[str, bool]) -> None:
    """Raises: ValueError for the first rule that the row of that name breaks."""
    for rule, holds in rules.items():
        if not holds:
            raise ValueError(f"kernels/tilelang_families.py {name}: got a row that breaks a rule; expected: {rule}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """One layer type, and how a thread block is cut for it."""

    name: str
    head_dim: int  # of q, k and v
    group: int  # query heads per kv head, a divisor of 64
    row_groups: int  # of 64 query rows
    column_groups: int  # warpgroups that share the output columns of a row group
    keys: int  # of a tile
    stages: int  # tiles of K, and of V, that shared memory holds
    chunk: int  # columns of K that arrive and are freed together
    about: str

    def __post_init__(self) -> None:
        rules = {
            "a row group holds whole groups": ROWS % self.group == 0,
            "two warpgroups compute": self.row_groups * self.column_groups == COMPUTING,
            "a chunk is whole panels and K whole chunks": self.chunk % PANEL == 0 and self.head_dim % self.chunk == 0,
            "a warpgroup's columns are whole panels": self.head_dim % (PANEL * self.column_groups) == 0,
            "a tile is whole pages": all(self.keys % page == 0 for page in PAGE_SIZES),
            "its tiles fit": self.shared_bytes <= SHARED,
        }
        _hold(self.name, rules)

    @property
    def generator(self) -> str:
        """The module that writes its kernel."""
        return "tilelang_body"

    @property
    def columns(self) -> int:
        """Output columns of a warpgroup."""
        return self.head_dim // self.column_groups

    @property
    def rows(self) -> int:
        """Query rows of a thread block."""
        return ROWS * self.row_groups

    @property
    def tokens(self) -> int:
        """Query tokens of a thread block."""
        return self.rows // self.group

    @property
    def shared_bytes(self) -> int:
        """Shared memory of a thread block: Q, K, V, and where followers need them two tiles of P with their factors."""
        tiles = 2 * self.head_dim * (self.rows + 2 * self.stages * self.keys)
        return tiles + (2 * ROWS * (2 * self.keys + 4) + 4 * ROWS if self.column_groups > 1 else 0)


PAGE_SIZES = (16, 64)

_ROWS = (
    Family(
        name="hd512",
        head_dim=512,
        group=8,
        row_groups=1,
        column_groups=2,
        keys=64,
        stages=1,
        chunk=128,
        about="Gemma 4 31B, global layers: 32 query heads over 4 kv heads",
    ),
    Family(
        name="hd256",
        head_dim=256,
        group=2,
        row_groups=2,
        column_groups=1,
        keys=64,
        stages=2,
        chunk=128,
        about="Gemma 4 31B, sliding layers: 32 query heads over 16 kv heads, window (1023, 0)",
    ),
    Family(
        name="hd128",
        head_dim=128,
        group=4,
        row_groups=2,
        column_groups=1,
        keys=128,
        stages=2,
        chunk=128,
        about="Llama 3 8B: 32 query heads over 8 kv heads",
    ),
)

FAMILIES: dict[str, Family] = {family.name: family for family in _ROWS}


@dataclass(frozen=True, slots=True, kw_only=True)
class Fp8Family:
    """One layer type whose q, k, v and P are e4m3, and how a thread block of four warpgroups is cut for it.

    One copies, one scores 64 query rows, and two multiply by V, half of the output's columns each.  `products`, `held` and
    `ahead` are ways to order that work, which ci/gpu/fp8_tilelang.py times against each other.
    """

    name: str
    head_dim: int  # of q, k and v
    group: int  # query heads per kv head, a divisor of 64
    k_stages: int  # tiles of 64 keys that shared memory holds
    v_stages: int
    chunk: int  # output columns that are moved from the tensor cores' accumulator to float32 together
    products: int  # chunks that are in the tensor cores' hands at once
    held: bool  # whether P is multiplied from registers, else from shared memory
    ahead: bool  # whether the scores of the next tile are multiplied while those of this one are weighed
    registers: tuple[int, int, int]  # of a thread that copies, scores, multiplies by V
    about: str

    def __post_init__(self) -> None:
        copying, scoring, weighing = self.registers
        rules = {
            "a row group holds whole groups": ROWS % self.group == 0,
            "half of the columns is whole chunks": self.head_dim % (2 * self.chunk) == 0 and self.chunk % 32 == 0,
            "rows of q and k are whole panels of 128 codes": self.head_dim % 128 == 0,
            "a multiprocessor has its registers": copying + scoring + 2 * weighing <= 512,
            "its tiles fit": self.shared_bytes <= SHARED,
        }
        _hold(self.name, rules)

    @property
    def generator(self) -> str:
        """The module that writes its kernel."""
        return "tilelang_fp8_body"

    @property
    def tokens(self) -> int:
        """Query tokens of a thread block."""
        return ROWS // self.group

    @property
    def shared_bytes(self) -> int:
        """Shared memory of a thread block: Q, K, V, two tiles of P with their factors, and room for barriers."""
        return self.head_dim * (ROWS + KEYS * (self.k_stages + self.v_stages)) + 2 * ROWS * (KEYS + 4) + 4 * ROWS + 1024


AnyFamily = Family | Fp8Family
KEYS = 64  # of a tile in e4m3: those that share a scale

_FP8_ROWS = (
    Fp8Family(
        name="fp8_hd512",
        head_dim=512,
        group=8,
        k_stages=3,
        v_stages=2,
        chunk=64,
        products=1,
        held=False,
        ahead=True,
        registers=(24, 120, 184),
        about="Gemma 4 31B, global layers: 32 query heads over 4 kv heads",
    ),
)

FP8_FAMILIES: dict[str, Fp8Family] = {family.name: family for family in _FP8_ROWS}
