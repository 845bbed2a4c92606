"""`make bench` asks for commands that there are, of kernels that there are, and makes its page of what they wrote."""

from __future__ import annotations

import importlib.util
import shlex
import sys
from pathlib import Path
from types import ModuleType

import click
import pytest

from oracle import cli_bench
from oracle.checkpoints.knob import KNOBS
from oracle.families import FAMILIES
from oracle.kernels.table import KERNELS

ROOT = Path(__file__).parents[1]


def script() -> ModuleType:
    """ci/bench_kernels.py, which is a script and no module of a package."""
    spec = importlib.util.spec_from_file_location("bench_kernels", ROOT / "ci" / "bench_kernels.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["bench_kernels"] = module  # where its dataclass looks for its annotations
    spec.loader.exec_module(module)
    return module


BENCH = script()
PARTS = [(device, name) for device, parts in BENCH.PARTS.items() for name in parts]


@pytest.mark.parametrize(("device", "name"), PARTS)
def test_every_part_is_a_command_with_kernels_that_there_are(device: str, name: str) -> None:
    part = BENCH.PARTS[device][name]
    verb, *arguments = shlex.split(part.arguments)
    command: click.Command = getattr(cli_bench, verb)
    given = command.make_context(verb, arguments).params

    kernels = [given[key] for key in ("a", "b", "knob", "against", "decode") if given.get(key) not in (None, "", "off")]
    assert all(device in KERNELS[kernel].devices for kernel in [*kernels, *(word for _, word in part.knobs)])
    assert given["device"] == device and {name for name, _ in part.knobs} <= {*KNOBS.values()}
    assert {*(given.get("families") or "llama3").split(",")} <= {*FAMILIES}


def test_the_page_has_what_was_measured_and_how_to_measure_it_again(tmp_path: Path) -> None:
    parts = BENCH.PARTS["cuda"]
    (tmp_path / "bench.md").write_text("## A against B\n\nfaster\n\n```sh\noracle bench A B --json /tmp/x.json\n```\n")
    (tmp_path / "bench.svg").write_text("<svg/>")
    (tmp_path / "roofline-after.md").write_text("## Prefill\n\n| a |\n\n```sh\noracle roofline\n```\n")

    page = BENCH.page(parts, tmp_path)

    assert page.count("\n# ") == 1 and page.startswith("# Gemma 4's global layers")
    assert "faster" in page and "![Gemma 4's global layers" in page and "/tmp/x.json" not in page
    assert "ORACLE_GLOBAL_ATTN=tilelang-hd512 ORACLE_SLIDING_ATTN=triton-split-64 oracle roofline gemma4-31b-like" in page
