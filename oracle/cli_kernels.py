"""`oracle kernels`, `families` and `build-kernels`: what comes with the oracle."""

from __future__ import annotations

from pathlib import Path

import click

from oracle.progress import progress_bar


@click.command()
def kernels() -> int:
    """List the kernels that come with the oracle: what they are, the verdict expected, why one is unavailable."""
    from oracle.kernels.table import KERNELS, unavailable
    from oracle.report import console, kernels_table

    console().print(kernels_table({name: (row, unavailable(row, "cpu")) for name, row in KERNELS.items()}))
    return 0


@click.command()
def families() -> int:
    """List the families: the attention layer types that kernels are judged on."""
    from oracle.families import FAMILIES
    from oracle.report import console, families_table

    console().print(families_table(FAMILIES.values()))
    return 0


@click.command("build-kernels")
@click.option("--arch", default="sm_90a", show_default=True, type=click.Choice(["sm_90a"]), help="The GPU that they are for.")
@click.option(
    "-o",
    "--output",
    type=click.Path(path_type=Path, file_okay=False),
    default=Path("build/kernels"),
    show_default=True,
    help="Folder of the libraries, made where missing.",
)
def build_kernels(arch: str, output: Path) -> int:
    """Compile the TileLang kernels ahead of time, for machines without TileLang and nvcc; no GPU is needed.

    There, name the folder in ATTENTION_ORACLE_LIBRARIES.  Exit status: 0 built, 2 something is missing or failed.
    """
    from oracle.errors import InputError
    from oracle.kernels.ahead_of_time import BuildError, build
    from oracle.kernels.tilelang_families import FAMILIES, FP8_FAMILIES, KEYS, PAGE_SIZES, AnyFamily

    wanted: list[tuple[AnyFamily, int]] = [(family, page) for family in FAMILIES.values() for page in PAGE_SIZES]
    wanted += [(family, KEYS) for family in FP8_FAMILIES.values()]
    built = []
    with progress_bar(f"build for {arch}") as progress:
        for done, (family, page_size) in enumerate(wanted):
            progress(done, len(wanted), f"{family.name}, pages of {page_size}")
            try:
                built.append(build(family, page_size, output))
            except BuildError as problem:
                raise InputError(str(problem)) from None
    click.echo("\n".join(map(str, built)))
    return 0
