"""From a kernel's name to a verdict, end to end, on a handful of cases: what ships, what does not, and why."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from oracle import accept as accepting
from oracle import coverage as coverage_module
from oracle import pairs
from oracle.accept import Asked, accept, default_seed
from oracle.cases import Case, to_toml
from oracle.coverage import coverage as real_coverage
from oracle.coverage import with_relations
from oracle.errors import InputError
from oracle.families import FAMILIES, Family
from oracle.isolation.process import KernelProcess
from oracle.relations import table
from oracle.relations.judge import Related, relate
from oracle.suite import Suite
from oracle.verdict import Coverage, Finding, Outcome, Reason, Verdict

KERNELS = Path(__file__).with_name("kernels_by_path.py")
FAMILY = Family(name="small", q_heads=8, kv_heads=4, head_dim=64, head_dim_v=64, scale=0.125)

# Rows of few keys, rows without any, decode beside prefill, twins of equal shapes; enough clusters for door 2.
MIXED = Case(name="mixed", family=FAMILY, q_lens=(24, 2, 1, 4, 1, 1), kv_lens=(70, 0, 9, 40, 33, 17), seed=1)
CASES = (
    MIXED,
    replace(MIXED, name="mixed+again", seed=2, q_lens=MIXED.q_lens[::-1], kv_lens=MIXED.kv_lens[::-1]),
    replace(MIXED, name="short", q_lens=(16, 16), kv_lens=(16, 16), give_out=False, seed=3),
    replace(MIXED, name="flat", inputs="flat", dtype="fp16", page_size=64, padded_seqs=2, layout="kv-in-page", seed=4),
)
SUITE = Suite(profile="default", seed=7, families=(), cases=CASES, skipped=())


@pytest.fixture(autouse=True)
def small_suite(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every kernel is judged on CASES and on no relation, and these are said to be all that is needed."""

    def build(scope: Any, *, profile: str, seed: int, families: tuple[str, ...]) -> Suite:
        skipped = tuple((c, reason) for c in CASES if (reason := scope.refuses(c)))
        cases = tuple(c for c in CASES if scope.refuses(c) is None)
        return Suite(profile=profile, seed=seed, families=families, cases=cases, skipped=skipped)

    def enough(*of: Any) -> Coverage:
        return replace(real_coverage(*of), missing=())

    monkeypatch.setattr(accepting, "build", build)
    monkeypatch.setattr(accepting, "coverage", enough)
    monkeypatch.setattr(accepting, "relate", lambda *_, **__: Related())
    monkeypatch.setattr(accepting, "with_relations", lambda covered, *_: covered)


def judge(kernel: str, **asked: Any) -> Verdict:
    return accept(Asked(candidate=f"{KERNELS}:{kernel}", **{"seed": 7} | asked))


class Kept:
    """A process that outlives its verdict, because its start takes a second."""

    def __init__(self, process: KernelProcess) -> None:
        self.describe, self.call = process.describe, process.call

    def close(self) -> None:
        pass


@pytest.fixture(scope="module")
def processes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., Kept]]:
    """In place of KernelProcess: the same process for the same kernel."""
    environment = {"KERNEL_FILE": str(tmp_path_factory.mktemp("accept") / "kernel")}
    with ExitStack() as stack:

        @cache
        def process(target: str) -> Kept:
            return Kept(stack.enter_context(KernelProcess(target, threads=1, environment=environment)))

        def start(target: str, **_: Any) -> Kept:
            name = target.rpartition(":")[2]
            if name not in REAL:
                Path(environment["KERNEL_FILE"]).write_text(name)
            return process(target if name in REAL else f"{KERNELS}:switched")

        yield start


# Kernels with a process of their own: two are named at once, or they have a record or another signature.
REAL = (
    "textbook",
    "plain",
    "textbook__p_e4m3",
    "multiplies_nan_by_zero__finite_tails",
    "without_softmax_scale",
    "takes_anything",
)


@pytest.fixture(autouse=True)
def few_starts(processes: Callable[..., Kept], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(accepting, "KernelProcess", processes)


def timeless(verdict: Verdict) -> Verdict:
    """Without what the clock of the kernel's process said."""
    assert verdict.figures is not None
    return replace(verdict, figures=replace(verdict.figures, seconds=0.0))


# What ships


def test_a_correct_kernel_is_accepted_and_the_same_seed_gives_the_same_verdict() -> None:
    one, two = judge("textbook"), judge("textbook")

    assert (one.outcome, one.door, one.exit_code, one.findings) == (Outcome.ACCEPT, "accuracy", 0, ())
    assert one.ratios[0].value == 1.0 and one.ratios[0].margin == 1.25 and one.incumbent == "emulator (textbook)"
    assert one.figures is not None and 0 < one.figures.max_e <= 1 and one.figures.calls == 4 * 8
    assert one.coverage.cases == 4 and one.coverage.unseen == ()
    assert timeless(one) == timeless(two)


def test_against_itself_a_kernel_has_the_same_bits() -> None:
    verdict = judge("textbook", against=f"{KERNELS}:textbook")

    assert (verdict.outcome, verdict.door, verdict.ratios[0].value, verdict.ratios[0].margin) == (
        Outcome.ACCEPT,
        "bits",
        1.0,
        1.05,
    )


def test_an_undeclared_row_sum_over_rounded_p_is_accepted_and_said() -> None:
    verdict = judge("row_sum_after")

    assert verdict.outcome is Outcome.ACCEPT
    assert verdict.figures is not None and verdict.figures.row_sum == "after, undeclared"
    assert verdict.figures.max_e_lse is not None and verdict.figures.max_e_lse > 1


def test_a_kernel_that_does_little_is_judged_on_what_it_can_do() -> None:
    """What it cannot is counted, and what goes unseen without an LSE is said."""
    verdict = judge("plain")

    assert verdict.outcome is Outcome.ACCEPT
    assert verdict.coverage.cases == 3 and verdict.coverage.skipped == {"no num_seqs": 1}
    assert any("without an LSE" in text for text in verdict.coverage.unseen)
    assert verdict.figures is not None and verdict.figures.max_e_lse is None


def test_finite_tails_are_said_to_leave_nan_unseen() -> None:
    verdict = judge("multiplies_nan_by_zero__finite_tails")

    assert verdict.outcome is Outcome.ACCEPT
    assert any("NaN and inf fills are skipped" in text for text in verdict.coverage.unseen)


# What does not


@pytest.mark.parametrize(
    ("kernel", "reason", "case"),
    [
        ("zeros", Reason.ERROR, "short"),
        ("nan_in_one_element", Reason.NOT_FINITE, "short"),
        ("last_key_dropped", Reason.ERROR, "short"),
        ("wrong_lse", Reason.LSE, "short"),
        ("multiplies_nan_by_zero", Reason.LEAK, "mixed"),
        ("keeps_its_first_plan", Reason.ERROR, "mixed+again"),
    ],
)
def test_a_wrong_kernel_is_rejected_for_its_reason_on_the_smallest_case_that_shows_it(
    kernel: str, reason: Reason, case: str
) -> None:
    verdict = judge(kernel)

    assert (verdict.outcome, verdict.door, verdict.exit_code, verdict.reasons[0]) == (Outcome.REJECT, "", 1, reason)
    assert verdict.findings[0].case == case


def test_a_crash_is_a_verdict_and_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(accepting, "build", lambda *_, **__: replace(SUITE, cases=CASES[:1]))
    verdict = judge("crashes")

    assert (verdict.outcome, verdict.reasons, verdict.figures) == (Outcome.REJECT, (Reason.CRASH,), None)
    assert "its process was ended by SIGSEGV during the call" in verdict.findings[0].text


@pytest.mark.parametrize(("kernel", "reason"), [("exp_error", Reason.LSE), ("truncates_p", Reason.GAIN)])
def test_small_systematic_errors_are_found(kernel: str, reason: Reason) -> None:
    assert reason in judge(kernel).reasons


def test_an_incumbent_does_not_excuse_a_fault() -> None:
    """Not even the same one: the door of bits opens for safe kernels only."""
    verdict = judge("last_key_dropped", against=f"{KERNELS}:last_key_dropped")

    assert verdict.outcome is Outcome.REJECT and Reason.ERROR in verdict.reasons and verdict.door == ""


def test_a_looser_contract_needs_an_incumbent_of_the_same() -> None:
    assert judge("textbook__p_e4m3").reasons == (Reason.LOOSER_CONTRACT,)
    assert judge("textbook__p_e4m3", against=f"{KERNELS}:textbook__p_e4m3").outcome is Outcome.ACCEPT


def test_other_bits_do_not_pass_where_only_the_same_may() -> None:
    verdict = judge("row_sum_after", against=f"{KERNELS}:textbook", doors=("bits",))

    assert verdict.reasons == (Reason.NO_DOOR,) and "doors allowed: bits" in verdict.findings[0].text


def test_within_a_distance_of_fp32_a_kernel_that_lost_a_key_is_rejected_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """V so small that whatever is lost is within 0.002 of fp32."""
    family = replace(FAMILY, name="tiny")
    case = replace(MIXED, name="tiny", family=family, inputs="tiny-v")
    monkeypatch.setattr(accepting, "build", lambda *_, **__: replace(SUITE, cases=(case,)))

    lost = judge("last_key_dropped", within_fp32=0.002)
    assert lost.outcome is Outcome.REJECT and Reason.FP32_LINE not in lost.reasons and lost.reasons[0] is Reason.ERROR
    assert judge("textbook", within_fp32=0.002).outcome is Outcome.ACCEPT
    assert lost.figures is not None and lost.figures.max_abs < 0.002


def test_the_fp32_line_is_a_condition_of_its_own() -> None:
    verdict = judge("textbook", within_fp32=1e-4)

    assert verdict.reasons == (Reason.FP32_LINE,) and "limit 0.0001" in verdict.findings[0].text
    assert judge("textbook", within_fp32=0.05).outcome is Outcome.ACCEPT


def test_after_ten_cases_with_findings_the_rest_is_not_run(monkeypatch: pytest.MonkeyPatch) -> None:
    many = tuple(replace(MIXED, name=f"case-{i}", q_lens=(1,), kv_lens=(5,), seed=i) for i in range(14))
    monkeypatch.setattr(accepting, "build", lambda *_, **__: replace(SUITE, cases=many))

    verdict = judge("zeros")
    assert verdict.coverage.cases == 10
    assert "stopped after 10 cases with findings: 4 cases were not run" in verdict.notes


def test_progress_counts_the_cases() -> None:
    told: list[tuple[int, int, str]] = []
    accept(Asked(candidate=f"{KERNELS}:plain", seed=7), lambda *step: told.append(step))

    assert told == [
        (0, 3, "mixed"), (1, 3, "mixed+again"), (2, 3, "short"), (3, 3, "the first cases once more"),
    ]  # fmt: skip


# Coverage and cases


def test_too_little_coverage_is_no_acceptance(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(accepting, "coverage", real_coverage)
    verdict = judge("plain")

    assert (verdict.outcome, verdict.exit_code, verdict.findings) == (Outcome.NOT_COVERED, 3, ())
    assert "family llama3" in verdict.coverage.missing


def test_the_users_cases_are_judged_as_well_and_first(tmp_path: Path) -> None:
    mine = replace(MIXED, name="mine", family=FAMILIES["smollm2"], q_lens=(3,), kv_lens=(20,), seed=9)
    (tmp_path / "mine.toml").write_text(to_toml(mine))
    (tmp_path / "not for it.toml").write_text(to_toml(replace(mine, name="fp32", dtype="fp32")))
    told: list[str] = []
    asked = Asked(candidate=f"{KERNELS}:plain", seed=7, cases=tmp_path)

    verdict = accept(asked, lambda done, total, what: told.append(what))

    assert told == ["mine", "mixed", "mixed+again", "short", "the first cases once more"]
    assert verdict.coverage.skipped == {"no num_seqs": 1, "no fp32": 1}


# Relations


def test_relations_are_put_to_a_kernel_after_its_cases_and_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(accepting, "relate", relate)
    monkeypatch.setattr(accepting, "with_relations", with_relations)
    for module in (table, coverage_module):
        monkeypatch.setattr(module, "RELATIONS", {"q-times-4": table.RELATIONS["q-times-4"]})
    told: list[str] = []

    verdict = accept(Asked(candidate=f"{KERNELS}:textbook", seed=7), lambda done, total, what: told.append(what))

    assert verdict.outcome is Outcome.ACCEPT and verdict.coverage.counts["relation q-times-4"] == 2
    assert told[-2:] == ["relation q-times-4", "the first cases once more"]


def test_a_broken_relation_is_a_reject_and_its_notes_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    finding = Finding(reason=Reason.RELATION, case="chunks", text="with new tokens 0 to 5 as a chunk of their own: e = 7")
    monkeypatch.setattr(accepting, "relate", lambda *_, **__: Related(findings=(finding,), notes=("not batch-invariant",)))

    verdict = judge("textbook")
    assert (verdict.outcome, verdict.findings) == (Outcome.REJECT, (finding,))
    assert "not batch-invariant" in verdict.notes


def test_a_relation_that_did_not_run_is_no_acceptance(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(accepting, "with_relations", with_relations)

    verdict = judge("textbook")
    assert (verdict.outcome, verdict.exit_code) == (Outcome.NOT_COVERED, 3)
    assert "relation chunks" in verdict.coverage.missing


def test_families_asked_for_by_name_are_put_to_no_relation(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(accepting, "relate")
    monkeypatch.setattr(accepting, "with_relations", with_relations)

    assert judge("textbook", families=("llama3",)).outcome is Outcome.ACCEPT


# Wrong usage

USAGE: list[tuple[dict[str, Any], str]] = [
    ({"candidate": "nowhere.py:kernel"}, "nowhere.py: no such file"),
    ({"candidate": str(KERNELS)}, "expected .*kernels_by_path.py:FUNCTION"),
    ({"candidate": f"{KERNELS}:without_softmax_scale"}, "the contract's softmax_scale is not among its keyword arguments"),
    ({"candidate": f"{KERNELS}:takes_anything"}, "takes \\*\\*kwargs and has no record"),
    ({"families": ("llama4",)}, "no family 'llama4'; there are .*llama3"),
    ({"profile": "quik"}, "no profile 'quik'; there are default, quick, deep"),
    ({"doors": ("acuracy",)}, "doors allowed: acuracy; expected some of bits, accuracy, drift"),
    ({"doors": ()}, "doors allowed: none"),
    ({"against": "nowhere.py:kernel"}, "nowhere.py: no such file"),
    ({"cases": Path(__file__).parent}, "no \\*.toml case in it"),
]


@pytest.mark.parametrize(("asked", "message"), USAGE, ids=[str(i) for i in range(len(USAGE))])
def test_wrong_usage_is_an_input_error_that_says_what_is_wrong(asked: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        accept(Asked(**{"candidate": f"{KERNELS}:plain"} | asked))


def test_a_device_that_the_record_has_not_is_wrong_usage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(accepting, "KernelProcess", KernelProcess)
    file = tmp_path / "kernel.py"
    file.write_text(
        "from oracle.contract import Record, contract_kernel\n"
        "kernel = contract_kernel(Record(devices=('cuda',)))(lambda call, return_lse: call.q)\n"
    )
    with pytest.raises(
        InputError, match=r"kernel.py:kernel: is not for device cpu; its record has cuda: say --device cuda, on a"
    ):
        accept(Asked(candidate=f"{file}:kernel"))


def test_where_no_case_fits_that_is_wrong_usage_and_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    only = replace(MIXED, dtype="fp32")

    def build(scope: Any, **_: Any) -> Suite:
        return replace(SUITE, cases=(), skipped=((only, scope.refuses(only)),))

    monkeypatch.setattr(accepting, "build", build)
    with pytest.raises(InputError, match=r"plain: no case fits it \(no fp32\); widen its record"):
        judge("plain")


def test_an_incumbent_that_takes_none_of_the_cases_is_wrong_usage(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(accepting, "build", lambda *_, **__: replace(SUITE, cases=(CASES[3],)))
    with pytest.raises(InputError, match=r"takes none of the candidate's cases \(incumbent: no num_seqs\)"):
        judge("textbook", against=f"{KERNELS}:plain")


# The seed


def test_the_default_seed_is_made_of_the_source_and_the_suite(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One byte of the kernel's file, or one value of the parameter table, and the cases are others."""
    monkeypatch.setattr(accepting, "KernelProcess", KernelProcess)
    file = tmp_path / "kernel.py"
    source = "def kernel(q, k_cache, v_cache, *, cu_seqlens_q, seqused_k, page_table, softmax_scale): pass\n"
    seeds = []

    def build(scope: Any, *, seed: int, **_: Any) -> Suite:
        seeds.append(seed)
        return replace(SUITE, cases=())

    monkeypatch.setattr(accepting, "build", build)
    for text in (source, source + "\n"):
        file.write_text(text)
        with pytest.raises(InputError):
            accept(Asked(candidate=f"{file}:kernel"))
    assert seeds == [default_seed(hashlib.sha256((source + end).encode()).hexdigest()) for end in ("", "\n")]
    assert seeds[0] != seeds[1]

    before = default_seed("a")
    monkeypatch.setitem(pairs.FACTORS, "group", (*pairs.FACTORS["group"], 3))
    assert default_seed("a") != before != default_seed("b")


def test_the_environment_names_what_the_verdict_depends_on() -> None:
    environment = judge("plain").environment

    assert environment["seed"] == 7 and environment["profile"] == "default" and environment["device"] == "cpu"
    assert environment["source_sha256"] == hashlib.sha256(KERNELS.read_bytes()).hexdigest()
    assert {"oracle", "python", "torch", "cpu_capability", "threads", "suite_sha256", "record", "command"} <= environment.keys()
