"""`oracle drift`: the command line of the drift report."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import click

from oracle.checkpoints import shipped
from oracle.progress import Progress, progress_bar

if TYPE_CHECKING:
    from oracle.checkpoints.drifted import Drift
    from oracle.checkpoints.lockstep import Progress as Tokens

CONFIGS = "fp8,fp8+int8-attention"
FORM = "WEIGHTS[+ATTENTION][+kv-FORMAT][@LAYERS]"
PAIR = ("fp8+int8-attention", "fp8")  # the decision of a report that was asked for nothing
EXIT = {"accept": 0, "reject": 1, "inconclusive": 3}
FILE = click.Path(path_type=Path, dir_okay=False)
text_option = click.option(
    "--text",
    "texts",
    multiple=True,
    type=click.Path(path_type=Path, exists=True),
    help="A UTF-8 file, or a folder of .txt, that CHECKPOINT reads.",
)
blocks_option = click.option(
    "--blocks", default=shipped.BLOCKS, show_default=True, metavar="NxLENGTH,...", help="Blocks of so many tokens of it."
)


@click.command()
@click.argument("checkpoint", required=False, type=click.Path(path_type=Path))
@click.option("--configs", default=CONFIGS, show_default=True, metavar="C,C,...", help=f"Each {FORM}.")
@click.option("--reference", default="bf16", show_default=True, metavar="C", help="What all others are measured from.")
@click.option("--floor", metavar="C", help="A second, equally correct kernel of the reference [default: bf16+other-attention].")
@text_option
@blocks_option
@click.option("--accept", "candidate", metavar="C", help="Decide whether this configuration's drift is no worse than that of ...")
@click.option("--no-worse-than", "incumbent", metavar="C", help="... this one, which is already accepted.")
@click.option("--margin", type=click.FloatRange(min=0), default=0.05, show_default=True, help="... by more than this share.")
@click.option("--attribute", multiple=True, metavar="C", help="Swap its layers one by one into the reference; may be repeated.")
@click.option("--waypoints", is_flag=True, help="Run every configuration at lengths round the window, whole and in steps.")
@click.option(
    "--device",
    default="cpu",
    show_default=True,
    type=click.Choice(["cpu", "cuda", "auto"]),
    help="auto: all CUDA devices together.",
)
@click.option("--work", type=click.Path(path_type=Path, file_okay=False), help="Folder of unfinished runs [default: a cache].")
@click.option("--json", "json_file", type=FILE, help="Write the report as JSON as well.")
@click.option("--markdown", "markdown_file", type=FILE, help="Write it as Markdown, for a CI summary.")
@click.option("--html", "html_file", type=FILE, help="Write it with pictures, as one file.")
def drift(
    checkpoint: Path | None,
    configs: str,
    reference: str,
    floor: str | None,
    texts: tuple[Path, ...],
    blocks: str,
    candidate: str | None,
    incumbent: str | None,
    margin: float,
    attribute: tuple[str, ...],
    waypoints: bool,
    device: str,
    work: Path | None,
    json_file: Path | None,
    markdown_file: Path | None,
    html_file: Path | None,
) -> int:
    """What a checkpoint's next-token distributions lose under other weights, attention or cache: KL divergence, with its company.

    CHECKPOINT is a Hugging Face folder with safetensors weights, or a .gguf file [default: the small Gemma 4 that comes with the
    oracle, and its held-out text].

    Exit status: 0 a report; with --accept 0 accept, 1 reject, 3 inconclusive; 2 wrong usage or input.
    """
    from oracle.checkpoints.drift import FLOOR, Asked, measure
    from oracle.checkpoints.ranks import ranks
    from oracle.report import console

    if (candidate is None) != (incumbent is None):
        raise click.UsageError("--accept and --no-worse-than name the two sides of a decision: give both")
    check_folders({"--json": json_file, "--markdown": markdown_file, "--html": html_file})
    if html_file is not None:
        from oracle.html_report import check_installed

        check_installed()
    asked_for = tuple(name for name in re.split(r",(?=[a-z])", configs) if name)
    pair = (candidate, incumbent) if candidate and incumbent else PAIR
    wanted = dict.fromkeys((*asked_for, *(pair if candidate else ()), *attribute))
    asked = Asked(
        checkpoint=checkpoint or shipped.folder(),
        configurations=tuple(wanted),
        texts=texts or (shipped.text(),),
        blocks=blocks,
        reference=reference,
        floor=FLOOR if floor is None else floor,
        decisions=(pair,) if set(pair) <= set(wanted) else (),
        margin=margin,
        attribute=attribute,
        waypoints=tuple(name for name in wanted if name != reference) if waypoints else (),
        device=device,
        work=work,
    )
    with ranks() as processes:
        with progress_bar("drift") as bar:
            found = measure(asked, processes, _tokens(bar))
        if processes.rank == 0:
            from oracle.drift_text import drift_text

            console().print(drift_text(found))
            _write(found, json_file, markdown_file, html_file)
    return EXIT[str(found.decisions[0].ruling)] if candidate else 0


def check_folders(named: Mapping[str, Path | None]) -> None:
    """Returns when every file that an option names lies in a folder that is there.  Raises UsageError otherwise."""
    for option, file in named.items():
        if file is not None and not file.absolute().parent.is_dir():
            raise click.UsageError(f"{option} {file}: there is no folder {file.absolute().parent}")


def _tokens(bar: Progress) -> Tokens:
    """Progress in tokens, with their rate."""
    began: dict[str, tuple[float, int]] = {}

    def progress(what: str, done: int, total: int) -> None:
        start, first = began.setdefault(what, (time.monotonic(), done))
        spent = time.monotonic() - start
        rate = f", {(done - first) / spent:.0f} tokens/s" if spent > 0 and done > first else ""
        bar(done, total, f"tokens, {what}{rate}")

    return progress


def _write(found: Drift, json_file: Path | None, markdown_file: Path | None, html_file: Path | None) -> None:
    from oracle.files import write_whole

    if json_file is not None:
        from oracle.drift_json import drift_json

        write_whole(json_file, json.dumps(drift_json(found), indent=2) + "\n", otherwise="name another file with --json")
    if markdown_file is not None:
        from oracle.drift_markdown import drift_markdown

        write_whole(markdown_file, drift_markdown(found), otherwise="name another file with --markdown")
    if html_file is not None:
        from oracle.drift_html import drift_html

        write_whole(html_file, drift_html(found), otherwise="name another file with --html")
