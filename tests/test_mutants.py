"""The mutants: each kind of public report has some, each of them is active somewhere, and each is correct but for its fault."""

from __future__ import annotations

import inspect
import re
from dataclasses import dataclass, fields, replace
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor

from oracle.cases import Case
from oracle.contract import OPTIONAL, REQUIRED, Call, Record
from oracle.families import Family
from oracle.material import material
from oracle.mutants import table
from oracle.mutants.mutant import Faulty, Run, chosen_pairs, remember
from oracle.mutants.planted import FAULTS
from oracle.mutants.reports import REPORTS
from oracle.mutants.selectors import never
from oracle.mutants.table import EQUIVALENT, MUTANTS, NOT_APPLICABLE
from oracle.pool import Fill, Laid, lay_out
from oracle.references.arithmetic import Arithmetic
from oracle.references.emulator import emulate, record_of
from oracle.references.plan import live_rows, row_plan
from oracle.verdict import Reason

Lengths = tuple[tuple[int, ...], tuple[int, ...]]
MIXED: Lengths = ((1, 0, 33, 1, 0, 17, 1, 2), (200, 5, 50, 0, 0, 17, 64, 1))
CHUNKS: Lengths = ((5, 1, 20, 3), (150, 97, 300, 3))
SHORT: Lengths = ((20, 9, 16, 1), (12, 9, 16, 3))
LONG: Lengths = ((1, 5), (4_112, 5_003))


def a_case(
    lengths: Lengths,
    *,
    heads: tuple[int, int] = (4, 2),
    dims: tuple[int, int] = (64, 64),
    window: tuple[int, int] = (-1, -1),
    scale: float | None = None,
    causal: bool = True,
    softcap: float = 0.0,
    **options: Any,
) -> Case:
    family = Family(
        name="directed",
        q_heads=heads[0],
        kv_heads=heads[1],
        head_dim=dims[0],
        head_dim_v=dims[1],
        scale=dims[0] ** -0.5 if scale is None else scale,
        causal=causal,
        window=window,
        softcap=softcap,
        sinks=options.get("sinks", "none") != "none",
    )
    q_lens, kv_lens = lengths
    return Case(name="directed", family=family, q_lens=q_lens, kv_lens=kv_lens, seed=7, **options)


EXACT: Lengths = ((64, 16, 1, 1, 1, 4, 2), (70, 16, 256, 16, 5, 100, 2))


def decode(batch: int) -> Lengths:
    return (1,) * batch, tuple(1 + 37 * i % 90 for i in range(batch))


CASES: dict[str, Case] = {
    "mixed": a_case(MIXED, layout="strided", padded_seqs=3),
    "chunks": a_case(CHUNKS, inputs="peaked"),
    "everything": a_case(
        CHUNKS, window=(20, 0), softcap=5.0, sinks="small", scales="per-sequence", layout="hnd", inputs="peaked", dtype="fp16"
    ),
    "8-bit": a_case(CHUNKS, cache_dtype="e4m3", scales="per-sequence", layout="kv-in-page", sinks="dominant", heads=(6, 3)),
    "8-bit-hnd": a_case(CHUNKS, cache_dtype="e4m3", scales="kv-per-head", layout="hnd", window=(20, 0)),
    "short": a_case(SHORT, heads=(5, 1), dims=(80, 80), sinks="small"),
    "two-sided": a_case(CHUNKS, window=(30, 10), causal=False, heads=(16, 1)),
    "left-only": a_case(CHUNKS, window=(20, -1), causal=False, scale=1.0, inputs="flat"),
    "right-only": a_case(CHUNKS, window=(-1, 10), causal=False),
    "not-causal": a_case(MIXED, causal=False, dims=(256, 256), heads=(2, 1)),
    "decode-70": a_case(decode(70), window=(20, 0), sinks="small"),
    "decode-256": a_case(decode(20), dims=(256, 256), padded_seqs=3),
    "prefill": a_case(((300,), (340,)), window=(70, 0), page_size=64, scales="per-head"),
    "decode-100": a_case(decode(100), heads=(1, 1)),
    "many-heads": a_case(((3, 2), (70, 90)), heads=(72, 6)),
    "wide-512": a_case(((3, 1), (70, 97)), dims=(512, 512), heads=(2, 1), sinks="small"),
    "192/128": a_case(((3, 1), (70, 90)), dims=(192, 128), heads=(2, 1)),
    "64/128": a_case(((3, 1), (70, 90)), dims=(64, 128), heads=(2, 1)),
    "page-1": a_case(CHUNKS, page_size=1),
    "page-8": a_case(CHUNKS, page_size=8),
    "page-64": a_case(CHUNKS, page_size=64),
    "page-128": a_case(((1,), (400,)), page_size=128),
    "exact": a_case(EXACT, sinks="small", dtype="fp16"),
    "softcaps": a_case(CHUNKS, softcap=0.7),
    "decode-130": a_case(decode(130), heads=(1, 1)),
    "decode-32": a_case(decode(32), heads=(1, 1), page_size=64, dtype="fp16", sinks="small", give_out=False, window=(9, 0)),
    "fp32": a_case(CHUNKS, dtype="fp32"),
    "wide-window": a_case(CHUNKS, window=(40_000, 0)),
    "8-bit-everything": a_case(
        CHUNKS,
        cache_dtype="e4m3",
        scales="per-sequence",
        padded_seqs=2,
        softcap=5.0,
        window=(20, 0),
        inputs="peaked",
        heads=(6, 2),
    ),
    "encoder-everything": a_case(CHUNKS, causal=False, softcap=5.0, sinks="small"),
    "80-fp16": a_case(CHUNKS, dims=(80, 80), dtype="fp16", scales="per-sequence", sinks="small", padded_seqs=2),
    "logits-3e3": a_case(CHUNKS, inputs="logits-3e3", dims=(96, 96)),
    "logits-3e3-fp16": a_case(CHUNKS, inputs="logits-3e3", dims=(512, 512), dtype="fp16", heads=(2, 1)),
    "logits-x10": a_case(CHUNKS, inputs="x10"),
    "shifted-down": a_case(CHUNKS, inputs="shifted-down"),
    "constant-v": a_case(CHUNKS, inputs="constant-v"),
    "four-heads": a_case(CHUNKS, heads=(4, 4), dtype="fp16"),
    "group-12": a_case(CHUNKS, heads=(12, 2)),
    "group-16": a_case(CHUNKS, heads=(32, 2)),
    "one-kv-head": a_case(CHUNKS, heads=(4, 1), scales="per-head"),
    "chunks-hnd": a_case(CHUNKS, layout="hnd"),
    "twice-the-scale": a_case(CHUNKS, scale=0.25),
    "chunks-capped": a_case(CHUNKS, softcap=5.0),
    "fp16-256": a_case(CHUNKS, dims=(256, 256), heads=(2, 1), dtype="fp16"),
    "keys-256": a_case(((1, 4), (256, 512)), window=(3, 0)),
    "long": a_case(LONG, heads=(4, 1), window=(4_090, 0), sinks="dominant", softcap=30.0),
    "long-wide-pages": a_case(((5,), (5_003,)), heads=(1, 1), page_size=256),
    "long-8-bit-window": a_case(LONG, heads=(1, 1), cache_dtype="e4m3", window=(100, 0)),
    "long-64": a_case(LONG, heads=(1, 1), page_size=64, window=(300, 0)),
    "long-64-full": a_case(LONG, heads=(1, 1), page_size=64),
    "long-512": a_case(((1,), (4_100,)), heads=(1, 1), dims=(512, 512)),
    "long-8-bit": a_case(LONG, heads=(4, 1), cache_dtype="e4m3", scales="kv-per-sequence"),
    "long-wide-window": a_case(((5,), (1_200,)), window=(1_000, -1), causal=False),
    "flat": a_case(((5,), (300,)), heads=(2, 1), inputs="flat"),
    "17k": a_case(((1,), (17_000,)), heads=(1, 1), inputs="offset-v"),
    "17k-flat": a_case(((1,), (17_000,)), heads=(1, 1), inputs="flat"),
    "33k": a_case(((1,), (33_001,)), heads=(1, 1)),
    "66k": a_case(((1,), (65_600,)), heads=(1, 1)),
}
SHORT_CASES = tuple(name for name, case in CASES.items() if max(case.kv_lens) <= 4_096)


@dataclass(frozen=True, slots=True)
class Step:
    """A call ready to be made, and its canaries."""

    call: Call
    laid: Laid | None
    buffer: Tensor | None  # what the storage of `out` held


@cache
def steps(name: str) -> tuple[Step, ...]:
    """Calls of one directed case: stale data past the plan, NaN on other pages, and the same shapes with other data."""
    case = CASES[name]
    twin = replace(case, seed=case.seed + 1, q_lens=case.q_lens[::-1], kv_lens=case.kv_lens[::-1])
    long = max(case.kv_lens) > 4_096
    several = [(case, Fill.STALE, 0), (case, Fill.NAN, 1), (twin, Fill.LARGE, 2), (case, Fill.NEG_INF, 4)]
    chosen = [(case, Fill.NAN, 1)] if long else several
    return tuple(_step(lay_out(c, material(c), fill=fill, salt=salt)) for c, fill, salt in chosen)


def _step(laid: Laid) -> Step:
    out = laid.call.out
    return Step(laid.call, laid, None if out is None else bytes_of(out).clone())


def bytes_of(x: Tensor) -> Tensor:
    """The storage of a tensor, uint8."""
    return torch.empty(0, dtype=torch.uint8).set_(x.untyped_storage())


def far_pages() -> tuple[Step, ...]:
    """Page ids beyond 2^16 in a pool of more than 2^31 elements, of which only the live pages are ever touched."""
    size, heads, dim = 16, 1, 64
    ids = torch.tensor([[66_000, 40_000, 70_100], [3, 66_001, 35_000]], dtype=torch.int32)
    stride = 32_768
    pool = torch.empty(70_200 * stride, dtype=torch.bfloat16)
    strides = (stride, heads * dim, dim, 1)
    k_cache = pool.as_strided((70_200, size, heads, dim), strides)
    v_cache = pool.as_strided((70_200, size, heads, dim), strides, size * heads * dim)
    generator = torch.Generator().manual_seed(3)
    for page in ids.flatten().tolist():
        k_cache[page] = torch.randn(size, heads, dim, generator=generator).bfloat16()
        v_cache[page] = torch.randn(size, heads, dim, generator=generator).bfloat16()
    call = Call(
        q=torch.randn(4, 2, dim, generator=generator).bfloat16(),
        k_cache=k_cache,
        v_cache=v_cache,
        cu_seqlens_q=torch.tensor([0, 3, 4], dtype=torch.int32),
        seqused_k=torch.tensor([41, 48], dtype=torch.int32),
        page_table=ids,
        softmax_scale=0.125,
    )
    return (Step(call, None, None),)


def shared_prefix() -> tuple[Step, ...]:
    """Two sequences whose first page is the same page."""
    call = steps("chunks")[0].call
    table = call.page_table.clone()
    table[2, 0] = table[0, 0]
    return (Step(replace(call, page_table=table, out=None), None, None),)


HANDMADE = {"far-pages": far_pages, "shared-prefix": shared_prefix}
SHOWS: dict[str, tuple[str, ...]] = {  # mutant -> the directed cases that it shows in, where few do
    "v_tail_long_only": ("long",),
    "page_256_middle_lost": ("long-wide-pages",),
    "page_64_of_table": ("long",),
    "page_256_of_table": ("long",),
    "page_ids_to_127": ("long",),
    "page_ids_15_bit": ("far-pages",),
    "page_ids_16_bit": ("far-pages",),
    "page_ids_window_of_16_bit": ("far-pages",),
    "page_offset_int32": ("far-pages",),
    "page_offset_24_bit": ("far-pages",),
    "pool_size_int32": ("far-pages",),
    "mask_column_int16": ("33k",),
    "kv_bound_wraps": ("33k",),
    "keys_past_65536_lost": ("66k",),
    "cascade_of_shared_prefix": ("shared-prefix",),
    "strides_of_first_call": ("chunks", "chunks-hnd"),
    "stale_softcap": ("chunks", "chunks-capped"),
    "window_two_sided_long_nan": ("long-wide-window",),
    "window_minus_one_long": ("long",),
    "softcap_dropped_long": ("long",),
    "sinks_dropped_long": ("long",),
    "split_key_lost_long": ("long",),
    "rescale_flushed": ("long-8-bit",),
    "row_sum_stops_at_2048": ("17k-flat",),
    "row_sum_bf16_long": ("17k-flat",),
    "pv_fp22_8_bit_long": ("long-8-bit",),
    "pv_overflows_fp16": ("17k",),
    "p_saturates_lazily_long": ("17k",),
    "int8_above_16k": ("17k",),
    "short_query_long_keys": ("long-8-bit",),
    "constant_value_nan": ("constant-v",),
    "maximum_rounded": ("logits-3e3",),
    "sentinel_maximum": ("logits-3e3", "logits-3e3-fp16"),
    "sentinel_one_key": ("logits-3e3", "logits-3e3-fp16"),
    "scores_in_fp16": ("logits-3e3-fp16",),
    "phi_fp16_range": ("logits-3e3-fp16",),
    "maximum_fixed_at_10": ("logits-x10",),
    "pv_in_fp16_range": ("logits-x10",),
    "lse_not_shifted": ("shifted-down",),
    "window_over_1000_ignored": ("long-wide-window",),
    "dims_to_256": ("wide-512",),
    "scale_from_value_dim": ("192/128", "64/128"),
    "key_tile_edge_off_by_one": ("prefill",),
    "q_scale_missing_one_kv_head": ("one-kv-head",),
    "wrong_above_2048_8_bit": ("long-8-bit",),
    "window_starts_late_beyond_4096": ("long-64",),
    "window_long_8_bit": ("long-8-bit-window",),
    "window_sinks_long": ("long",),
    "page_64_long_stale": ("long-64-full",),
    "wide_heads_long": ("long-512",),
    "columns_permuted_fp16_256": ("fp16-256",),
    "grid_of_rows": ("prefill",),
    "window_no_left_is_zero": ("right-only",),
    "stale_scale": ("chunks", "twice-the-scale"),
    "softcap_truncated": ("softcaps",),
    "softcap_below_one_off": ("softcaps",),
    "window_int16": ("wide-window",),
    "wide_group_last_head": ("group-16",),
    "batch_over_128": ("decode-130",),
    "batch_of_16_32_64": ("decode-32",),
}


@cache
def directed(name: str) -> tuple[Step, ...]:
    """The calls of one directed case, drawn or made by hand."""
    return HANDMADE[name]() if name in HANDMADE else steps(name)


@cache
def correct(name: str, index: int, arithmetic: Arithmetic) -> tuple[Tensor, Tensor]:
    """What the correct kernel gives at a call of a directed case."""
    return emulate(directed(name)[index].call, arithmetic)


def run_of(kernel: Faulty, call: Call) -> Run:
    return Run(call=call, plan=row_plan(call, live_rows(call)), past=kernel.past)


def differs(kernel: Faulty, name: str, index: int, *, want_lse: bool = True) -> bool:
    """The kernel's output, LSE, canaries or arguments are not those of a correct kernel at that call; all is put back."""
    step = directed(name)[index]
    call = step.call
    wanted = correct(name, index, kernel.mutant.claims)
    arguments = {
        f.name: x.clone() for f in fields(call) if isinstance(x := getattr(call, f.name), Tensor) and x.numel() < 1 << 24
    }
    live = len(wanted[0])
    result = kernel(call, want_lse)
    pairs = zip(result if isinstance(result, tuple) else (result,), wanted, strict=False)
    found = not all(same_bits(got[:live], rows) for got, rows in pairs)
    if call.out is not None and step.laid is not None and step.buffer is not None:
        found |= step.laid.canaries_broken(bytes_of(call.out)) > 0
        bytes_of(call.out).copy_(step.buffer)
    for argument, before in arguments.items():
        now = getattr(call, argument)
        if argument != "out" and not same_bits(now, before):
            found = True
            now.copy_(before)
    return found


def same_bits(a: Tensor, b: Tensor) -> bool:
    return torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))


def active(name: str) -> bool:
    """The mutant differs from a correct kernel in a directed case, one kernel object for all of them.

    A call in which the fault strikes no pair is not computed: it would give the correct result.
    """
    kernel, want_lse = Faulty(MUTANTS[name]), not name.startswith("without_lse")
    for case in SHOWS.get(name, SHORT_CASES):
        for index, step in enumerate(directed(case)):
            if not bool(chosen_pairs(kernel.mutant, replace(run_of(kernel, step.call), want_lse=want_lse)).any()):
                remember(kernel.past, step.call, correct(case, index, kernel.mutant.claims))
            elif differs(kernel, case, index, want_lse=want_lse):
                return True
    return False


@pytest.mark.parametrize("name", [name for name in MUTANTS if name != "grid_over_65535"])
def test_every_mutant_is_active_somewhere(name: str) -> None:
    assert active(name)


def test_a_batch_beyond_65535_is_not_written() -> None:
    """The one fault whose call takes seconds: its selector and its writing by themselves."""
    mutant = MUTANTS["grid_over_65535"]
    for batch in (65_535, 65_536):
        call = Call(
            q=torch.zeros(batch, 1, 1),
            k_cache=torch.zeros(1, 1, 1, 1),
            v_cache=torch.zeros(1, 1, 1, 1),
            cu_seqlens_q=torch.arange(batch + 1, dtype=torch.int32),
            seqused_k=torch.ones(batch, dtype=torch.int32),
            page_table=torch.zeros(batch, 1, dtype=torch.int32),
            softmax_scale=1.0,
        )
        run = run_of(Faulty(mutant), call)
        chosen = chosen_pairs(mutant, run)
        buffers = torch.ones(batch, 1, 1), torch.ones(batch, 1)

        assert mutant.write is not None
        mutant.write(run, chosen, (torch.zeros(batch, 1, 1), torch.zeros(batch, 1)), buffers)
        assert bool(chosen.all()) == (batch == 65_536) == bool(buffers[0].all()) == bool(buffers[1].all())


@pytest.mark.parametrize("name", list(MUTANTS))
def test_a_mutant_that_strikes_nowhere_is_the_correct_kernel(name: str) -> None:
    """Bit for bit, canaries and arguments included, in a first call and in a later one."""
    kernel = Faulty(replace(MUTANTS[name], where=never))

    assert not differs(kernel, "mixed", 0)
    assert not differs(kernel, "mixed", 1)


def test_every_kind_of_report_has_a_mutant_or_a_reason() -> None:
    kinds = {report.partition("-")[0] for report in REPORTS}

    assert len(kinds) == 29
    assert {m.kind for m in MUTANTS.values()} == kinds - set(NOT_APPLICABLE)
    assert len(MUTANTS) >= 120


def test_every_report_is_modelled_or_has_a_reason() -> None:
    modelled = {m.report for m in MUTANTS.values()}
    explained = {report for report in REPORTS if report in NOT_APPLICABLE or report.partition("-")[0] in NOT_APPLICABLE}

    assert modelled | explained == set(REPORTS) and not modelled & explained
    assert {name for name in NOT_APPLICABLE if "-" in name} <= set(REPORTS)
    assert all(NOT_APPLICABLE.values()) and all(EQUIVALENT.values())


def test_every_reference_names_a_project_and_a_thread() -> None:
    for report, reference in REPORTS.items():
        assert re.fullmatch(r"[A-Z]{4}-\d\d", report)
        assert re.fullmatch(r"[\w.-]+/[\w.-]+ (issue|PR) #[1-9]\d*", reference), reference


def test_a_mutant_says_what_it_is_and_what_counts_as_understood() -> None:
    for name, mutant in MUTANTS.items():
        assert mutant.reference == REPORTS[mutant.report]
        assert mutant.models and mutant.reasons and set(mutant.reasons) <= set(Reason), name
        assert re.fullmatch(r"[a-z][a-z0-9_]*", name)


def test_a_mutant_is_a_kernel_with_the_record_that_it_claims() -> None:
    """The default record but where the fault needs another, and the contract's whole signature."""
    batches = {Record(batch_invariant=True), Record(batch_invariant=True, thresholds=(32,))}
    kernel = table.window_ignored

    assert kernel.record == Record()
    assert set(inspect.signature(kernel).parameters) == {"q", "k_cache", "v_cache", *REQUIRED, *OPTIONAL}
    assert {m.record for m in MUTANTS.values()} == {
        Record(),
        record_of(Arithmetic()),
        *batches,
        *(m.record for m in FAULTS.values()),
    }


def test_an_unknown_mutant_is_an_attribute_error_that_lists_them() -> None:
    with pytest.raises(AttributeError, match=r"no fault 'none'; it has window_plus_1, "):
        _ = table.none
