"""The pytest plugin: a kernel's verdict as a test.

    def test_my_kernel(oracle):
        oracle.accept(my_kernel, family="gemma4-global", against=their_kernel)

Every pytest of an environment loads this module, so it imports neither torch nor the judging before a test asks for a verdict.
"""

from __future__ import annotations

import io
import os
import re
import shlex
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypedDict, Unpack

import pytest

from oracle.errors import InputError, OracleError
from oracle.named import name_of
from oracle.verdict import Outcome, Reason, Verdict
from oracle.verdict_lines import failure_text, properties, summary

if TYPE_CHECKING:
    from oracle.accept import Asked
    from oracle.trial import Watch

MARK = ("families", "profile", "seed")  # keywords of pytest.mark.oracle
BOTH_DOORS = ("bits", "accuracy")
GPUS = "CUDA_VISIBLE_DEVICES"
Kernel = str | Callable[..., object]  # a name as `oracle accept` takes it, or what a module-level name holds
VERDICTS = pytest.StashKey["list[Verdict]"]()  # on a test that asks for the fixture: its verdicts so far


class Options(TypedDict, total=False):
    """Keywords of `accept` and `reject`, as `oracle accept` has them.  None says as much as leaving it out."""

    family: str | None  # the only one of `families`
    families: str | Sequence[str] | None  # all, where none is named
    against: Kernel | None
    doors: str | Sequence[str] | None
    cases: str | Path | None  # a folder of CASE.toml; a relative one starts at pytest's rootdir
    within_fp32: float | None
    profile: str | None
    seed: int | None


@dataclass(frozen=True, kw_only=True)
class Oracle:
    """What the fixture `oracle` gives to one test."""

    request: pytest.FixtureRequest
    verdicts: list[Verdict] = field(default_factory=list)

    def accept(self, kernel: Kernel, **options: Unpack[Options]) -> Verdict:
        """The verdict, an accept on at least one case; with any other the test fails."""
        verdict, moved = self._judge(kernel, options, locked=True)
        if verdict.outcome is not Outcome.ACCEPT or not verdict.coverage.cases:
            pytest.fail(failure_text(verdict), pytrace=False)
        if moved:
            pytest.fail("\n".join([f"MOVED  {verdict.candidate}", *moved]), pytrace=False)
        return verdict

    def reject(self, kernel: Kernel, *, reason: str, **options: Unpack[Options]) -> Verdict:
        """The verdict, a reject for `reason` among others; with any other the test fails."""
        if reason not in list(Reason):
            raise usage(f"oracle.reject(reason={reason!r}): no such reason; there are {', '.join(Reason)}")
        verdict, _ = self._judge(kernel, options, locked=False)
        if verdict.outcome is not Outcome.REJECT or reason not in verdict.reasons:
            got = ", ".join(verdict.reasons) or verdict.outcome
            pytest.fail(f"EXPECTED reject for {reason}, got {got}\n{failure_text(verdict)}", pytrace=False)
        return verdict

    def _judge(self, kernel: Kernel, options: Options, *, locked: bool) -> tuple[Verdict, list[str]]:
        """The verdict, recorded, and what is not as the lock says, where there is to be one.  Wrong usage fails the test."""
        config = self.request.config
        folder = config.getoption("oracle_lock") if locked else None
        try:
            asked, moved = self._asked(kernel, options), list[str]()
            if folder is None:
                verdict = judged(asked)
            else:
                verdict, moved = beside_lock(asked, config.rootpath / folder, update=config.getoption("oracle_update"))
        except OracleError as error:
            raise usage(str(error)) from None
        self.verdicts.append(verdict)
        self.request.node.user_properties += [(f"oracle.{name}", value) for name, value in properties(verdict).items()]
        return verdict, moved

    def _asked(self, kernel: Kernel, options: Options) -> Asked:
        """What is asked of the oracle: the call's keywords before the mark's before the command line's."""
        from oracle.accept import Asked

        known(options, tuple(Options.__annotations__), "oracle.accept and oracle.reject")
        node, config = self.request.node, self.request.config
        near, root = self.request.module, config.rootpath
        line = {"profile": config.getoption("oracle_profile"), "seed": config.getoption("oracle_seed")}
        given = {name: value for name, value in options.items() if value is not None}
        if "family" in given:
            if "families" in given:
                raise InputError("oracle.accept: got family and families; expected one of them")
            given["families"] = given["family"]
        chosen: dict[str, Any] = {"families": (), "against": "", "doors": BOTH_DOORS} | line | mark_keywords(node) | given
        return Asked(
            candidate=name_of(kernel, near, root),
            against=name_of(chosen["against"], near, root),
            families=several(chosen["families"]),
            doors=several(chosen["doors"]),
            cases=root / chosen["cases"] if "cases" in chosen else None,
            device=config.getoption("oracle_device"),
            profile=chosen["profile"],
            seed=chosen["seed"],
            within_fp32=chosen.get("within_fp32"),
        )


def beside_lock(asked: Asked, folder: Path, *, update: bool) -> tuple[Verdict, list[str]]:
    """The verdict, and in sentences what is not as the lock in `folder` says; `update` writes it there instead.

    A row that was not there is never born green.  Raises InputError for wrong usage, and where a lock would be loosened.
    """
    from oracle import plugin_lock

    asked = plugin_lock.as_locked(asked, folder)
    if update:
        verdict, new = plugin_lock.update(asked, folder, judged)
        return verdict, [f"{plugin_lock.row_name(asked)}: is locked now; look at {folder}, commit it, run again"] if new else []
    found = plugin_lock.judge_locked(asked, folder, judged)
    assert found.verdict is not None
    return found.verdict, [move.text for move in found.moves]


def judged(asked: Asked, watch: Watch | None = None) -> Verdict:
    """The verdict on what is asked, with the command that gives it again.  Every verdict of the plugin is made here.

    Raises InputError for wrong usage.
    """
    from oracle.accept import accept
    from oracle.trial import unwatched

    with own_gpu(asked.device):
        verdict = accept(asked, watch=watch or unwatched)
    return replace(verdict, environment=verdict.environment | {"command": command(asked, verdict.environment["seed"])})


def command(asked: Asked, seed: int) -> str:
    """The command line that gives the same verdict."""
    options = [
        ("--against", asked.against),
        *(("--family", name) for name in asked.families),
        *(("--door", door) for door in asked.doors if asked.doors != BOTH_DOORS),
        ("--cases", str(asked.cases or "")),
        ("--device", asked.device if asked.device != "cpu" else ""),
        ("--profile", asked.profile),
        ("--within-fp32", "" if asked.within_fp32 is None else str(asked.within_fp32)),
        ("--seed", str(seed)),
    ]
    return shlex.join(["oracle", "accept", asked.candidate, *(word for pair in options if pair[1] for word in pair)])


@contextmanager
def own_gpu(device: str) -> Iterator[None]:
    """Under xdist, on cuda, where several GPUs are visible: a process started meanwhile sees one, by the worker's number."""
    worker, before = os.environ.get("PYTEST_XDIST_WORKER"), os.environ.get(GPUS)
    gpus = visible_gpus(before) if device == "cuda" and worker else []
    if worker and len(gpus) > 1:
        os.environ[GPUS] = gpus[int(re.sub(r"\D", "", worker) or 0) % len(gpus)]
    try:
        yield
    finally:
        os.environ.pop(GPUS, None)
        if before is not None:
            os.environ[GPUS] = before


def visible_gpus(named: str | None) -> list[str]:
    """The GPUs that CUDA_VISIBLE_DEVICES names, or the numbers of all."""
    if named is not None:
        return [gpu for gpu in named.split(",") if gpu]
    import torch

    return [str(number) for number in range(torch.cuda.device_count())]


def several(names: str | Sequence[str]) -> tuple[str, ...]:
    """One name, or several, as a tuple."""
    return (names,) if isinstance(names, str) else tuple(names)


def known(keywords: Iterable[str], names: tuple[str, ...], where: str) -> None:
    """Raises InputError for a keyword that is not one of `names`."""
    if strange := [name for name in keywords if name not in names]:
        raise InputError(f"{where}: got {strange[0]}=; expected some of {', '.join(names)}")


def mark_keywords(node: pytest.Item) -> dict[str, Any]:
    """Keywords of every mark `oracle` of a test, the nearest first.  Raises InputError for what a mark does not take."""
    found: dict[str, Any] = {}
    for mark in node.iter_markers("oracle"):
        if mark.args:
            raise InputError(f"pytest.mark.oracle: got {mark.args[0]!r}; expected keywords only: {', '.join(MARK)}")
        known(mark.kwargs, MARK, "pytest.mark.oracle")
        found = dict(mark.kwargs) | found
    return found


def usage(text: str) -> BaseException:
    """What fails a test with `text` and no traceback."""
    return pytest.fail.Exception(f"WRONG USAGE  {text}", pytrace=False)


def rendered(verdict: Verdict, config: pytest.Config) -> str:
    """The whole verdict as text, as wide and as colourful as pytest's terminal."""
    from rich.console import Console

    from oracle.report import PIPE_WIDTH, verdict_text

    # A worker of xdist has no terminal.
    terminal = config.get_terminal_writer() if config.pluginmanager.has_plugin("terminalreporter") else None
    out = io.StringIO()
    console = Console(
        file=out,
        width=terminal.fullwidth if terminal else PIPE_WIDTH,
        color_system="standard" if terminal and terminal.hasmarkup else None,
        force_terminal=bool(terminal and terminal.hasmarkup),
        highlight=False,
    )
    console.print(verdict_text(verdict))
    return "\n".join(line.rstrip() for line in out.getvalue().splitlines())


# What pytest calls


def pytest_addoption(parser: pytest.Parser) -> None:
    """--oracle-device, --oracle-seed, --oracle-profile, --oracle-lock and --oracle-update."""
    group = parser.getgroup("oracle", "attention kernels (fixture `oracle`)")
    group.addoption("--oracle-device", default="cpu", choices=["cpu", "cuda"], help="Where kernels are judged [default: cpu].")
    group.addoption("--oracle-seed", type=int, metavar="N", help="Seed of the suite, where neither test nor mark gives one.")
    group.addoption(
        "--oracle-profile",
        default="",
        choices=["default", "quick", "deep"],
        help="How much is judged, where neither test nor mark says so.",
    )
    group.addoption(
        "--oracle-lock", metavar="FOLDER", help="Compare the figures of every accept with the locks in FOLDER; docs/lock.md."
    )
    group.addoption("--oracle-update", action="store_true", help="Write the figures into the locks of --oracle-lock.")


def pytest_configure(config: pytest.Config) -> None:
    """The mark is known.  Raises UsageError where options do not go together."""
    if config.getoption("oracle_update"):
        if config.getoption("oracle_lock") is None:
            raise pytest.UsageError("--oracle-update: writes the locks of --oracle-lock FOLDER, and none is named")
        if config.getoption("numprocesses", None) or hasattr(config, "workerinput"):
            raise pytest.UsageError("--oracle-update: got -n; one process writes the lock, so run without xdist")
    config.addinivalue_line("markers", "oracle(families=..., profile=..., seed=...): defaults for the test's fixture `oracle`.")


@pytest.fixture(name="oracle")
def oracle_fixture(request: pytest.FixtureRequest) -> Oracle:
    """Judges attention kernels: `oracle.accept(kernel, ...)` fails the test unless the kernel is accepted."""
    try:
        mark_keywords(request.node)
    except InputError as error:
        raise usage(str(error)) from None
    given = Oracle(request=request)
    request.node.stash[VERDICTS] = given.verdicts
    return given


@pytest.hookimpl(wrapper=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> Generator[None, object, object]:
    """A test that asked for the fixture and judged nothing has shown nothing, and fails."""
    result = yield
    if pyfuncitem.stash.get(VERDICTS, None) == []:
        raise usage("the test asks for the fixture `oracle` and judged no kernel; call oracle.accept(kernel), or leave it out")
    return result


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """A failing test shows its latest verdict whole."""
    report = yield
    if report.when == "call" and report.failed and (verdicts := item.stash.get(VERDICTS, None)):
        report.sections.append(("verdict", rendered(verdicts[-1], item.config)))
    return report


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """With -v: every verdict, with what its kernel has not declared and what was not covered."""
    if config.get_verbosity() < 1:
        return
    reports = (r for those in terminalreporter.stats.values() for r in those)
    told: list[dict[str, Any]] = []
    for report in reports:
        if type(report) is not pytest.TestReport or report.when != "call":  # subtests repeat what their test says
            continue
        for name, value in report.user_properties:
            if name == "oracle.kernel":
                told.append({})
            if name.startswith("oracle."):
                told[-1][name.removeprefix("oracle.")] = value
    if told:
        terminalreporter.write_sep("=", "oracle")
        for one in told:
            terminalreporter.write_line(summary(one))
