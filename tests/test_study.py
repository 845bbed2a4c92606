"""The study runs, says of its inputs what the document says, and the document is of the sources as they are."""

from __future__ import annotations

import importlib.util
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
import torch

from oracle.mutants.distributions import DISTRIBUTIONS, EXTRA, draw_call
from oracle.references.plan import live_rows

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="module")
def study() -> Iterator[ModuleType]:
    spec = importlib.util.spec_from_file_location("ci_study", ROOT / "ci" / "study.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["ci_study"] = module  # its dataclasses look their module up
    spec.loader.exec_module(module)
    yield module
    del sys.modules["ci_study"]


def test_the_document_is_of_these_sources(study: ModuleType) -> None:
    stated = re.search(r"^sources ([0-9a-f]{64})$", (ROOT / "docs" / "study.md").read_text(), re.MULTILINE)

    assert stated is not None
    assert stated[1] == study.source_sha256(), "run make study"


def test_the_hash_moves_with_every_source(study: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = [file.relative_to(ROOT) for pattern in study.SOURCES for file in ROOT.glob(pattern)]
    assert {Path("references/bound.py"), Path("oracle/measure.py"), Path("ci/study.py")} <= set(files)
    for file in files:
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / file).write_bytes((ROOT / file).read_bytes())
    monkeypatch.setattr(study, "ROOT", tmp_path)
    seen = {study.source_sha256()}
    for file in files:
        (tmp_path / file).write_bytes((ROOT / file).read_bytes() + b"\n")
        seen.add(study.source_sha256())

    assert len(seen) == 1 + len(files)


@pytest.mark.parametrize("name", [*DISTRIBUTIONS, *EXTRA])
def test_an_input_depends_on_its_name_and_seed_alone_and_is_finite(name: str) -> None:
    one, same, other = draw_call(name, 3), draw_call(name, 3), draw_call(name, 4)
    live = live_rows(one)

    assert all(torch.equal(getattr(one, f), getattr(same, f)) for f in ("q", "k_cache", "v_cache"))
    assert not all(torch.equal(getattr(one, f), getattr(other, f)) for f in ("q", "k_cache", "v_cache"))
    assert all(bool(torch.isfinite(getattr(one, f).float()).all()) for f in ("q", "k_cache", "v_cache"))
    assert len(live) == one.q.shape[0] and int(one.seqused_k[0]) == one.k_cache.shape[0] * one.k_cache.shape[1]


@pytest.fixture(scope="module")
def short(study: ModuleType) -> object:
    return study.study("ties")


def test_no_correct_kernel_is_rejected_and_every_fault_that_moves_a_bit_is_judged(study: ModuleType, short: object) -> None:
    judged = [*short.promised.values(), *short.own.values()]  # type: ignore[attr-defined]
    faults = short.faults  # type: ignore[attr-defined]

    assert len(judged) == 2 * len(study.CORRECT)
    assert not any(j.caught for j in judged)
    assert max(j.e for j in judged) > 0.5
    assert {"window_plus_1", "softcap_omitted", "ffma_overflow"}.isdisjoint(faults), "nothing on this input shows them"
    assert all(faults[n].caught for n in ("scale_half_percent", "last_key_dropped", "v_page_rolled", "p_bf16_truncated", "zeros"))


def test_the_averaged_form_of_the_lse_bound_is_the_tighter_one_where_many_keys_share_the_weight(study: ModuleType) -> None:
    b = study.bench("randn", 0, every=16)
    truth = b.truth(study.PLAIN)
    got = (truth.exact.out.bfloat16(), (truth.exact.lse + 1e-4).float())
    judged = b.judge(got, study.PLAIN)

    assert bool((3 * truth.exact.p2g < 1).all())
    assert 0.5 < judged.e_lse < judged.e_lse_averaged


def test_quantised_kernels_stay_within_their_bounds_on_rows_of_one_key(study: ModuleType) -> None:
    """Where nothing averages: six standard deviations hold what two did not."""
    for index, term in enumerate(study.TERMS):
        if term.what.startswith(("int8", "e4m3")):
            _, _, judged = study.validated((index, "one-hot"))
            assert not any(j.caught for j in judged), term.what
            assert max(j.e_lse for j in judged) <= 0.9


def test_the_report_has_a_row_for_every_input_kernel_and_fault(study: ModuleType, short: object) -> None:
    text = study.report([short], {0: {"ties": study.validated((0, "ties"))[2]}}, {}, "0")

    for name in ("ties", *study.CORRECT, *study.PLANTED, study.TERMS[0].what):
        assert re.search(rf"^\| {re.escape(name)} \|", text, re.MULTILINE), name
    active = len(short.faults)  # type: ignore[attr-defined]
    assert re.search(rf"^\| \*\*total\*\* \| {active} \|", text, re.MULTILINE)
