"""A test's verdict beside a lock: never born green, held to its figures, loosened by nobody in passing."""

from __future__ import annotations

from pathlib import Path

import pytest
from lock_samples import LOCK

from oracle.accept import Asked
from oracle.errors import InputError
from oracle.lock import read, write
from oracle.plugin_lock import as_locked, judge_locked, row_name
from oracle.verdict import Coverage, Outcome, Verdict

ACCEPTED = Verdict(
    outcome=Outcome.ACCEPT,
    door="accuracy",
    candidate="k",
    incumbent="emulator",
    findings=(),
    ratios=(),
    figures=None,
    coverage=Coverage(cases=1, elements=1, rows=1, counts={}, missing=(), left_out=(), skipped={}, unseen=()),
    notes=(),
)
PROJECT = """
import torch
from oracle.contract import Call, Record
from oracle.references.arithmetic import Arithmetic
from oracle.references.emulator import emulate

def attention(q, k_cache, v_cache, *, cu_seqlens_q, seqused_k, page_table, softmax_scale):
    plan = dict(cu_seqlens_q=cu_seqlens_q, seqused_k=seqused_k, page_table=page_table, softmax_scale=softmax_scale)
    out = torch.zeros(*q.shape[:2], v_cache.shape[-1], dtype=q.dtype)
    rows, _ = emulate(Call(q=q, k_cache=k_cache, v_cache=v_cache, **plan), Arithmetic({}))
    out[: len(rows)] = rows
    return out

attention.record = Record(dtypes=("bf16",), head_dims=(64,), page_sizes=(16,), groups=(3,))
"""
TEST = """
import mine

def test_mine(oracle):
    oracle.accept(mine.attention, family="smollm2", profile="quick")
"""
ROW = "mine.py:attention --family smollm2"


def run(pytester: pytest.Pytester, *arguments: str) -> pytest.RunResult:
    return pytester.runpytest_subprocess("-q", "--oracle-lock", "locks", *arguments)


def test_a_row_is_written_held_and_not_loosened(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(mine=PROJECT.format(""), test_it=TEST)

    without = run(pytester)
    without.assert_outcomes(failed=1)
    without.stdout.fnmatch_lines(["WRONG USAGE*no lock for device cpu there; --oracle-update makes one*"])

    created = run(pytester, "--oracle-update")
    created.assert_outcomes(failed=1)
    created.stdout.fnmatch_lines([f"*{ROW}: is locked now; look at *locks, commit it, run again*"])
    run(pytester).assert_outcomes(passed=1)
    before = read(pytester.path / "locks" / "cpu.toml")
    assert list(before.kernels) == [ROW]

    pytester.makepyfile(mine=PROJECT.format("lazy=8.0"))
    moved = run(pytester)
    moved.assert_outcomes(failed=1)
    moved.stdout.fnmatch_lines(["MOVED  mine.py:attention", f"{ROW} on all: ratio rose from *"])
    refused = run(pytester, "--oracle-update")
    refused.assert_outcomes(failed=1)
    refused.stdout.fnmatch_lines(["WRONG USAGE*cpu.toml would demand less than it did:*"])
    assert read(pytester.path / "locks" / "cpu.toml") == before


def test_a_kernel_that_the_lock_has_not_is_named(lock_folder: Path) -> None:
    found = judge_locked(Asked(candidate="k"), lock_folder, lambda asked, watch: ACCEPTED)

    assert [move.text for move in found.moves] == ["k: measured, and not locked: `oracle lock` adds it"]


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("--oracle-update",), "--oracle-update: writes the locks of --oracle-lock FOLDER, and none is named"),
        (("--oracle-lock", "x", "--oracle-update", "-n", "2"), "--oracle-update: got -n; one process writes the lock"),
    ],
)
def test_options_that_do_not_go_together_are_refused(pytester: pytest.Pytester, arguments: tuple[str, ...], says: str) -> None:
    result = pytester.runpytest_subprocess(*arguments)

    assert result.ret == pytest.ExitCode.USAGE_ERROR
    assert says in result.stderr.str()


@pytest.fixture
def lock_folder(tmp_path: Path) -> Path:
    """A folder with a lock of other kernels."""
    folder = tmp_path / "locks"
    folder.mkdir()
    write(LOCK, folder / "cpu.toml")
    return folder


def test_the_seed_is_the_locks(lock_folder: Path, tmp_path: Path) -> None:
    asked = Asked(candidate="k")

    assert as_locked(asked, lock_folder).seed == 0
    assert as_locked(asked, tmp_path / "none").seed == 0
    with pytest.raises(InputError, match=r"seed 3: the lock in .* was made with seed 0; leave the seed to it"):
        as_locked(Asked(candidate="k", seed=3), lock_folder)


def test_rows_are_called_by_kernel_and_families() -> None:
    assert row_name(Asked(candidate="k")) == "k"
    assert row_name(Asked(candidate="k", families=("gemma2", "gemma3"))) == "k --family gemma2 --family gemma3"


def test_nothing_is_judged_where_there_is_no_lock(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no lock for device cpu"):
        judge_locked(Asked(candidate="k"), tmp_path, lambda asked, watch: pytest.fail("judged"))
