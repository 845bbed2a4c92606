"""FLOPs and bytes of a case are those of its live pairs, and nothing is timed on numbers that are not random."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from oracle.bench_case import batch_shape, calls_of, check_random, grid, work_of
from oracle.cases import Case
from oracle.errors import InputError


def case_of(family: str, shape: str, context: int, page_size: int = 16) -> Case:
    (found,) = grid((family,), (context,), (shape,), dtype="bf16", page_size=page_size, seed=0)
    return found


def test_shapes_are_read() -> None:
    assert batch_shape("1x512") == (512,)
    assert batch_shape("2x3+3x1") == (3, 3, 1, 1, 1)


@pytest.mark.parametrize("text", ["", "8", "0x8", "8x0", "1x8+", "x8", "1x8,2x8"])
def test_other_shapes_are_refused(text: str) -> None:
    with pytest.raises(InputError, match="SEQUENCESxROWS"):
        batch_shape(text)


def test_the_grid_has_every_combination_once() -> None:
    cases = list(grid(("llama3", "mqa"), (64, 0), ("1x8", "2x1"), dtype="bf16", page_size=16, seed=0))

    assert len({case.name for case in cases}) == len({case.seed for case in cases}) == 8
    assert [case.kv_lens for case in cases[:4]] == [(8,), (72,), (1, 1), (65, 65)]
    with pytest.raises(InputError, match="family 'nothing' is unknown"):
        list(grid(("nothing",), (0,), ("1x8",), dtype="bf16", page_size=16, seed=0))


@pytest.mark.parametrize(
    ("family", "shape", "context"),
    [("llama3", "1x20", 0), ("llama3", "3x5+1x20", 33), ("gpt-oss-sliding", "1x40", 150), ("encoder", "2x9", 12)],
)
def test_flops_count_the_pairs_that_a_row_sees(family: str, shape: str, context: int) -> None:
    """Against a mask written out pair by pair."""
    case = case_of(family, shape, context)
    f, (call,) = case.family, calls_of(case, "cpu", 1)
    pairs, seen = 0, 0
    for q_len, kv_len in zip(case.q_lens, case.kv_lens, strict=True):
        pos, key = (kv_len - q_len + torch.arange(q_len))[:, None], torch.arange(kv_len)
        mask = (key <= pos) if f.causal else torch.ones(q_len, kv_len, dtype=torch.bool)
        mask &= (key >= pos - f.window[0]) if f.window[0] >= 0 else True
        pairs, seen = pairs + int(mask.sum()), seen + int(mask.any(0).sum())
    pages = sum(-(-n // 16) for n in case.kv_lens)
    dims = f.head_dim + f.head_dim_v

    work = work_of(call)

    assert work.flops == 2 * pairs * f.q_heads * dims
    assert work.nbytes == 2 * dims * (case.total_q * f.q_heads + seen * f.kv_heads) + 4 * pages


def test_calls_have_pages_of_their_own_and_the_same_bits_again() -> None:
    case = case_of("llama3", "2x5", 40)
    one, two = calls_of(case, "cpu", 2)
    (again,) = calls_of(case, "cpu", 1)
    live = [one.page_table[i, : -(-n // 16)] for i, n in enumerate(case.kv_lens)]

    assert len(torch.unique(torch.cat(live))) == sum(map(len, live))
    assert not torch.equal(one.q, two.q) and one.k_cache.data_ptr() != two.k_cache.data_ptr()
    assert torch.equal(one.q, again.q) and torch.equal(one.k_cache, again.k_cache)


def test_logits_have_a_deviation_of_one_in_every_family() -> None:
    for family in ("gemma4-global", "llama3"):
        case = case_of(family, "1x8", 248)
        (call,) = calls_of(case, "cpu", 1)
        k = call.k_cache.flatten(0, 1)[:256, 0].float()
        logits = case.family.scale * call.q[:, 0].float() @ k.T

        assert 0.8 < float(logits.std()) < 1.2


@pytest.mark.parametrize("name", ["q", "k_cache", "v_cache"])
@pytest.mark.parametrize("value", [0.0, 0.5, float("nan"), float("inf")])
def test_zeros_constants_and_what_is_not_finite_are_refused(name: str, value: float) -> None:
    """In one head alone as well."""
    (call,) = calls_of(case_of("llama3", "1x8", 8), "cpu", 1)
    check_random("a case", call)
    whole: dict[str, Any] = {name: torch.full_like(getattr(call, name), value)}
    head: dict[str, Any] = {name: getattr(call, name).clone()}
    head[name].select(1 if name == "q" else 2, 3).fill_(value)

    for bad in (replace(call, **whole), replace(call, **head)):
        with pytest.raises(InputError, match=f"a case: {name} of head .* expected random finite numbers"):
            check_random("a case", bad)
