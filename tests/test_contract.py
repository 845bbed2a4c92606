"""A function of a call becomes a kernel of the contract."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch

from oracle.contract import OPTIONAL, REQUIRED, SCALES, Answer, Call, Record, contract_kernel
from oracle.isolation.worker import describe

PLAN: dict[str, Any] = {
    "cu_seqlens_q": torch.tensor([0, 1], dtype=torch.int32),
    "seqused_k": torch.ones(1, dtype=torch.int32),
    "page_table": torch.zeros(1, 1, dtype=torch.int32),
    "softmax_scale": 1.0,
}
Q, CACHE = torch.zeros(1, 1, 8), torch.zeros(1, 1, 1, 8)


def echo(call: Call, return_lse: bool) -> Answer:
    """What it was called with."""
    seen.append((call, return_lse))
    return call.q


seen: list[tuple[Call, bool]] = []
whole = contract_kernel(Record(page_sizes=(1,)))(echo)
narrow = contract_kernel(lacks=("softcap", *SCALES), extras=("weight",), name="narrow")(echo)


def test_the_signature_is_the_contracts_without_what_is_lacking_and_with_the_extras() -> None:
    assert list(inspect.signature(whole).parameters) == ["q", "k_cache", "v_cache", *REQUIRED, *OPTIONAL]
    left = [name for name in OPTIONAL if name not in ("softcap", *SCALES)]
    assert list(inspect.signature(narrow).parameters) == ["q", "k_cache", "v_cache", *REQUIRED, *left, "weight"]


def test_the_isolated_process_describes_it_as_a_function_of_that_signature() -> None:
    told = describe(narrow, inspect.getmodule(echo))  # type: ignore[arg-type]

    assert told["required"] == [*REQUIRED, "weight"]
    assert "weight" in told["parameters"] and "softcap" not in told["parameters"] and not told["has_var_keyword"]
    assert told["doc"] == "What it was called with."
    assert told["source_sha256"] is not None


def test_it_is_called_as_the_function_or_as_asked_and_has_the_record_if_any() -> None:
    assert (whole.__name__, narrow.__name__) == ("echo", "narrow")  # type: ignore[attr-defined]
    assert whole.record == Record(page_sizes=(1,))
    assert not hasattr(narrow, "record")


def test_the_function_is_given_the_call_whole() -> None:
    sinks = torch.zeros(1)
    whole(Q, CACHE, CACHE, **PLAN, causal=False, window_size=(3, 0), sinks=sinks, num_seqs=1, out=Q, return_lse=True)
    call, return_lse = seen.pop()

    assert return_lse and call.q is Q and call.k_cache is CACHE and call.out is Q and call.sinks is sinks
    assert (call.causal, call.window_size, call.num_seqs, dict(call.extras)) == (False, (3, 0), 1, {})
    assert all(getattr(call, name) is value for name, value in PLAN.items())


def test_extras_are_part_of_the_call() -> None:
    narrow(Q, CACHE, CACHE, **PLAN, weight=Q)  # type: ignore[call-arg]

    assert dict(seen.pop()[0].extras) == {"weight": Q}


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"softcap": 1.0, "weight": Q}, "narrow: does not take softcap; expected some of cu_seqlens_q, "),
        ({"return_LSE": True, "weight": Q}, "narrow: does not take return_LSE; "),
        ({}, "narrow: not given weight$"),
    ],
)
def test_what_it_does_not_take_or_lacks_is_a_type_error_that_names_it(given: dict[str, Any], said: str) -> None:
    with pytest.raises(TypeError, match=said):
        narrow(Q, CACHE, CACHE, **PLAN, **given)
    assert not seen


def test_a_missing_part_of_the_plan_is_a_type_error_that_names_it() -> None:
    with pytest.raises(TypeError, match="echo: not given page_table, softmax_scale"):
        whole(Q, CACHE, CACHE, **{name: PLAN[name] for name in ("cu_seqlens_q", "seqused_k")})
