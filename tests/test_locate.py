"""A kernel's name leads to its function, and a wrong name to one clear line with the nearest right one."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import numpy
import pytest

from oracle.isolation.locate import KernelImportError, KernelNotFound, load, locate

TABLE = {"triton-fwd": "oracle.kernels.triton_fwd:kernel", "triton-fp8": "oracle.kernels.triton_fp8:kernel"}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The working folder, with a kernel, its sibling and a package; nothing of it stays imported."""
    monkeypatch.setattr(sys, "path", list(sys.path))
    (tmp_path / "tiles.py").write_text("SIZE = 64\n")
    (tmp_path / "flash.py").write_text(
        "import tiles\n"
        "def forward(q, k, v): return tiles.SIZE\n"
        "def backward(q, k, v): return None\n"
        "block = 3\n"
        "def __getattr__(name):\n"
        "    if name == 'made_on_demand': return lambda q, k, v: name\n"
        "    if name == 'broken': raise ImportError('no triton')\n"
        "    raise AttributeError(name)\n"
    )
    (tmp_path / "notes.txt").touch()
    (tmp_path / "my_kernels").mkdir()
    (tmp_path / "my_kernels" / "__init__.py").touch()
    (tmp_path / "my_kernels" / "sdpa.py").write_text("def kernel(q, k, v): return 'sdpa'\n")
    monkeypatch.chdir(tmp_path)
    yield tmp_path
    for name, module in list(sys.modules.items()):
        if str(getattr(module, "__file__", "")).startswith(str(tmp_path)):
            del sys.modules[name]


def test_a_name_means_its_row() -> None:
    assert locate("triton-fp8", TABLE) == "oracle.kernels.triton_fp8:kernel"


@pytest.mark.parametrize("target", ["flash.py:forward", "./flash.py:forward", "my_kernels.sdpa:kernel", "no.such.module:kernel"])
def test_a_target_means_itself_and_nothing_is_imported_to_find_out(folder: Path, target: str) -> None:
    assert locate(target, TABLE) == target
    assert "my_kernels" not in sys.modules and "flash" not in sys.modules


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("triton-fdw", "triton-fdw: no such kernel; did you mean triton-fwd or triton-fp8?; `oracle kernels` lists them"),
        ("cudnn", "cudnn: no such kernel; there are triton-fp8, triton-fwd; `oracle kernels` lists them; or give file"),
        ("flash.py", "flash.py: no function named; expected flash.py:FUNCTION"),
        ("flsh.py:forward", "flsh.py: no such file; did you mean flash.py or tiles.py?"),
        ("nowhere/flash.py:forward", "nowhere/flash.py: no such file, and no folder nowhere"),
        ("./my_kernels:kernel", "my_kernels: not a file"),
        ("./notes.txt:forward", "notes.txt: not a Python file; expected file.py:function"),
        ("flash.py:", "flash.py:: not the name of a kernel; expected NAME, file.py:function or module:function"),
        (":forward", ":forward: not the name of a kernel"),
        ("flash.py:a.b", "flash.py:a.b: not the name of a kernel"),
        ("my-kernels:kernel", "my-kernels:kernel: not the name of a kernel"),
    ],
)
def test_a_wrong_name_is_told_before_anything_runs(folder: Path, name: str, text: str) -> None:
    with pytest.raises(KernelNotFound) as error:
        locate(name, TABLE)

    assert str(error.value).startswith(text)


def test_a_file_is_loaded_with_its_siblings_at_the_end_of_the_path(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir("/")

    kernel, module = load(f"{folder}/flash.py:forward")

    assert kernel(1, 2, 3) == 64
    assert sys.path[-1] == str(folder)
    assert sys.modules[module.__name__] is module and "flash" not in sys.modules


def test_a_file_named_as_an_installed_package_hides_nothing(folder: Path) -> None:
    (folder / "numpy.py").write_text("import numpy\ndef kernel(q, k, v): return numpy.float32\n")

    assert load("numpy.py:kernel")[0](1, 2, 3) is numpy.float32


def test_a_file_is_loaded_as_it_is_now(folder: Path) -> None:
    """Two sources of one size, written within one second."""
    for factor in (2, 3):
        (folder / "mutant.py").write_text(f"def kernel(q, k, v): return {factor}\n")
        assert load("mutant.py:kernel")[0](1, 2, 3) == factor


def test_a_module_of_the_working_folder_is_found(folder: Path) -> None:
    assert load("my_kernels.sdpa:kernel")[0](1, 2, 3) == "sdpa"
    assert sys.path[-1] == str(folder)


def test_a_function_may_be_made_on_demand(folder: Path) -> None:
    assert load("flash.py:made_on_demand")[0](1, 2, 3) == "made_on_demand"


@pytest.mark.parametrize(
    ("target", "text"),
    [
        ("flash.py:forwrad", "flash.py:forwrad: no forwrad in flash.py; did you mean forward?"),
        ("flash.py:kernel", "flash.py:kernel: no kernel in flash.py; there are backward, forward"),
        ("flash.py:block", "flash.py:block: block is of type int, expected a function"),
        ("my_kernels.spda:kernel", "my_kernels.spda: no module my_kernels.spda; did you mean my_kernels.sdpa?"),
        ("my_kernel.sdpa:kernel", "my_kernel.sdpa: no module my_kernel; did you mean my_kernels?"),
        ("my_kernels.sdpa.x:kernel", "my_kernels.sdpa.x: no module my_kernels.sdpa.x"),
        ("gone.py:kernel", "gone.py: no such file"),
    ],
)
def test_what_is_not_there_is_told_with_what_is(folder: Path, target: str, text: str) -> None:
    with pytest.raises(KernelNotFound) as error:
        load(target)

    assert str(error.value).startswith(text)


@pytest.mark.parametrize(
    ("source", "text"),
    [
        ("import os\nimport no_such_thing\n", "line 2: ModuleNotFoundError: No module named 'no_such_thing'"),
        ("x = 1\n\nx = 1 / 0\n", "line 3: ZeroDivisionError: division by zero"),
        ("def f(:\n", "line 1: SyntaxError: invalid syntax"),
        ("import tiles\ntiles.missing\n", "line 2: AttributeError: module 'tiles' has no attribute 'missing'"),
        ("import sys\nsys.exit(3)\n", "line 2: SystemExit: 3"),
        ("import json\njson.loads('{')\n", "line 2: JSONDecodeError: Expecting property name"),
    ],
)
@pytest.mark.parametrize("target", ["bad.py:kernel", "bad:kernel"])
def test_an_import_error_names_the_line(folder: Path, source: str, text: str, target: str) -> None:
    (folder / "bad.py").write_text(source)

    with pytest.raises(KernelImportError) as error:
        load(target)

    assert str(error.value).startswith(f"{folder}/bad.py {text}")


def test_an_import_error_of_a_function_made_on_demand_names_the_line(folder: Path) -> None:
    with pytest.raises(KernelImportError, match=r"flash\.py line 7: ImportError: no triton"):
        load("flash.py:broken")
