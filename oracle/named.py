"""The name under which a kernel's own process finds a function object: "module:function" or "file.py:function".

That process imports the function's module again, so it finds only what a name at the top of a module holds.
"""

from __future__ import annotations

import functools
import inspect
import os
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from types import MethodType, ModuleType

from oracle.errors import InputError


def name_of(kernel: str | Callable[..., object], near: ModuleType, root: Path) -> str:
    """What `kernel` is called, as `oracle accept` takes it.

    A name stays as it is, but for a relative path, which starts at `root`; an object is looked for by identity in the module
    that it was defined in and in `near`.  Raises InputError for an object that no name at the top of either holds.
    """
    if isinstance(kernel, str):
        place, _, function = kernel.rpartition(":")
        return f"{_short(root / place)}:{function}" if place.endswith(".py") else kernel
    if not callable(kernel):
        raise InputError(f"{kernel!r:.80}: is of type {type(kernel).__name__}; expected a function, or the name of a kernel")
    home = sys.modules.get(str(getattr(kernel, "__module__", "")))
    modules = [near] if home is None or home is near else [home, near]
    own = str(getattr(kernel, "__name__", ""))
    for module in modules:
        names = [name for name, value in vars(module).items() if value is kernel]
        if names:
            return f"{_place(module)}:{own if own in names else names[0]}"
    files = [(m.__name__, getattr(m, "__file__", None)) for m in modules]
    where = " or ".join(_short(Path(file)) if file else name for name, file in files)
    raise InputError(
        f"{own or type(kernel).__name__}: is {_kind(kernel, home)}, and its own process finds only what a name at the top of a "
        f"module holds; got no such name in {where}; expected one: give it a module-level name (def my_kernel(...), or "
        f"my_kernel = ...) and pass that"
    )


def _kind(kernel: Callable[..., object], home: ModuleType | None) -> str:
    """What the object is, in a few words."""
    if isinstance(kernel, functools.partial):
        return "a functools.partial"
    if isinstance(kernel, MethodType):
        return "a bound method"
    if not inspect.isfunction(kernel):
        return f"an object of type {type(kernel).__name__}"
    if kernel.__name__ == "<lambda>":
        return "a lambda"
    if "<locals>" in kernel.__qualname__:
        return "a closure" if kernel.__closure__ else "a nested function"
    if hasattr(home, kernel.__name__):
        return f"no longer what {kernel.__name__} means in its module (monkeypatched, or defined twice)"
    return "a function without a name in its module"


def _place(module: ModuleType) -> str:
    """The module's name where it lies in a package and can be imported, for it may import its siblings; else its file.

    A package whose top has no `__init__.py` is none here: whether it can be imported depends on where and how pytest was started.
    """
    file = getattr(module, "__file__", None)
    top = module.__spec__.parent.partition(".")[0] if module.__spec__ and module.__spec__.parent else ""
    if top and _origin(top) is not None and _same(_origin(module.__name__), file):
        return module.__name__
    if file is None or not file.endswith(".py"):
        raise InputError(f"{module.__name__}: its file is {file}; expected a Python file, or a module that can be imported")
    return _short(Path(file))


def _origin(name: str) -> str | None:
    """The file that importing `name` would run, if it had not been imported yet, or None where it cannot be."""
    spec, path = None, None
    parts = name.split(".")
    for end in range(1, len(parts) + 1):
        found = (f.find_spec(".".join(parts[:end]), path) for f in sys.meta_path)
        spec = next((s for s in found if s is not None), None)
        if spec is None:
            return None
        path = _listed(spec.submodule_search_locations)
    return spec.origin if spec else None


def _listed(locations: Iterable[str] | None) -> list[str] | None:
    return None if locations is None else list(locations)


def _same(one: str | None, other: str | None) -> bool:
    return one is not None and other is not None and os.path.realpath(one) == os.path.realpath(other)


def _short(path: Path) -> str:
    """The path from the working folder where it lies in that, so that a command shown with it can be typed there."""
    absolute, here = path.absolute(), Path.cwd()
    return str(absolute.relative_to(here) if absolute.is_relative_to(here) else absolute)
