"""Generates the prefill kernel of an e4m3 family in TileLang: codes and block scales in, causal or not, windowed, with the LSE.

Warp-specialised for sm_90a.  One warpgroup copies tiles of 64 keys by TMA, one multiplies q.k and makes P of it, and two
multiply P.V, half of the columns each, since no warpgroup's registers hold 64 x 512 numbers.  The scores of tile k + 1 are
multiplied while tile k is weighed; P and the factors that fade what came before go through shared memory, two tiles of them.

Hopper adds e4m3 products in an accumulator that cuts every addend to 13 bits below the largest, so sums have two levels: P.V
starts from 0 with each tile, two instructions, and is then moved to float32, where the scale of its 64 keys of V comes in.  q.k
stays in the accumulator for all of a head's channels: of 512 it loses at most 16 x 17 x 2^-13 = 0.033 of its largest product,
beside 0.22 of it that rounding q and k to e4m3 may cost (`triton_eight_bit` has the derivation); moving it every 128 channels
would take 32 more registers and a fourth of the softmax's time.

Weights are taken against the maximum less 8 powers of two: so P is times 256 as it is made, the sum of the weights with it,
and the LSE needs no correction.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, valid-type, name-defined"
# The generator is written in TileLang's language, which has no types that mypy knows.

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import tilelang
import tilelang.language as T
from tilelang.layout import make_half_bank_swizzled_layout

from oracle.kernels.tilelang_families import KEYS, ROWS, Fp8Family

WARPGROUP = 128
PANEL = 128  # codes of a row that lie side by side in shared memory: 128 bytes, what a TMA box and a swizzle span
VALUES = 2  # warpgroups that multiply by V
UNIT = 8  # elements that the strides of out count in: 16 bytes
RAISED = 8.0  # log2 of what P is multiplied by before it is rounded
TINY = 2.0**-126  # a factor that underflows is this instead: -inf times it is still -inf
LN2 = 0.6931471805599453
bf16, f32, i32, e4m3 = "bfloat16", "float32", "int32", "float8_e4m3fn"


def pass_configs() -> dict[str, bool]:
    """TileLang's compiler options, the same ahead of time and just in time."""
    keys = tilelang.PassConfigKey
    return {
        keys.TL_ENABLE_FAST_MATH.value: True,  # exp2 is ex2.approx.ftz
        keys.TL_DISABLE_SAFE_MEMORY_ACCESS.value: True,  # the generator clamps what needs it
        keys.TL_DISABLE_THREAD_STORAGE_SYNC.value: True,  # what warpgroups hand each other waits at mbarriers
    }


def prefill(family: Fp8Family, page_size: int) -> Any:
    """The TileLang function of `family`, not compiled.  Codes have left their pages: `page_size` is that of a block, 64 keys."""
    assert page_size == KEYS
    f = family
    columns = f.head_dim // VALUES
    chunks = columns // f.chunk
    sizes = ("rows", "heads", "plan", "owners", "key_blocks", "k_rows", "v_rows", "out_row", "out_head")
    n = SimpleNamespace(**{name: T.dynamic(name) for name in sizes})
    copying, scoring, weighing = f.registers

    @T.macro
    def copy_k(s):
        """Orders K; in turns of two tiles, and then one more than there are, since the scores run one ahead."""
        for k in T.serial(s.loaded):
            slot = k % f.k_stages
            row = (s.own * s.key_blocks + s.first_tile + T.min(k, s.tiles - 1)) * KEYS
            T.barrier_wait(s.k_free[slot], ((k // f.k_stages) & 1) ^ 1)
            for u in [*range(0, f.head_dim, PANEL)]:
                T.tma_copy(
                    s.k[row : row + KEYS, u : u + PANEL],
                    s.k_tile[slot, :, u : u + PANEL],
                    barrier=s.k_full[slot],
                    leader_scope_threads=32,
                )
            T.barrier_arrive(s.k_full[slot])

    @T.macro
    def copy_v(s, part):
        for k in T.serial(s.tiles):
            slot = k % f.v_stages
            row, key = s.own * f.head_dim + part.first, (s.first_tile + k) * KEYS
            T.barrier_wait(part.v_free[slot], ((k // f.v_stages) & 1) ^ 1)
            T.tma_copy(
                s.v[row : row + columns, key : key + KEYS],
                part.v_tile[slot, :, :],
                barrier=part.v_full[slot],
                leader_scope_threads=32,
            )
            T.barrier_arrive(part.v_full[slot])

    @T.macro
    def multiply_k(s, scores, k):
        """Queues S = Q K^T of tile k, in codes."""
        T.barrier_wait(s.k_full[k % f.k_stages], (k // f.k_stages) & 1)
        T.wgmma_gemm(s.q_tile, s.k_tile[k % f.k_stages, :, :], scores, transpose_B=True, clear_accum=True)

    @T.macro
    def weigh(s, g, scores, k):
        """Scores of tile k to weights times 256; g.base follows the maximum, and g.fade is the factor of what came before."""
        k_scale = s.next_scale[0]
        s.next_scale[0] = s.k_scale[s.own, s.first_tile + T.min(k + 1, s.tiles - 1)]
        if T.Or(k < g.clear_from[0], k >= g.clear_to[0]):
            for i, j in T.Parallel(ROWS, KEYS):
                key = (s.first_tile + k) * KEYS + j
                at = s.position + i // f.group
                scores[i, j] = T.if_then_else(
                    T.And(key < T.min(at + s.right + 1, s.kv_len), key >= at - s.left), scores[i, j], -T.infinity(f32)
                )
        T.reduce_max(scores, g.largest, dim=1)
        for i in T.Parallel(ROWS):
            g.scale[i] = T.max(g.factor[i] * k_scale, TINY)
            g.fade[i] = g.base[i]
            g.base[i] = T.max(g.base[i], g.largest[i] * g.scale[i] - RAISED)
            g.shift[i] = T.if_then_else(g.base[i] == -T.infinity(f32), 0.0, g.base[i])
            g.fade[i] = T.exp2(g.fade[i] - g.shift[i])
        for i, j in T.Parallel(ROWS, KEYS):
            scores[i, j] = T.exp2(scores[i, j] * g.scale[i] - g.shift[i])

    @T.macro
    def hand_over(s, g, slot, turn):
        """Weights as codes and factors of a tile to shared memory, in a slot for the turn-th time."""
        T.barrier_wait(s.p_free[slot], (turn & 1) ^ 1)
        T.copy(g.weights, s.p_tile[slot, :, :])
        T.copy(g.fade, s.p_fade[slot, :])
        T.fence_proxy_async()
        T.barrier_arrive(s.p_full[slot])

    @T.macro
    def add_up(g, scores):
        """The weights, not rounded, into the running sum."""
        T.reduce_sum(scores, g.added, dim=1)
        for i in T.Parallel(ROWS):
            g.total[i] = g.total[i] * g.fade[i] + g.added[i]

    @T.macro
    def tile(s, g, k, slot, turn):
        """Tile k, whose scores are on their way; then those of tile k + 1 are, from before the softmax on if they run ahead."""
        T.wait_wgmma(0)
        T.barrier_arrive(s.k_free[k % f.k_stages])
        if f.ahead:
            multiply_k(s, g.scores[1 - slot], k + 1)
            weigh(s, g, g.scores[slot], k)
            T.copy(g.scores[slot], g.weights)
            hand_over(s, g, slot, turn)
            add_up(g, g.scores[slot])
        else:
            weigh(s, g, g.scores[0], k)
            T.copy(g.scores[0], g.weights)
            add_up(g, g.scores[0])
            multiply_k(s, g.scores[0], k + 1)
            hand_over(s, g, slot, turn)

    @T.macro
    def score(s, g):
        T.set_max_nreg(scoring, int(scoring > 128))
        for i, d in T.Parallel(ROWS, f.head_dim):
            s.q_tile[i, d] = s.q[s.start + T.min(i // f.group, s.tokens - 1), s.kv_head * f.group + i % f.group, d]
        for i in T.Parallel(ROWS):
            row = s.start + T.min(i // f.group, s.tokens - 1)
            g.factor[i] = s.q_scale[row, s.kv_head * f.group + i % f.group] * s.scale2
        T.fill(g.total, 0)
        T.fill(g.base, -T.infinity(f32))
        # Tiles whose keys every row sees: after the largest first key, before the smallest last one.
        g.clear_from[0] = T.ceildiv(s.position + f.tokens - 1 - s.left, KEYS) - s.first_tile
        g.clear_to[0] = T.min(s.position + s.right + 1, s.kv_len) // KEYS - s.first_tile
        s.next_scale[0] = s.k_scale[s.own, s.first_tile]
        T.fence_proxy_async()
        T.sync_threads(3, WARPGROUP)
        multiply_k(s, g.scores[0], 0)
        for turn in T.serial(s.tiles // 2):
            tile(s, g, 2 * turn, 0, turn)
            tile(s, g, 2 * turn + 1, 1, turn)
        T.wait_wgmma(0)
        if s.tiles % 2 == 1:
            weigh(s, g, g.scores[0], s.tiles - 1)
            T.copy(g.scores[0], g.weights)
            hand_over(s, g, 0, s.tiles // 2)
            add_up(g, g.scores[0])
        for i in T.Parallel(ROWS):
            g.fade[i] = T.if_then_else(g.total[i] > 0.0, 1.0 / g.total[i], 0.0)
        T.copy(g.fade, s.inverse)
        T.barrier_arrive(s.done[0])
        for i in T.Parallel(ROWS):
            if i // f.group < s.tokens:
                s.lse[s.start + i // f.group, s.kv_head * f.group + i % f.group] = T.if_then_else(
                    g.total[i] > 0.0, g.base[i] * LN2 + T.log(g.total[i]), -T.infinity(f32)
                )

    @T.macro
    def queue_v(s, part, k, c):
        """Queues P V of tile k for chunk c of the columns."""
        if f.held:
            T.wgmma_gemm(
                part.weights,
                part.v_tile[k % f.v_stages, c * f.chunk : (c + 1) * f.chunk, :],
                part.products[c % f.products],
                transpose_B=True,
                clear_accum=True,
            )
        else:
            T.wgmma_gemm(
                s.p_tile[k & 1, :, :],
                part.v_tile[k % f.v_stages, c * f.chunk : (c + 1) * f.chunk, :],
                part.products[c % f.products],
                transpose_B=True,
                clear_accum=True,
            )

    @T.macro
    def multiply_v(s, part, k):
        """O = O times the fade, plus P V of tile k times V's scale, chunk by chunk; what fades does so beside the product."""
        v_scale = s.next_scale[0]
        s.next_scale[0] = s.v_scale[s.own, s.first_tile + T.min(k + 1, s.tiles - 1)]
        T.barrier_wait(s.p_full[k & 1], (k >> 1) & 1)
        T.copy(s.p_fade[k & 1, :], part.fade)
        if f.held:
            T.copy(s.p_tile[k & 1, :, :], part.weights)
            T.barrier_arrive(s.p_free[k & 1])
        part.faded[0] = 0
        for i in T.Parallel(ROWS):
            part.faded[0] = T.if_then_else(part.fade[i] != 1.0, 1, part.faded[0])
        part.faded[0] = T.any_sync(part.faded[0])
        T.barrier_wait(part.v_full[k % f.v_stages], (k // f.v_stages) & 1)
        for c in [*range(f.products - 1)]:
            queue_v(s, part, k, c)
        for c in [*range(chunks)]:
            if c + f.products <= chunks:
                queue_v(s, part, k, c + f.products - 1)
            if part.faded[0] != 0:
                for i, d in T.Parallel(ROWS, f.chunk):
                    part.output[c][i, d] *= part.fade[i]
            T.wait_wgmma(min(f.products, chunks - c) - 1)
            for i, d in T.Parallel(ROWS, f.chunk):
                part.output[c][i, d] += part.products[c % f.products][i, d] * v_scale

    @T.macro
    def value(s, part):
        T.set_max_nreg(weighing, 1)
        for c in [*range(chunks)]:
            T.fill(part.output[c], 0)
        s.next_scale[0] = s.v_scale[s.own, s.first_tile]
        for k in T.serial(s.tiles):
            multiply_v(s, part, k)
            T.barrier_arrive(part.v_free[k % f.v_stages])
            if not f.held:
                T.barrier_arrive(s.p_free[k & 1])
        T.barrier_wait(s.done[0], 0)
        T.copy(s.inverse, part.fade)
        for c in [*range(chunks)]:
            for i, d in T.Parallel(ROWS, f.chunk):  # codes of a sequence without keys are whatever memory held
                part.output[c][i, d] = T.if_then_else(part.fade[i] > 0.0, part.output[c][i, d] * part.fade[i], 0.0)
            first = part.first + c * f.chunk
            for i, d in T.Parallel(ROWS, f.chunk):
                if i // f.group < s.tokens:
                    s.out[s.start + i // f.group, s.kv_head * f.group + i % f.group, first + d] = part.output[c][i, d]

    def shared():
        """Everything that the warpgroups of a thread block share."""
        pairs = {name: T.alloc_barrier([WARPGROUP]) for name in ("done",)}
        return {
            **pairs,
            "q_tile": T.alloc_shared([ROWS, f.head_dim], e4m3),
            "k_tile": T.alloc_shared([f.k_stages, KEYS, f.head_dim], e4m3),
            "k_full": T.alloc_barrier([32] * f.k_stages),
            "k_free": T.alloc_barrier([WARPGROUP] * f.k_stages),
            "p_tile": T.alloc_shared([2, ROWS, KEYS], e4m3),
            "p_fade": T.alloc_shared([2, ROWS], f32),
            "inverse": T.alloc_shared([ROWS], f32),
            "p_full": T.alloc_barrier([WARPGROUP] * 2),
            "p_free": T.alloc_barrier([WARPGROUP * VALUES] * 2),
            "next_scale": T.alloc_local([1], f32),
        }

    def scores():
        """What the scoring warpgroup has in registers."""
        names = ("largest", "base", "scale", "shift", "fade", "added", "total", "factor")
        return SimpleNamespace(
            **{name: T.alloc_fragment([ROWS], f32) for name in names},
            scores=[T.alloc_fragment([ROWS, KEYS], f32) for _ in range(2 if f.ahead else 1)],
            weights=T.alloc_fragment([ROWS, KEYS], e4m3),
            clear_from=T.alloc_local([1], i32),
            clear_to=T.alloc_local([1], i32),
        )

    def part(w):
        """What warpgroup w of those that multiply by V has."""
        return SimpleNamespace(
            first=w * columns,
            v_tile=T.alloc_shared([f.v_stages, columns, KEYS], e4m3),
            v_full=T.alloc_barrier([32] * f.v_stages),
            v_free=T.alloc_barrier([WARPGROUP] * f.v_stages),
            output=[T.alloc_fragment([ROWS, f.chunk], f32) for _ in range(chunks)],
            products=[T.alloc_fragment([ROWS, f.chunk], f32) for _ in range(f.products)],
            weights=T.alloc_fragment([ROWS, KEYS], e4m3),
            fade=T.alloc_fragment([ROWS], f32),
            faded=T.alloc_local([1], i32),
        )

    @T.prim_func
    def main(
        q: T.Tensor([n.rows, n.heads, f.head_dim], e4m3),
        q_scale: T.Tensor([n.rows, n.heads], f32),
        k: T.Tensor([n.k_rows, f.head_dim], e4m3),
        k_scale: T.Tensor([n.owners, n.key_blocks], f32),
        v: T.Tensor([n.v_rows, n.key_blocks * KEYS], e4m3),
        v_scale: T.Tensor([n.owners, n.key_blocks], f32),
        out: T.StridedTensor([n.rows, n.heads, f.head_dim], [n.out_row * UNIT, n.out_head * UNIT, 1], bf16),
        lse: T.Tensor([n.rows, n.heads], f32),
        cu: T.Tensor([n.plan + 1], i32),
        used: T.Tensor([n.plan], i32),
        blocks: T.int32,
        kv_heads: T.int32,
        seqs: T.int32,
        steps: T.int32,
        left: T.int32,
        right: T.int32,
        scale2: T.float32,
        out_row: n.out_row,
        out_head: n.out_head,
    ):
        with T.Kernel(blocks, kv_heads, threads=(VALUES + 2) * WARPGROUP) as (bx, by):
            s = shared()
            T.annotate_layout({s["p_tile"]: make_half_bank_swizzled_layout(s["p_tile"])})  # what wgmma reads, and no conflicts
            g = scores()
            parts = [part(w) for w in range(VALUES)]
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
                first_tile = T.alloc_var(i32, init=T.max(position - left, 0) // KEYS)
                tiles = T.alloc_var(i32, init=T.ceildiv(T.min(position + tokens + right, kv_len), KEYS))
                tiles = T.max(tiles - first_tile, 1)
                own = T.alloc_var(i32, init=seq * kv_heads + by)
                x = SimpleNamespace(
                    **s, q=q, q_scale=q_scale, k=k, k_scale=k_scale, v=v, v_scale=v_scale, out=out, lse=lse, kv_head=by, own=own,
                    start=start, tokens=tokens, position=position, kv_len=kv_len, left=left, right=right, scale2=scale2,
                    first_tile=first_tile, tiles=tiles, loaded=tiles // 2 * 2 + 1, key_blocks=n.key_blocks,
                )  # fmt: skip
                thread = T.get_thread_binding()
                if thread < WARPGROUP:
                    score(x, g)
                else:
                    if thread < 2 * WARPGROUP:
                        value(x, parts[0])
                    else:
                        if thread < 3 * WARPGROUP:
                            value(x, parts[1])
                        else:
                            T.set_max_nreg(copying, 0)
                            if thread < 3 * WARPGROUP + 32:
                                copy_k(x)
                            else:
                                if thread < 3 * WARPGROUP + 64:
                                    copy_v(x, parts[0])
                                else:
                                    if thread < 3 * WARPGROUP + 96:
                                        copy_v(x, parts[1])

    return main
