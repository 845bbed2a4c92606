"""A lock as a file: the same text for equal locks, one fact a line, and errors that say where."""

from __future__ import annotations

import math
import tomllib
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from lock_samples import KERNEL, LOCK, WAIVER, WHAT, with_kernel, with_row

from oracle.errors import InputError
from oracle.lock import FIGURES, Figure, Lock, Row, from_text, read, rounded, to_text, write

NUMBERS = st.floats(min_value=0, max_value=1e30).map(rounded)
FIGURE = st.builds(Figure, value=NUMBERS, spread=NUMBERS, ceiling=NUMBERS)
ROWS = st.builds(
    Row,
    cases=st.integers(0, 10**6),
    rows=st.integers(0, 10**9),
    digest=st.sampled_from(["", "f" * 64]),
    figures=st.dictionaries(st.sampled_from(FIGURES), FIGURE),
)
NAMES = st.text(st.characters(codec="utf-8", exclude_categories=["C"]), min_size=1, max_size=30)
TEXT = to_text(LOCK)


@given(st.dictionaries(NAMES, ROWS, max_size=3), NAMES)
def test_what_is_written_is_read(rows: dict[str, Row], name: str) -> None:
    lock = replace(LOCK, kernels={name: replace(KERNEL, families=rows)}, waivers=(WAIVER,))

    assert from_text(to_text(lock), "x") == lock


def test_order_does_not_show() -> None:
    turned = replace(
        LOCK,
        header=dict(sorted(LOCK.header.items(), reverse=True)),
        kernels=dict(sorted(LOCK.kernels.items(), reverse=True)),
    )

    assert to_text(turned) == TEXT


def test_one_fact_a_line() -> None:
    other = with_kernel(with_row(replace(KERNEL.families["gemma2"], cases=13)))
    changed = [(a, b) for a, b in zip(TEXT.splitlines(), to_text(other).splitlines(), strict=True) if a != b]

    assert changed == [("cases = 12", "cases = 13")]


def test_a_kernel_more_moves_no_other_row() -> None:
    before, after = TEXT.splitlines(), to_text(replace(LOCK, kernels={**LOCK.kernels, "new": KERNEL})).splitlines()

    assert [line for line in before if line not in after] == []
    start = after.index("[kernel.new]")
    assert after[:start] + after[start + len(after) - len(before) :] == before


def test_every_fact_has_its_line() -> None:
    lock, lines = from_text(TEXT, "x"), TEXT.splitlines()

    assert lines[lock.lines[WHAT] - 1] == "rms_e_ceiling = 0.157858"
    assert lines[lock.lines["kernel.sdpa.flash"] - 1] == '[kernel."sdpa.flash"]'
    assert lines[lock.lines["bound.margin_named"] - 1] == "margin_named = 1.05"


@pytest.mark.parametrize(
    ("was", "becomes", "says"),
    [
        ("rms_e = 0.15\n", "rms_e = O.15\n", "Invalid value (at line {line}, column 9)"),
        (
            "rms_e = 0.15\n",
            'rms_e = "0.15"\n',
            "line {line}, column 9: kernel.kernel.py:attention.family.all.rms_e: got '0.15', expec",
        ),
        (
            "rms_e = 0.15\n",
            "rms_e = -0.15\n",
            "line {line}, column 9: kernel.kernel.py:attention.family.all.rms_e: got -0.15, expecte",
        ),
        ("rms_e = 0.15\n", "rms_e = 0.15\nrms_f = 1.0\n", "column 9: kernel.kernel.py:attention.family.all.rms_f: unknown key"),
        ("rms_e = 0.15\n", "rms_e = 0.15\nrms_e = 0.15\n", "Cannot overwrite a value (at line"),
        ("rms_e_spread = 0.001\n", "", "kernel.kernel.py:attention.family.all: 'rms_e_spread' is a dependency of 'rms_e'"),
        ("format = 1\n", "format = 2\n", "line {line}, column 10: format: 1 was expected"),
        ("factor = 7.85783\n", "", "header: 'factor' is a required property"),
        ('verdict = "accept"\n', 'verdict = "acept"\n', "verdict: got 'acept', expected accept or reject"),
        ("[bound]\n", "[bound\n", "at line"),
        ("cases = 12\n", "cases = 12.5\n", "cases: got 12.5, expected a count"),
        ("[kernel.wrong]\n", "[kernel.wrong]\n[kernel.wrong]\n", "Cannot declare ('kernel', 'wrong') twice"),
    ],
)
def test_a_file_that_no_lock_command_wrote_is_refused_with_its_place(was: str, becomes: str, says: str) -> None:
    line = TEXT[: TEXT.index(was)].count("\n") + 1

    with pytest.raises(InputError) as error:
        from_text(TEXT.replace(was, becomes, 1), "ci/thresholds/cpu.toml")

    assert says.format(line=line) in str(error.value)
    assert str(error.value).startswith("ci/thresholds/cpu.toml: ")
    assert "restore it from git, or run `oracle lock`" in str(error.value)


@pytest.mark.parametrize(
    ("field", "value", "says"),
    [
        ("why", "", "should be non-empty"),
        ("link", "see chat", "expected the address"),
        ("expires", "soon", "expected a day, YYYY-MM-DD"),
    ],
)
def test_a_waiver_says_why_where_and_until_when(field: str, value: str, says: str) -> None:
    text = to_text(replace(LOCK, waivers=(replace(WAIVER, **{field: value}),)))

    with pytest.raises(InputError, match=f"waiver.0.{field}: .*{says}"):
        from_text(text, "x")


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_numbers_that_are_none_are_refused(bad: float) -> None:
    row = replace(KERNEL.families["all"], figures={"rms_e": Figure(value=0.1, spread=0.0, ceiling=bad)})

    with pytest.raises(InputError, match="rms_e_ceiling"):
        from_text(to_text(with_kernel(with_row(row))), "x")


def test_a_lock_is_written_whole_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "cpu.toml"
    write(LOCK, path)

    def killed(fd: int) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("os.fsync", killed)
    with pytest.raises(KeyboardInterrupt):
        write(Lock(header=LOCK.header, bound={}, kernels={}), path)

    assert read(path) == LOCK
    assert [p.name for p in tmp_path.iterdir()] == ["cpu.toml"]


def test_a_file_that_is_not_text_is_refused(tmp_path: Path) -> None:
    (tmp_path / "cpu.toml").write_bytes(b"\xff\xfe")

    with pytest.raises(InputError, match="byte 0 is not UTF-8; restore it from git"):
        read(tmp_path / "cpu.toml")
    with pytest.raises(InputError, match="`oracle lock` makes it"):
        read(tmp_path / "none.toml")


def test_the_head_states_the_formula() -> None:
    head = [line for line in TEXT.splitlines() if line.startswith("#")]

    assert "# ceiling = value + 7.85783 spread" in head[1] and "t(0.999, 4) sqrt(1 + 1/5)" in head[2]
    assert tomllib.loads(TEXT)["format"] == 1
