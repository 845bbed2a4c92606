"""The user's cache folder."""

from __future__ import annotations

import os
from pathlib import Path


def cache_folder(kind: str) -> Path:
    """Where a user's programs keep what can be made again: the folder of ours for one kind of it, which need not be there yet."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "attention-oracle" / kind
