"""Door 3: what a kernel does to a checkpoint decides, and only for a kernel that is safe."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import jsonschema
import pytest
from click.testing import CliRunner
from test_report import ACCEPTED, SCHEMA, text_of
from tiny_models import save_with_texts

from oracle.accept import Asked, read_ahead
from oracle.checkpoints.configurations import Plugged
from oracle.checkpoints.isolated import isolated
from oracle.checkpoints.loading import CheckpointError
from oracle.cli import cli
from oracle.contract import Record
from oracle.drift_door import DriftAsked, check, through, waits
from oracle.errors import InputError
from oracle.isolation.outcome import Description
from oracle.isolation.process import KernelProcess
from oracle.markdown import verdict_markdown
from oracle.report import verdict_json
from oracle.verdict import Finding, Outcome, Reason, Verdict

FILE = Path(__file__).with_name("drifting_kernels.py")
NOISY = f"fp8+{FILE}:noisy"
LOOSER = Finding(reason=Reason.LOOSER_CONTRACT, case="", text="its record promises looser arithmetic")
SAFE = replace(ACCEPTED, outcome=Outcome.REJECT, door="", findings=(LOOSER,))


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> DriftAsked:
    """A checkpoint and texts for it."""
    folder, texts = save_with_texts(pytest.importorskip("transformers"), tmp_path_factory.mktemp("tiny"))
    return DriftAsked(checkpoint=folder, texts=(texts,), blocks="12x48")


@pytest.fixture(autouse=True)
def own_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))


@pytest.fixture
def kernel(request: pytest.FixtureRequest) -> Iterator[Plugged]:
    """The kernel that the test names, in its process."""
    with KernelProcess(f"{FILE}:{request.param}", threads=1) as process:
        description = process.describe()
        assert isinstance(description, Description)
        record = description.record or Record()
        yield isolated(f"{FILE}:{request.param}", process, description, record)


def silent(done: int, total: int, what: str) -> None:
    """No progress."""


def asked_of(name: str) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("kernel", [name], indirect=True, ids=[name])


@asked_of("plain")
def test_a_kernel_that_drifts_no_more_than_what_is_accepted_goes_through_door_3(tiny: DriftAsked, kernel: Plugged) -> None:
    verdict = through(SAFE, replace(tiny, accepted=NOISY), kernel, silent)

    assert (verdict.outcome, verdict.door, verdict.findings) == (Outcome.ACCEPT, "drift", ())
    assert verdict.drift is not None and verdict.drift.kl_candidate <= verdict.drift.kl_incumbent
    assert verdict.incumbent == NOISY and verdict.drift.candidate == f"fp8+{kernel.name}"
    assert f"through door drift, against {NOISY}" in " ".join(text_of(verdict).split())


@asked_of("noisy")
def test_a_kernel_that_drifts_more_is_rejected_for_that(tiny: DriftAsked, kernel: Plugged) -> None:
    verdict = through(SAFE, tiny, kernel, silent)

    assert verdict.outcome is Outcome.REJECT and verdict.reasons == (Reason.LOOSER_CONTRACT, Reason.DRIFT)
    assert verdict.drift is not None and verdict.drift.excess_lower > 0
    assert "of fp8, over 12 blocks" in " ".join(text_of(verdict).split())
    jsonschema.Draft202012Validator(SCHEMA).validate(verdict_json(verdict))
    assert f"mean KL of fp8+{kernel.name}" in verdict_markdown(verdict)


@asked_of("noisy")
def test_where_another_door_cannot_tell_a_larger_drift_rejects_nothing(tiny: DriftAsked, kernel: Plugged) -> None:
    verdict = through(replace(SAFE, outcome=Outcome.INCONCLUSIVE, findings=()), tiny, kernel, silent)

    assert (verdict.outcome, verdict.findings) == (Outcome.INCONCLUSIVE, ())
    assert verdict.drift is not None and verdict.drift.ruling == "reject"


@asked_of("plain")
def test_too_little_text_is_inconclusive_and_says_so(tiny: DriftAsked, kernel: Plugged) -> None:
    verdict = through(SAFE, replace(tiny, blocks="2x48"), kernel, silent)

    assert (verdict.outcome, verdict.exit_code, verdict.door) == (Outcome.INCONCLUSIVE, 3, "")
    assert "does it drift more than fp8? this text cannot tell" in text_of(verdict)


@asked_of("plain")
def test_an_accept_by_drift_is_withheld_where_too_little_was_covered(tiny: DriftAsked, kernel: Plugged) -> None:
    uncovered = replace(SAFE, coverage=replace(SAFE.coverage, missing=("captured inputs",)))

    verdict = through(uncovered, replace(tiny, accepted=NOISY), kernel, silent)

    assert (verdict.outcome, verdict.exit_code) == (Outcome.NOT_COVERED, 3)


@asked_of("dies_later")
def test_a_kernel_that_dies_in_the_checkpoint_is_rejected_for_that(tiny: DriftAsked, kernel: Plugged) -> None:
    check(tiny, kernel)
    verdict = through(SAFE, tiny, kernel, silent)

    assert verdict.outcome is Outcome.REJECT and verdict.reasons[0] is Reason.CRASH
    assert "in tiny-gemma4: " in verdict.findings[0].text


@asked_of("forges")
def test_what_a_kernel_does_to_its_process_does_not_reach_the_figures(tiny: DriftAsked, kernel: Plugged) -> None:
    verdict = through(SAFE, tiny, kernel, silent)

    assert verdict.outcome is Outcome.REJECT and verdict.drift is not None and verdict.drift.kl_candidate > 0


@asked_of("small_dims")
def test_a_kernel_that_cannot_do_a_layer_is_told_so_before_it_is_judged(tiny: DriftAsked, kernel: Plugged) -> None:
    with pytest.raises(CheckpointError, match=r"head dims \(128, 128\).*--layers"):
        check(tiny, kernel)
    check(replace(tiny, layers="sliding"), kernel)


@pytest.mark.parametrize(
    ("verdict", "expected"),
    [
        (ACCEPTED, False),
        (SAFE, True),
        (replace(ACCEPTED, outcome=Outcome.INCONCLUSIVE, door=""), True),
        (replace(ACCEPTED, outcome=Outcome.NOT_COVERED), False),
        (replace(SAFE, findings=(LOOSER, replace(LOOSER, reason=Reason.ERROR))), False),
        (replace(SAFE, findings=(replace(LOOSER, reason=Reason.LESS_ACCURATE), replace(LOOSER, reason=Reason.NO_DOOR))), True),
    ],
)
def test_door_3_is_for_kernels_that_are_safe_and_through_no_other(verdict: Verdict, expected: bool) -> None:
    assert waits(verdict) is expected


def test_door_3_and_a_checkpoint_go_together(tiny: DriftAsked) -> None:
    for asked in (Asked(candidate="emulator", doors=("drift",)), Asked(candidate="emulator", drift=tiny)):
        with pytest.raises(InputError, match="--door drift and --checkpoint go together"):
            read_ahead(asked)


@pytest.mark.parametrize("option", [("--layers", "global"), ("--no-worse-than", "fp8"), ("--blocks", "8x512")])
def test_an_option_of_door_3_without_a_checkpoint_is_wrong_usage(option: tuple[str, str]) -> None:
    result = CliRunner().invoke(cli, ["accept", "emulator", *option])

    assert result.exit_code == 2 and f"{option[0]} is for --door drift: name a --checkpoint" in result.output
