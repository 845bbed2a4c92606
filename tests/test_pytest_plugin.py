"""The pytest plugin as other people's projects meet it: what passes, what a failure says, and what it leaves alone.

`PROJECT` is a real kernel and a wrong one, really judged; where only the wording or the wiring matters, `judged` is stood in for.
"""

from __future__ import annotations

import importlib.metadata
import os
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree

import pytest

from oracle import accept as accepting
from oracle import pytest_plugin as plugin
from oracle.accept import Asked, open_kernel
from oracle.verdict import Coverage, Figures, Finding, Outcome, Ratio, Reason, Verdict

PROJECT = """
import torch
import torch.nn.functional as F
from oracle.contract import Record

def attention(q, k_cache, v_cache, *, cu_seqlens_q, seqused_k, page_table, softmax_scale, lost=0):
    out = torch.zeros(len(q), q.shape[1], v_cache.shape[-1], dtype=q.dtype)
    for b, keys in enumerate(seqused_k.tolist()):
        start, stop = cu_seqlens_q[b : b + 2].tolist()
        pages = page_table[b, : -(-keys // k_cache.shape[1])].long()
        k, v = (cache[pages].flatten(0, 1)[:keys].float().transpose(0, 1)[None] for cache in (k_cache, v_cache))
        mask = torch.ones(stop - start, keys, dtype=torch.bool).tril(keys - (stop - start) - lost)
        rows = F.scaled_dot_product_attention(
            q[start:stop].float().transpose(0, 1)[None], k, v, attn_mask=mask, scale=softmax_scale, enable_gqa=True
        )
        out[start:stop] = rows[0].transpose(0, 1).nan_to_num(0.0).to(q.dtype)
    return out

def loses_a_key(q, k_cache, v_cache, *, cu_seqlens_q, seqused_k, page_table, softmax_scale):
    plan = dict(cu_seqlens_q=cu_seqlens_q, seqused_k=seqused_k, page_table=page_table)
    return attention(q, k_cache, v_cache, **plan, softmax_scale=softmax_scale, lost=1)

attention.record = loses_a_key.record = Record(dtypes=("bf16",), head_dims=(64,), page_sizes=(16,), groups=(3,))
"""
QUICK = 'family="smollm2", profile="quick", seed=1'
WRONG = Finding(
    reason=Reason.ERROR, case="pair-0096", text="e = 29.4 at row 0 head 7 column 63: got 0.0093, exact 0.0122, limit 0.0001"
)
LEAK = replace(WRONG, reason=Reason.LEAK, text="other bits")
ACCEPTED = Verdict(
    outcome=Outcome.ACCEPT,
    door="accuracy",
    candidate="mine.py:attention",
    incumbent="emulator (textbook)",
    findings=(),
    ratios=(Ratio(label="all cases", value=1.25, lower=1.1, upper=1.4, margin=1.25, rows=1234, rows_to_decide=5678),),
    figures=Figures(
        max_e=0.5, max_e_det=0.4, max_e_own=0.3, max_e_lse=0.25, rms_e=0.125, mean_abs=0.1, max_abs=0.2,
        slopes={}, row_sum="before", seconds=1.0, calls=3,
    ),
    coverage=Coverage(
        cases=3, elements=30, rows=10, counts={}, missing=(), left_out=("fill -inf",), skipped={"no fp32": 2}, unseen=(),
    ),
    notes=(),
    environment={"seed": 7, "profile": "quick", "device": "cpu", "torch": "2", "threads": 1, "command": "oracle accept it"},
)  # fmt: skip
REJECTED = replace(ACCEPTED, outcome=Outcome.REJECT, door="", findings=(WRONG, LEAK))


@pytest.fixture
def stand_in(monkeypatch: pytest.MonkeyPatch) -> Callable[[Verdict], list[Asked]]:
    """After `stand_in(verdict)` every verdict is that one; what was asked is in the list."""

    def install(verdict: Verdict) -> list[Asked]:
        asked: list[Asked] = []

        def judged(what: Asked) -> Verdict:
            asked.append(what)
            return replace(verdict, candidate=what.candidate)

        monkeypatch.setattr(plugin, "judged", judged)
        return asked

    return install


StandIn = Callable[[Verdict], list[Asked]]


def test_calling(pytester: pytest.Pytester, call: str, *arguments: str, above: str = "") -> pytest.RunResult:
    """A project with one test that makes `call`, run in this process."""
    pytester.makepyfile(test_it=f"import pytest\n{above}\n\ndef test_it(oracle):\n    {call}\n")
    return pytester.runpytest_inprocess(*arguments)


test_calling.__test__ = False  # type: ignore[attr-defined]


# What it costs those who do not use it


def test_it_is_found_under_the_name_oracle() -> None:
    found = importlib.metadata.entry_points(group="pytest11", name="oracle")
    assert {entry.value for entry in found} == {"oracle.pytest_plugin"}, "install the project again: pip install -e ."


def test_a_test_that_does_not_ask_for_it_is_untouched_and_meets_no_torch(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(
        """
        import sys

        def test_nothing_was_loaded(request):
            assert request.config.pluginmanager.has_plugin("oracle")
            assert not {"torch", "numpy", "rich", "oracle.accept"} & set(sys.modules)
        """
    )
    result = pytester.runpytest_subprocess("-v", "--strict-markers", "-W", "error")

    result.assert_outcomes(passed=1)
    result.stdout.no_fnmatch_line("=* oracle =*")


def test_without_the_plugin_nothing_is_left(pytester: pytest.Pytester) -> None:
    result = test_calling(pytester, "pass", "-p", "no:oracle")

    result.assert_outcomes(errors=1)
    result.stdout.fnmatch_lines("*fixture 'oracle' not found")
    assert "--oracle-" not in pytester.runpytest_inprocess("-p", "no:oracle", "--help").stdout.str()


# Real verdicts


def test_a_right_kernel_passes_and_a_wrong_one_fails_as_its_verdict_reads(pytester: pytest.Pytester) -> None:
    """By function object, by path, and from the test file itself; the command that it names gives the same again."""
    pytester.makepyfile(mine=PROJECT)
    pytester.makepyfile(
        test_it=f"""
        import mine

        def test_right(oracle):
            verdict = oracle.accept(mine.attention, {QUICK})
            assert verdict.door == "accuracy"

        def test_wrong(oracle):
            oracle.accept("mine.py:loses_a_key", {QUICK})
        """
    )
    result = pytester.runpytest_inprocess("-q", "--junit-xml=junit.xml")

    result.assert_outcomes(passed=1, failed=1)
    result.stdout.fnmatch_lines(
        [
            "REJECT  mine.py:loses_a_key  error-exceeds-bound*",
            "error-exceeds-bound  *: e = * at row * head * column *: got *, exact *, limit *",
            "again: oracle accept mine.py:loses_a_key --family smollm2 --profile quick --seed 1",
            "-* verdict -*",
            "REJECT  mine.py:loses_a_key  error-exceeds-bound*",
            "judged * cases, * query rows*",
            "FAILED test_it.py::test_wrong - Failed: REJECT  mine.py:loses_a_key*",
        ]
    )
    text = result.stdout.str()
    assert "Traceback" not in text and "pytest_plugin.py" not in text and text.count("judged ") == 1
    tests = {case.get("name"): case for case in ElementTree.parse(pytester.path / "junit.xml").iter("testcase")}
    told = {p.get("name", ""): p.get("value", "") for p in tests["test_right"].iter("property")}
    assert 0 < float(told["oracle.max_e"]) <= 1 and float(told["oracle.rms_e"]) < 1 and "oracle.max_e_lse" not in told
    assert (told["oracle.verdict"], told["oracle.door"], told["oracle.seed"]) == ("accept", "accuracy", "1")
    assert int(told["oracle.cases"]) > 10 and 0.5 < float(told["oracle.ratio"]) < 1.25

    command = re.search(r"^again: oracle (.*)", text, re.MULTILINE)
    assert command is not None
    again = subprocess.run([sys.executable, "-m", "oracle", *command[1].split()], capture_output=True, text=True, check=False)
    line = next(line for line in text.splitlines() if line.startswith("error-exceeds-bound"))
    assert again.returncode == 1 and line.split()[1:7] == again.stdout.split("error-exceeds-bound  ")[1].split()[:6]


def test_the_same_seed_gives_the_same_verdict(pytester: pytest.Pytester) -> None:
    """Of a kernel in the test file, too."""
    twice = f"""
from dataclasses import replace

def test_twice(oracle):
    one, two = (oracle.accept(attention, {QUICK}) for _ in range(2))
    assert replace(one, figures=replace(one.figures, seconds=0)) == replace(two, figures=replace(two.figures, seconds=0))
"""
    pytester.makepyfile(test_it=PROJECT + twice)
    pytester.runpytest_inprocess().assert_outcomes(passed=1)


def test_workers_of_xdist_judge_and_tell_as_one_process_does(pytester: pytest.Pytester) -> None:
    tests = f"""
def test_right(oracle):
    oracle.accept(attention, {QUICK})

def test_wrong(oracle):
    oracle.accept(loses_a_key, {QUICK})
"""
    pytester.makepyfile(test_it=PROJECT + tests)
    result = pytester.runpytest_subprocess("-n", "2", "-v", "--junit-xml=junit.xml")

    result.assert_outcomes(passed=1, failed=1)
    result.stdout.fnmatch_lines(
        ["REJECT  test_it.py:loses_a_key  *", "again: oracle accept *", "-* verdict -*", "judged * cases*", "=* oracle =*"]
    )
    text = result.stdout.str()
    assert "accept  test_it.py:attention  through door accuracy; " in text
    assert "reject  test_it.py:loses_a_key  error-exceeds-bound" in text and "not declared: " in text
    told = [p.get("name") for p in ElementTree.parse(pytester.path / "junit.xml").iter("property")]
    assert told.count("oracle.max_e") == 2


# Kernels


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels are loaded in their processes, and not judged."""

    def judged(asked: Asked) -> Verdict:
        for name in (asked.candidate, asked.against):
            if name:
                open_kernel(name, "cpu").process.close()
        return replace(ACCEPTED, candidate=asked.candidate, incumbent=asked.against)

    monkeypatch.setattr(plugin, "judged", judged)


CONTRACT = "q, k_cache, v_cache, *, cu_seqlens_q, seqused_k, page_table, softmax_scale"


@pytest.mark.usefixtures("opened")
@pytest.mark.parametrize("mode", ["prepend", "importlib"])
def test_a_kernel_in_a_test_file_is_loaded_under_every_import_mode(pytester: pytest.Pytester, mode: str) -> None:
    """With what a test file has besides: marks, fixtures, a conftest beside it, siblings."""
    folder = pytester.mkdir("tests")
    (folder / "conftest.py").write_text(f"import pytest\n\ndef theirs({CONTRACT}): return q\n")
    (folder / "helper_of_test_it.py").write_text("TILE = 32\n")
    (folder / "test_it.py").write_text(
        "import sys, pathlib, pytest\n"
        "sys.path.append(str(pathlib.Path(__file__).parent))\n"
        "from helper_of_test_it import TILE\n"
        "pytestmark = pytest.mark.oracle(profile='quick')\n"
        f"def mine({CONTRACT}): return TILE\n"
        "def test_it(oracle):\n"
        "    verdict = oracle.accept(mine, against='tests/conftest.py:theirs')\n"
        "    assert verdict.candidate == 'tests/test_it.py:mine'\n"
    )
    pytester.runpytest_inprocess(f"--import-mode={mode}").assert_outcomes(passed=1)


@pytest.mark.usefixtures("opened")
def test_a_kernel_in_a_package_of_tests_may_import_its_siblings(pytester: pytest.Pytester) -> None:
    folder = pytester.mkpydir("in_package")
    (folder / "sibling.py").write_text(f"def mine({CONTRACT}): return q\n")
    (folder / "test_it.py").write_text(
        f"from .sibling import mine\n\ndef own({CONTRACT}): return mine\n\ndef test_it(oracle):\n"
        "    assert oracle.accept(mine, against=own).incumbent == 'in_package.test_it:own'\n"
    )
    pytester.runpytest_inprocess().assert_outcomes(passed=1)


def test_a_lambda_is_refused_with_the_next_step(pytester: pytest.Pytester) -> None:
    result = test_calling(pytester, "oracle.accept(lambda q: q)")

    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines("WRONG USAGE  <lambda>: is a lambda, *no such name in test_it.py*give it a module-level name*")
    assert "During handling" not in result.stdout.str() and "Traceback" not in result.stdout.str()


# What a failure says


@pytest.mark.parametrize("arguments", [("-q",), ("-v",), ("--tb=short",), ("--tb=long", "--showlocals"), ("-qq",)])
def test_a_failure_is_a_few_lines_and_the_verdict_however_it_is_shown(
    pytester: pytest.Pytester, stand_in: StandIn, arguments: tuple[str, ...]
) -> None:
    stand_in(REJECTED)
    result = test_calling(pytester, "oracle.accept('mine.py:attention')", *arguments)

    result.stdout.fnmatch_lines(
        [
            "REJECT  mine.py:attention  error-exceeds-bound, past-the-plan",
            f"error-exceeds-bound  pair-0096: {WRONG.text}",
            "again: oracle accept it",
            "-* verdict -*",
            "REJECT  mine.py:attention  error-exceeds-bound, past-the-plan",
        ]
    )
    assert "def _judge" not in result.stdout.str() and "def test_it" not in result.stdout.str()


def test_the_verdict_is_as_colourful_as_the_terminal(pytester: pytest.Pytester, stand_in: StandIn) -> None:
    stand_in(REJECTED)
    call = "oracle.accept('mine.py:attention')"
    assert "\x1b[1;31mREJECT" in test_calling(pytester, call, "--color=yes").stdout.str()
    assert "\x1b" not in test_calling(pytester, call).stdout.str()


UNDECIDED = [
    (
        replace(ACCEPTED, outcome=Outcome.INCONCLUSIVE, door=""),
        "INCONCLUSIVE  mine.py:attention  as accurate as emulator (textbook)? these rows cannot tell\n"
        "RMS e ratio 1.250 [1.100, 1.400], margin 1.25, 1,234 clusters; about 5,678 would decide\nagain: ",
    ),
    (
        replace(ACCEPTED, outcome=Outcome.NOT_COVERED, coverage=replace(ACCEPTED.coverage, missing=("family mqa", "fill nan"))),
        "NOT-COVERED  mine.py:attention  nothing found against it, but too little was judged\n"
        "not covered: family mqa, fill nan\nagain: ",
    ),
    (replace(ACCEPTED, coverage=replace(ACCEPTED.coverage, cases=0)), "ACCEPT  mine.py:attention  no case was judged\nagain: "),
]


@pytest.mark.parametrize(("verdict", "says"), UNDECIDED, ids=["inconclusive", "not-covered", "zero-cases"])
def test_what_is_not_decided_does_not_pass_and_has_its_own_words(
    pytester: pytest.Pytester, stand_in: StandIn, verdict: Verdict, says: str
) -> None:
    stand_in(verdict)
    result = test_calling(pytester, "oracle.accept('mine.py:attention')")

    result.assert_outcomes(failed=1)
    assert says in result.stdout.str()


def test_a_success_says_nothing_and_the_summary_only_when_asked(pytester: pytest.Pytester, stand_in: StandIn) -> None:
    stand_in(ACCEPTED)
    result = test_calling(pytester, "oracle.accept('mine.py:attention')")
    assert result.ret == 0 and "mine.py" not in result.stdout.str()

    result = test_calling(pytester, "oracle.accept('mine.py:attention'); oracle.accept('sdpa-math')", "-v")
    result.stdout.fnmatch_lines(
        [
            "=* oracle =*",
            "accept  mine.py:attention  through door accuracy; 3 cases, seed 7",
            "    not declared: 2 x no fp32",
            "    not covered: fill -inf",
            "accept  sdpa-math  through door accuracy; 3 cases, seed 7",
        ],
        consecutive=True,
    )


def test_a_test_that_judges_nothing_fails(pytester: pytest.Pytester) -> None:
    result = test_calling(pytester, "for kernel in (): oracle.accept(kernel)")

    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines("WRONG USAGE  the test asks for the fixture `oracle` and judged no kernel*")
    test_calling(pytester, "pytest.skip('not here')").assert_outcomes(skipped=1)


# Rejects that are wanted


def test_a_reject_for_its_reason_passes(pytester: pytest.Pytester, stand_in: StandIn) -> None:
    stand_in(REJECTED)
    test_calling(pytester, "oracle.reject('mine.py:f', reason='past-the-plan', seed=1)").assert_outcomes(passed=1)


@pytest.mark.parametrize(
    ("verdict", "reason", "says"),
    [
        (ACCEPTED, "gain", "EXPECTED reject for gain, got accept\nACCEPT  mine.py:f  through door accuracy, against emulator"),
        (REJECTED, "gain", "EXPECTED reject for gain, got error-exceeds-bound, past-the-plan\nREJECT  mine.py:f  error"),
        (REJECTED, "gian", "WRONG USAGE  oracle.reject(reason='gian'): no such reason; there are invalid-access, crash"),
    ],
)
def test_any_other_verdict_fails(pytester: pytest.Pytester, stand_in: StandIn, verdict: Verdict, reason: str, says: str) -> None:
    stand_in(verdict)
    result = test_calling(pytester, f"oracle.reject('mine.py:f', reason={reason!r})")

    result.assert_outcomes(failed=1)
    assert says in result.stdout.str()


# What is asked


def test_the_call_goes_before_the_mark_and_the_mark_before_the_command_line(pytester: pytest.Pytester, stand_in: StandIn) -> None:
    asked = stand_in(ACCEPTED)
    line = ("--oracle-seed=1", "--oracle-profile=deep", "--oracle-device=cuda")
    module = "pytestmark = pytest.mark.oracle(profile='default', families=['mqa'])"
    mark = f"{module}\n\n@pytest.mark.oracle(families=['mqa', 'llama3'], seed=2)"
    test_calling(pytester, "oracle.accept('k')").assert_outcomes(passed=1)
    test_calling(pytester, "oracle.accept('k')", *line).assert_outcomes(passed=1)
    pytester.makepyfile(test_it=f"import pytest\n{mark}\ndef test_it(oracle):\n    oracle.accept('k', family=None)\n")
    pytester.runpytest_inprocess(*line, "--strict-markers").assert_outcomes(passed=1)
    pytester.makepyfile(
        test_it=f"import pytest\n{mark}\ndef test_it(oracle):\n    oracle.accept('k', family='gemma2', profile='quick', seed=0)\n"
    )
    pytester.runpytest_inprocess(*line).assert_outcomes(passed=1)

    assert asked == [
        Asked(candidate="k"),
        Asked(candidate="k", device="cuda", profile="deep", seed=1),
        Asked(candidate="k", device="cuda", profile="default", seed=2, families=("mqa", "llama3")),
        Asked(candidate="k", device="cuda", profile="quick", seed=0, families=("gemma2",)),
    ]


def test_every_keyword_of_a_call_arrives(pytester: pytest.Pytester, stand_in: StandIn) -> None:
    """Relative paths start at pytest's rootdir, wherever it was started."""
    asked = stand_in(ACCEPTED)
    pytester.makeini("[pytest]")
    pytester.makepyfile(
        **{
            "deep/test_it": "def test_it(oracle):\n    oracle.accept('a.py:f', against='b.py:g', families=('mqa',), doors='bits',"
            " cases='cases', within_fp32=0.5)\n"
        }
    )
    pytester.runpytest_inprocess("deep").assert_outcomes(passed=1)

    what = Asked(candidate="a.py:f", against="b.py:g", families=("mqa",), doors=("bits",), within_fp32=0.5)
    assert asked == [replace(what, cases=pytester.path / "cases")]


USAGE = [
    ("oracle.accept('sdpa-math', family='lama3')", "", "no family 'lama3'; there are gemma4-global, * llama3, *"),
    ("oracle.accept('sdpa-mth')", "", "sdpa-mth: no such kernel; did you mean sdpa-math*"),
    ("oracle.accept('sdpa-math', famly='mqa')", "", "*got famly=; expected some of family, families, against, *"),
    ("oracle.accept('sdpa-math', family='mqa', families=['mqa'])", "", "*got family and families; expected one of them"),
    ("pass", "pytestmark = pytest.mark.oracle(family='mqa')", "pytest.mark.oracle: got family=; expected some of families, *"),
    ("pass", "pytestmark = pytest.mark.oracle('mqa')", "pytest.mark.oracle: got 'mqa'; expected keywords only: families, *"),
]


@pytest.mark.parametrize(("call", "above", "says"), USAGE, ids=[str(i) for i in range(len(USAGE))])
def test_wrong_usage_is_one_line_that_says_what_is_right(pytester: pytest.Pytester, call: str, above: str, says: str) -> None:
    result = test_calling(pytester, call, above=above)

    assert result.ret == pytest.ExitCode.TESTS_FAILED
    result.stdout.fnmatch_lines(f"WRONG USAGE  {says}")
    assert "Traceback" not in result.stdout.str() and "During handling" not in result.stdout.str()


def test_an_unknown_profile_on_the_command_line_is_refused_by_pytest(pytester: pytest.Pytester) -> None:
    result = pytester.runpytest_inprocess("--oracle-profile=quik")

    assert result.ret == pytest.ExitCode.USAGE_ERROR and "invalid choice: 'quik'" in result.stderr.str()


# Judging itself


def judge(monkeypatch: pytest.MonkeyPatch, asked: Asked) -> tuple[Verdict, str | None]:
    """The plugin's verdict, and the CUDA_VISIBLE_DEVICES under which it was judged."""
    seen: list[str | None] = []

    def accept(asked: Asked, watch: object) -> Verdict:
        seen.append(os.environ.get("CUDA_VISIBLE_DEVICES"))
        return ACCEPTED

    monkeypatch.setattr(accepting, "accept", accept)
    return plugin.judged(asked), seen[0]


def test_the_command_that_gives_a_verdict_again_is_no_pytest_command(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = Asked(
        candidate="my dir/a.py:f", against="b", families=("mqa", "llama3"), doors=("bits",), cases=Path("c"), device="cuda",
        profile="quick", within_fp32=0.5,
    )  # fmt: skip
    assert judge(monkeypatch, whole)[0].environment["command"] == (
        "oracle accept 'my dir/a.py:f' --against b --family mqa --family llama3 --door bits --cases c --device cuda "
        "--profile quick --within-fp32 0.5 --seed 7"
    )
    assert judge(monkeypatch, Asked(candidate="a"))[0].environment["command"] == "oracle accept a --seed 7"


@pytest.mark.parametrize(
    ("device", "worker", "visible", "gpus", "sees"),
    [
        ("cuda", "gw1", None, 2, "1"),
        ("cuda", "gw5", None, 4, "1"),
        ("cuda", "gw1", "4,GPU-8a", 8, "GPU-8a"),
        ("cuda", "gw1", "3", 8, "3"),
        ("cuda", "gw1", None, 1, None),
        ("cuda", "gw1", None, 0, None),
        ("cuda", None, None, 4, None),
        ("cpu", "gw1", None, 4, None),
    ],
)
def test_a_worker_of_xdist_has_a_gpu_of_its_own_where_there_are_several(
    monkeypatch: pytest.MonkeyPatch, device: str, worker: str | None, visible: str | None, gpus: int, sees: str | None
) -> None:
    for name, value in (("PYTEST_XDIST_WORKER", worker), ("CUDA_VISIBLE_DEVICES", visible)):
        monkeypatch.delenv(name, raising=False)
        if value is not None:
            monkeypatch.setenv(name, value)
    monkeypatch.setattr("torch.cuda.device_count", lambda: gpus)

    assert judge(monkeypatch, Asked(candidate="a", device=device))[1] == sees
    assert os.environ.get("CUDA_VISIBLE_DEVICES") == visible
