"""What a kernel has declared: every reason to leave a case out, and none besides."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from oracle.cases import SCALES, Case
from oracle.contract import OPTIONAL, Precision, Record
from oracle.families import FAMILIES, Family
from oracle.scope import Scope

drawn = settings(derandomize=True, deadline=None, database=None, max_examples=100)

PLAIN = Case(name="c", family=replace(FAMILIES["llama3"], q_heads=8), q_lens=(1,), kv_lens=(3,))
DEFAULT = Scope(record=Record(), parameters=frozenset(OPTIONAL))


def scope(without: str = "", extras: frozenset[str] = frozenset(), **record: Any) -> Scope:
    """All keyword arguments but one, and a record."""
    return Scope(record=Record(**record), parameters=frozenset(OPTIONAL) - {without}, extras=extras)


def family(**changes: Any) -> dict[str, Family]:
    return {"family": replace(PLAIN.family, **changes)}


REFUSALS: list[tuple[Scope, dict[str, Any], str]] = [
    (scope(without="causal"), family(causal=False), "no causal"),
    (scope(without="window_size"), family(window=(127, 0)), "no window_size"),
    (scope(without="window_size"), family(window=(-1, 10)), "no window_size"),
    (scope(without="softcap"), family(softcap=30.0), "no softcap"),
    (scope(without="sinks"), {"sinks": "below"}, "no sinks"),
    *((scope(without=name), {"scales": "per-head"}, f"no {name}") for name in ("q_scale", "k_scale", "v_scale")),
    *((scope(without=name), {"scales": "kv-scalar"}, f"no {name}") for name in ("k_scale", "v_scale")),
    (scope(without="num_seqs"), {"padded_seqs": 1}, "no num_seqs"),
    (scope(), {"dtype": "fp32"}, "no fp32"),
    (scope(dtypes=("fp16",)), {}, "no bf16"),
    (scope(without="k_scale"), {"cache_dtype": "e4m3"}, "no e4m3 cache"),
    (scope(without="v_scale"), {"cache_dtype": "e4m3"}, "no e4m3 cache"),
    (scope(page_sizes=(16,)), {"cache_dtype": "e4m3"}, "no e4m3 cache"),
    (scope(), family(head_dim=72, head_dim_v=72), "no head dim 72"),
    (scope(), family(head_dim=192), "no head dims 192/128"),
    (scope(uneven_head_dims=((192, 128),)), family(head_dim=128, head_dim_v=192), "no head dims 128/192"),
    (scope(), {"page_size": 32}, "no page size 32"),
    (scope(groups=(4, 8)), {}, "no group of 1"),
    (scope(precision=Precision(flush_to_zero=True)), {"inputs": "tiny-v"}, "no promise for tiny-v"),
    (scope(), {"inputs": "logits-1e36"}, "no promise for logits-1e36"),
    (scope(), {"inputs": "shared-kv"}, "shared-kv inputs are for kernels that ask for k_norm_weight"),
    (scope(extras=frozenset({"k_norm_weight"})), {}, "no k_norm_weight in this input class"),
    (scope(extras=frozenset({"alibi"})), {"inputs": "shared-kv"}, "no alibi in this input class"),
]


@pytest.mark.parametrize(("one", "changes", "reason"), REFUSALS, ids=[f"{i}: {r[2]}" for i, r in enumerate(REFUSALS)])
def test_a_case_that_needs_what_is_not_declared_is_refused_with_its_reason(
    one: Scope, changes: dict[str, Any], reason: str
) -> None:
    assert one.refuses(replace(PLAIN, **changes)) == reason


TAKEN: list[tuple[Scope, dict[str, Any]]] = [
    (DEFAULT, {}),
    (scope(without="causal"), {}),
    (scope(without="window_size"), family(softcap=30.0)),
    (scope(without="q_scale"), {"scales": "kv-per-sequence"}),
    (scope(without="out"), {"give_out": True}),
    (scope(without="return_lse"), {}),
    (DEFAULT, {"cache_dtype": "e4m3", "scales": "kv-scalar"}),
    (scope(cache_dtypes=("e4m3",), page_sizes=(16,)), {"cache_dtype": "e4m3"}),
    (scope(uneven_head_dims=((192, 128),)), family(head_dim=192)),
    (scope(groups=(1,)), {}),
    (DEFAULT, {"inputs": "tiny-v"}),
    (scope(precision=Precision(subtract_first=True)), {"inputs": "logits-1e36"}),
    (scope(extras=frozenset({"k_norm_weight"})), {"inputs": "shared-kv"}),
]


@pytest.mark.parametrize(("one", "changes"), TAKEN, ids=map(str, range(len(TAKEN))))
def test_what_is_declared_is_not_refused(one: Scope, changes: dict[str, Any]) -> None:
    assert one.refuses(replace(PLAIN, **changes)) is None


def test_a_kernel_without_any_option_takes_a_plain_causal_case() -> None:
    assert Scope(record=Record(), parameters=frozenset()).refuses(PLAIN) is None


def test_scales_make_a_plain_kernel_one_of_8_bit_caches() -> None:
    """One that takes k_scale and v_scale and has no record; a record says it itself."""
    assert DEFAULT.cache_dtypes == ("e4m3",)
    assert scope(without="k_scale").cache_dtypes == ()
    assert scope(dtypes=("bf16",)).cache_dtypes == ()
    assert scope(cache_dtypes=("e4m3",), dtypes=("bf16",), without="k_scale").cache_dtypes == ("e4m3",)


@drawn
@given(
    st.sets(st.sampled_from(OPTIONAL)), st.sets(st.sampled_from(OPTIONAL)), st.booleans(), st.sampled_from((0.0, 30.0)),
    st.sampled_from(((-1, -1), (20, 0))), st.sampled_from(SCALES), st.sampled_from(("none", "small")), st.integers(0, 1),
)  # fmt: skip
def test_a_kernel_that_takes_more_refuses_no_more(
    few: set[str], more: set[str], causal: bool, softcap: float, window: tuple[int, int], scales: str, sinks: str, padded: int
) -> None:
    """Naming an argument never shrinks what is judged, and what is refused names an argument that is not taken."""
    options: dict[str, Any] = {"scales": scales, "sinks": sinks, "padded_seqs": padded}
    options |= family(causal=causal, softcap=softcap, window=window)
    case = replace(PLAIN, **options)
    refused = Scope(record=Record(), parameters=frozenset(few)).refuses(case)
    again = Scope(record=Record(), parameters=frozenset(few | more)).refuses(case)

    assert again is None or refused is not None
    assert refused is None or refused.removeprefix("no ") not in few
