"""Cases: TOML there and back, one line for whatever is wrong with a file, and the same bits for the same case."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
import tomli_w
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from oracle.cases import DTYPES, LAYOUTS, SCALES, SINKS, Case, captured_case, case_seed, from_toml, read_cases, to_toml
from oracle.errors import InputError
from oracle.families import FAMILIES, Family
from oracle.inputs import INPUT_CLASSES
from oracle.material import material

drawn = settings(derandomize=True, deadline=None, database=None, max_examples=100)

LLAMA = Case(name="a", family=FAMILIES["llama3"], q_lens=(1, 3), kv_lens=(20, 3))
GOOD = to_toml(LLAMA)
names = st.text(st.sampled_from("aé/\"'\\ 0-#=[]"), max_size=8)
sides = st.integers(-1, 100)
families = st.sampled_from(list(FAMILIES.values())) | st.builds(
    lambda kv, group, **rest: Family(kv_heads=kv, q_heads=kv * group, **rest),
    kv=st.integers(1, 3), group=st.integers(1, 5), name=names, head_dim=st.integers(1, 600), head_dim_v=st.integers(1, 600),
    scale=st.floats(1e-3, 4.0) | st.just(-1.0), causal=st.booleans(), window=st.tuples(sides, sides),
    softcap=st.sampled_from((0.0, 30.0)), sinks=st.booleans(), source=names,
)  # fmt: skip
cases = st.builds(
    lambda lengths, **rest: Case(q_lens=tuple(q for q, _ in lengths), kv_lens=tuple(k for _, k in lengths), **rest),
    lengths=st.lists(st.tuples(st.integers(0, 40), st.integers(0, 70000)), max_size=4), name=names, family=families,
    dtype=st.sampled_from(DTYPES), cache_dtype=st.sampled_from(("", "e4m3")), page_size=st.integers(1, 256),
    layout=st.sampled_from(LAYOUTS), inputs=st.sampled_from([*INPUT_CLASSES, "captured"]), captured=names,
    scales=st.sampled_from(SCALES), sinks=st.sampled_from(SINKS), padded_seqs=st.integers(0, 3), tail_rows=st.integers(0, 9),
    shared_prefix=st.integers(0, 99), give_out=st.booleans(), rows=st.integers(0, 500), seed=st.integers(0, 2**48),
)  # fmt: skip


@drawn
@given(cases)
@example(LLAMA)
def test_a_case_comes_back_from_toml_as_it_was(case: Case) -> None:
    """Whatever its values, and the family whole where it is not one of the table."""
    assert from_toml(to_toml(case), "here") == case


def test_a_case_of_a_known_family_takes_a_few_lines() -> None:
    """What is at its default is not written."""
    assert " ".join(GOOD.split()) == 'format = 1 name = "a" family = "llama3" q_lens = [ 1, 3, ] kv_lens = [ 20, 3, ]'


def refusal(text: str) -> str:
    """The error that a text is refused with, one line that names the file."""
    with pytest.raises(InputError) as caught:
        from_toml(text, "dir/CASE.toml")
    message = str(caught.value)
    assert "\n" not in message
    assert message.startswith("dir/CASE.toml: ")
    return message


def with_value(**values: Any) -> str:
    return tomli_w.dumps({"format": 1, "name": "a", "family": "llama3", "q_lens": [1], "kv_lens": [2]} | values)


def with_family(**values: Any) -> str:
    plain = {"name": "f", "q_heads": 4, "kv_heads": 2, "head_dim": 8, "head_dim_v": 8, "scale": 0.5}
    return with_value(family={key: value for key, value in (plain | values).items() if value is not None})


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("format = 1\nname = ", ("not valid TOML",)),
        ("format = 1\nname = 'a'\nname = 'b'", ("not valid TOML",)),
        ("", ("expected `format = 1`",)),
        (GOOD.replace("format = 1", "format = 2"), ("expected `format = 1`",)),
        (GOOD.replace("format = 1", "format = '1'"), ("expected `format = 1`",)),
        (with_value(sequence=1), ("unknown key 'sequence'", "q_lens")),
        (with_value(family="llama9"), ("no family 'llama9'", "oracle families")),
        (with_value(family=3), ("family is 3", "expected the name of a family")),
        (GOOD.replace('name = "a"\n', ""), ("'name' is missing",)),
        ("format = 1\nname = 'a'\nq_lens = [1]\nkv_lens = [1]", ("'family' is missing",)),
        (with_value(layout="nhd"), ("layout is 'nhd'", "'hnd'")),
        (with_value(scales="block"), ("scales is 'block'", "'per-head'")),
        (with_value(sinks="huge"), ("sinks is 'huge'", "'dominant'")),
        (with_value(dtype="fp64"), ("dtype is 'fp64'", "'bf16'")),
        (with_value(cache_dtype="e5m2"), ("cache_dtype is 'e5m2'", "'e4m3'")),
        (with_value(name=3), ("name is 3", "expected a line of text")),
        (with_value(name="a\nb"), ("name is 'a\\nb'", "expected a line of text")),
        (with_value(seed="x"), ("seed is 'x'", "expected a whole number")),
        (with_value(seed=True), ("seed is True", "expected a whole number")),
        (with_value(page_size=16.0), ("page_size is 16.0", "expected a whole number")),
        (with_value(page_size=0), ("page_size is 0", "1 or more")),
        (with_value(give_out=1), ("give_out is 1", "expected true or false")),
        (with_value(q_lens=1), ("q_lens is 1", "expected a list of whole numbers")),
        (with_value(q_lens=["1"]), ("q_lens is ['1']", "expected a list of whole numbers")),
        (with_value(q_lens=[1, 2]), ("2 q_lens but 1 kv_lens",)),
        (with_value(kv_lens=[-1]), ("kv_lens is -1", "0 or more")),
        (with_value(padded_seqs=-1), ("padded_seqs is -1", "0 or more")),
        (with_value(shared_prefix=-1), ("shared_prefix is -1", "0 or more")),
        (with_value(rows=-1), ("rows is -1", "0 or more")),
        (with_value(tail_rows=-1), ("tail_rows is -1", "0 or more")),
        (with_family(heads=3), ("[family]", "unknown key 'heads'", "q_heads")),
        (with_family(scale=None), ("[family]", "'scale' is missing")),
        (with_family(scale="1"), ("[family]", "scale is '1'", "expected a number")),
        (with_family(scale=0), ("[family]", "scale is 0", "not 0")),
        (with_family(scale=float("nan")), ("[family]", "scale is nan", "finite")),
        (with_family(q_heads=3), ("[family]", "q_heads is 3", "a multiple of kv_heads, 2")),
        (with_family(kv_heads=0), ("[family]", "kv_heads is 0", "1 or more")),
        (with_family(window=[1]), ("[family]", "window is [1]", "expected two whole numbers")),
        (with_family(window=[-2, 0]), ("[family]", "window is (-2, 0)", "-1 (no limit) or more")),
        (with_family(softcap=-1.0), ("[family]", "softcap is -1.0", "0 (off)")),
        (with_family(causal="yes"), ("[family]", "causal is 'yes'", "expected true or false")),
    ],
)  # fmt: skip
def test_a_wrong_file_is_refused_in_one_line_that_says_what_was_expected(text: str, parts: tuple[str, ...]) -> None:
    message = refusal(text)

    assert all(part in message for part in parts), message


@drawn
@given(
    st.sampled_from([f.name for f in fields(Case)]), st.sampled_from([3, -1, 0.5, True, "x", "a\nb", [1], [[1]], {}, {"a": 1}])
)
def test_no_value_of_a_key_ends_in_another_error(key: str, value: Any) -> None:
    """A case, or one line."""
    try:
        from_toml(with_value(**{key: value}), "CASE.toml")
    except InputError as problem:
        assert "\n" not in str(problem)
        assert str(problem).startswith("CASE.toml: ")


@drawn
@given(st.text(st.sampled_from("=[]{}\"'\\\n a1.#,"), max_size=20))
def test_no_text_ends_in_another_error(text: str) -> None:
    refusal(text)


def test_a_folder_is_read_by_name(tmp_path: Path) -> None:
    for name in ("b", "a", "c"):
        (tmp_path / f"{name}.toml").write_text(to_toml(replace(LLAMA, name=name)))
    (tmp_path / "notes.txt").write_text("no case")

    assert [c.name for c in read_cases(tmp_path)] == ["a", "b", "c"]


@pytest.mark.parametrize("folder", ["empty", "absent"])
def test_a_folder_without_cases_is_an_error(tmp_path: Path, folder: str) -> None:
    """Zero cases are never a suite."""
    (tmp_path / "empty").mkdir()
    with pytest.raises(InputError, match=r"no \*\.toml case in it"):
        read_cases(tmp_path / folder)


def test_one_wrong_file_of_a_folder_is_named(tmp_path: Path) -> None:
    (tmp_path / "a.toml").write_text(GOOD)
    (tmp_path / "b.toml").write_text(with_value(layout="nhd"))
    with pytest.raises(InputError, match=r"b\.toml: case a: layout is 'nhd'"):
        read_cases(tmp_path)


def test_a_file_that_is_no_text_is_named(tmp_path: Path) -> None:
    (tmp_path / "a.toml").write_bytes(b"\xff\xfe")
    with pytest.raises(InputError, match=r"a\.toml: cannot be read as UTF-8 text"):
        read_cases(tmp_path)


def test_a_capture_is_looked_for_beside_its_case_and_then_in_the_package(tmp_path: Path) -> None:
    case = captured_case("c", FAMILIES["smollm2"], 40, "bf16", "mine.safetensors")
    (tmp_path / "c.toml").write_text(to_toml(case))
    assert read_cases(tmp_path)[0].captured == str(tmp_path / "mine.safetensors")

    shipped = replace(case, captured="smollm2-layer00.safetensors")
    (tmp_path / "c.toml").write_text(to_toml(shipped))
    assert read_cases(tmp_path) == [shipped]
    (tmp_path / "smollm2-layer00.safetensors").touch()
    assert read_cases(tmp_path)[0].captured == str(tmp_path / "smollm2-layer00.safetensors")


@pytest.mark.parametrize("tokens", [1, 96, 640])
def test_a_captured_case_reads_the_last_rows_of_a_capture(tokens: int) -> None:
    case = captured_case("c", FAMILIES["gpt-oss-full"], tokens, "fp16", "file")

    assert (case.q_lens, case.kv_lens) == ((min(96, tokens),), (tokens,))
    assert (case.sinks, case.dtype, case.inputs, case.captured) == ("small", "fp16", "captured", "file")


def test_keys_are_shared_as_far_as_both_sequences_reach() -> None:
    """Sequence 0 shares with no one before it."""
    case = replace(LLAMA, q_lens=(1, 1, 1, 1), kv_lens=(20, 3, 50, 0), shared_prefix=30)

    assert case.shared == (0, 3, 20, 0)
    assert replace(case, shared_prefix=0).shared == (0, 0, 0, 0)


@pytest.mark.parametrize("scales", SCALES)
@pytest.mark.parametrize("cache_dtype", ["", "e4m3"])
def test_shared_keys_are_those_of_sequence_0_bit_for_bit_and_mean_the_same(scales: str, cache_dtype: str) -> None:
    """All that a case without them shares stays as it is: the other keys, and the queries."""
    case = Case(name="s", family=FAMILIES["gpt-oss-full"], q_lens=(1, 2, 1), kv_lens=(40, 33, 20), scales=scales, sinks="small",
                cache_dtype=cache_dtype, shared_prefix=25)  # fmt: skip
    plain, made = material(replace(case, shared_prefix=0)), material(case)

    for x, y in ((plain.k, made.k), (plain.v, made.v)):
        got, of_first = y.view(torch.uint8), y.view(torch.uint8)[:25]
        assert torch.equal(got[40:65], of_first) and torch.equal(got[73:93], of_first[:20])
        assert not torch.equal(x.view(torch.uint8)[40:65], of_first)
        if not scales.endswith("per-sequence"):
            assert torch.equal(got[:40], x.view(torch.uint8)[:40]) and torch.equal(got[65:73], x.view(torch.uint8)[65:73])
    for scale in (made.k_scale, made.v_scale):
        if isinstance(scale, torch.Tensor) and scale.dim() == 2:
            assert torch.equal(scale, scale[:1].expand_as(scale))
    assert torch.equal(made.q, plain.q)


def test_totals_are_sums_over_sequences() -> None:
    assert (LLAMA.total_q, LLAMA.total_k) == (4, 23)


@drawn
@given(st.integers(0, 2**32), names, st.integers(0, 2**32), names)
@example(1, "1:a", 11, ":a")
def test_cases_of_a_suite_do_not_share_a_seed(seed: int, name: str, other_seed: int, other: str) -> None:
    """Another name or another seed of the suite gives another seed of the case; equal ones the same."""
    same = (seed, name) == (other_seed, other)

    assert (case_seed(seed, name) == case_seed(other_seed, other)) == same
    assert 0 <= case_seed(seed, name) < 2**48  # TOML holds 63 bits


# The bits

PINNED = {
    "needle": (
        Case(name="n", family=FAMILIES["gpt-oss-full"], q_lens=(1, 5, 0), kv_lens=(70, 33, 4), inputs="needle", sinks="small",
             scales="per-sequence", cache_dtype="e4m3"),
        "b697f8a5d61bd74bd3292093513626835f23a0594ae07adfdb6c6649447a76fe",
    ),
    "qk-norm": (
        Case(name="q", family=FAMILIES["gemma4-sliding"], dtype="fp32", q_lens=(9,), kv_lens=(40,), inputs="qk-norm",
             scales="scalar", seed=7),
        "04d60f9bdcadece2e74a8ca8e67c0a7b289ac464bf5b65393f6ef721dcc53d9d",
    ),
    "first-token": (
        Case(name="f", family=FAMILIES["group-5"], dtype="fp16", q_lens=(3, 4), kv_lens=(50, 4), inputs="first-token",
             scales="kv-per-head", seed=8),
        "2d7d05019d1003c0a572cbf4380b6a9d9a57cc59722c3acb2d37366298f0cf7a",
    ),
    "captured": (
        captured_case("c", FAMILIES["smollm2"], 100, "bf16", "smollm2-layer18.safetensors"),
        "58d9d78cf5723f9e5e18ddbaf2c47176736ff7cd693bf8b5087097b8ce0c0789",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", PINNED)
def test_the_same_case_has_the_same_bits_on_any_machine(name: str) -> None:
    """The digests were taken once."""
    case, digest = PINNED[name]

    assert material(case).digest() == digest


def test_the_bits_do_not_depend_on_the_vector_unit_or_on_threads() -> None:
    """The digests are those above where torch uses no vector instructions, and two threads."""
    program = (
        "import sys, torch; torch.set_num_threads(2)\n"
        "from oracle.cases import from_toml\nfrom oracle.material import material\n"
        "print(*(material(from_toml(text, 'stdin')).digest() for text in sys.stdin.read().split('\\0')))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], input="\0".join(to_toml(case) for case, _ in PINNED.values()), text=True, check=True,
        capture_output=True, env=os.environ | {"ATEN_CPU_CAPABILITY": "default", "OMP_NUM_THREADS": "2"},
    )  # fmt: skip

    assert done.stdout.split() == [digest for _, digest in PINNED.values()]


@pytest.mark.parametrize(
    "changes", [{"seed": 1}, {"inputs": "flat"}, {"dtype": "fp16"}, {"scales": "scalar"}, {"kv_lens": (21, 3)}]
)
def test_another_case_has_other_bits(changes: dict[str, Any]) -> None:
    assert material(replace(LLAMA, **changes)).digest() != material(LLAMA).digest()


@pytest.mark.parametrize(
    "changes", [{"name": "b"}, {"page_size": 64}, {"layout": "hnd"}, {"padded_seqs": 3}, {"tail_rows": 0}, {"give_out": False}]
)  # fmt: skip
def test_where_a_case_lies_does_not_change_its_bits(changes: dict[str, Any]) -> None:
    assert material(replace(LLAMA, **changes)).digest() == material(LLAMA).digest()
