"""How far two distributions stand apart: the definitions, what is exact, and what cannot be computed."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from scipy.special import log_softmax, rel_entr
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from oracle.checkpoints import divergence as module
from oracle.checkpoints.divergence import Divergence, divergence, from_tensors, joined, to_tensors

FLOOR = 1e-14  # nats: ten times what rounding leaves of a KL, a JS or an NLL of a few nats
INF, NAN = math.inf, math.nan
FLOATS = ("kl", "kl_reverse", "js", "agree5", "nll_reference", "nll_candidate", "confidence")
seeds = st.integers(0, 2**32 - 1)
few = settings(max_examples=40)


def made(
    seed: int, tokens: int, vocabulary: int, size: float, change: float, dtype: torch.dtype = torch.float64
) -> tuple[Tensor, Tensor, Tensor]:
    """Logits of a reference, those of a candidate, and the true tokens."""
    g = torch.Generator().manual_seed(seed)
    x = size * torch.randn(tokens, vocabulary, generator=g, dtype=torch.float64)
    y = x + change * torch.randn(tokens, vocabulary, generator=g, dtype=torch.float64)
    return x.to(dtype), y.to(dtype), torch.randint(vocabulary, (tokens,), generator=g)


def independent(x: Tensor, y: Tensor, following: Tensor) -> dict[str, np.ndarray]:
    """The columns again, in scipy and numpy, for logits without ties."""
    p, q = (log_softmax(logits.double().numpy(), axis=1) for logits in (x, y))
    rows = np.arange(len(p))
    middle = (np.exp(p) + np.exp(q)) / 2
    five_p, five_q = (np.argsort(-logits, axis=1)[:, :5] for logits in (p, q))
    return {
        "kl": rel_entr(np.exp(p), np.exp(q)).sum(1),
        "kl_reverse": rel_entr(np.exp(q), np.exp(p)).sum(1),
        "js": (rel_entr(np.exp(p), middle).sum(1) + rel_entr(np.exp(q), middle).sum(1)) / 2,
        "agree1": p.argmax(1) == q.argmax(1),
        "agree5": np.array([len({*a} & {*b}) / len(a) for a, b in zip(five_p.tolist(), five_q.tolist(), strict=True)]),
        "nll_reference": -p[rows, following.numpy()],
        "nll_candidate": -q[rows, following.numpy()],
        "confidence": np.exp(p).max(1),
        "finite": np.ones(len(p), dtype=bool),
    }


def assert_equal(got: Divergence, want: Mapping[str, Any], *, relative: float = 0.0, floor: float = 0.0) -> None:
    for name, column in to_tensors(got).items():
        np.testing.assert_allclose(column.numpy(), np.asarray(want[name]), rtol=relative, atol=floor, err_msg=name)


@few
@given(seeds, st.integers(1, 9), st.integers(2, 300), st.floats(0.1, 12), st.floats(1e-3, 20))
def test_every_column_is_that_of_an_independent_computation(
    seed: int, tokens: int, vocabulary: int, size: float, change: float
) -> None:
    x, y, following = made(seed, tokens, vocabulary, size, change)

    assert_equal(divergence(x, y, following), independent(x, y, following), relative=1e-9, floor=FLOOR)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_logits_of_any_dtype_are_taken_as_they_are(dtype: torch.dtype) -> None:
    x, y, following = made(1, 20, 700, 4.0, 0.5, dtype)
    want = divergence(x.double(), y.double(), following)

    assert_equal(divergence(x, y, following), to_tensors(want))


def test_the_directions_differ_so_mixing_them_up_would_show() -> None:
    d = divergence(*made(2, 50, 100, 3.0, 1.0))

    assert ((d.kl - d.kl_reverse).abs() > 1e-6).all()


@few
@given(
    seeds, st.integers(1, 70), st.floats(0, 1e4), st.sampled_from([torch.float64, torch.float32, torch.bfloat16]), st.booleans()
)
def test_equal_logits_are_exactly_nothing_apart(seed: int, vocabulary: int, size: float, dtype: torch.dtype, mask: bool) -> None:
    x, _, following = made(seed, 7, vocabulary, size, 0.0, dtype)
    if mask:
        x[:, 0] = -INF
        following = following.clamp(min=min(1, vocabulary - 1))
    d = divergence(x, x.clone(), following)
    expected_finite = not (mask and vocabulary == 1)

    assert bool(d.finite.all()) == expected_finite
    if expected_finite:
        for name in ("kl", "kl_reverse", "js"):
            assert (getattr(d, name) == 0).all(), name
        assert d.agree1.all() and (d.agree5 == 1).all()
        assert torch.equal(d.nll_reference, d.nll_candidate)


@few
@given(seeds, st.floats(0.1, 12), st.floats(1e-3, 5))
def test_with_the_roles_exchanged_the_directions_change_places(seed: int, size: float, change: float) -> None:
    x, y, following = made(seed, 5, 60, size, change)
    d, e = divergence(x, y, following), divergence(y, x, following)
    other = to_tensors(d) | {
        "kl": d.kl_reverse, "kl_reverse": d.kl, "nll_reference": d.nll_candidate, "nll_candidate": d.nll_reference,
        "confidence": e.confidence,
    }  # fmt: skip

    assert_equal(e, other, relative=1e-12, floor=FLOOR)


@few
@given(seeds, st.integers(-1000, 1000), st.integers(-1000, 1000))
def test_a_constant_added_to_a_row_changes_no_bit(seed: int, one: int, other: int) -> None:
    x, y, following = made(seed, 5, 60, 3.0, 0.5)
    x, y = (x * 1024).round() / 1024, (y * 1024).round() / 1024  # so that the sums below are exact

    assert_equal(divergence(x + one, y + other, following), to_tensors(divergence(x, y, following)))


@few
@given(seeds, st.integers(2, 200))
def test_the_order_of_the_vocabulary_does_not_matter(seed: int, vocabulary: int) -> None:
    x, y, following = made(seed, 5, vocabulary, 3.0, 0.5)
    order = torch.randperm(vocabulary, generator=torch.Generator().manual_seed(seed))
    d = divergence(x[:, order], y[:, order], order.argsort()[following])

    assert_equal(d, to_tensors(divergence(x, y, following)), relative=1e-12, floor=FLOOR)


@few
@given(seeds, st.integers(2, 60), st.floats(0, 400), st.floats(0, 800))
@example(seed=0, vocabulary=2, size=0.0, change=800.0)
def test_jensen_shannon_lies_between_nothing_and_ln_2_and_below_each_half_kl(
    seed: int, vocabulary: int, size: float, change: float
) -> None:
    d = divergence(*made(seed, 9, vocabulary, size, change))

    assert d.finite.all()
    assert (d.js >= -FLOOR).all()
    assert (d.js <= math.log(2) + FLOOR).all()
    assert (d.js <= (d.kl + d.kl_reverse) / 4 + FLOOR).all()  # Lin 1991


def test_distributions_without_a_common_token_are_ln_2_apart() -> None:
    x = torch.tensor([[1000.0, 0.0]])
    d = divergence(x, x.flip(1), torch.tensor([0]))

    assert d.js.item() == pytest.approx(math.log(2), rel=1e-15)
    assert d.kl.item() == 1000.0


@few
@given(seeds, st.floats(1e-16, 1e-7), st.floats(0, 1e3))
def test_rounding_leaves_no_more_than_the_floor(seed: int, change: float, shift: float) -> None:
    x, y, following = made(seed, 5, 2048, 3.0, change)
    d = divergence(x + shift, y + shift, following)
    most = (
        2 * (change * 6 + 2e-13) ** 2
    )  # KL is at most the square of the largest change of a logit; 2e-13 the sum's own rounding

    for column in (d.kl, d.kl_reverse, d.js):
        assert (column >= -FLOOR).all()
        assert (column <= most + FLOOR).all()


@few
@given(seeds, st.integers(0, 40), st.integers(1, 33), st.integers(1, 700))
def test_slices_do_not_show(seed: int, tokens: int, vocabulary: int, size: int) -> None:
    x, y, following = made(seed, tokens, vocabulary, 3.0, 0.5, torch.bfloat16)  # coarse, so that ties occur
    if tokens > 3:
        x[1, 0], y[3] = NAN, x[3]
        x[2, 0] = y[2, 0] = -INF
    want = divergence(x, y, following)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(module.SLICE, "cpu", size)
        assert_equal(divergence(x, y, following), to_tensors(want))


class Largest(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Remembers the most bytes that one tensor made inside took."""

    bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for one in result if isinstance(result, (tuple, list)) else [result]:
            if isinstance(one, Tensor) and not func.is_view:
                self.bytes = max(self.bytes, one.nbytes)
        return result


def test_temporaries_are_no_larger_than_a_slice_whatever_the_number_of_tokens() -> None:
    x, y, following = made(3, 600, 2048, 3.0, 0.1, torch.float32)
    slice_bytes = 8 * module.SLICE["cpu"]
    ours, naive = (Largest() for _ in range(2))  # type: ignore[no-untyped-call]
    with ours:
        divergence(x, y, following)
    with naive:
        torch.log_softmax(x.double(), 1)

    assert 0 < ours.bytes <= slice_bytes < naive.bytes


def test_logits_are_left_as_they_are() -> None:
    x, y, following = made(4, 6, 30, 3.0, 0.5)
    x[2, 3] = y[2, 3] = -INF
    before = x.clone(), y.clone()
    divergence(x, y, following)

    assert torch.equal(x, before[0]) and torch.equal(y, before[1])


# Row of the reference, of the candidate, true token: what cannot be computed
BROKEN = {
    "NaN in the reference": ([NAN, 1.0, 2.0], [0.0, 1.0, 2.0], 0),
    "NaN in the candidate": ([0.0, 1.0, 2.0], [0.0, NAN, 2.0], 0),
    "+inf in the reference": ([0.0, INF, 2.0], [0.0, 1.0, 2.0], 0),
    "+inf in the candidate": ([0.0, 1.0, 2.0], [0.0, 1.0, INF], 0),
    "+inf in both": ([0.0, INF, 2.0], [0.0, INF, 2.0], 0),
    "NaN beside a shared mask": ([-INF, NAN, 2.0], [-INF, 1.0, 2.0], 2),
    "masked in the candidate only": ([0.0, 1.0, 2.0], [0.0, -INF, 2.0], 0),
    "masked in the reference only": ([0.0, -INF, 2.0], [0.0, 1.0, 2.0], 0),
    "masked in the candidate where the reference underflows": ([-2000.0, 1.0, 2.0], [-INF, 1.0, 2.0], 1),
    "other masks": ([-INF, 1.0, 2.0], [0.0, -INF, 2.0], 2),
    "the true token masked": ([-INF, 1.0, 2.0], [-INF, 1.0, 2.0], 0),
    "all masked": ([-INF] * 3, [-INF] * 3, 0),
}


@pytest.mark.parametrize("case", BROKEN.values(), ids=BROKEN.keys())
def test_a_token_that_cannot_be_computed_is_not_finite_and_leaves_its_neighbours_alone(
    case: tuple[list[float], list[float], int],
) -> None:
    x, y, following = made(5, 3, 3, 1.0, 0.5)
    want = divergence(x, y, following)
    x[1], y[1], following[1] = torch.tensor(case[0]), torch.tensor(case[1]), case[2]
    d = divergence(x, y, following)

    assert d.finite.tolist() == [True, False, True]
    for name in FLOATS:
        assert getattr(d, name).isnan().tolist() == [False, True, False], name
        assert torch.equal(getattr(d, name)[::2], getattr(want, name)[::2]), name
    assert not d.agree1[1]


@few
@given(seeds, st.integers(6, 40), st.integers(1, 30))
def test_entries_masked_in_both_are_as_if_not_there(seed: int, vocabulary: int, masked: int) -> None:
    x, y, following = made(seed, 5, vocabulary, 3.0, 0.5)
    filler = torch.full((5, masked), -INF, dtype=torch.float64)
    d = divergence(torch.cat([x, filler], 1), torch.cat([y, filler], 1), following)

    assert d.finite.all()
    assert_equal(d, to_tensors(divergence(x, y, following)), relative=1e-12, floor=FLOOR)


def test_logits_too_far_apart_for_their_exponentials_are_finite() -> None:
    x, y = torch.tensor([[0.0, 3e38, 1.0]]), torch.tensor([[0.0, 1.0, 3e38]])
    d = divergence(x, y, torch.tensor([1]))

    assert d.finite.all()
    assert d.kl.item() == d.nll_candidate.item() == float(y[0, 2])


# Rows of both, agree1, agree5
TIES = [
    ([3.0, 3.0, 1, 0, 0, 0], [2.0, 2.0, 1, 0, 0, 0], True, 1.0),  # the lowest id is best in both
    ([3.0, 3.0, 1, 0, 0, 0], [2.0, 2.5, 1, 0, 0, 0], False, 1.0),
    ([2.0, 2.5, 1, 0, 0, 0], [3.0, 3.0, 1, 0, 0, 0], False, 1.0),
    ([9.0, 8, 7, 6, 5, 4], [9.0, 8, 7, 6, 4, 5], True, 0.8),
    ([9.0, 8, 7, 6, 5, 4], [9.0, 8, 7, 6, 5, 5], True, 1.0),  # both are fifth in the candidate
    ([9.0, 8, 7, 6, 5, 5], [9.0, 8, 7, 6, 5, 4], True, 5 / 6),  # both are fifth in the reference
    ([1.0] * 6, [1.0] * 6, True, 1.0),
    ([9.0, 8, 7, 6, 5, 4], [4.0, 5, 6, 7, 8, 9], False, 0.8),
]


@pytest.mark.parametrize(("x", "y", "one", "five"), TIES)
def test_ties_are_broken_for_the_best_and_kept_for_the_fifth(x: list[float], y: list[float], one: bool, five: float) -> None:
    d = divergence(torch.tensor([x]), torch.tensor([y]), torch.tensor([0]))

    assert bool(d.agree1) is one
    assert d.agree5.item() == pytest.approx(five, rel=1e-15)


@few
@given(seeds, st.integers(1, 12))
def test_agreement_on_coarse_logits_follows_the_definition(seed: int, vocabulary: int) -> None:
    x, y, following = made(seed, 8, vocabulary, 1.5, 1.0)
    x, y = x.round(), y.round()
    d = divergence(x, y, following)
    for row in range(8):
        a, b = x[row].tolist(), y[row].tolist()
        best_a, best_b = ({i for i in range(vocabulary) if r[i] >= sorted(r, reverse=True)[:5][-1]} for r in (a, b))
        assert d.agree1[row].item() == (a.index(max(a)) == b.index(max(b)))
        assert d.agree5[row].item() == pytest.approx(len(best_a & best_b) / len(best_a), rel=1e-15)


def test_parts_joined_are_the_whole() -> None:
    x, y, following = made(6, 30, 40, 3.0, 0.5)
    parts = [divergence(x[rows], y[rows], following[rows]) for rows in (slice(0, 7), slice(7, 7), slice(7, 30))]

    assert_equal(joined(parts), to_tensors(divergence(x, y, following)))


def test_a_divergence_comes_back_from_safetensors_as_it_was(tmp_path: Path) -> None:
    x, y, following = made(7, 30, 40, 3.0, 0.5)
    x[3, 3] = NAN
    d = divergence(x, y, following)
    save_file(to_tensors(d), tmp_path / "d.safetensors")

    assert_equal(from_tensors(load_file(tmp_path / "d.safetensors")), to_tensors(d))


def test_columns_that_are_no_divergence_are_refused() -> None:
    columns = to_tensors(divergence(*made(8, 5, 9, 1.0, 0.5)))
    wrong = [
        {name: column for name, column in columns.items() if name != "js"},
        columns | {"more": columns["kl"]},
        columns | {"kl": columns["kl"].float()},
        columns | {"js": columns["js"][:-1]},
        {name: column[None] for name, column in columns.items()},
    ]

    assert sorted(columns) == sorted(field.name for field in fields(Divergence))
    for one in wrong:
        with pytest.raises(ValueError, match="divergence: "):
            from_tensors(one)


@pytest.mark.parametrize(
    ("x", "y", "following"),
    [((2, 3), (2, 4), [0, 0]), ((2, 3), (2, 3), [0]), ((3,), (3,), [0]), ((2, 3), (2, 3), [0, 3]), ((2, 3), (2, 3), [-1, 0])],
)
def test_shapes_and_tokens_that_do_not_fit_are_refused(x: tuple[int, ...], y: tuple[int, ...], following: list[int]) -> None:
    with pytest.raises(ValueError, match="divergence: "):
        divergence(torch.zeros(x), torch.zeros(y), torch.tensor(following))
