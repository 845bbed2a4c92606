"""Which function a kernel's name means.

A kernel is named NAME (a row of the kernels' table), `file.py:function` or `module:function`.  `locate` runs in the parent and
executes nothing of the kernel; `load` runs in the kernel's own process.
"""

from __future__ import annotations

import difflib
import importlib
import importlib.util
import os
import pkgutil
import re
import sys
import sysconfig
import traceback
from collections.abc import Callable, Iterable, Mapping
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import CodeType, ModuleType


class KernelNotFound(ValueError):
    """There is no such kernel; one line with the nearest right name."""


class KernelImportError(ImportError):
    """The module of a kernel cannot be imported; one line with file, line and cause."""


def locate(kernel: str, table: Mapping[str, str]) -> str:
    """The target that `kernel` names: "module:function" or "file.py:function".

    `table` gives the target of each NAME.  Raises KernelNotFound for an unknown NAME, for a name of the wrong form and for a
    missing file; whether the module and the function exist, only importing can tell.
    """
    if kernel in table:
        return table[kernel]
    place, colon, function = kernel.rpartition(":")
    if not colon and _is_path(kernel):
        raise KernelNotFound(f"{kernel}: no function named; expected {kernel}:FUNCTION")
    if not colon:
        raise KernelNotFound(
            f"{kernel}: no such kernel{_nearest(kernel, table)}; `oracle kernels` lists them; or give file.py:function"
        )
    named = _is_path(place) or all(part.isidentifier() for part in place.split("."))
    if not (named and function.isidentifier()):
        raise KernelNotFound(f"{kernel}: not the name of a kernel; expected NAME, file.py:function or module:function")
    if _is_path(place):
        _check_file(Path(place))
    return kernel


def load(target: str) -> tuple[Callable[..., object], ModuleType]:
    """The function of `target`, and the module it was looked up in, now imported.

    A file's folder, and the working folder for a module, are put at the end of sys.path: kernels often import their
    siblings, and no sibling may hide an installed package.  Raises KernelNotFound and KernelImportError.
    """
    place, _, function = target.rpartition(":")
    module = _load_file(Path(place)) if _is_path(place) else _load_module(place)
    try:
        found = getattr(module, function)
    except AttributeError:
        callables = [name for name, value in vars(module).items() if callable(value) and not name.startswith("_")]
        raise KernelNotFound(f"{target}: no {function} in {place}{_nearest(function, callables)}") from None
    except BaseException as e:
        raise _import_error(place, e) from e
    if not callable(found):
        raise KernelNotFound(f"{target}: {function} is of type {type(found).__name__}, expected a function")
    return found, module


def _is_path(place: str) -> bool:
    return place.endswith(".py") or os.sep in place


def _check_file(path: Path) -> None:
    if path.is_file() and path.suffix == ".py":
        return
    if path.is_file():
        raise KernelNotFound(f"{path}: not a Python file; expected file.py:function")
    folder = path.parent
    if not folder.is_dir():
        raise KernelNotFound(f"{path}: no such file, and no folder {folder}")
    near = _nearest(path.name, (p.name for p in folder.iterdir() if p.suffix == ".py"))
    raise KernelNotFound(f"{path}: {'not a file' if path.exists() else 'no such file'}{near}")


class _UncachedLoader(SourceFileLoader):
    """Compiles the source that is there now: a bytecode cache goes by size and whole second, and two mutants may share both."""

    def get_code(self, fullname: str) -> CodeType:
        code = compile(self.get_data(self.path), self.path, "exec", dont_inherit=True)
        assert isinstance(code, CodeType)
        return code


def _load_file(path: Path) -> ModuleType:
    _check_file(path)
    # A prefix, so that a kernel in torch.py does not become the module torch.
    name = "kernel_file_" + re.sub(r"\W", "_", path.stem)
    loader = _UncachedLoader(name, str(path.resolve()))
    spec = importlib.util.spec_from_file_location(name, path.resolve(), loader=loader)
    assert spec is not None
    sys.path.append(str(path.resolve().parent))
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        loader.exec_module(module)
    except BaseException as e:
        raise _import_error(str(path), e) from e
    return module


def _load_module(name: str) -> ModuleType:
    sys.path.append(os.getcwd())
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as e:
        if e.name is None or not f"{name}.".startswith(f"{e.name}."):
            raise _import_error(name, e) from e
        parent, _, _ = e.name.rpartition(".")
        paths = getattr(sys.modules[parent], "__path__", []) if parent else None
        siblings = [f"{parent}.{m.name}" if parent else m.name for m in pkgutil.iter_modules(paths)]
        raise KernelNotFound(f"{name}: no module {e.name}{_nearest(e.name, siblings)}") from None
    except BaseException as e:
        raise _import_error(name, e) from e


def _import_error(place: str, error: BaseException) -> KernelImportError:
    """`error` in one line, with the last line outside installed packages, or else the last of any, that led to it."""
    if isinstance(error, SyntaxError) and error.filename:
        return KernelImportError(f"{error.filename} line {error.lineno}: {type(error).__name__}: {error.msg}")
    machinery = ("<frozen importlib", str(importlib.__file__), __file__)
    installed = tuple(sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib"))
    frames = [f for f in traceback.extract_tb(error.__traceback__) if not f.filename.startswith(machinery)]
    frames = [f for f in frames if not f.filename.startswith(installed)] or frames
    where = f"{frames[-1].filename} line {frames[-1].lineno}" if frames else place
    return KernelImportError(f"{where}: {type(error).__name__}: {error}")


def _nearest(wrong: str, names: Iterable[str]) -> str:
    """ "; did you mean a or b?", or the names themselves where none is near and they are few."""
    there = sorted(set(names))
    if near := difflib.get_close_matches(wrong, there, n=3):
        return f"; did you mean {' or '.join(near)}?"
    return f"; there are {', '.join(there)}" if 0 < len(there) <= 20 else ""
