"""What a program of the Triton kernels works on: its query rows, tiles of a paged pool, dequantisation scales.

The functions of the first part are compiled into kernels (interpreted: called by them); those of the second run on the host.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"
# The compiled functions below are written in Triton's language, which has no types that mypy knows.

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from oracle.kernels.triton_language import (  # before Triton: without a GPU it switches the interpreter on
    INTERPRETED,
    device_function,
    operand,
    total,
)

# isort: split

import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

# Two words of two e4m3 codes to two pairs of bf16, 9 instructions.  Sign, exponent and fraction are moved to where bf16 has
# them, which is exact for subnormals too; 2^120, 0x7b80, makes up for the biases.
_CODES_TO_BF16 = tl.constexpr("""{
    .reg .b32 t, u, c;
    mov.b32 c, 0x7b807b80;
    shl.b32 t, $2, 4;
    and.b32 t, t, 0x07f007f0;
    shl.b32 u, $2, 8;
    lop3.b32 t, u, 0x80008000, t, 0xea;
    mul.rn.bf16x2 $0, t, c;
    shr.b32 t, $2, 4;
    and.b32 t, t, 0x07f007f0;
    lop3.b32 t, $2, 0x80008000, t, 0xea;
    mul.rn.bf16x2 $1, t, c;
}""")


@device_function
def page_at(table, step, at, end, PAGE: tl.constexpr, KEYS: tl.constexpr, TMA: tl.constexpr):
    """The page of a key tile from `at`, or of each of its keys; 0 from `end` on."""
    if TMA:
        return tl.load(table + (at // PAGE).to(tl.int64) * step, mask=at < end, other=0)
    else:
        key = tl.add(tl.arange(0, KEYS), at, sanitize_overflow=False)
        return tl.load(table + (key // PAGE).to(tl.int64) * step, mask=key < end, other=0)


@device_function
def rows_of(
    source,
    strides,
    page,
    at,
    end,
    kv_head,
    column,
    DIM: tl.constexpr,
    WIDTH: tl.constexpr,
    PAGE: tl.constexpr,
    KEYS: tl.constexpr,
    TMA: tl.constexpr,
    WHOLE: tl.constexpr,
):
    """Rows of K or V, (KEYS, WIDTH), from key `at` and column `column`; columns from DIM on are 0.

    Rows from `end` on are 0 if not TMA; WHOLE says that there are none.
    """
    if TMA:
        return tl.reshape(source.load([page, kv_head.to(tl.int32), at % PAGE, column]), [KEYS, WIDTH])
    else:
        key = tl.add(tl.arange(0, KEYS), at, sanitize_overflow=False)
        d = column + tl.arange(0, WIDTH)[None, :]
        row = page.to(tl.int64) * strides[0] + (key % PAGE).to(tl.int64) * strides[1]
        address = source + kv_head * strides[2] + row[:, None] + d.to(tl.int64) * strides[3]
        if WHOLE:
            return tl.load(address) if DIM % WIDTH == 0 else tl.load(address, mask=d < DIM, other=0)
        else:
            held = (key < end)[:, None]
            return tl.load(address, mask=held if DIM % WIDTH == 0 else held & (d < DIM), other=0)


@device_function
def columns_of(words, dtype: tl.constexpr):
    """The even and the odd columns of an e4m3 tile, of words of two columns, as operands of `tl.dot`.

    Exact; compiled for bf16, a NaN becomes 480 or -480.
    """
    if not INTERPRETED and dtype == tl.bfloat16:
        # Triton's own conversion of a code passes through the unit that does a quarter of a warp at a time.
        return tl.inline_asm_elementwise(_CODES_TO_BF16, "=&r,=&r,r", [words], (tl.bfloat16, tl.bfloat16), is_pure=True, pack=2)
    else:
        return operand((words & 255).to(tl.uint8), dtype), operand(((words >> 8) & 255).to(tl.uint8), dtype)


@device_function
def place(cu_ptr, used_ptr, seqs, GROUP: tl.constexpr, SEQS: tl.constexpr, ROWS: tl.constexpr, PARTS: tl.constexpr = 1):
    """The sequence of this program's tile, its first query, its queries and keys, and the tile's rows, of the sequence's own.

    There are none, row_begin >= row_end, in tiles that no sequence fills.  All int64.
    """
    tile = tl.num_programs(0).to(tl.int64) - 1 - tl.program_id(0)  # late rows see the most keys: they start first
    if PARTS > 1:
        tile //= PARTS  # programs of one tile, side by side
    # Sequence i starts at tile cu[i] * GROUP // ROWS + i, which leaves it at least as many tiles as it fills: the grid
    # follows from sizes alone, without reading the plan on the host.
    i = tl.arange(0, SEQS).to(tl.int64)
    first = tl.load(cu_ptr + i, mask=i < seqs, other=0).to(tl.int64) * GROUP // ROWS + i
    seq = total(((first <= tile) & (i < seqs)).to(tl.int64), 0) - 1
    start = tl.load(cu_ptr + seq).to(tl.int64)
    q_len = tl.load(cu_ptr + seq + 1).to(tl.int64) - start
    kv_len = tl.load(used_ptr + seq).to(tl.int64)
    row_begin = (tile - start * GROUP // ROWS - seq) * ROWS
    return seq, start, q_len, kv_len, row_begin, tl.minimum(row_begin + ROWS, q_len * GROUP)


@device_function
def head_scale(scales, strides, seq, kv_head):
    """The dequantisation scale of a sequence and kv head; 1 where there are no `scales`."""
    if scales is None:
        return 1.0
    else:
        return tl.load(scales + seq * strides[0] + kv_head * strides[1])


def fits_tma(cache: Tensor, keys: int) -> bool:
    """Whether the copy engine can fetch tiles of `keys` rows: page = whole tiles, 16-byte steps, columns side by side."""
    size = cache.element_size()
    steps = (cache.data_ptr(), *(stride * size for stride in cache.stride()[:3]))
    return cache.shape[1] % keys == 0 and cache.stride(3) == 1 and all(step > 0 and step % 16 == 0 for step in steps)


def descriptor(cache: Tensor, keys: int, width: int) -> Any:
    """A pool (pages, page_size, kv_heads, dim) for the copy engine, heads before the rows of a page."""
    cache = cache.transpose(1, 2)
    return TensorDescriptor(cache, list(cache.shape), list(cache.stride()), [1, 1, keys, width])


def fits_words(cache: Tensor) -> bool:
    """Whether a cache holds e4m3 codes that can be read as 16-bit words of two columns."""
    even = all(step % 2 == 0 for step in (cache.shape[3], cache.data_ptr(), cache.storage_offset(), *cache.stride()[:3]))
    return cache.dtype == torch.float8_e4m3fn and cache.stride(3) == 1 and even
