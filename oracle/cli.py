"""The command line: `oracle VERB ...`.  Results on stdout, progress on stderr; the exit status is the answer.

Only this module prints and exits.  torch is imported by the verbs that need it, so that --help is quick.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from oracle import __version__

if TYPE_CHECKING:
    from oracle.accept import Asked
    from oracle.kernels.table import KernelRow
    from oracle.verdict import Verdict

WRONG_USAGE, INTERRUPTED = 2, 130
Progress = Callable[[int, int, str], None]


@click.group(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 120})
@click.version_option(__version__, prog_name="oracle")
def cli() -> None:
    """May this attention kernel ship?  A numerical accuracy oracle and regression gate for attention kernels."""


@cli.command()
@click.argument("kernel")
@click.option("--against", default="", metavar="KERNEL", help="The incumbent: the kernel it would replace.")
@click.option("--family", "families", multiple=True, metavar="FAMILY", help="Judge only this layer type; may be repeated.")
@click.option("--door", "doors", multiple=True, type=click.Choice(["bits", "accuracy"]), help="Doors allowed [default: both].")
@click.option(
    "--cases", type=click.Path(path_type=Path, exists=True, file_okay=False), help="A folder of CASE.toml, judged as well."
)
@click.option("--device", default="cpu", show_default=True, type=click.Choice(["cpu", "cuda"]))
@click.option(
    "--profile",
    default="",
    type=click.Choice(["", "default", "quick", "deep"]),
    metavar="default|quick|deep",
    help="How much is judged [default: default; quick for interpreted kernels].",
)
@click.option("--seed", type=int, help="Seed of the suite [default: a hash of the kernel's source and the suite's version].")
@click.option(
    "--within-fp32", type=click.FloatRange(min=0, min_open=True), metavar="X", help="Also demand |out - fp32 reference| <= X."
)
@click.option("--list", "list_only", is_flag=True, help="Show what would be judged, as counts, and judge nothing.")
@click.option("--json", "json_file", type=click.Path(path_type=Path, dir_okay=False), help="Write the verdict as JSON as well.")
def accept(json_file: Path | None, list_only: bool, doors: tuple[str, ...], **options: Any) -> int:
    """May KERNEL ship?  Exit status: 0 accept, 1 reject, 2 wrong usage, 3 inconclusive or too little covered.

    KERNEL is a NAME that `oracle kernels` lists, file.py:function or module:function.
    """
    from oracle.accept import Asked, listed
    from oracle.report import console, coverage_table

    asked = Asked(candidate=options.pop("kernel"), doors=doors or ("bits", "accuracy"), **options)
    if list_only:
        console().print(coverage_table(listed(asked)))
        return 0
    if json_file is not None and not json_file.absolute().parent.is_dir():
        raise click.UsageError(f"--json {json_file}: there is no folder {json_file.absolute().parent}")
    verdict = _judge(asked)
    _show(verdict, json_file)
    return verdict.exit_code


@cli.command()
@click.option("--device", default="cpu", show_default=True, type=click.Choice(["cpu", "cuda"]))
@click.option("--seed", type=int, default=0, show_default=True, help="Seed of the suites.")
def gate(device: str, seed: int) -> int:
    """Judge every shipped kernel that this machine can run, and compare each verdict with the expected one.

    Exit status: 0 all as expected, 1 a verdict moved.
    """
    from oracle.accept import Asked
    from oracle.gate import check
    from oracle.kernels.table import KERNELS, unavailable
    from oracle.report import console, gate_table, verdict_text

    out = console()
    rows: list[tuple[str, KernelRow, Verdict | None, str]] = []
    for name, row in KERNELS.items():
        if why := unavailable(row, device):
            rows.append((name, row, None, f"not run: {why}"))
            continue
        profile = row.profile if device == "cpu" else ""
        verdict = _judge(Asked(candidate=name, against=row.against, device=device, profile=profile, seed=seed))
        problem = check(row, verdict)
        rows.append((name, row, verdict, problem))
        if problem:
            out.print(verdict_text(verdict))
    out.print(gate_table(rows))
    ran = [problem for _, _, verdict, problem in rows if verdict is not None]
    return 0 if ran and not any(ran) else 1


@cli.command()
def kernels() -> int:
    """List the kernels that come with the oracle: what they are, the verdict expected, why one is unavailable."""
    from oracle.kernels.table import KERNELS, unavailable
    from oracle.report import console, kernels_table

    console().print(kernels_table({name: (row, unavailable(row, "cpu")) for name, row in KERNELS.items()}))
    return 0


@cli.command()
def families() -> int:
    """List the families: the attention layer types that kernels are judged on."""
    from oracle.families import FAMILIES
    from oracle.report import console, families_table

    console().print(families_table(FAMILIES.values()))
    return 0


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

    if not output.absolute().parent.is_dir():
        raise click.UsageError(f"-o {output}: there is no folder {output.absolute().parent}")
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


def _judge(asked: Asked) -> Verdict:
    from oracle.accept import accept as judge

    with _progress(asked.candidate) as progress:
        return judge(asked, progress)


@contextmanager
def _progress(name: str) -> Iterator[Progress]:
    """A progress bar on stderr, where that is a terminal."""
    from oracle.report import console

    err = console(stderr=True)
    if not err.is_terminal:
        yield lambda done, total, what: None
        return
    from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
    from rich.progress import Progress as Bar

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.fields[what]}"),
    )
    with Bar(*columns, console=err, transient=True) as bar:
        task = bar.add_task(name, total=None, what="")
        yield lambda done, total, what: bar.update(task, completed=done, total=total, what=what)


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
