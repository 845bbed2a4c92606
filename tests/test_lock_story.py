"""The life of a lock, told by the command in this process.  `tests/test_wheel.py` tells it through the installed wheel."""

from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner
from lock_story import Said, tell

from oracle.cli import cli
from oracle.errors import OracleError


def test_nothing_moves_unseen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("GITHUB_ACTIONS", "GITHUB_STEP_SUMMARY"):
        monkeypatch.delenv(name, raising=False)

    def run(arguments: list[str]) -> Said:
        done = CliRunner().invoke(cli, arguments, standalone_mode=False)
        if isinstance(done.exception, OracleError) or hasattr(done.exception, "format_message"):
            return Said(2, done.output + str(done.exception))
        assert done.exception is None, done.exc_info
        return Said(int(done.return_value), done.output)

    tell(tmp_path, run)
