"""Material: packed inputs in the case's formats, and scales that a kernel has to use."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from oracle.captured import CaptureError, load_capture, shipped
from oracle.cases import DTYPES, SCALES, Case, captured_case
from oracle.contract import Call
from oracle.errors import InputError
from oracle.families import FAMILIES, Family
from oracle.inputs import EXTRA_CLASSES
from oracle.material import SCALE_CHOICES, TORCH_DTYPES, Material, material, offsets, visible_keys
from oracle.pool import Fill, lay_out, without_fill
from oracle.references.attention import attend
from oracle.references.dense import dense_fp32
from oracle.references.plan import row_plan

drawn = settings(derandomize=True, deadline=None, database=None, max_examples=80)

SMALL = Family(name="small", q_heads=6, kv_heads=3, head_dim=16, head_dim_v=8, scale=0.25, sinks=True)
PLAIN = Case(name="m", family=SMALL, q_lens=(2, 0, 5, 1), kv_lens=(20, 3, 5, 0))


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """Small cases over masks, formats, scales and sinks."""
    lengths = draw(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 12)), min_size=1, max_size=4))
    family = replace(
        SMALL,
        causal=draw(st.booleans()),
        window=draw(st.sampled_from([(-1, -1), (3, 0), (0, 0), (2, 2), (-1, 1), (2, -1)])),
    )
    return replace(
        PLAIN, family=family, q_lens=tuple(q for q, _ in lengths), kv_lens=tuple(k for _, k in lengths),
        dtype=draw(st.sampled_from(DTYPES)), cache_dtype=draw(st.sampled_from(("", "e4m3"))),
        scales=draw(st.sampled_from(SCALES)), sinks=draw(st.sampled_from(("none", "small"))), seed=draw(st.integers(0, 99)),
    )  # fmt: skip


@drawn
@given(cases())
def test_everything_has_the_shape_and_the_format_of_the_case(case: Case) -> None:
    made, f, batch = material(case), case.family, len(case.q_lens)
    cache = TORCH_DTYPES[case.cache_dtype or case.dtype]

    assert (made.q.shape, made.q.dtype) == ((case.total_q, f.q_heads, f.head_dim), TORCH_DTYPES[case.dtype])
    assert (made.k.shape, made.k.dtype) == ((case.total_k, f.kv_heads, f.head_dim), cache)
    assert (made.v.shape, made.v.dtype) == ((case.total_k, f.kv_heads, f.head_dim_v), cache)
    assert made.cu_q.tolist() == [sum(case.q_lens[:i]) for i in range(batch + 1)]
    assert made.cu_k.tolist() == [sum(case.kv_lens[:i]) for i in range(batch + 1)]
    assert (made.sinks is None) == (case.sinks == "none")
    assert made.extras == {}


@drawn
@given(cases())
def test_the_keys_that_a_row_sees_are_those_that_the_reference_lets_it_see(case: Case) -> None:
    """The same masks as of the laid-out call, at packed positions."""
    seen = visible_keys(case)
    call = without_fill(lay_out(case, material(case), fill=Fill.STALE, salt=0))
    plan = row_plan(call, torch.arange(case.total_q))
    start = offsets(case.kv_lens)[plan.seq]

    assert torch.equal(seen.lo, plan.lo + start)
    assert torch.equal(seen.hi, plan.hi + start)


@pytest.mark.parametrize("scales", SCALES)
def test_scales_have_the_shape_that_their_kind_says(scales: str) -> None:
    made = material(replace(PLAIN, scales=scales))
    shapes = {"none": None, "scalar": "float", "per-head": (3,), "per-sequence": (4, 3)}
    expected = shapes[scales.removeprefix("kv-")]

    def shape(x: Tensor | float | None) -> object:
        return None if x is None else "float" if isinstance(x, float) else tuple(x.shape)

    assert shape(made.k_scale) == shape(made.v_scale) == expected
    assert shape(made.q_scale) == (None if scales.startswith("kv-") else expected)


def test_scales_are_far_from_1_and_differ_between_heads_and_sequences() -> None:
    """Half or twice it at the least; and no two of q, k and v have the same."""
    made = material(replace(PLAIN, scales="per-sequence"))
    tensors = [s for s in (made.q_scale, made.k_scale, made.v_scale) if isinstance(s, Tensor)]

    assert len(tensors) == 3
    assert all(abs(torch.log2(s)).min() > 0.8 for s in tensors)
    assert all(len(set(s[:, 0].tolist())) > 1 and len(set(s[0].tolist())) > 1 for s in tensors)
    assert not torch.equal(tensors[0], tensors[1])
    assert not torch.equal(tensors[1], tensors[2])
    assert all(float(torch.tensor(c).bfloat16()) == c for c in SCALE_CHOICES)


def answer(call: Call) -> Tensor:
    return attend(call, torch.arange(int(call.cu_seqlens_q[-1])), 2**-8).out


@pytest.mark.parametrize("cache", ["", "e4m3"])
@pytest.mark.parametrize("scales", SCALES[1:])
def test_scales_give_back_the_inputs_that_the_class_aims_at(scales: str, cache: str) -> None:
    """The answer is that of the case without scales, but for the roundings of the format."""
    plain = replace(PLAIN, cache_dtype=cache)
    one, two = (without_fill(lay_out(c, material(c), fill=Fill.STALE, salt=0)) for c in (plain, replace(plain, scales=scales)))

    rounding = 0.15 if cache else 0.03
    assert float((answer(one) - answer(two)).abs().median()) < rounding


@pytest.mark.parametrize("name", ["q_scale", "k_scale", "v_scale"])
@pytest.mark.parametrize("scales", SCALES[1:])
def test_a_kernel_that_drops_a_scale_gives_another_answer(scales: str, name: str) -> None:
    """By far more than a rounding: in 16 bits too."""
    case = replace(PLAIN, scales=scales)
    call = without_fill(lay_out(case, material(case), fill=Fill.STALE, salt=0))
    if getattr(call, name) is None:
        assert scales.startswith("kv-")
        assert name == "q_scale"
        return
    changes: dict[str, None] = {name: None}
    dropped = replace(call, **changes)  # type: ignore[arg-type]  # one of three optional fields

    assert float((answer(dropped) - answer(call)).abs().max()) > 0.1


@pytest.mark.parametrize("scales", ["scalar", "kv-per-head", "per-sequence"])
def test_an_8_bit_cache_is_not_clamped(scales: str) -> None:
    """The scale grows by a power of two where v divided by it would not fit: clamped values would all be equal."""
    for seed in range(8):
        made = material(replace(PLAIN, cache_dtype="e4m3", scales=scales, inputs="cancel-v", seed=seed))
        assert float((made.v.float().abs() == 448).double().mean()) < 0.3
        assert len(set(made.v.float().abs().flatten().tolist())) > 1


def test_what_does_not_fit_the_format_is_clamped_not_infinite() -> None:
    """Where there are no scales: logits of 10^36 in fp16."""
    made = material(replace(PLAIN, inputs="logits-1e36", dtype="fp16"))

    assert bool(made.q.isfinite().all())
    assert float(made.q.abs().max()) == 65504


@pytest.mark.parametrize(("sinks", "most", "least"), [("small", 0.7, 0.02), ("dominant", 1.0, 0.9), ("below", 1e-20, 0.0)])
def test_sinks_weigh_what_their_kind_says(sinks: str, most: float, least: float) -> None:
    """Beside twenty keys of unit logits: about one key's worth, nearly all, or nothing that a format could hold."""
    case = replace(PLAIN, sinks=sinks, kv_lens=(20, 3, 25, 0))
    call = without_fill(lay_out(case, material(case), fill=Fill.STALE, salt=0))
    _, lse = dense_fp32(call)
    assert call.sinks is not None
    share = torch.exp(call.sinks - lse)[:7]

    assert least <= float(share.median()) <= most
    assert len(set(call.sinks.tolist())) == len(call.sinks)


def test_each_sink_is_the_head_s_own() -> None:
    assert material(replace(PLAIN, sinks="small")).sinks is not None
    assert material(replace(PLAIN, sinks="none")).sinks is None


def test_an_unknown_input_class_is_an_error_that_lists_them() -> None:
    with pytest.raises(InputError, match=r"case m: no input class 'rand'; there are randn, flat"):
        material(replace(PLAIN, inputs="rand"))


@pytest.mark.parametrize("change", ["q", "k", "v", "sinks", "k_scale", "extras"])
def test_the_digest_sees_a_change_of_any_part(change: str) -> None:
    """Of one bit of a tensor; no part is left out."""
    whole = Case(name="s", family=FAMILIES["gemma4-global"], q_lens=(1,), kv_lens=(3,), inputs="shared-kv", scales="per-head",
                 sinks="small")  # fmt: skip
    made = material(whole)
    assert set(whole.inputs.split()) <= set(EXTRA_CLASSES)
    if change == "extras":
        other = replace(made, extras={name: -x for name, x in made.extras.items()})
    else:
        value = getattr(made, change).clone()
        value.view(torch.uint8).view(-1)[0] ^= 1
        fields: dict[str, Tensor] = {change: value}
        other = replace(made, **fields)  # type: ignore[arg-type]  # the field is a tensor

    assert other.digest() != made.digest()


def test_the_digest_tells_no_scale_from_a_scale_of_1() -> None:
    made = material(PLAIN)

    assert replace(made, k_scale=1.0).digest() != made.digest()


# Captures

CAPTURED = captured_case("c", FAMILIES["smollm2"], 200, "bf16", "smollm2-layer00.safetensors")


def test_a_captured_case_holds_the_tensors_of_the_file() -> None:
    """The last q_len queries of the first kv_len tokens, bit for bit."""
    capture = load_capture(shipped()["smollm2-layer00"])
    made = material(CAPTURED)

    assert torch.equal(made.q, capture.q[104:200])
    assert torch.equal(made.k, capture.k[:200])
    assert torch.equal(made.v, capture.v[:200])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"q_lens": (1, 1), "kv_lens": (2, 2)}, "holds one sequence of 640 tokens"),
        ({"q_lens": (1,), "kv_lens": (641,)}, "holds one sequence of 640 tokens"),
        ({"q_lens": (5,), "kv_lens": (4,)}, r"got q_lens \(5,\) and kv_lens \(4,\)"),
        ({"family": FAMILIES["llama3"]}, r"holds q heads, kv heads and head dims \(9, 3, 64, 64\); family llama3"),
        ({"captured": "none.safetensors"}, "none.safetensors: no such file"),
        ({"captured": ""}, "no such file"),
    ],
)
def test_a_case_that_does_not_fit_its_capture_is_an_error(changes: dict[str, object], message: str) -> None:
    """Must fail: more tokens than there are, several sequences, another family's heads, no file."""
    with pytest.raises(InputError, match=message):
        material(replace(CAPTURED, **changes))  # type: ignore[arg-type]


def test_a_file_that_is_no_capture_is_an_input_error(tmp_path: Path) -> None:
    (tmp_path / "x.safetensors").write_bytes(b"no")
    with pytest.raises(CaptureError) as caught:
        material(replace(CAPTURED, captured=str(tmp_path / "x.safetensors")))

    assert isinstance(caught.value, InputError)


def test_material_is_a_record_of_everything_that_a_call_needs() -> None:
    """What lay_out takes from it reaches the call."""
    case = replace(PLAIN, sinks="small", scales="scalar")
    made: Material = material(case)
    call = lay_out(case, made, fill=Fill.NAN, salt=1).call

    assert (call.sinks is made.sinks, call.q_scale, call.k_scale, call.v_scale) == (
        True,
        made.q_scale,
        made.k_scale,
        made.v_scale,
    )
