"""The checkpoint that comes with the oracle, and how much of its held-out text a drift report reads."""

from __future__ import annotations

from importlib.resources import files
from pathlib import Path

NAME = "gemma4-mini"
BLOCKS = "64x512,4x4096"


def folder() -> Path:
    """Where the checkpoint lies in the installed package."""
    return Path(str(files("oracle").joinpath(f"checkpoints/{NAME}")))


def text() -> Path:
    """The folder of its held-out text."""
    return folder() / "text"
