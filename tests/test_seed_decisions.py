"""Decisions that a team once made by hand about its kernels, made by the gate.

Another tile size with the same bits ships; K rebuilt from V in bf16, 1.6 to 1.8 times farther from fp64, does not; nor does P
rounded by truncation, nor a kernel within 0.002 of fp32 that loses a key.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from oracle.accept import Asked, accept
from oracle.cases import Case, to_toml
from oracle.families import FAMILIES
from oracle.kernels.table import KERNELS
from oracle.suite import Suite
from oracle.verdict import Outcome, Reason, Verdict


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder for cases; they are all that is judged."""
    nothing = Suite(profile="default", seed=0, families=(), cases=(), skipped=())
    monkeypatch.setattr("oracle.accept.build", lambda *_, **__: nothing)
    yield tmp_path


def decide(folder: Path, candidate: str, *cases: Case, against: str = "", within_fp32: float | None = None) -> Verdict:
    for case in cases:
        (folder / f"{case.name}.toml").write_text(to_toml(case))
    return accept(Asked(candidate=candidate, against=against, cases=folder, seed=0, within_fp32=within_fp32))


def prompt(name: str, inputs: str = "randn", family: str = "llama3", keys: int = 96, rows: int = 64) -> Case:
    return Case(name=name, family=FAMILIES[family], q_lens=(rows,), kv_lens=(keys,), inputs=inputs)


def test_retuned_tiles_give_the_same_bits(folder: Path) -> None:
    """The order of sums over keys is the same; few cases cannot cover what an accept must, so the door is what counts."""
    verdict = decide(folder, "triton-prefill-32", prompt("short", family="smollm2"), against="triton-prefill-16")

    assert verdict.door == "bits"
    assert verdict.findings == ()


def test_another_order_of_sums_is_as_accurate(folder: Path) -> None:
    cases = [prompt(inputs, inputs, keys=600) for inputs in ("randn", "peaked", "positive-v")]
    verdict = decide(folder, "oracle.kernels.emulated:reversed", *cases, against="emulator")

    assert verdict.door == "accuracy"
    assert 0.95 < verdict.ratios[0].value < 1.05


def test_k_rebuilt_from_v_is_rejected_with_its_ratio(folder: Path) -> None:
    verdict = decide(folder, KERNELS["rebuilt-k"].target, prompt("shared", "shared-kv", "llama3", 400))

    assert verdict.outcome is Outcome.REJECT
    assert Reason.LSE in verdict.reasons
    assert 1.5 < verdict.ratios[0].value < 2.0


def test_truncated_p_is_rejected_and_is_half_as_bad_again(folder: Path) -> None:
    verdict = decide(folder, "oracle.mutants.planted:p_bf16_truncated", prompt("randn", keys=400))

    assert verdict.outcome is Outcome.REJECT
    assert Reason.GAIN in verdict.reasons
    assert 1.4 < verdict.ratios[0].value < 1.7


def test_within_a_line_of_fp32_but_a_key_lost_is_rejected(folder: Path) -> None:
    """At 33,000 keys a lost key moves the output by less than 0.002: the line holds, the bound does not."""
    long = Case(name="long", family=FAMILIES["smollm2"], q_lens=(4,), kv_lens=(33_000,), inputs="randn")
    verdict = decide(folder, "oracle.mutants.planted:last_key_dropped", long, within_fp32=0.002)

    assert verdict.outcome is Outcome.REJECT
    assert Reason.FP32_LINE not in verdict.reasons
    assert {Reason.ERROR, Reason.LSE} & set(verdict.reasons)
