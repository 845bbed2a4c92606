"""A function object has the name under which its own process finds it again, or it is refused with the next step."""

from __future__ import annotations

import functools
import importlib
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest.mock import Mock

import pytest

from oracle.errors import InputError
from oracle.isolation.locate import load
from oracle.kernels import torch_sdpa
from oracle.named import name_of

HERE = sys.modules[__name__]


def kernel(q: object) -> object:
    return q


def made(tile: int) -> Callable[..., object]:
    def inner(q: object) -> object:
        return q, tile

    return inner


class Tiled:
    def __call__(self, q: object) -> object:
        return q

    def run(self, q: object) -> object:
        return q


tiled = made(32)
part = functools.partial(kernel, q=1)
instance = Tiled()
method = instance.run


@pytest.fixture(autouse=True)
def at_home(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(Path(__file__).parents[1])


def named(thing: Any, near: ModuleType = HERE) -> str:
    return name_of(thing, near, Path(__file__).parents[1])


def test_a_function_is_named_by_its_file_as_typed_in_the_working_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert named(kernel) == "tests/test_named.py:kernel"
    monkeypatch.chdir(tmp_path)
    assert named(kernel) == f"{__file__}:kernel"


@pytest.mark.parametrize("name", ["tiled", "part", "instance", "method"])
def test_whatever_a_module_level_name_holds_is_named_by_it(name: str) -> None:
    assert named(globals()[name]) == f"tests/test_named.py:{name}"


def test_a_function_in_a_package_is_named_by_its_module_which_may_import_its_siblings() -> None:
    assert named(torch_sdpa.sdpa_flash) == "oracle.kernels.torch_sdpa:sdpa_flash"


def test_what_the_name_means_is_the_same_function(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a package with relative imports, and in a package's folder that is not on sys.path."""
    package = tmp_path / "flashy"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "tiles.py").write_text("TILE = 32\n")
    (package / "fast.py").write_text("from .tiles import TILE\n\n\ndef kernel(q):\n    return TILE\n")
    monkeypatch.syspath_prepend(tmp_path)
    fast = importlib.import_module("flashy.fast")
    assert named(fast.kernel) == "flashy.fast:kernel"
    assert load(named(fast.kernel))[0] is fast.kernel

    monkeypatch.setattr(sys, "path", [p for p in sys.path if p != str(tmp_path)])
    assert named(fast.kernel) == f"{tmp_path}/flashy/fast.py:kernel"
    for name in ("flashy", "flashy.tiles", "flashy.fast"):
        del sys.modules[name]


def test_a_relative_path_starts_at_the_root_and_other_names_stay() -> None:
    root = Path(__file__).parent
    assert name_of("kernels_by_path.py:plain", HERE, root) == "tests/kernels_by_path.py:plain"
    assert name_of("/there/mine.py:plain", HERE, root) == "/there/mine.py:plain"
    for name in ("sdpa-flash", "flashy.fast:kernel", "mine.py", ""):
        assert name_of(name, HERE, root) == name


def redefined(monkeypatch: pytest.MonkeyPatch) -> Callable[..., object]:
    before = kernel
    monkeypatch.setattr(HERE, "kernel", made(16))
    return before


REFUSED: list[tuple[str, Callable[[pytest.MonkeyPatch], object], str]] = [
    ("lambda", lambda _: lambda q: q, "<lambda>: is a lambda"),
    ("closure", lambda _: made(64), "inner: is a closure"),
    ("partial", lambda _: functools.partial(kernel, q=2), "partial: is a functools.partial"),
    ("method", lambda _: Tiled().run, "run: is a bound method"),
    ("instance", lambda _: Tiled(), "Tiled: is an object of type Tiled"),
    ("mock", lambda _: Mock(), "Mock: is an object of type Mock"),
    ("monkeypatched", redefined, "kernel: is no longer what kernel means in its module"),
]


@pytest.mark.parametrize(("make", "says"), [case[1:] for case in REFUSED], ids=[case[0] for case in REFUSED])
def test_what_no_name_holds_is_refused_with_the_next_step(
    make: Callable[[pytest.MonkeyPatch], object], says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(InputError) as error:
        named(make(monkeypatch))

    assert str(error.value).startswith(says)
    assert "test_named.py" in str(error.value) and "give it a module-level name" in str(error.value)


def test_a_nested_function_without_a_closure_is_refused_as_such() -> None:
    def inner(q: object) -> object:
        return q

    with pytest.raises(InputError, match="inner: is a nested function"):
        named(inner)


def test_what_cannot_be_called_is_refused() -> None:
    with pytest.raises(InputError, match="3: is of type int; expected a function, or the name of a kernel"):
        named(3)


def test_a_module_without_a_file_is_refused() -> None:
    near = ModuleType("typed_in")
    exec("def typed(q): return q", near.__dict__)
    with pytest.raises(InputError, match="typed_in: its file is None; expected a Python file"):
        named(near.__dict__["typed"], near)
