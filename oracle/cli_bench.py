"""`oracle bench`, `oracle roofline` and `oracle ab`: what a kernel is worth."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import click

from oracle.checkpoints import shipped
from oracle.cli_drift import FILE, check_folders, text_option
from oracle.progress import progress_bar

if TYPE_CHECKING:
    from oracle.sheet import Sheet

DEFAULTS = {  # device -> families, contexts, batches of `oracle bench`
    "cpu": ("gemma4-global,gemma4-sliding,llama3", "0,1024,4096", "1x128,8x1"),
    "cuda": ("gemma4-global,gemma4-sliding,llama3", "0,8192,16384,57344", "1x8192,8x1"),
}
QUIET = ("KINETO_LOG_LEVEL", "99")  # read when torch is imported: its profiler says nothing on stderr
device_option = click.option("--device", default="cpu", show_default=True, type=click.Choice(["cpu", "cuda"]))
json_option = click.option("--json", "json_file", type=FILE, help="Write everything that was measured as JSON as well.")
markdown_option = click.option("--markdown", "markdown_file", type=FILE, help="Write it as Markdown.")

depth_option = click.option(
    "--depth",
    type=click.IntRange(min=1),
    metavar="N",
    help="Layers of a model with random weights, its last ones [default: all].",
)
prompt_option = click.option("--prompt-tokens", type=click.IntRange(min=2), default=1024, show_default=True, metavar="N")


@click.command()
@click.argument("a")
@click.argument("b")
@click.option("--families", metavar="F,F,...", help="Layer types, as `oracle families` lists them.")
@click.option("--contexts", metavar="N,N,...", help="Tokens that every sequence has before its new ones.")
@click.option("--shapes", metavar="S,S,...", help="Batches: SEQUENCESxROWS[+SEQUENCESxROWS...], such as 1x512 or 1x512+7x1.")
@click.option("--dtype", default="bf16", show_default=True, type=click.Choice(["bf16", "fp16", "fp32"]))
@click.option("--page-size", type=click.IntRange(min=1), default=64, show_default=True)
@device_option
@click.option("--rounds", type=click.IntRange(min=6), default=10, show_default=True, help="Of a block of each, in turn.")
@click.option(
    "--block-seconds", type=click.FloatRange(min=0, min_open=True), default=0.5, show_default=True, help="Length of a block."
)
@click.option("--seed", type=int, default=0, show_default=True, help="Of the random inputs.")
@json_option
@markdown_option
@click.option("--svg", "svg_file", type=FILE, help="Write a picture of the growth with the context.")
def bench(
    a: str,
    b: str,
    families: str | None,
    contexts: str | None,
    shapes: str | None,
    dtype: str,
    page_size: int,
    device: str,
    rounds: int,
    block_seconds: float,
    seed: int,
    json_file: Path | None,
    markdown_file: Path | None,
    svg_file: Path | None,
) -> int:
    """Time kernel A against kernel B, in turns in one process, on one pool and one plan; their answers are compared first.

    Both run in this process: let `oracle accept` judge them before.  Exit status: 0 timed, 2 wrong usage or a wrong answer.
    """
    check_folders({"--json": json_file, "--markdown": markdown_file, "--svg": svg_file})
    if svg_file is not None:
        from oracle.html_report import check_installed

        check_installed()
    from oracle.bench import Asked
    from oracle.bench import bench as measure
    from oracle.bench_text import bench_json, bench_markdown, headline, notes, sheets

    own = DEFAULTS[device]
    asked = Asked(
        a=a,
        b=b,
        families=tuple((families or own[0]).split(",")),
        contexts=_numbers("--contexts", contexts or own[1]),
        shapes=tuple((shapes or own[2]).split(",")),
        dtype=dtype,
        page_size=page_size,
        device=device,
        rounds=rounds,
        seconds=block_seconds,
        seed=seed,
    )
    with progress_bar("bench") as progress, built():
        found = measure(asked, progress)
    _show(headline(found), sheets(found), notes(found))
    _write({json_file: json.dumps(bench_json(found), indent=1) + "\n", markdown_file: bench_markdown(found)})
    if svg_file is not None:
        from oracle.bench_charts import growth

        _write({svg_file: growth(found).light})
    return 0


@click.command()
@click.argument("checkpoint", required=False, type=click.Path(path_type=Path))
@prompt_option
@text_option
@depth_option
@device_option
@click.option("--rounds", type=click.IntRange(min=6), default=6, show_default=True, help="Of products and prefills, in turn.")
@json_option
@markdown_option
def roofline(
    checkpoint: Path | None,
    prompt_tokens: int,
    texts: tuple[Path, ...],
    depth: int | None,
    device: str,
    rounds: int,
    json_file: Path | None,
    markdown_file: Path | None,
) -> int:
    """Where the time of one prefill goes: kind of work by layer type, its FLOPs, and its rate beside the matrix product's.

    CHECKPOINT is a Hugging Face folder, a .gguf file or gemma4-31b-like, which has Gemma 4's shapes and random weights [default:
    the small Gemma 4 that comes with the oracle].  ORACLE_GLOBAL_ATTN=KERNEL and ORACLE_SLIDING_ATTN=KERNEL put KERNEL in place
    of the attention of those layers.  Exit status: 0 a report, 2 wrong usage or input.
    """
    check_folders({"--json": json_file, "--markdown": markdown_file})
    os.environ.setdefault(*QUIET)
    from oracle.roofline import Asked
    from oracle.roofline import roofline as measure
    from oracle.roofline_text import headline, notes, roofline_json, roofline_markdown, sheet

    asked = Asked(
        checkpoint=_checkpoint(checkpoint),
        texts=texts or (shipped.text(),),
        prompt_tokens=prompt_tokens,
        device=device,
        layers=depth,
        rounds=rounds,
    )
    with progress_bar("roofline") as progress, built():
        found = measure(asked, os.environ, progress)
    _show(headline(found), [sheet(found)], notes(found))
    _write({json_file: json.dumps(roofline_json(found), indent=1) + "\n", markdown_file: roofline_markdown(found)})
    return 0


@click.command()
@click.argument("checkpoint", required=False, type=click.Path(path_type=Path))
@click.option(
    "--knob", required=True, metavar="KERNEL", help="What the knob says on one side; off compares the incumbent with itself."
)
@click.option(
    "--against", default="off", show_default=True, metavar="KERNEL", help="What it says on the other; off: the incumbent."
)
@click.option("--decode", default="", metavar="KERNEL", help="What it says on both once the prompt is read [default: the same].")
@click.option("--layers", default="global", show_default=True, type=click.Choice(["global", "sliding"]), help="Which knob.")
@prompt_option
@click.option("--new-tokens", type=click.IntRange(min=2), default=32, show_default=True, metavar="N", help="Tokens produced.")
@text_option
@depth_option
@device_option
@click.option("--repeats", type=click.IntRange(min=3), default=10, show_default=True, help="Of both sides, in turn.")
@click.option(
    "--margin",
    type=click.FloatRange(min=0, min_open=True),
    default=0.05,
    show_default=True,
    help="How far off a ratio may be that counts as stayed.",
)
@json_option
@markdown_option
def ab(
    checkpoint: Path | None,
    knob: str,
    against: str,
    decode: str,
    layers: str,
    prompt_tokens: int,
    new_tokens: int,
    texts: tuple[Path, ...],
    depth: int | None,
    device: str,
    repeats: int,
    margin: float,
    json_file: Path | None,
    markdown_file: Path | None,
) -> int:
    """What a kernel changes end to end: the same model in one process with ORACLE_GLOBAL_ATTN off and on, in turns.

    Time to first token, the prefill by account, time per output token, peak memory and the tokens produced: which of them moved,
    by how much, which stayed within the margin, and which the repeats cannot tell.  CHECKPOINT is as in `oracle roofline`; KERNEL
    runs in this process.  Exit status: 0 a report, 2 wrong usage or input.
    """
    check_folders({"--json": json_file, "--markdown": markdown_file})
    os.environ.setdefault(*QUIET)
    from oracle.ab import Asked
    from oracle.ab import ab as measure
    from oracle.ab_text import ab_json, ab_markdown, headline, notes, sheet

    asked = Asked(
        checkpoint=_checkpoint(checkpoint),
        knob=knob,
        kind=layers,
        against=against,
        decode=decode,
        texts=texts or (shipped.text(),),
        prompt_tokens=prompt_tokens,
        new_tokens=new_tokens,
        margin=margin,
        device=device,
        layers=depth,
        repeats=repeats,
    )
    with progress_bar("ab") as progress, built():
        found = measure(asked, os.environ, progress)
    _show(headline(found), [sheet(found)], notes(found))
    _write({json_file: json.dumps(ab_json(found), indent=1) + "\n", markdown_file: ab_markdown(found)})
    return 0


@contextmanager
def built() -> Iterator[None]:
    """Inside, a kernel that cannot be built or loaded is an InputError."""
    from oracle.errors import InputError
    from oracle.kernels.ahead_of_time import BuildError

    try:
        yield
    except BuildError as problem:
        raise InputError(str(problem)) from None


def _checkpoint(named: Path | None) -> Path:
    """Where the checkpoint lies that was named; the one that comes with the oracle has a name, and is the default."""
    return shipped.folder() if named is None or (str(named) == shipped.NAME and not named.exists()) else named


def _numbers(option: str, text: str) -> tuple[int, ...]:
    """The numbers from 0 of a list with commas.  Raises UsageError."""
    if not all(part.isdecimal() for part in text.split(",")):
        raise click.UsageError(f"{option} {text!r}: expected numbers such as 0,1024,4096")
    return tuple(int(part) for part in text.split(","))


def _show(headline: str, sheets: Sequence[Sheet], notes: Sequence[str]) -> None:
    """Headline, tables and notes on stdout."""
    from oracle.report import console, sheet_table

    click.echo(headline)
    for sheet in sheets:
        click.echo()
        console().print(sheet_table(sheet))
    click.echo()
    for note in notes:
        click.echo(f"note: {note}")


def _write(texts: Mapping[Path | None, str]) -> None:
    """Every file that was named holds its text."""
    from oracle.files import write_whole

    for file, text in texts.items():
        if file is not None:
            write_whole(file, text, otherwise="name another file")
