"""Input classes: finite, of the right shape, and as peaked as they say in every family, however it scales its logits."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from oracle.cases import SCALES, Case
from oracle.contract import Call
from oracle.families import FAMILIES, Family
from oracle.inputs import EXTRA_CLASSES, INPUT_CLASSES, LOGIT_LIMIT, PROMISED_CLASSES, Draw, k_norm_weight
from oracle.material import TORCH_DTYPES, material, visible_keys
from oracle.pool import Fill, lay_out, without_fill
from oracle.references.attention import Exact, attend
from oracle.references.dense import dense_fp32
from oracle.streams import Stream

drawn = settings(derandomize=True, deadline=None, database=None, max_examples=60)

ALL = INPUT_CLASSES | PROMISED_CLASSES | EXTRA_CLASSES
U_P = 2.0**-8
# scales of 1 at head dims 512 and 256, 1/16, 0.088 and 0.07, capped, windowed and with sinks
APART = ("gemma4-global", "gemma4-sliding", "gemma2", "llama3", "gpt-oss-sliding", "mla-prefill", "group-5")

# the standard deviation of a row's logits that a class aims at, before a softcap
AIMS = {
    "randn": 1.0, "flat": 0.05, "peaked": 8.0, "x10": 100.0, "logits-3e3": 3000.0, "logits-3e4": 3e4,
    "outliers": 1.05, "k-channels": 1.0,
    "constant-v": 1.0, "ones-v": 2.0, "offset-v": 1.0, "positive-v": 1.0, "cancel-v": 0.3, "probe-v": 0.5,
    "shifted-down": 1.1, "shifted-up": 1.1, "ties": 1.0, "tiny-v": 1.0, "logits-1e36": 1e36,
}  # fmt: skip
NO_AIM = {"one-hot", "needle", "first-token", "qk-norm", "shared-kv"}  # each has a test of its own


def case_of(inputs: str, family: Family, **changes: object) -> Case:
    """Five rows at the end of 130 keys."""
    case = Case(name=inputs, family=family, q_lens=(5,), kv_lens=(130,), inputs=inputs)
    return replace(case, **changes)  # type: ignore[arg-type]


def call_of(case: Case) -> Call:
    return without_fill(lay_out(case, material(case), fill=Fill.STALE, salt=0))


def exact(call: Call) -> Exact:
    return attend(call, torch.arange(int(call.cu_seqlens_q[-1])), U_P)


def deviation(case: Case) -> float:
    """The standard deviation of a row's logits before any softcap, RMS over rows and heads, by the fp64 reference.

    Under a scale smaller by `shrink` all weights are equal, and g2^2 - g1^2 is the variance of shrunk logits.
    """
    shrink = 1e-6 / max(1.0, AIMS.get(case.inputs, 1.0))
    call = call_of(case)
    x = exact(replace(call, softmax_scale=call.softmax_scale * shrink, softcap=0.0, sinks=None))
    return float((x.g2 * x.g2 - x.g1 * x.g1).mean().sqrt()) / shrink


def keys_in_use(case: Case) -> Tensor:
    """1 / sum p^2, the number of keys that a row attends to, over the number that it sees: (R, q_heads)."""
    x = exact(replace(call_of(case), sinks=None))
    return 1 / (x.p2 * x.p2 * x.keys[:, None])


def raw(case: Case) -> tuple[Tensor, Tensor, Tensor]:
    """What the class fills in, before it is rounded and scaled."""
    return ALL[case.inputs].fill(Draw(case, visible_keys(case), Stream(case.seed, f"inputs/{case.inputs}")))


def test_every_class_is_measured_below() -> None:
    assert set(AIMS) | NO_AIM == set(ALL)


def test_every_class_says_in_a_line_what_it_is() -> None:
    assert all(c.about and "\n" not in c.about and len(c.about) < 130 for c in ALL.values())


@pytest.mark.parametrize("inputs", ALL)
def test_a_class_gives_finite_numbers_of_the_right_shapes(inputs: str) -> None:
    """In every family; sequences without queries or keys, and rows without keys, among them."""
    for family in FAMILIES.values():
        case = case_of(inputs, family, q_lens=(3, 0, 2, 3, 1), kv_lens=(20, 3, 0, 2, 17))
        if inputs == "shared-kv" and family.head_dim != family.head_dim_v:
            continue
        q, k, v = raw(case)
        assert q.shape == (9, family.q_heads, family.head_dim)
        assert k.shape == (42, family.kv_heads, family.head_dim)
        assert v.shape == (42, family.kv_heads, family.head_dim_v)
        assert {x.dtype for x in (q, k, v)} == {torch.float32}
        assert all(bool(x.isfinite().all()) for x in (q, k, v))


@pytest.mark.parametrize("inputs", ALL)
def test_a_class_without_a_single_key_is_no_error(inputs: str) -> None:
    case = case_of(inputs, FAMILIES["qwen2-0.5b"], q_lens=(2, 0), kv_lens=(0, 0))

    assert [x.shape[0] for x in raw(case)] == [2, 0, 0]


@pytest.mark.parametrize("inputs", AIMS)
def test_logits_have_the_deviation_that_a_class_aims_at_in_every_family(inputs: str) -> None:
    """Within the sampling error: 5 rows and 130 keys a head."""
    measured = {name: deviation(case_of(inputs, FAMILIES[name])) for name in APART}

    tolerance = 0.25 if inputs in ("ties", "outliers") else 0.12  # only eight different keys; heavy tails
    assert {name: s for name, s in measured.items() if not abs(s / AIMS[inputs] - 1) < tolerance} == {}


def test_a_class_that_ignored_the_scale_of_its_family_would_show(monkeypatch: pytest.MonkeyPatch) -> None:
    """Unit q and k at head dim 512 and scale 1 have logits of deviation 22."""
    monkeypatch.setattr(Draw, "size", lambda draw, aim: aim**0.5)

    assert deviation(case_of("flat", FAMILIES["gemma4-global"])) > 1


@pytest.mark.parametrize("family", FAMILIES)
def test_flat_is_flat_and_peaked_is_peaked_in_every_family(family: str) -> None:
    """Flat weights are those of 99 % of the keys, peaked ones of a twentieth and fewer."""
    assert bool((keys_in_use(case_of("flat", FAMILIES[family])) > 0.99).all())
    assert float(keys_in_use(case_of("peaked", FAMILIES[family])).median()) < 0.05


@pytest.mark.parametrize("scales", SCALES)
def test_dequantisation_scales_do_not_change_the_deviation(scales: str) -> None:
    """They are taken out of q and k, so that the kernel's product has the size aimed at, in 16 bits and in 8."""
    for family in ("gemma4-global", "llama3"):
        for cache in ("", "e4m3"):
            case = case_of("peaked", FAMILIES[family], scales=scales, cache_dtype=cache)
            assert abs(deviation(case) / 8.0 - 1) < 0.12


def test_qk_norm_is_nearly_one_hot_where_the_family_does_not_scale() -> None:
    """Deviations of sqrt(head_dim) times the scale, or a little more: 24 in Gemma 4's global layers, 1 in Llama's."""
    for family in ("gemma4-global", "gemma4-sliding", "llama3", "gpt-oss-full"):
        f = FAMILIES[family]
        native = f.head_dim**0.5 * f.scale
        assert 0.9 * native < deviation(case_of("qk-norm", f)) < 1.5 * native
    assert float(keys_in_use(case_of("qk-norm", FAMILIES["gemma4-global"])).median()) < 0.02


def test_gemma2_has_logits_that_its_softcap_changes() -> None:
    """The class of large logits: capped at 50, the largest weight of a row is another."""
    call = call_of(case_of("x10", FAMILIES["gemma2"]))
    capped, plain = exact(call), exact(replace(call, softcap=0.0))

    assert float(plain.s_max.max()) > 100
    assert float(capped.s_max.max()) <= 50
    assert bool(((capped.out - plain.out).abs().amax(-1) > 0.1).double().mean() > 0.25)


@pytest.mark.parametrize("inputs", [name for name in ALL if name != "logits-1e36"])
def test_logits_stay_within_the_contract(inputs: str) -> None:
    """|logit| <= 2^20, under scales too, in families of very different scale."""
    for name, scales, dtype, cache in (
        ("gemma4-global", "none", "bf16", ""),
        ("llama3", "per-sequence", "fp16", ""),
        ("group-5", "kv-per-head", "bf16", "e4m3"),
    ):
        call = call_of(case_of(inputs, FAMILIES[name], scales=scales, dtype=dtype, cache_dtype=cache))
        assert float(exact(replace(call, softcap=0.0, sinks=None)).s_max.max()) <= LOGIT_LIMIT


def test_logits_beyond_the_contract_are_promised_ones() -> None:
    """Must fail the limit: the class for kernels that promise to subtract first."""
    call = call_of(case_of("logits-1e36", FAMILIES["llama3"]))

    assert float(exact(call).s_max.max()) > 1e36 > LOGIT_LIMIT


@pytest.mark.parametrize("inputs", [*INPUT_CLASSES, "tiny-v"])
@pytest.mark.parametrize("scales", ["none", "per-head"])
def test_fp16_overflows_in_no_class(inputs: str, scales: str) -> None:
    """Not a single number of q, k and v is at the largest that fp16 has."""
    for family in APART:
        made = material(case_of(inputs, FAMILIES[family], q_lens=(4,), kv_lens=(40,), dtype="fp16", scales=scales))
        assert all(float(x.float().abs().max()) < torch.finfo(torch.float16).max for x in (made.q, made.k, made.v))


@pytest.mark.parametrize("inputs", INPUT_CLASSES)
@pytest.mark.parametrize("scales", ["none", "scalar", "kv-per-sequence"])
def test_e4m3_saturates_in_no_class(inputs: str, scales: str) -> None:
    """At most one number of k or v in a hundred is at the largest that e4m3 has: values clamped to it are all equal."""
    for family in ("gemma4-global", "llama3", "group-5"):
        made = material(case_of(inputs, FAMILIES[family], q_lens=(4,), kv_lens=(40,), cache_dtype="e4m3", scales=scales))
        assert all(float((x.float().abs() >= 448).double().mean()) <= 0.01 for x in (made.k, made.v))


# The structured classes


def nearest_v(case: Case) -> tuple[Tensor, Tensor]:
    """For each row and head the key of the first sequence whose v lies nearest to the exact output, and how far it is."""
    call, made = call_of(case), material(case)
    out = exact(call).out
    v = made.v[: case.kv_lens[0]].double().repeat_interleave(case.family.group, 1)
    distance = torch.cdist(out.transpose(0, 1), v.transpose(0, 1), p=torch.inf).transpose(0, 1)
    return distance.argmin(-1), distance.amin(-1)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_needle_puts_out_the_v_of_one_key(family: str) -> None:
    """To within a thousandth of a unit in the last place of bf16, in every row and head, one that the row sees."""
    case = case_of("needle", FAMILIES[family])
    key, distance = nearest_v(case)
    seen = visible_keys(case)

    assert float(distance.max()) < 1e-3 * 2.0**-9
    assert bool(((key >= seen.lo[:, None]) & (key < seen.hi[:, None])).all())


@pytest.mark.parametrize(("window", "causal"), [((-1, -1), True), ((-1, -1), False), ((1200, 0), True)])
def test_needles_read_the_whole_page_table(window: tuple[int, int], causal: bool) -> None:
    """With two (row, head) pairs to a page or more, some needle of a long case lies in each page that all rows see, and one
    at the last key."""
    family = Family(name="long", q_heads=4, kv_heads=1, head_dim=64, head_dim_v=8, scale=0.125, causal=causal, window=window)
    case = case_of("needle", family, q_lens=(40,), kv_lens=(2_499,), page_size=32)
    key, distance = nearest_v(case)
    seen = visible_keys(case)

    assert float(distance.max()) < 1e-3 * 2.0**-9
    shared = range(-(-int(seen.lo.max()) // 32), int(seen.hi.min()) // 32)
    assert set(shared) <= set((key // 32).flatten().tolist())
    assert 2_498 in key[-1]


def test_needles_of_a_batch_lie_in_their_own_sequence() -> None:
    case = case_of("needle", FAMILIES["llama3"], q_lens=(2, 0, 3, 1), kv_lens=(40, 5, 2, 0))
    out, v = exact(call_of(case)).out, material(case).v.double()
    kv_head = torch.arange(32) // 4

    for row, (start, stop) in {0: (0, 40), 1: (0, 40), 3: (45, 47), 4: (45, 47)}.items():
        distance = (out[row][None] - v[start:stop][:, kv_head]).abs().amax(-1).amin(0)
        assert float(distance.max()) < 1e-3 * 2.0**-9
    assert bool((out[2] == 0).all())  # three queries on two keys: the first sees none
    assert bool((out[5] == 0).all())


def test_one_hot_rows_are_half_the_rows() -> None:
    """Half the (row, head) pairs give nearly all weight to one key; the others are as flat as randn."""
    used = keys_in_use(case_of("one-hot", FAMILIES["llama3"], q_lens=(40,), kv_lens=(150,)))

    assert 0.4 < float((used < 1.01 / 110).double().mean()) < 0.6
    assert 0.4 < float((used > 0.2).double().mean()) < 0.6


@pytest.mark.parametrize("family", ["gemma4-global", "llama3", "group-5", "mla-prefill"])
@pytest.mark.parametrize("keys", [5, 150, 600])
def test_the_columns_of_probe_v_share_out_the_keys(family: str, keys: int) -> None:
    """One column is 1 for each key, and every column has as many keys as any other but for one."""
    f = FAMILIES[family]
    _, _, v = raw(case_of("probe-v", f, q_lens=(1, 1), kv_lens=(keys, 7)))
    per_column = v[:keys].sum(0)

    assert bool((v.sum(-1) == 1).all())
    assert set(v.flatten().tolist()) == {0.0, 1.0}
    if keys >= f.head_dim_v:
        assert float(per_column.max() - per_column.min()) <= 1


@pytest.mark.parametrize("family", ["gemma4-global", "llama3", "mla-prefill", "gemma4-sliding"])
def test_the_output_of_probe_v_sums_to_1(family: str) -> None:
    """Column c is the weight of the c-th block of keys; a sink is left out."""
    x = exact(call_of(case_of("probe-v", FAMILIES[family])))

    assert float((x.out.sum(-1) - 1).abs().max()) < 1e-12


def test_probe_v_shows_a_missing_page_at_any_length() -> None:
    """One page of 16 keys in 33,001 takes a thirtieth of a column: eight times the rounding of that column in bf16."""
    family = Family(name="long", q_heads=1, kv_heads=1, head_dim=64, head_dim_v=64, scale=0.125)
    case = case_of("probe-v", family, q_lens=(1,), kv_lens=(33_001,))
    call = call_of(case)
    whole = exact(call).out[0, 0]
    for page in (0, 1000, 2061):
        pages = call.page_table[0, :2063].tolist()
        left = torch.tensor([[*pages[:page], *pages[page + 1 :], pages[0]]], dtype=torch.int32)
        less = replace(call, page_table=left, seqused_k=torch.tensor([33_001 - 16], dtype=torch.int32), causal=False)
        assert float(((exact(less).out[0, 0] - whole) / whole).abs().max()) > 8 * 2.0**-9


@pytest.mark.parametrize("inputs", ["ones-v", "constant-v"])
def test_equal_values_come_out_as_they_are(inputs: str) -> None:
    """1, or the constant, whatever the weights: in rows that see a key, without a sink."""
    for family in ("gemma4-global", "gemma2", "encoder", "group-5"):
        out = exact(call_of(case_of(inputs, FAMILIES[family]))).out
        value = 1.0 if inputs == "ones-v" else 0.7109375
        assert float((out - value).abs().max()) < 1e-14


def test_the_constant_is_exact_in_every_format_but_e4m3() -> None:
    assert all(float(torch.tensor(0.7109375).to(TORCH_DTYPES[d])) == 0.7109375 for d in ("bf16", "fp16", "fp32"))


@pytest.mark.parametrize("family", ["gemma4-global", "llama3", "gpt-oss-full"])
def test_the_first_token_takes_most_of_the_weight_and_adds_little(family: str) -> None:
    case = case_of("first-token", FAMILIES[family])
    call = replace(call_of(case), sinks=None)
    _, _, v = raw(case)
    probe = torch.zeros_like(call.v_cache)
    probe[call.page_table[0, 0], 0] = 1
    weight = exact(replace(call, v_cache=probe)).out[..., 0]

    assert float(weight.median()) > 0.9
    assert float(v[0].abs().max()) < 0.1 < float(v[1:].abs().mean())


@pytest.mark.parametrize(("inputs", "centre"), [("shifted-down", -150.0), ("shifted-up", 150.0)])
def test_shifted_logits_leave_the_range_of_exp(inputs: str, centre: float) -> None:
    """Of every row and family, capped ones apart: exp(-100) is 0 in fp32 and exp(100) inf."""
    for family in FAMILIES.values():
        lse = dense_fp32(replace(call_of(case_of(inputs, family)), softcap=0.0, sinks=None))[1]
        assert abs(float(lse.median()) - centre) < 25
        assert float(lse.abs().median()) > 89


def test_k_channels_have_a_large_mean_that_smoothing_takes_off() -> None:
    _, k, _ = raw(case_of("k-channels", FAMILIES["llama3"]))

    assert float(k.mean(0).abs().max()) > 8 * float(k.std(0).max())


def test_ties_are_exact_and_eight() -> None:
    made = material(case_of("ties", FAMILIES["llama3"]))

    assert len({tuple(key) for key in made.k[:, 0].tolist()}) == 8
    x = exact(call_of(case_of("ties", FAMILIES["llama3"])))
    assert bool((x.p2g > 2 * x.p2).all())


def test_cancel_v_cancels() -> None:
    """The output is a small part of the values."""
    x = exact(call_of(case_of("cancel-v", FAMILIES["llama3"])))

    assert float((x.out.abs() / x.v1).median()) < 0.1


def test_positive_v_is_positive_and_offset_v_lies_round_8() -> None:
    assert bool((raw(case_of("positive-v", FAMILIES["llama3"]))[2] >= 0).all())
    assert abs(float(raw(case_of("offset-v", FAMILIES["llama3"]))[2].mean()) - 8) < 0.05


@pytest.mark.parametrize("dtype", ["bf16", "fp16", "fp32"])
def test_tiny_v_gives_subnormal_outputs(dtype: str) -> None:
    """Not 0, and smaller than the smallest normal number."""
    case = case_of("tiny-v", FAMILIES["llama3"], dtype=dtype)
    out = exact(call_of(case)).out.to(TORCH_DTYPES[dtype]).double().abs()

    assert float((out > 0).double().mean()) > 0.5
    assert float((out < torch.finfo(TORCH_DTYPES[dtype]).tiny).double().mean()) > 0.95


def test_outliers_are_one_in_a_thousand() -> None:
    _, _, v = raw(case_of("outliers", FAMILIES["llama3"], kv_lens=(1000,)))

    assert 2e-4 < float((v.abs() > 5).double().mean()) < 2e-3


def test_shared_kv_is_v_times_the_weight_but_for_the_rotated_quarter() -> None:
    """And the rotation keeps lengths."""
    case = case_of("shared-kv", FAMILIES["gemma4-global"])
    _, k, v = raw(case)
    weight = k_norm_weight(case)

    assert torch.allclose(k[..., 128:], v[..., 128:] * weight[128:], rtol=1e-6, atol=0)
    assert not torch.allclose(k[..., :128], v[..., :128] * weight[:128], rtol=0.1)
    assert torch.allclose(k[..., :128].norm(dim=-1), (v * weight)[..., :128].norm(dim=-1), rtol=1e-5)


# The needles' sweep


@st.composite
def batches(draw: st.DrawFn) -> Case:
    lengths = draw(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 12)), min_size=1, max_size=4))
    window = draw(st.sampled_from([(-1, -1), (3, 0), (0, 0), (2, 2), (-1, 1), (2, -1)]))
    family = Family(
        name="s", q_heads=4, kv_heads=2, head_dim=16, head_dim_v=4, scale=1.0, causal=draw(st.booleans()), window=window
    )
    q_lens, kv_lens = zip(*lengths, strict=True)
    return Case(
        name="s", family=family, q_lens=q_lens, kv_lens=kv_lens, inputs="needle", dtype="fp32", seed=draw(st.integers(0, 9))
    )


def visible_v(case: Case, made: Tensor) -> Iterator[tuple[int, Tensor]]:
    seen = visible_keys(case)
    for row, (lo, hi) in enumerate(zip(seen.lo.tolist(), seen.hi.tolist(), strict=True)):
        yield row, made[lo:hi].double().repeat_interleave(case.family.group, 1)


@drawn
@given(batches())
def test_every_needle_lies_where_its_row_can_see_it(case: Case) -> None:
    """Most of a row's weight is on one key that it sees, whatever the mask and the batch; rows without keys give 0."""
    out = exact(call_of(case)).out if case.total_q else torch.zeros(0, 4, 4)
    for row, v in visible_v(case, material(case).v):
        if len(v) == 0:
            assert bool((out[row] == 0).all())
        else:
            assert float((out[row] - v).abs().amax(-1).amin(0).max()) < 0.05


def test_a_class_is_a_function_of_case_and_seed() -> None:
    """Equal cases give equal numbers, another seed others."""
    fills: list[Callable[[Case], tuple[Tensor, Tensor, Tensor]]] = [raw, raw]
    for inputs in INPUT_CLASSES:
        one, two = (fill(case_of(inputs, FAMILIES["group-5"])) for fill in fills)
        other = raw(case_of(inputs, FAMILIES["group-5"], seed=1))
        assert all(torch.equal(a, b) for a, b in zip(one, two, strict=True))
        assert not torch.equal(one[0], other[0])
