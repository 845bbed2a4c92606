"""The figures of a drift and their error bars: llama.cpp's definitions, blocks as what is counted, and honest intervals."""

from __future__ import annotations

import math
from dataclasses import astuple, replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats
from scipy.special import log_softmax, rel_entr
from skewed_runs import long_run, mixed_run

from oracle.checkpoints.clusters import Estimate, _weighted_percentiles, clustered_mean, clustered_percentiles, coverage
from oracle.checkpoints.divergence import Divergence, divergence, from_tensors, to_tensors
from oracle.checkpoints.figures import DP_POINTS, Figures, figures
from oracle.checkpoints.texts import Text

INF = math.inf
EVERYTHING = (-INF, INF, INF)
seeds = st.integers(0, 2**32 - 1)
few = settings(max_examples=30)
LENGTHS = (40, 7, 200, 1, 93, 40)  # of blocks: unequal, one with a single token


def text_of(lengths: tuple[int, ...] = LENGTHS, documents: tuple[str, ...] = ("a.txt", "b.txt")) -> Text:
    """Blocks of these lengths, every position scored, documents in turn."""
    block = torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths))
    position = torch.cat([torch.arange(length) for length in lengths])
    return Text(
        block=block, document=block % len(documents), position=position, token=torch.zeros_like(block),
        documents=documents, blocks=tuple((0,) * (length + 1) for length in lengths),
    )  # fmt: skip


def logits_of(text: Text, change: float = 0.5, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    g = torch.Generator().manual_seed(seed)
    x = 3 * torch.randn(len(text.block), 50, generator=g)
    return x, x + change * torch.randn(x.shape, generator=g), torch.randint(50, (len(x),), generator=g)


def made(text: Text, change: float = 0.5, seed: int = 0) -> Divergence:
    return divergence(*logits_of(text, change, seed))


def changed(d: Divergence, **columns: torch.Tensor) -> Divergence:
    return from_tensors(to_tensors(d) | columns)


def test_the_figures_are_llama_cpps_computed_independently_from_stored_logits() -> None:
    text = text_of()
    x, y, following = logits_of(text)
    base, other = (log_softmax(logits.double().numpy(), axis=1) for logits in (x, y))
    rows = np.arange(len(base))
    nll_base, nll = -base[rows, following.numpy()], -other[rows, following.numpy()]
    dp = np.exp(-nll) - np.exp(-nll_base)
    kl = rel_entr(np.exp(base), np.exp(other)).sum(1)
    want = {
        "kl": kl.mean(),
        "agree1": (base.argmax(1) == other.argmax(1)).mean(),
        "perplexity_reference": math.exp(nll_base.mean()),
        "perplexity_candidate": math.exp(nll.mean()),
        "ln_ratio": math.log(math.exp(nll.mean()) / math.exp(nll_base.mean())),
        "dp_mean": dp.mean(),
        "dp_rms": math.sqrt((dp**2).mean()),
    }
    f = figures(divergence(x, y, following), text)

    for name, value in want.items():
        assert getattr(f, name).value == pytest.approx(value, rel=1e-9), name
    assert f.kl_max == pytest.approx(kl.max(), rel=1e-9)
    assert [w.index for w in f.worst] == np.argsort(-kl)[:10].tolist()
    for name, value in f.kl_percentiles.items():
        assert value.value == pytest.approx(llama_percentile(kl, float(name) / 100), rel=1e-9), name
    assert list(f.dp_percentiles) == [f"{point:g}" for point in DP_POINTS]
    for name, point in f.dp_percentiles.items():
        assert point == pytest.approx(llama_percentile(dp, float(name) / 100), rel=1e-9), name


def llama_percentile(values: np.ndarray, share: float) -> float:
    """Between the two values next to the place share (n - 1), by how near it is to each."""
    ascending = sorted(values.tolist())
    whole, part = divmod(share * (len(ascending) - 1), 1)
    upper = ascending[min(int(whole) + 1, len(ascending) - 1)]
    return float((1 - part) * ascending[int(whole)] + part * upper)


@few
@given(seeds, st.lists(st.integers(1, 30), min_size=2, max_size=9))
def test_the_standard_error_is_the_jackknifes_over_blocks_and_the_interval_students(seed: int, lengths: list[int]) -> None:
    values = np.random.default_rng(seed).lognormal(size=sum(lengths))
    block = np.repeat(np.arange(len(lengths)) * 3, lengths)
    got = clustered_mean(values, block)

    groups = len(lengths)
    without = np.array([values[block != 3 * number].mean() for number in range(groups)])
    se = math.sqrt((groups - 1) / groups * ((without - values.mean()) ** 2).sum())
    degrees = max(1, sum(lengths) ** 2 / sum(length**2 for length in lengths) - 1)
    low, high = stats.t.interval(0.95, degrees, loc=values.mean(), scale=se)
    assert astuple(got) == pytest.approx((values.mean(), low, high, se), rel=1e-9, abs=1e-12)


@few
@given(seeds, st.integers(2, 9), st.integers(1, 30))
def test_for_blocks_of_one_length_it_is_cr1_with_one_degree_of_freedom_less_than_blocks(
    seed: int, groups: int, length: int
) -> None:
    values = np.random.default_rng(seed).lognormal(size=groups * length)
    got = clustered_mean(values, np.repeat(np.arange(groups), length))

    residuals = (values - values.mean()).reshape(groups, length).sum(1)
    se = math.sqrt(groups / (groups - 1) * (residuals**2).sum()) / len(values)
    low, high = stats.t.interval(0.95, groups - 1, loc=values.mean(), scale=se)
    assert astuple(got) == pytest.approx((values.mean(), low, high, se), rel=1e-9, abs=1e-12)


def test_with_one_token_in_each_block_it_is_the_standard_error_of_a_mean() -> None:
    values = np.random.default_rng(1).normal(size=50)

    assert clustered_mean(values, np.arange(50)).se == pytest.approx(stats.sem(values), rel=1e-12)


def test_tokens_repeated_within_their_block_bring_no_certainty_and_blocks_repeated_do() -> None:
    values, block = np.random.default_rng(2).normal(size=60), np.repeat(np.arange(20), 3)
    once = clustered_mean(values, block)

    assert clustered_mean(np.tile(values, 4), np.tile(block, 4)).se == pytest.approx(once.se, rel=1e-12)
    more = clustered_mean(np.tile(values, 4), np.concatenate([block + 20 * i for i in range(4)]))
    assert more.se == pytest.approx(once.se / 2, rel=0.03)


@pytest.mark.parametrize("run", ["both light", "candidate heavy", "both heavy"])
def test_the_interval_covers_the_long_runs_mean_as_often_as_it_says(run: str) -> None:
    kl, _, block = long_run(run)

    assert 0.93 <= coverage(kl, block, blocks_drawn=64, resamples=1000, seed=0) <= 0.97


def test_it_does_so_nearly_with_blocks_of_unequal_length() -> None:
    kl, block = mixed_run()

    assert 0.90 <= coverage(kl, block, blocks_drawn=72, resamples=1000, seed=0) <= 0.97  # docs/drift.md: keep to one length


def test_an_interval_that_counts_tokens_does_not() -> None:
    kl, _, block = long_run("both light")
    drawn = np.random.default_rng(0).integers(block.max() + 1, size=(300, 64))
    tokens = kl.reshape(-1, (block == 0).sum())[drawn].reshape(300, -1)
    reach = 1.96 * tokens.std(1) / math.sqrt(tokens.shape[1])

    assert (abs(tokens.mean(1) - kl.mean()) <= reach).mean() < 0.8


def test_coverage_shows_a_bar_that_is_too_short() -> None:
    kl, _, block = long_run("candidate heaviest")

    assert coverage(kl, block, blocks_drawn=4, resamples=1000, seed=0) < 0.93


@few
@given(seeds, st.lists(st.integers(0, 3), min_size=1, max_size=30).filter(any))
def test_percentiles_of_a_resample_are_those_of_the_values_written_out(seed: int, weights: list[int]) -> None:
    values = np.sort(np.random.default_rng(seed).normal(size=len(weights)))
    points = (0.0, 0.1, 12.5, 50.0, 99.9, 100.0)
    got = _weighted_percentiles(values, np.array(weights), points)

    assert got == pytest.approx(np.percentile(np.repeat(values, weights), points), rel=1e-12, abs=1e-12)


def test_intervals_of_percentiles_cover_them_are_the_same_each_time_and_other_draws_give_others() -> None:
    kl, _, block = long_run("both light")
    points = (50.0, 90.0, 99.0)
    truth = np.percentile(kl, points)
    held = np.zeros(len(points))
    parts = np.random.default_rng(0).permutation(block.max() + 1)[: 40 * 32].reshape(40, 32)
    for part in parts:
        chosen = np.isin(block, part)
        got = clustered_percentiles(kl[chosen], block[chosen], points)
        held += [e.low <= t <= e.high for e, t in zip(got, truth, strict=True)]
    assert (held >= 33).all()  # of 40: at 95 % each, fewer come once in a thousand times

    assert clustered_percentiles(kl[chosen], block[chosen], points) == got
    assert clustered_percentiles(kl[chosen], block[chosen], points, seed=1) != got


def test_one_block_gives_no_error_bar() -> None:
    text = text_of((50,), ("a.txt",))
    f = figures(made(text), text)
    estimates = [f.kl, f.kl_reverse, f.js, f.agree1, f.agree5, f.ln_ratio, f.dp_mean, *f.kl_percentiles.values()]

    assert all((e.low, e.high, e.se) == EVERYTHING and math.isfinite(e.value) for e in estimates)
    assert astuple(f.perplexity_candidate)[1:] == (0.0, INF, INF)
    assert astuple(f.dp_rms)[1:] == (0.0, INF, INF)


def test_tokens_that_are_not_finite_are_counted_and_left_out() -> None:
    text = text_of()
    x, y, following = logits_of(text)
    gone = torch.zeros(len(x), dtype=torch.bool)
    gone[::7] = True
    whole = divergence(x, y, following)
    y[gone] = math.nan
    f = figures(divergence(x, y, following), text)
    columns = {name: column[~gone] for name, column in to_tensors(whole).items()}
    kept = replace(
        text, block=text.block[~gone], document=text.document[~gone], position=text.position[~gone], token=text.token[~gone]
    )
    want = figures(from_tensors(columns), kept)

    assert (f.tokens, f.not_finite, f.blocks) == (len(x), int(gone.sum()), len(LENGTHS))
    assert [w.index for w in f.worst] == np.flatnonzero(~gone.numpy())[[w.index for w in want.worst]].tolist()
    assert replace(want, tokens=f.tokens, not_finite=f.not_finite, blocks=f.blocks, worst=f.worst) == f


def test_nothing_finite_gives_nan_and_no_band() -> None:
    text = text_of()
    x, y, following = logits_of(text)
    f = figures(divergence(x, y * math.nan, following), text)

    assert f.not_finite == f.tokens == len(x)
    assert not (f.worst or f.by_position or f.by_confidence or f.by_document)
    values = [f.kl, f.js, f.agree1, f.perplexity_candidate, f.dp_rms, *f.kl_percentiles.values()]
    assert all(math.isnan(e.value) and e.se == INF for e in values)
    assert math.isnan(f.kl_max) and all(map(math.isnan, f.dp_percentiles.values()))


def test_no_drift_at_all_is_exactly_nothing_without_any_error() -> None:
    text = text_of()
    x, _, following = logits_of(text)
    f = figures(divergence(x, x, following), text)

    for e in (f.kl, f.kl_reverse, f.js, f.ln_ratio, f.dp_mean, f.dp_rms, *f.kl_percentiles.values()):
        assert astuple(e) == (0.0, 0.0, 0.0, 0.0)
    assert astuple(f.agree1) == astuple(f.agree5) == (1.0, 1.0, 1.0, 0.0)
    assert f.kl_max == 0 and set(f.dp_percentiles.values()) == {0.0}


def test_errors_of_perplexity_and_rms_follow_from_those_of_their_means() -> None:
    text = text_of()
    d = made(text)
    f = figures(d, text)
    nll = clustered_mean(d.nll_candidate.numpy(), text.block.numpy())
    square = clustered_mean((np.exp(-d.nll_candidate.numpy()) - np.exp(-d.nll_reference.numpy())) ** 2, text.block.numpy())
    step = 1e-6

    slope = (math.exp(nll.value + step) - math.exp(nll.value - step)) / (2 * step)
    want = (math.exp(nll.value), math.exp(nll.low), math.exp(nll.high), slope * nll.se)
    assert astuple(f.perplexity_candidate) == pytest.approx(want, rel=1e-6)
    slope = (math.sqrt(square.value * (1 + step)) - math.sqrt(square.value * (1 - step))) / (2 * step * square.value)
    want = (math.sqrt(square.value), math.sqrt(max(square.low, 0)), math.sqrt(square.high), slope * square.se)
    assert astuple(f.dp_rms) == pytest.approx(want, rel=1e-6)


def test_an_upper_limit_of_perplexity_beyond_all_numbers_is_infinite() -> None:
    text = text_of((3, 3))
    d = made(text)
    f = figures(changed(d, nll_candidate=torch.tensor([0.0, 0, 0, 600, 600, 600], dtype=torch.float64)), text)

    assert f.perplexity_candidate.high == INF


@settings(max_examples=10)
@given(seeds)
def test_the_order_of_tokens_and_the_numbers_of_blocks_do_not_matter(seed: int) -> None:
    text = text_of()
    d = made(text)
    order = torch.randperm(len(text.block), generator=torch.Generator().manual_seed(seed))
    other = replace(
        text, block=text.block[order], document=text.document[order], position=text.position[order], token=text.token[order]
    )
    f = figures(from_tensors({name: column[order] for name, column in to_tensors(d).items()}), other)
    g = figures(d, replace(text, block=9 * text.block))
    want = figures(d, text)

    assert g == want
    for got, wanted in ((f.kl, want.kl), (f.ln_ratio, want.ln_ratio), (f.kl_percentiles["99"], want.kl_percentiles["99"])):
        assert astuple(got) == pytest.approx(astuple(wanted), rel=1e-9, abs=1e-12)
    assert [order[w.index].item() for w in f.worst] == [w.index for w in want.worst]


def test_the_worst_tokens_are_the_largest_and_of_equals_the_first() -> None:
    text = text_of((8, 8))
    kl = torch.zeros(16, dtype=torch.float64)
    kl[3], kl[9] = 2.0, 5.0
    f = figures(changed(made(text), kl=kl), text)

    assert [(w.index, w.kl) for w in f.worst][:3] == [(9, 5.0), (3, 2.0), (0, 0.0)]
    assert len(f.worst) == 10


def bands(f: Figures) -> tuple[dict[str, int], ...]:
    return tuple({band.label: band.tokens for band in part} for part in (f.by_position, f.by_confidence, f.by_document))


def test_each_token_is_in_one_band_of_each_kind_and_the_bands_make_up_the_whole() -> None:
    text = text_of()
    f = figures(made(text), text)

    for part in (f.by_position, f.by_confidence, f.by_document):
        assert sum(band.tokens for band in part) == f.tokens
        for name in ("kl", "agree1"):
            parts = [(getattr(band, name), band.tokens) for band in part]
            total = sum((value.value if isinstance(value, Estimate) else value) * tokens for value, tokens in parts)
            assert total / f.tokens == pytest.approx(getattr(f, name).value, rel=1e-9)
    assert bands(f)[2] == {"a.txt": 40 + 200 + 93, "b.txt": 7 + 1 + 40}


def test_positions_fall_into_octaves() -> None:
    text = text_of((1100,), ("a.txt",))
    f = figures(made(text), text)

    assert bands(f)[0] == {"0-63": 64, "64-127": 64, "128-255": 128, "256-511": 256, "512-1023": 512, "1024-2047": 76}


def test_confidence_falls_into_bands_that_hold_their_lower_edge() -> None:
    text = text_of((4, 4))
    confidence = torch.tensor([0.0, 0.2499, 0.25, 0.5, 0.75, 0.9499, 0.95, 1.0], dtype=torch.float64)
    f = figures(changed(made(text), confidence=confidence), text)

    assert bands(f)[1] == {"0-0.25": 2, "0.25-0.5": 1, "0.5-0.75": 1, "0.75-0.95": 2, "0.95-1": 2}


def test_a_band_has_the_error_bar_of_its_own_blocks() -> None:
    text = text_of()
    d = made(text)
    mine = text.document == 0
    band = figures(d, text).by_document[0]

    assert band.kl == clustered_mean(d.kl[mine].numpy(), text.block[mine].numpy())


def test_another_number_of_tokens_than_positions_is_refused() -> None:
    with pytest.raises(ValueError, match="figures: got 6 divergences, expected one for each of 381"):
        figures(made(text_of((3, 3))), text_of())
