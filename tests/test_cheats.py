"""What a kernel's author may try within the first hour: each cheat is rejected, or is proven harmless."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
import torch

from oracle.accept import default_seed
from oracle.cases import Case, case_seed
from oracle.contract import Record
from oracle.families import Family
from oracle.isolation.process import KernelProcess
from oracle.trial import Prepared, Trial, prepare
from oracle.verdict import Finding, Reason

KERNELS = Path(__file__).with_name("kernels_by_path.py")
FAMILY = Family(name="small", q_heads=4, kv_heads=2, head_dim=16, head_dim_v=16, scale=0.25)
CASE = Case(name="mixed", family=FAMILY, q_lens=(3, 2, 1), kv_lens=(21, 0, 9), page_size=8)
CASES = (
    CASE,
    replace(CASE, name="mixed+again", q_lens=CASE.q_lens[::-1], kv_lens=CASE.kv_lens[::-1]),
    replace(CASE, name="short", q_lens=(2,), kv_lens=(12,)),
    replace(CASE, name="longer", q_lens=(2,), kv_lens=(40,)),
)


@cache
def prepared(case: Case) -> Prepared:
    return prepare(case, Record())


def suite(seed: int) -> list[Prepared]:
    """CASES as the suite of `seed` has them."""
    return [prepared(replace(case, seed=case_seed(seed, case.name))) for case in CASES]


OWN_PROCESS = ("bribes_torch", "stops_the_clock")  # they spoil it for others
Judge = Callable[[str, int], list[Finding]]


@pytest.fixture(scope="module")
def judge(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Judge]:
    """What a kernel of kernels_by_path.py shows on the suite of a seed; `knows_its_exam` has seen that of seed 7."""
    file = tmp_path_factory.mktemp("cheats") / "kernel"
    file.with_name("exam").write_text("\n".join(str(p.laid.call.q[0, 0, :4].tolist()) for p in suite(7)))

    def started() -> KernelProcess:
        return KernelProcess(f"{KERNELS}:switched", threads=1, environment={"KERNEL_FILE": str(file)})

    def findings(process: KernelProcess, seed: int) -> list[Finding]:
        trial = Trial(process, Record())
        return [finding for case in suite(seed) for finding in trial.run(case).findings] + trial.return_to_first()

    with started() as shared:

        def judged(name: str, seed: int) -> list[Finding]:
            file.write_text(name)
            if name not in OWN_PROCESS:
                return findings(shared, seed)
            with started() as own:
                return findings(own, seed)

        yield judged


@pytest.mark.parametrize(
    ("name", "reasons"),
    [
        ("keeps_its_first_answer", {Reason.ERROR, Reason.LSE}),
        ("returns_the_last_answer", {Reason.ERROR, Reason.NONDETERMINISTIC, Reason.LEAK, Reason.PAGE_IDS}),
        ("is_right_on_few_keys", {Reason.ERROR}),
        ("bribes_torch", {Reason.ERROR}),
        ("stops_the_clock", {Reason.TAMPERED}),
        ("writes_its_inputs", {Reason.INPUT_WRITTEN}),
        ("writes_late", {Reason.ERROR, Reason.CANARY, Reason.INPUT_WRITTEN}),
    ],
)
def test_a_cheat_is_rejected(judge: Judge, name: str, reasons: set[Reason]) -> None:
    assert {finding.reason for finding in judge(name, 1)} & reasons


@pytest.mark.parametrize("name", ["textbook", "answers_from_memory"])
def test_what_cannot_give_a_wrong_answer_is_harmless(judge: Judge, name: str) -> None:
    """The first is no cheat; the second returns what it computed for the same bytes."""
    assert judge(name, 1) == []


def test_who_knows_one_suite_does_not_know_the_next(judge: Judge) -> None:
    """Right on the suite of one seed only: a seed that the author can choose shows nothing, and any other everything."""
    assert judge("knows_its_exam", 7) == []
    assert {finding.reason for finding in judge("knows_its_exam", 8)} & {Reason.ERROR}


def test_the_seed_that_is_used_when_none_is_asked_for_changes_with_every_change_of_the_source() -> None:
    """So a source that holds the answers to its own suite would have to contain its own hash."""
    assert len({default_seed(f"{digit:x}" * 64) for digit in range(16)}) == 16


def test_a_patched_torch_in_the_kernels_process_is_not_ours(judge: Judge) -> None:
    before = (torch.equal, torch.allclose, torch.isfinite, torch.get_num_threads(), torch.initial_seed())

    judge("bribes_torch", 1)

    assert (torch.equal, torch.allclose, torch.isfinite, torch.get_num_threads(), torch.initial_seed()) == before
