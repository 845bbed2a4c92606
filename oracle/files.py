"""Writing a file whole or not at all."""

from __future__ import annotations

import os
from pathlib import Path

from oracle.errors import InputError


def write_whole(path: Path, text: str, *, otherwise: str) -> None:
    """The file holds `text`, in UTF-8; whoever is killed while writing leaves what was there before.

    Raises InputError where it cannot be written; its text ends with `otherwise`, the next step.
    """
    unfinished = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with unfinished.open("w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        unfinished.replace(path)
    except OSError as problem:
        raise InputError(f"{path}: cannot be written: {problem.strerror}; {otherwise}") from None
    finally:
        unfinished.unlink(missing_ok=True)
