"""docs/kernels.md is made of the reports that stand beside it, and says by how much a bar is missed."""

from __future__ import annotations

import copy
import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="module")
def kernels_page() -> ModuleType:
    """The module ci/gpu/kernels_page.py."""
    spec = importlib.util.spec_from_file_location("kernels_page", ROOT / "ci" / "gpu" / "kernels_page.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.path.insert(0, str(ROOT / "ci" / "gpu"))
    spec.loader.exec_module(module)
    sys.path.remove(str(ROOT / "ci" / "gpu"))
    return module


def test_the_page_is_made_of_the_reports(kernels_page: ModuleType) -> None:
    assert (ROOT / "docs" / "kernels.md").read_text() == kernels_page.page(), "run python ci/gpu/kernels_page.py"


def test_every_run_times_the_same_kernels_at_the_same_shapes_until_it_ends(kernels_page: ModuleType) -> None:
    runs = kernels_page.runs()

    timed = [[(f["kernel"], f["shape"], f["bar"]) for f in run["pairs"]] for run in runs]

    assert len(runs) >= 5
    assert all(one == timed[0][: len(one)] for one in timed)
    assert all(len(one) == len(timed[0]) or "from" in run["versions"] for one, run in zip(timed, runs, strict=True))


def test_a_prototype_that_is_faster_than_allowed_is_said_with_the_number(kernels_page: ModuleType) -> None:
    once = kernels_page.report("once")
    once["beside_the_prototypes"]["runs"]["ours64 0"]["ratio"] = 0.9 * once["beside_the_prototypes"]["runs"]["E64 0"]["ratio"]

    assert "0.900: **0.97 missed by 0.070**" in kernels_page.beside(once)


def test_a_kernel_under_its_bar_is_said_with_the_number(kernels_page: ModuleType) -> None:
    runs = copy.deepcopy(kernels_page.runs())
    for run in runs:
        run["pairs"][0].update(bar=0.42, ratio=0.4)

    assert "0.42: **missed by 0.020**" in kernels_page.pairs(runs)


def test_a_kernel_in_8_bits_says_its_verdict_and_by_how_much_it_misses_its_bar(kernels_page: ModuleType) -> None:
    """By the lock, or else by a verdict that is no part of it."""
    locked = {"triton-fp8-lazy": {"verdict": "reject", "door": "", "reason": "error-exceeds-bound"}}
    told = {"triton-fp8": {"outcome": "reject", "door": "", "reasons": ["gain"], "figures": {"max_e": 8.0}}}
    timed = [
        {"kernel": "fp8, codes ready", "bar": 1.2, "over_tilelang": 0.7},
        {"kernel": "int8, codes ready", "bar": 1.2, "over_tilelang": 1.3},
    ]

    lines = kernels_page.kinds(locked, told, {"runs": {}}, timed).splitlines()

    rows = {line.split("|")[1].strip(): [cell.strip() for cell in line.split("|")[2:-1]] for line in lines}
    assert rows["`triton-fp8-lazy`"][:4] == ["reject", "error-exceeds-bound", "", ""]
    assert rows["`triton-fp8`"] == ["reject", "gain", "8", "", "", "0.7 (**1.2 missed by 0.500**)"]
    assert rows["`triton-int8`"] == ["not judged", "", "", "", "", "1.3"]


def test_a_kernel_that_was_not_measured_says_why(kernels_page: ModuleType) -> None:
    runs = copy.deepcopy(kernels_page.runs())
    for run in runs:
        shape = run["pairs"][0]["shape"]
        run["pairs"][0] = {"kernel": "split_tuned", "shape": shape, "bar": 0.42, "absent": "no Triton here"}

    assert "no Triton here" in kernels_page.pairs(runs)
