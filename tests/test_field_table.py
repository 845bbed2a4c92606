"""The table of the field: every adapter is available or says why not, imports without its package, and promises what it takes."""

from __future__ import annotations

import importlib
import inspect
import sys
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from types import ModuleType

import pytest
import torch

from oracle.contract import OPTIONAL, REQUIRED, DeclaredKernel, Record
from oracle.kernels.field.table import FIELD, FieldRow, installed, unavailable

ROW = FieldRow(
    target="oracle.kernels.torch_sdpa:sdpa_math",
    project="a project",
    package="torch",
    about="a kernel",
    devices=("cpu", "cuda"),
    module="torch",
)


def loaded(row: FieldRow) -> DeclaredKernel:
    """The adapter of a row."""
    module, _, function = row.target.partition(":")
    kernel: DeclaredKernel = getattr(importlib.import_module(module), function)
    return kernel


@pytest.mark.parametrize("name", FIELD)
def test_an_adapter_loads_without_its_package(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    row = FIELD[name]
    if row.module != "torch":
        for module in [m for m in sys.modules if m.partition(".")[0] == row.module.partition(".")[0]]:
            monkeypatch.delitem(sys.modules, module)
        monkeypatch.setitem(sys.modules, row.module.partition(".")[0], None)  # importing it raises ImportError
    for module in [m for m in sys.modules if m.startswith("oracle.kernels.field.") and not m.endswith(".table")]:
        monkeypatch.delitem(sys.modules, module)

    kernel = loaded(row)

    assert isinstance(kernel.record, Record)
    assert set(row.devices) <= set(kernel.record.devices)


@pytest.mark.parametrize("name", FIELD)
def test_an_adapter_takes_arguments_of_the_contract_and_no_others(name: str) -> None:
    taken = {p.name for p in inspect.signature(loaded(FIELD[name])).parameters.values() if p.kind is p.KEYWORD_ONLY}

    assert set(REQUIRED) <= taken <= {*REQUIRED, *OPTIONAL}
    assert {"num_seqs", "out"} <= taken


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("name", FIELD)
def test_each_is_available_or_says_why_not_in_a_few_words(name: str, device: str) -> None:
    row = FIELD[name]
    why = unavailable(row, device)

    assert len(why) < 80 and "\n" not in why
    if not why:
        assert device in row.devices and installed(row)


def test_it_says_which_device_which_package_and_which_tool_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)

    assert unavailable(ROW, "cpu") == ""
    assert unavailable(ROW, "cuda") == "no CUDA device here"
    assert unavailable(replace(ROW, devices=("cuda",)), "cpu") == "is not for cpu"
    absent = replace(ROW, package="no-such-package", module="no_such_package.part")
    assert unavailable(absent, "cpu") == "no-such-package is not installed: pip install no-such-package"
    assert unavailable(replace(absent, wheel=False), "cpu").endswith("there is no wheel: it must be compiled")
    assert unavailable(replace(ROW, tools=("python3", "no-such-tool")), "cpu") == "no-such-tool is not on the PATH"


def test_a_version_is_that_of_the_package() -> None:
    assert installed(ROW) == version("torch")
    assert installed(replace(ROW, package="no-such-package")) == ""


def test_no_two_rows_are_the_same_kernel_and_every_adapter_file_has_one() -> None:
    folder = importlib.import_module("oracle.kernels.field.table")
    assert isinstance(folder, ModuleType) and folder.__file__ is not None
    files = {f.stem for f in Path(folder.__file__).parent.glob("*.py")} - {"table", "sequences"}
    targets = [row.target for row in FIELD.values()]

    assert len(set(targets)) == len(targets)
    assert files <= {t.partition(":")[0].rpartition(".")[2] for t in targets}
