"""The TileLang kernels: a family is a row of a table, every query row falls into one block, and what cannot run explains itself.

The kernels run on a Hopper GPU only, where ci/gpu/bits.py and `oracle accept` judge them.  What is around them runs here.
"""

from __future__ import annotations

import ast
import importlib.util
import inspect
import math
import shutil
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from oracle.contract import OPTIONAL, REQUIRED, Record
from oracle.kernels import ahead_of_time, tilelang_families, tilelang_prefill
from oracle.kernels.tilelang_families import FAMILIES, PAGE_SIZES, Family

KERNELS = {name: getattr(tilelang_prefill, name) for name in FAMILIES}
GENERATOR = Path(tilelang_families.__file__).with_name("tilelang_body.py")
HD128 = FAMILIES["hd128"]
needs_tilelang = pytest.mark.skipif(importlib.util.find_spec("tilelang") is None, reason="tilelang is not installed")
needs_nvcc = pytest.mark.skipif(shutil.which("nvcc") is None, reason="nvcc is not installed")


class Recorder:
    """Stands in for a compiled kernel: keeps what it is launched with, and fills `out`."""

    def __init__(self) -> None:
        self.values: dict[str, Any] = {}

    def launch(self, values: dict[str, Any], stream: int) -> None:
        """Keeps the arguments."""
        self.values = values
        values["out"].fill_(1.0)
        values["lse"].fill_(2.0)


def launched(monkeypatch: pytest.MonkeyPatch, family: Family = HD128, **changes: Any) -> dict[str, Any]:
    """The arguments that a call with `changes` launches the kernel with; 5 query tokens, 2 of 3 sequences live."""
    recorder = Recorder()
    monkeypatch.setattr(tilelang_prefill, "compiled", lambda family, page_size: recorder)
    monkeypatch.setattr(tilelang_prefill, "_check", lambda *_: None)
    monkeypatch.setattr(torch.cuda, "device", lambda _: torch.no_grad())
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: SimpleNamespace(cuda_stream=0))
    heads, dim = 2 * family.group, family.head_dim
    arguments: dict[str, Any] = {
        "cu_seqlens_q": torch.tensor([0, 2, 5, -(10**7)], dtype=torch.int32),
        "seqused_k": torch.tensor([2, 9, 10**7], dtype=torch.int32),
        "page_table": torch.zeros(3, 4, dtype=torch.int32),
        "softmax_scale": 0.5,
        "num_seqs": 2,
    }
    q = changes.pop("q", torch.zeros(5, heads, dim, dtype=torch.bfloat16))
    cache = changes.pop("cache", torch.zeros(6, 16, 2, dim, dtype=torch.bfloat16))
    KERNELS[family.name](q, cache, cache, **(arguments | changes))
    return recorder.values


def test_every_row_of_the_table_has_its_kernel() -> None:
    for name, family in FAMILIES.items():
        kernel = KERNELS[name]
        record: Record = kernel.record
        assert (record.head_dims, record.groups, record.page_sizes) == ((family.head_dim,), (family.group,), PAGE_SIZES)
        assert record.dtypes == ("bf16",) and record.devices == ("cuda",)
        assert kernel.__name__ == name == family.name


def test_kernels_name_what_they_support_and_no_more() -> None:
    for kernel in KERNELS.values():
        named = set(inspect.signature(kernel).parameters) - {"q", "k_cache", "v_cache"}
        assert named == set(REQUIRED) | (set(OPTIONAL) - {"softcap", "sinks", "q_scale", "k_scale", "v_scale"})


def test_the_generator_knows_no_family() -> None:
    """A family is a row, never a branch: no name and no head dim of the table stands in the generator."""
    constants = {node.value for node in ast.walk(ast.parse(GENERATOR.read_text())) if isinstance(node, ast.Constant)}
    known = {f.name for f in FAMILIES.values()} | {f.head_dim for f in FAMILIES.values() if f.head_dim != 128}
    assert not constants & known  # 128 is also the threads of a warpgroup


@pytest.mark.parametrize(
    ("change", "rule"),
    [
        ({"group": 12}, "a row group holds whole groups"),
        ({"row_groups": 1}, "two warpgroups compute"),
        ({"chunk": 96}, "a chunk is whole panels and K whole chunks"),
        ({"head_dim": 192, "chunk": 64, "row_groups": 1, "column_groups": 2}, "a warpgroup's columns are whole panels"),
        ({"keys": 80}, "a tile is whole pages"),
        ({"stages": 9}, "its tiles fit"),
    ],
)
def test_a_row_that_cannot_be_generated_is_refused(change: dict[str, Any], rule: str) -> None:
    with pytest.raises(ValueError, match=rule):
        replace(HD128, **change)


@given(
    st.lists(st.integers(0, 300), min_size=1, max_size=40),
    st.integers(0, 70),
    st.sampled_from(sorted(FAMILIES)),
)
def test_every_query_token_falls_into_one_block(lengths: list[int], tail: int, name: str) -> None:
    """The kernel's own search: block cu[i] // tokens + i is the first of sequence i.  Blocks past a sequence's end do nothing."""
    tokens, starts = FAMILIES[name].tokens, [0]
    for length in lengths:
        starts.append(starts[-1] + length)
    blocks = (starts[-1] + tail) // tokens + len(lengths)
    covered = torch.zeros(starts[-1], dtype=torch.int32)
    for block in range(blocks):
        seq, end = 0, len(lengths) - 1
        for _ in range((len(lengths) - 1).bit_length()):
            middle = (seq + end + 1) // 2
            seq, end = (middle, end) if starts[middle] // tokens + middle <= block else (seq, middle - 1)
        first = (block - starts[seq] // tokens - seq) * tokens
        assert first >= 0
        covered[starts[seq] + first : max(starts[seq] + first, min(starts[seq] + first + tokens, starts[seq + 1]))] += 1
    assert bool((covered == 1).all())


def test_only_the_live_plan_reaches_the_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    values = launched(monkeypatch)
    assert values["cu"].tolist() == [0, 2, 5] and values["used"].tolist() == [2, 9]
    assert values["table"].shape == (2, 4) and (values["seqs"], values["plan"], values["steps"]) == (2, 2, 1)
    assert values["scale2"] == pytest.approx(0.5 / math.log(2), rel=1e-15)


@pytest.mark.parametrize(
    ("asked", "bounds"),
    [
        ({}, (2**30, 0)),
        ({"window_size": (7, 3)}, (7, 0)),  # causal: nothing to the right
        ({"causal": False}, (2**30, 2**30)),
        ({"causal": False, "window_size": (7, 3)}, (7, 3)),
        ({"window_size": (2**31, -1)}, (2**30, 0)),
    ],
)
def test_the_window_is_that_of_the_contract(
    monkeypatch: pytest.MonkeyPatch, asked: dict[str, Any], bounds: tuple[int, int]
) -> None:
    values = launched(monkeypatch, **asked)
    assert (values["left"], values["right"]) == bounds


def test_caches_of_many_layers_in_a_page_are_passed_by_their_strides(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = torch.zeros(6, 3, 2, 16, 2, 128, dtype=torch.bfloat16)
    values = launched(monkeypatch, cache=whole[:, 1, 0])
    assert values["k"].data_ptr() == whole[0, 1, 0].data_ptr()
    assert [8 * values[n] for n in ("k_page", "k_slot", "k_head")] == [3 * 2 * 16 * 2 * 128, 2 * 128, 128]


def test_an_out_that_vector_stores_cannot_write_is_written_by_way_of_a_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    out = torch.zeros(5, 8, 129, dtype=torch.bfloat16)[..., :128]
    values = launched(monkeypatch, out=out)
    assert values["out"] is not out and bool((out == 1).all())
    aligned = torch.zeros(5, 8, 136, dtype=torch.bfloat16)[..., :128]
    assert launched(monkeypatch, out=aligned)["out"] is aligned


def test_an_empty_batch_launches_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    assert launched(monkeypatch, num_seqs=0) == {}
    assert launched(monkeypatch, q=torch.zeros(0, 8, 128, dtype=torch.bfloat16)) == {}


def test_a_call_without_a_gpu_says_what_is_needed() -> None:
    q, cache = torch.zeros(1, 8, 128, dtype=torch.bfloat16), torch.zeros(1, 16, 2, 128, dtype=torch.bfloat16)
    plan = torch.zeros(2, dtype=torch.int32)
    with pytest.raises(ValueError, match="hd128: q is on cpu; expected a Hopper GPU"):
        KERNELS["hd128"](q, cache, cache, cu_seqlens_q=plan, seqused_k=plan[:1], page_table=plan[None], softmax_scale=1.0)


def test_without_libraries_or_a_compiler_the_error_names_both_ways_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(tilelang_prefill.FOLDER, raising=False)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(ahead_of_time, "unavailable", lambda: "tilelang is not installed")
    with pytest.raises(
        ahead_of_time.BuildError, match=f"tilelang is not installed, or name a folder .* in {tilelang_prefill.FOLDER}"
    ):
        tilelang_prefill.compiled(HD128, 16)


@needs_tilelang
def test_a_fourth_family_is_a_row(tmp_path: Path) -> None:
    """Nothing but a row is added, and TileLang writes a kernel of it that copies by TMA and multiplies by wgmma."""
    row = replace(HD128, name="hd64", head_dim=64, group=16, chunk=64)
    code, _ = ahead_of_time.source(row, 16)
    assert "tma_load" in code and "wgmma_ss" in code and "warpgroup_reg_dealloc" in code
