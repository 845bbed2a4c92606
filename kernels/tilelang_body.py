"""Generates the prefill kernel of a family in TileLang: paged, variable lengths, causal or not, windowed, with the LSE.

Warp-specialised for sm_90a: one warpgroup copies by TMA, two multiply by wgmma.  The queue of a leader is QK(k + 1), then
PV(k): the softmax of tile k + 1 runs while the tensor cores multiply for tile k.  Each part of K and V has a producer warp of
its own, and K is freed in chunks of its columns, so that the next tile's first columns arrive while the last are in use.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, valid-type, name-defined"
# The generator is written in TileLang's language, which has no types that mypy knows.

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import tilelang
import tilelang.language as T

from oracle.kernels.tilelang_families import COMPUTING, PANEL, ROWS, Family

WARPGROUP = 128
LEADING, FOLLOWING, COPYING = 240, 224, 40  # registers of a thread: 3 x 168 together, what a block starts with
EVEN = (LEADING + FOLLOWING) // 2  # of two leaders
UNIT = 8  # elements that the strides of q, out and the caches count in: 16 bytes, what TMA and vector loads need
LN2 = 0.6931471805599453
bf16, f32, i32 = "bfloat16", "float32", "int32"


def pass_configs() -> dict[str, bool]:
    """TileLang's compiler options, the same ahead of time and just in time."""
    keys = tilelang.PassConfigKey
    return {
        keys.TL_ENABLE_FAST_MATH.value: True,  # exp2 is ex2.approx.ftz, as the record says
        keys.TL_DISABLE_SAFE_MEMORY_ACCESS.value: True,  # the generator clamps what needs it
    }


def prefill(family: Family, page_size: int) -> Any:
    """The TileLang function of `family` for pages of `page_size` tokens, not compiled."""
    f = family
    boxes = f.keys // page_size  # pages of a tile
    chunks = f.head_dim // f.chunk
    sizes = ("rows", "heads", "kv_heads", "pages", "plan", "width", "table_row", "table_column")
    strides = ("q_row", "q_head", "k_page", "k_slot", "k_head", "v_page", "v_slot", "v_head", "out_row", "out_head")
    n = SimpleNamespace(**{name: T.dynamic(name) for name in sizes + strides})

    @T.macro
    def look_up(s, k):
        """The page ids of tile k to s.page_next; a page past the sequence gets an id out of range, which TMA reads as zeros."""
        for p in [*range(boxes)]:
            index = (s.first_tile + k) * boxes + p
            s.page_next[p] = T.if_then_else(index < s.live_pages, s.table[s.seq, index], n.pages)

    @T.macro
    def step(s, k):
        """The ids of tile k to s.page; those of the next tile are on their way while tile k waits for room."""
        for p in [*range(boxes)]:
            s.page[p] = s.page_next[p]
        look_up(s, k + 1)

    @T.macro
    def fetch(s, cache, tile, stage, first, last, base, barrier, b):
        """Orders columns [first, last) of the pages s.page of a cache, to `tile` from column `first - base`."""
        for p in [*range(boxes)]:
            if boxes == 1:
                T.tma_copy(
                    cache[s.page[p], :, s.kv_head, first:last],
                    tile[stage, :, first - base : last - base],
                    barrier=barrier[b],
                    leader_scope_threads=32,
                )
            else:
                for u in [*range(first, last, PANEL)]:
                    T.tma_copy(
                        cache[s.page[p], :, s.kv_head, u : u + PANEL],
                        tile[stage, p * page_size : (p + 1) * page_size, u - base : u - base + PANEL],
                        barrier=barrier[b],
                        leader_scope_threads=32,
                    )
        T.barrier_arrive(barrier[b])

    @T.macro
    def copy_k(s):
        look_up(s, 0)
        for k in T.serial(s.tiles):
            step(s, k)
            for c in [*range(chunks)]:
                slot = (k % f.stages) * chunks + c
                T.barrier_wait(s.k_free[slot], ((k // f.stages) & 1) ^ 1)
                fetch(s, s.k, s.k_tile, k % f.stages, c * f.chunk, (c + 1) * f.chunk, 0, s.k_full, slot)

    @T.macro
    def copy_v(s, part):
        look_up(s, 0)
        for k in T.serial(s.tiles):
            step(s, k)
            slot = k % f.stages
            T.barrier_wait(part.v_free[slot], ((k // f.stages) & 1) ^ 1)
            fetch(s, s.v, part.v_tile, slot, part.first, part.first + f.columns, part.first, part.v_full, slot)

    @T.macro
    def multiply_k(s, g, k):
        """Queues S = Q K^T of tile k, one group of instructions a chunk."""
        for c in T.unroll(chunks):
            T.barrier_wait(s.k_full[(k % f.stages) * chunks + c], (k // f.stages) & 1)
            T.wgmma_gemm(
                g.q_tile[:, c * f.chunk : (c + 1) * f.chunk],
                s.k_tile[k % f.stages, :, c * f.chunk : (c + 1) * f.chunk],
                g.scores,
                transpose_B=True,
                clear_accum=(c == 0),
            )

    @T.macro
    def weigh(s, g, k):
        """Scores of tile k to weights; the running maximum brought up to date, g.fade the factor of what came before."""
        if T.Or(k < g.clear_from[0], k >= g.clear_to[0]):
            for i, j in T.Parallel(ROWS, f.keys):
                key = (s.first_tile + k) * f.keys + j
                at = s.position + g.token + i // f.group
                g.scores[i, j] = T.if_then_else(
                    T.And(key < T.min(at + s.right + 1, s.kv_len), key >= at - s.left), g.scores[i, j], -T.infinity(f32)
                )
        T.copy(g.top, g.top_before)
        T.reduce_max(g.scores, g.largest, dim=1, clear=False)
        for i in T.Parallel(ROWS):
            g.top[i] = g.largest[i] * s.scale2
            g.shift[i] = T.if_then_else(g.largest[i] == -T.infinity(f32), 0.0, g.top[i])
            g.fade[i] = T.exp2(g.top_before[i] - g.shift[i])
        for i, j in T.Parallel(ROWS, f.keys):
            g.scores[i, j] = T.exp2(g.scores[i, j] * s.scale2 - g.shift[i])

    @T.macro
    def add_up(g):
        """The weights, not rounded, into the running sum."""
        T.reduce_sum(g.scores, g.added, dim=1)
        for i in T.Parallel(ROWS):
            g.total[i] = g.total[i] * g.fade[i] + g.added[i]

    @T.macro
    def fade_output(part, fade):
        """The output times `fade`, one factor a row; a warp whose 16 factors are all 1, as most are, has nothing to do."""
        part.faded[0] = 0
        for i in T.Parallel(ROWS):
            part.faded[0] = T.if_then_else(fade[i] != 1.0, 1, part.faded[0])
        if T.any_sync(part.faded[0]) != 0:
            for i, d in T.Parallel(ROWS, f.columns):
                part.output[i, d] *= fade[i]

    @T.macro
    def clear_tail(s, part, k):
        """Zeros the rows of V past the sequence's last key, which may hold anything: 0 times NaN is NaN."""
        if (s.first_tile + k + 1) * f.keys > s.kv_len:
            for j, d in T.Parallel(f.keys, f.columns):
                if (s.first_tile + k) * f.keys + j >= s.kv_len:
                    part.v_tile[k % f.stages, j, d] = T.cast(0.0, bf16)
            T.fence_proxy_async()
            T.sync_threads(part.barrier, WARPGROUP)

    @T.macro
    def store(s, g, part):
        for i, d in T.Parallel(ROWS, f.columns):
            part.output[i, d] *= part.inverse[i]
        for i, d in T.Parallel(ROWS, f.columns):
            if g.token + i // f.group < s.tokens:
                s.out[s.start + g.token + i // f.group, s.kv_head * f.group + i % f.group, part.first + d] = part.output[i, d]

    @T.macro
    def hand_over(s, g, k):
        """Weights and factors of tile k to shared memory, for the followers of this row group and for itself."""
        T.copy(g.weights, g.p_tile[k & 1, :, :])
        T.copy(g.fade, g.p_fade[k & 1, :])
        T.fence_proxy_async()
        T.barrier_arrive(g.p_full[k & 1])

    @T.macro
    def multiply_v(s, g, part, k):
        """Queues O += P V of tile k, which has arrived."""
        if f.column_groups > 1:
            T.wgmma_gemm(g.p_tile[k & 1, :, :], part.v_tile[k % f.stages, :, :], part.output)
        else:
            T.wgmma_gemm(g.weights, part.v_tile[k % f.stages, :, :], part.output)

    @T.macro
    def lead(s, g, part):
        T.set_max_nreg(LEADING if f.column_groups > 1 else EVEN, 1)
        for i, d in T.Parallel(ROWS, f.head_dim):
            g.q_tile[i, d] = s.q[s.start + T.min(g.token + i // f.group, s.tokens - 1), s.kv_head * f.group + i % f.group, d]
        T.fill(part.output, 0)
        T.fill(g.total, 0)
        T.fill(g.largest, -T.infinity(f32))
        T.fill(g.top, -T.infinity(f32))
        # Tiles whose keys every row of the group sees: after the largest first key, before the smallest last one.
        g.clear_from[0] = T.ceildiv(s.position + g.last_token - s.left, f.keys) - s.first_tile
        g.clear_to[0] = T.min(s.position + g.token + s.right + 1, s.kv_len) // f.keys - s.first_tile
        T.fence_proxy_async()
        T.sync_threads(part.barrier, WARPGROUP)
        multiply_k(s, g, 0)
        T.wait_wgmma(0)
        for c in [*range(chunks)]:
            T.barrier_arrive(s.k_free[c])
        weigh(s, g, 0)
        T.copy(g.scores, g.weights)
        if f.column_groups > 1:
            hand_over(s, g, 0)
        add_up(g)
        for k in T.serial(s.tiles - 1):
            multiply_k(s, g, k + 1)
            T.barrier_wait(part.v_full[k % f.stages], (k // f.stages) & 1)
            multiply_v(s, g, part, k)
            for c in [*range(chunks)]:
                T.wait_wgmma(chunks - c)
                T.barrier_arrive(s.k_free[((k + 1) % f.stages) * chunks + c])
            weigh(s, g, k + 1)
            if f.column_groups > 1:
                T.copy(g.scores, g.weights)
                if k > 0:
                    T.barrier_wait(g.p_free[(k + 1) & 1], ((k - 1) >> 1) & 1)
                hand_over(s, g, k + 1)
            add_up(g)
            T.wait_wgmma(0)
            T.barrier_arrive(part.v_free[k % f.stages])
            fade_output(part, g.fade)
            if f.column_groups == 1:
                T.copy(g.scores, g.weights)
        T.barrier_wait(part.v_full[(s.tiles - 1) % f.stages], ((s.tiles - 1) // f.stages) & 1)
        clear_tail(s, part, s.tiles - 1)
        multiply_v(s, g, part, s.tiles - 1)
        for i in T.Parallel(ROWS):
            part.inverse[i] = T.if_then_else(g.total[i] > 0.0, 1.0 / g.total[i], 0.0)
        if f.column_groups > 1:
            T.copy(part.inverse, g.inverse)
            T.barrier_arrive(g.done[0])
        for i in T.Parallel(ROWS):
            if g.token + i // f.group < s.tokens:
                s.lse[s.start + g.token + i // f.group, s.kv_head * f.group + i % f.group] = T.if_then_else(
                    g.total[i] > 0.0, g.top[i] * LN2 + T.log(g.total[i]), -T.infinity(f32)
                )
        T.wait_wgmma(0)
        store(s, g, part)

    @T.macro
    def take_over(s, g, part, k):
        """Waits for the weights of tile k and fades what came before them."""
        T.barrier_wait(g.p_full[k & 1], (k >> 1) & 1)
        T.copy(g.p_fade[k & 1, :], part.inverse)
        fade_output(part, part.inverse)
        T.barrier_wait(part.v_full[k % f.stages], (k // f.stages) & 1)

    @T.macro
    def follow(s, g, part):
        T.set_max_nreg(FOLLOWING, 1)
        T.fill(part.output, 0)
        for k in T.serial(s.tiles - 1):
            take_over(s, g, part, k)
            multiply_v(s, g, part, k)
            T.wait_wgmma(0)
            T.barrier_arrive(part.v_free[k % f.stages])
            T.barrier_arrive(g.p_free[k & 1])
        take_over(s, g, part, s.tiles - 1)
        clear_tail(s, part, s.tiles - 1)
        multiply_v(s, g, part, s.tiles - 1)
        T.wait_wgmma(0)
        T.barrier_wait(g.done[0], 0)
        T.copy(g.inverse, part.inverse)
        store(s, g, part)

    def compute(w):
        """The macro of warpgroup w and those after it, a chain of branches."""
        if w == COMPUTING:
            return copy

        rest = compute(w + 1)
        r, c = divmod(w, f.column_groups)
        is_leader = c == 0

        @T.macro
        def role(s):
            if s.thread < (w + 1) * WARPGROUP:
                if is_leader:
                    lead(s, s.groups[r], s.parts[w])
                else:
                    follow(s, s.groups[r], s.parts[w])
            else:
                rest(s)

        return role

    def copy_columns(c):
        """The macro of the producer warps of column group c and those after it."""
        if c == f.column_groups:
            return nothing

        rest = copy_columns(c + 1)

        @T.macro
        def role(s):
            if s.thread < COMPUTING * WARPGROUP + 32 * (c + 2):
                copy_v(s, s.parts[c])
            else:
                rest(s)

        return role

    @T.macro
    def nothing(s):
        pass

    rest_copies = copy_columns(0)

    @T.macro
    def copy(s):
        T.set_max_nreg(COPYING, 0)
        if s.thread < COMPUTING * WARPGROUP + 32:
            copy_k(s)
        else:
            rest_copies(s)

    roles = compute(0)

    def row_group(r):
        """Buffers of row group r: with followers, also those through which it hands over its weights."""
        names = ("largest", "top", "top_before", "shift", "fade", "added", "total")
        vectors = {name: T.alloc_fragment([ROWS], f32) for name in names}
        g = SimpleNamespace(
            token=r * ROWS // f.group,
            last_token=((r + 1) * ROWS - 1) // f.group,
            q_tile=T.alloc_shared([ROWS, f.head_dim], bf16),
            scores=T.alloc_fragment([ROWS, f.keys], f32),
            weights=T.alloc_fragment([ROWS, f.keys], bf16),
            clear_from=T.alloc_local([1], i32),
            clear_to=T.alloc_local([1], i32),
            **vectors,
        )
        if f.column_groups > 1:
            g.p_tile = T.alloc_shared([2, ROWS, f.keys], bf16)
            g.p_fade = T.alloc_shared([2, ROWS], f32)
            g.inverse = T.alloc_shared([ROWS], f32)
            g.p_full = T.alloc_barrier([WARPGROUP] * 2)
            g.p_free = T.alloc_barrier([WARPGROUP * (f.column_groups - 1)] * 2)
            g.done = T.alloc_barrier([WARPGROUP])
        return g

    def tiles_and_barriers():
        """Everything that a thread block allocates."""
        k_tile = T.alloc_shared([f.stages, f.keys, f.head_dim], bf16)
        k_full = T.alloc_barrier([32] * (f.stages * chunks))
        k_free = T.alloc_barrier([WARPGROUP * f.row_groups] * (f.stages * chunks))
        v_tiles = [T.alloc_shared([f.stages, f.keys, f.columns], bf16) for _ in range(f.column_groups)]
        v_full = [T.alloc_barrier([32] * f.stages) for _ in range(f.column_groups)]
        v_free = [T.alloc_barrier([WARPGROUP * f.row_groups] * f.stages) for _ in range(f.column_groups)]
        parts = [
            SimpleNamespace(
                barrier=3 + w,
                first=(w % f.column_groups) * f.columns,
                v_tile=v_tiles[w % f.column_groups],
                v_full=v_full[w % f.column_groups],
                v_free=v_free[w % f.column_groups],
                output=T.alloc_fragment([ROWS, f.columns], f32),
                inverse=T.alloc_fragment([ROWS], f32),
                faded=T.alloc_local([1], i32),
            )
            for w in range(COMPUTING)
        ]
        groups = [row_group(r) for r in range(f.row_groups)]
        ids = {name: T.alloc_local([boxes], i32) for name in ("page", "page_next")}
        return {**ids, "k_tile": k_tile, "k_full": k_full, "k_free": k_free, "parts": parts, "groups": groups}

    @T.prim_func
    def main(
        q: T.StridedTensor([n.rows, n.heads, f.head_dim], [n.q_row * UNIT, n.q_head * UNIT, 1], bf16),
        k: T.StridedTensor(
            [n.pages, page_size, n.kv_heads, f.head_dim], [n.k_page * UNIT, n.k_slot * UNIT, n.k_head * UNIT, 1], bf16
        ),
        v: T.StridedTensor(
            [n.pages, page_size, n.kv_heads, f.head_dim], [n.v_page * UNIT, n.v_slot * UNIT, n.v_head * UNIT, 1], bf16
        ),
        out: T.StridedTensor([n.rows, n.heads, f.head_dim], [n.out_row * UNIT, n.out_head * UNIT, 1], bf16),
        lse: T.Tensor([n.rows, n.heads], f32),
        cu: T.Tensor([n.plan + 1], i32),
        used: T.Tensor([n.plan], i32),
        table: T.StridedTensor([n.plan, n.width], [n.table_row, n.table_column], i32),
        blocks: T.int32,
        seqs: T.int32,
        steps: T.int32,
        left: T.int32,
        right: T.int32,
        scale2: T.float32,
        q_row: n.q_row,
        q_head: n.q_head,
        k_page: n.k_page,
        k_slot: n.k_slot,
        k_head: n.k_head,
        v_page: n.v_page,
        v_slot: n.v_slot,
        v_head: n.v_head,
        out_row: n.out_row,
        out_head: n.out_head,
    ):
        with T.Kernel(blocks, n.kv_heads, threads=(COMPUTING + 1) * WARPGROUP) as (bx, by):
            s = tiles_and_barriers()
            block = blocks - 1 - bx  # the longest rows first: they are the last of a sequence
            seq = T.alloc_var(i32, init=0)
            end = T.alloc_var(i32, init=seqs - 1)
            for _ in T.serial(steps):  # block cu[i] // tokens + i is the first of sequence i
                middle = (seq + end + 1) // 2
                if cu[middle] // f.tokens + middle <= block:
                    seq = middle
                else:
                    end = middle - 1
            # Variables and not expressions, which TileLang would repeat, and simplify again, wherever they are used.
            kv_len = T.alloc_var(i32, init=used[seq])
            start = T.alloc_var(i32, init=cu[seq])
            tokens = T.alloc_var(i32, init=cu[seq + 1] - start)
            position = T.alloc_var(i32, init=kv_len - tokens)
            skipped = (block - start // f.tokens - seq) * f.tokens
            start = start + skipped
            position = position + skipped
            tokens = T.min(tokens - skipped, f.tokens)
            if tokens > 0:
                first_tile = T.alloc_var(i32, init=T.max(position - left, 0) // f.keys)
                tiles = T.alloc_var(i32, init=T.ceildiv(T.min(position + tokens + right, kv_len), f.keys))
                tiles = T.max(tiles - first_tile, 1)
                live_pages = T.alloc_var(i32, init=T.ceildiv(kv_len, page_size))
                roles(
                    SimpleNamespace(
                        **s, q=q, k=k, v=v, out=out, lse=lse, table=table, kv_head=by, seq=seq, thread=T.get_thread_binding(),
                        start=start, tokens=tokens, position=position, kv_len=kv_len, left=left, right=right,
                        scale2=scale2, first_tile=first_tile, live_pages=live_pages, tiles=tiles,
                    )
                )  # fmt: skip

    return main
