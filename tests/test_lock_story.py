"""The life of a lock, told by the command in this process.  `tests/test_wheel.py` tells it through the installed wheel."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from lock_story import Said, tell


def test_nothing_moves_unseen(tmp_path: Path) -> None:
    def run(arguments: list[str]) -> Said:
        plain = {k: v for k, v in os.environ.items() if not k.startswith("GITHUB_")}
        done = subprocess.run(
            [sys.executable, "-m", "oracle", *arguments], cwd=tmp_path, env=plain, capture_output=True, text=True, check=False
        )
        return Said(done.returncode, done.stdout + done.stderr)

    tell(tmp_path, run)
