"""The command line: `oracle VERB ...`.  Results on stdout, progress on stderr; the exit status is the answer.

Only this module prints and exits.  torch is imported by the verbs that need it, so that --help is quick.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import date
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from oracle import __version__
from oracle.checkpoints import shipped
from oracle.cli_bench import ab, bench, roofline
from oracle.cli_drift import blocks_option, check_folders, drift, text_option
from oracle.cli_kernels import build_kernels, families, kernels
from oracle.progress import progress_bar

if TYPE_CHECKING:
    from oracle.accept import Asked
    from oracle.evidence import Gathered
    from oracle.gate import Judged
    from oracle.lock import Lock
    from oracle.loosened import Complaint
    from oracle.trial import Watch
    from oracle.verdict import Verdict

WRONG_USAGE, INTERRUPTED = 2, 130
PROFILES = click.Choice(["", "default", "quick", "deep"])
HELD_OUT, HELD_OUT_SHARE = 1000, 0.95  # faults that `oracle mutants --held-out` draws, and the share that must be rejected


@click.group(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 120})
@click.version_option(__version__, prog_name="oracle")
def cli() -> None:
    """May this attention kernel ship?  A numerical accuracy oracle and regression gate for attention kernels."""


for command in (drift, kernels, families, build_kernels, bench, roofline, ab):
    cli.add_command(command)


@cli.command()
@click.argument("kernel")
@click.option("--against", default="", metavar="KERNEL", help="The incumbent: the kernel it would replace.")
@click.option("--family", "families", multiple=True, metavar="FAMILY", help="Judge only this layer type; may be repeated.")
@click.option(
    "--door",
    "doors",
    multiple=True,
    type=click.Choice(["bits", "accuracy", "drift"]),
    help="Doors allowed [default: bits and accuracy, and drift where there is a --checkpoint].",
)
@click.option(
    "--checkpoint",
    type=click.Path(path_type=Path),
    metavar="DIR",
    help="Door drift: the checkpoint that KERNEL runs in; gemma4-mini is the one that comes with the oracle.",
)
@click.option(
    "--no-worse-than", "accepted", default="fp8", show_default=True, metavar="C", help="Door drift: what is already accepted."
)
@click.option("--layers", default="", help="Door drift: global, sliding or numbers: the layers that call KERNEL [default: all].")
@text_option
@blocks_option
@click.option(
    "--cases", type=click.Path(path_type=Path, exists=True, file_okay=False), help="A folder of CASE.toml, judged as well."
)
@click.option("--device", default="cpu", show_default=True, type=click.Choice(["cpu", "cuda"]))
@click.option(
    "--profile",
    default="",
    type=PROFILES,
    metavar="default|quick|deep",
    help="How much is judged [default: default; quick for interpreted kernels].",
)
@click.option("--seed", type=int, help="Seed of the suite [default: a hash of the kernel's source and the suite's version].")
@click.option(
    "--within-fp32", type=click.FloatRange(min=0, min_open=True), metavar="X", help="Also demand |out - fp32 reference| <= X."
)
@click.option("--sanitize", is_flag=True, help="CUDA: run KERNEL under compute-sanitizer; what it finds is a reason.")
@click.option("--graph", is_flag=True, help="CUDA: take KERNEL's answers from replays of CUDA graphs.")
@click.option("--list", "list_only", is_flag=True, help="Show what would be judged, as counts, and judge nothing.")
@click.option("--json", "json_file", type=click.Path(path_type=Path, dir_okay=False), help="Write the verdict as JSON as well.")
@click.option(
    "--markdown", "markdown_file", type=click.Path(path_type=Path, dir_okay=False), help="Write it as Markdown, for a CI summary."
)
@click.option("--html", "html_file", type=click.Path(path_type=Path, dir_okay=False), help="Write it with pictures, as one file.")
@click.pass_context
def accept(
    context: click.Context,
    /,
    json_file: Path | None,
    markdown_file: Path | None,
    html_file: Path | None,
    list_only: bool,
    doors: tuple[str, ...],
    checkpoint: Path | None,
    accepted: str,
    layers: str,
    texts: tuple[Path, ...],
    blocks: str,
    **options: Any,
) -> int:
    """May KERNEL ship?  Exit status: 0 accept, 1 reject, 2 wrong usage, 3 inconclusive or too little covered.

    KERNEL is a NAME that `oracle kernels` lists, file.py:function or module:function.
    """
    from oracle.accept import Asked, listed
    from oracle.report import console, coverage_table

    allowed = doors or ("bits", "accuracy", *(["drift"] if checkpoint else []))
    compared = None
    if checkpoint is None:
        for name, option in (
            ("accepted", "--no-worse-than"),
            ("layers", "--layers"),
            ("texts", "--text"),
            ("blocks", "--blocks"),
        ):
            if context.get_parameter_source(name) is not click.core.ParameterSource.DEFAULT:
                raise click.UsageError(f"{option} is for --door drift: name a --checkpoint")
    else:
        from oracle.drift_door import DriftAsked

        where = shipped.folder() if str(checkpoint) == shipped.NAME and not checkpoint.exists() else checkpoint
        compared = DriftAsked(checkpoint=where, accepted=accepted, layers=layers, texts=texts, blocks=blocks)
    asked = Asked(candidate=options.pop("kernel"), doors=allowed, drift=compared, **options)
    if list_only:
        console().print(coverage_table(listed(asked)))
        return 0
    check_folders({"--json": json_file, "--markdown": markdown_file, "--html": html_file})
    gathered = _gathered() if html_file is not None else None
    verdict = _judge(asked, gathered)
    _show(verdict, json_file)
    _write_reports(verdict, markdown_file, html_file, gathered)
    return verdict.exit_code


@cli.command()
@click.argument("kernel")
@click.option("--minutes", type=click.FloatRange(min=0, min_open=True), default=1.0, show_default=True, help="Time to search.")
@click.option("--seed", type=int, default=0, show_default=True, help="Same seed, same cases.")
@click.option("--device", default="cpu", show_default=True, type=click.Choice(["cpu", "cuda"]))
@click.option(
    "-o",
    "--output",
    type=click.Path(path_type=Path, exists=True, file_okay=False),
    default=Path(),
    help="Folder that the case is saved in [default: this one].",
)
def fuzz(kernel: str, minutes: float, seed: int, device: str, output: Path) -> int:
    """Search for a call that KERNEL gets wrong; print and save the smallest one.

    Exit status: 0 nothing found, 1 found, 2 wrong usage, 130 interrupted with nothing found.
    """
    from oracle.accept import open_kernel
    from oracle.casefile import save
    from oracle.exercised import pair_counts
    from oracle.fuzz import Limits, search
    from oracle.replay_text import found_text, inspect_text, searched_text
    from oracle.report import console, pairs_table

    candidate = open_kernel(kernel, device)
    try:
        with progress_bar(kernel) as progress:
            seen = search(
                candidate, seed, Limits(search_s=60 * minutes), lambda s, what: progress(int(s), int(60 * minutes), what)
            )
    finally:
        candidate.process.close()
    if seen.found is not None:
        judged = seen.found.judged
        finding = f"{judged.faults[0].reason}: {judged.faults[0].text}"
        path = save(judged.case, output, {"kernel": kernel, "found": finding, "seed": str(seed)})
        click.echo(found_text(kernel, seen.found, path))
        click.echo(searched_text(seen))
        return 1
    if seen.inspect:
        path = save(
            seen.inspect[0].case, output, {"kernel": kernel, "inspect": seen.inspect[0].inspect[0].text, "seed": str(seed)}
        )
        click.echo(inspect_text(kernel, seen.inspect[0], len(seen.inspect), path) + "\n")
    console().print(pairs_table(pair_counts(candidate.scope, seen.cases)))
    click.echo(searched_text(seen))
    return INTERRUPTED if seen.interrupted else 0


@cli.command()
@click.argument("case", type=click.Path(path_type=Path))
@click.argument("kernel", default="")
@click.option("--device", default="cpu", show_default=True, type=click.Choice(["cpu", "cuda"]))
def replay(case: Path, kernel: str, device: str) -> int:
    """Judge a saved CASE (a .toml, or a folder of them) again, with what lies round the worst element.

    KERNEL is by default the one that the file names.  Exit status: 0 nothing found, 1 found, 2 wrong usage.
    """
    from oracle.casefile import read
    from oracle.replay import replay as run
    from oracle.replay import status
    from oracle.replay_text import replayed_text

    files = read(case)
    with progress_bar(str(case)) as progress:
        replayed = run(files, kernel, device, progress)
    click.echo("\n\n".join(map(replayed_text, replayed)))
    return status(replayed)


LOCKS = Path("ci/thresholds")
_lock_option = click.option(
    "--lock",
    "folder",
    type=click.Path(path_type=Path, file_okay=False),
    help=f"Folder of the locks, one file a device [default: {LOCKS}].",
)


@cli.command()
@click.option("--device", default="cpu", show_default=True, type=click.Choice(["cpu", "cuda"]))
@_lock_option
@click.option("--base", metavar="REV", help="First see that no lock was loosened since this git revision without a waiver.")
@click.option("--allow-better", is_flag=True, help="Errors below their bands do not make the lock stale.")
@click.option(
    "--cases", type=click.Path(path_type=Path, exists=True, file_okay=False), help="A folder of CASE.toml, judged first."
)
def gate(device: str, folder: Path | None, base: str | None, allow_better: bool, cases: Path | None) -> int:
    """Judge every locked kernel, and every shipped one that this machine can run: is each as its lock and its row say?

    Exit status: 0 all as expected, 1 something moved.  On GitHub, sentences also become annotations and a step summary.
    """
    from oracle.lock_files import loosening, overdue, read_locks, require_locks

    where = folder or LOCKS
    today = date.today()
    complaints = loosening(where, base, today) if base else {}
    locks = read_locks(where, device)
    if folder is not None:
        require_locks(folder, locks, device)
    if not base:
        complaints = overdue(locks, today)
    if any(complaints.values()):
        return _tell_gate(where, locks, [], complaints)

    from oracle.gate import allow_better as without_falls
    from oracle.gate import judge, moved_constants, roster
    from oracle.report import console, verdict_text

    judged = []
    for entry in roster(locks, device, cases=cases):
        judged.append(judge(entry, locks, _judge))
        if judged[-1].problem and (verdict := judged[-1].verdict):
            console().print(verdict_text(verdict))
    return _tell_gate(where, locks, without_falls(judged) if allow_better else judged, moved_constants(locks))


def _tell_gate(
    folder: Path, locks: Mapping[str, Lock], judged: Sequence[Judged], complaints: Mapping[str, Sequence[Complaint]]
) -> int:
    """Everything that the gate found has been said, where it is looked for; 0 where nothing moved and something was judged."""
    from oracle.gate_text import complaint_lines, gate_lines, gate_table, github_annotations, summary
    from oracle.report import console

    holds = not any(complaints.values()) and all(j.holds for j in judged) and any(j.verdict for j in judged)
    if judged:
        console().print(gate_table(judged))
        if not locks:
            click.echo(f"note: no lock in {folder}: only verdicts were compared; `oracle lock` makes one")
    for line in [*complaint_lines(complaints), *gate_lines(judged)]:
        click.echo(line)
    if os.environ.get("GITHUB_ACTIONS") == "true":
        for line in github_annotations(folder, locks, judged, complaints):
            click.echo(line)
    if target := os.environ.get("GITHUB_STEP_SUMMARY"):
        with open(target, "a", encoding="utf-8") as file:
            file.write(summary(judged, complaints, holds))
    return 0 if holds else 1


@cli.command()
@click.argument("kernels", nargs=-1)
@click.option("--against", default="", metavar="KERNEL", help="The incumbent of the kernels named.")
@click.option("--profile", default="", type=PROFILES, metavar="default|quick|deep", help="The profile of the kernels named.")
@click.option("--device", default="cpu", show_default=True, type=click.Choice(["cpu", "cuda"]))
@_lock_option
@click.option("--reason", default="", metavar="TEXT", help="Why the lock may demand less than it did; kept in it.")
def lock(kernels: tuple[str, ...], against: str, profile: str, device: str, folder: Path | None, reason: str) -> int:
    """Measure KERNELS (default: all that are locked, and the shipped ones) and write their locks, or tighten them.

    Exit status: 0 unchanged, tightened, or loosened with --reason; 1 created: look at it, commit it; 2 refused.
    """
    from oracle.gate import check, roster
    from oracle.ledger import Ledger
    from oracle.lock_files import read_locks
    from oracle.locking import Book

    where = folder or LOCKS
    if (against or profile) and not kernels:
        raise click.UsageError("--against and --profile are about KERNELS, and none is named")
    locks = read_locks(where, device)
    book = Book(locks, partial=bool(kernels))
    for entry in roster(locks, device, names=kernels, against=against, profile=profile):
        if entry.absent:
            click.echo(f"note: {entry.name} is left as it is: {entry.absent}")
            continue
        ledger = Ledger()
        verdict = _judge(entry.asked, ledger)
        if entry.row is not None and (problem := check(entry.row, verdict)):
            raise click.ClickException(f"{entry.name}: {problem}; a wrong verdict is not locked")
        with progress_bar(f"{entry.name}, other seeds") as progress:
            book.enter(entry.name, entry.asked, verdict, ledger, progress, reason=entry.row.reason if entry.row else "")
    return _write_locks(where, locks, book.closed(), reason)


def _write_locks(folder: Path, old: Mapping[str, Lock], new: Mapping[str, Lock], reason: str) -> int:
    """The locks are written, where none is loosened without a reason.  Exit status of `oracle lock`."""
    from oracle.lock import write
    from oracle.locking import with_reason
    from oracle.loosened import loosened

    loose = {name: loosened(old[name], lock) for name, lock in new.items() if name in old}
    if not reason and any(loose.values()):
        for name, facts in loose.items():
            for fact in facts:
                click.echo(f"{folder / name}.toml: {fact.text}")
        raise click.ClickException("the lock would demand less than it did, and was left as it is; say why with --reason TEXT")
    folder.mkdir(parents=True, exist_ok=True)
    for name, lock in new.items():
        path = folder / f"{name}.toml"
        if name in old and replace(lock, header={**lock.header, "command": old[name].header["command"]}) == old[name]:
            click.echo(f"{path}: unchanged")
            continue
        write(with_reason(lock, reason, [fact.what for fact in loose[name]]) if loose.get(name) else lock, path)
        click.echo(
            f"{path}: {'written anew' if name in old else 'created: look at it and commit it'}, {len(lock.kernels)} kernels"
        )
    return 1 if set(new) - set(old) else 0


@cli.command()
@click.option("--only", default="", metavar="TEXT", help="Only mutants whose name holds this.")
@click.option("--seed", type=int, default=0, show_default=True, help="Seed of the suite.")
@click.option("--held-out", type=int, metavar="SEED", help="Instead: faults drawn at random from the parameter table.")
@click.option(
    "--json", "json_file", type=click.Path(path_type=Path, dir_okay=False), help="Write each verdict's reasons as JSON."
)
def mutants(only: str, seed: int, held_out: int | None, json_file: Path | None) -> int:
    """The gate's own exam: correct kernels with one planted fault each, fault by check, beside other projects' rules.

    Each by the quick profile, and by the default one where the quick one has not understood it.
    Exit status: 0 every one is rejected for a reason that names its fault (of faults drawn at random: 95 %), 1 some are not.
    """
    from oracle.exam import examine
    from oracle.exam_text import checks, faults, kinds, peers
    from oracle.heldout import held_out_share
    from oracle.mutants.table import MUTANTS
    from oracle.report import console, sheet_table

    if held_out is not None:
        share = held_out_share(held_out, HELD_OUT)
        click.echo(share)
        return 0 if share.rejected >= HELD_OUT_SHARE else 1
    names = [name for name in MUTANTS if only in name]
    if not names:
        raise click.UsageError(f"--only {only}: no mutant's name holds it; oracle/mutants/table.py has {len(MUTANTS)}")
    judged = examine(names, seed)
    for sheet in (faults(judged), kinds(judged), checks(judged), peers(judged)):
        console().print(sheet_table(sheet))
    if json_file is not None:
        text = {
            j.name: {"verdict": j.outcome, "profile": j.profile, "reasons": j.reasons, "understood": j.understood} for j in judged
        }
        json_file.write_text(json.dumps(text, indent=2) + "\n")
    return 0 if all(j.understood for j in judged) else 1


@cli.command()
@click.argument("checkpoint", type=click.Path(path_type=Path))
@click.option("--layer", type=int, required=True, help="Decoder layer, from 0.")
@click.option(
    "--text", "text_file", type=click.Path(path_type=Path, exists=True, dir_okay=False), required=True, help="UTF-8 text to read."
)
@click.option(
    "-o", "--output", type=click.Path(path_type=Path), required=True, help="CASE: CASE.toml and CASE.safetensors are written."
)
@click.option("--max-tokens", type=click.IntRange(min=1), default=640, show_default=True)
@click.option("--dtype", default="bf16", show_default=True, type=click.Choice(["bf16", "fp16", "fp32"]))
def capture(checkpoint: Path, layer: int, text_file: Path, output: Path, max_tokens: int, dtype: str) -> int:
    """Save q, k and v of one layer of CHECKPOINT, reading a text, as a case for `oracle accept --cases`."""
    from oracle.captured import save_capture
    from oracle.cases import captured_case, to_toml
    from oracle.checkpoints.capture import capture as run
    from oracle.checkpoints.capture import capture_command

    check_folders({"-o": output})
    text = text_file.read_bytes().decode("utf-8")
    command = capture_command(checkpoint, layer, text_file, max_tokens, dtype)
    taken = run(checkpoint, layer, text, max_tokens, dtype, command=command)
    tensors = output.with_suffix(".safetensors")
    save_capture(taken, tensors)
    case = captured_case(output.name, taken.family, taken.tokens, taken.dtype, tensors.name)
    output.with_suffix(".toml").write_text(to_toml(case))
    click.echo(f"{tensors}: {taken.tokens} tokens of layer {layer}, q {tuple(taken.q.shape)}, k {tuple(taken.k.shape)}")
    click.echo(
        f"{output.with_suffix('.toml')}: judge a kernel on it with `oracle accept KERNEL --cases {output.absolute().parent}`"
    )
    return 0


def _judge(asked: Asked, watch: Watch | None = None) -> Verdict:
    from oracle.accept import accept as judge
    from oracle.trial import unwatched

    with progress_bar(asked.candidate) as progress:
        return judge(asked, progress, watch=watch or unwatched)


def _gathered() -> Gathered:
    """What keeps the evidence for pictures.  Raises InputError where nothing could draw them: before anything is judged."""
    from oracle.evidence import Gathered
    from oracle.html_report import check_installed

    check_installed()
    return Gathered()


def _write_reports(verdict: Verdict, markdown_file: Path | None, html_file: Path | None, gathered: Gathered | None) -> None:
    from oracle.files import write_whole

    if markdown_file is not None:
        from oracle.markdown import verdict_markdown

        write_whole(markdown_file, verdict_markdown(verdict), otherwise="name another file with --markdown")
    if html_file is not None and gathered is not None:
        from oracle.html_report import html_report

        write_whole(html_file, html_report(verdict, gathered.evidence), otherwise="name another file with --html")


def _show(verdict: Verdict, json_file: Path | None) -> None:
    from oracle.report import console, verdict_json, verdict_text

    console().print(verdict_text(verdict))
    if json_file is not None:
        json_file.write_text(json.dumps(verdict_json(verdict), indent=2, allow_nan=False) + "\n")


def main() -> None:
    """The entry point of the `oracle` command."""
    from oracle.errors import OracleError

    try:
        status = cli.main(standalone_mode=False)
    except click.exceptions.Exit as stop:
        status = stop.exit_code
    except click.ClickException as problem:
        problem.show()
        status = WRONG_USAGE
    except OracleError as problem:
        click.echo(f"oracle: {problem}", err=True)
        status = WRONG_USAGE
    except MemoryError:
        click.echo(
            "oracle: not enough memory for this case; free some, or choose a smaller --family or --profile quick", err=True
        )
        status = WRONG_USAGE
    except (KeyboardInterrupt, click.Abort):
        click.echo("oracle: interrupted; no verdict", err=True)
        status = INTERRUPTED
    sys.exit(status)
