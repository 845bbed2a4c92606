"""A saved case is judged again as it was, on the kernel it was saved for, and shows where its worst element lies."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from oracle.case_text import in_words
from oracle.casefile import CaseFile, read, save
from oracle.cases import Case, read_cases, to_toml
from oracle.errors import InputError
from oracle.families import FAMILIES, Family
from oracle.places import edges, place
from oracle.replay import Replayed, replay, status
from oracle.replay_text import replayed_text

WRONG = Path(__file__).with_name("wrong_by_path.py")
FAMILY = Family(name="small", q_heads=4, kv_heads=2, head_dim=40, head_dim_v=40, scale=0.25)
CASE = Case(name="small", family=FAMILY, q_lens=(3, 5), kv_lens=(32, 9), page_size=16, seed=1)


# Files


def test_a_case_comes_back_with_the_kernel_it_was_saved_for(tmp_path: Path) -> None:
    path = save(CASE, tmp_path, {"kernel": "my kernel's.py:attention", "found": 'a "line"\nand\tanother'})

    assert read(path) == [CaseFile(path=path, case=CASE, kernel="my kernel's.py:attention")]
    assert read(tmp_path) == read(path)
    assert path.read_text().splitlines()[1] == r'# found = "a \"line\" and another"'


def test_other_readers_read_it_too(tmp_path: Path) -> None:
    """`oracle accept --cases` knows nothing of kernels in comments."""
    save(CASE, tmp_path, {"kernel": "k.py:f"})

    assert read_cases(tmp_path) == [CASE]


def test_a_file_without_comments_names_no_kernel(tmp_path: Path) -> None:
    (tmp_path / "old.toml").write_text(to_toml(CASE))
    (tmp_path / "people.toml").write_text("# a note: not TOML\n# 3\n\n# kernel = 'too late.py:f'\n" + to_toml(CASE))

    assert [file.kernel for file in read(tmp_path)] == ["", ""]


def test_a_file_is_there_whole_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = save(CASE, tmp_path, {})
    before = path.read_text()

    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(InputError, match=r"small\.toml: cannot be written: No space left on device"):
        save(replace(CASE, seed=2), tmp_path, {})

    assert path.read_text() == before
    assert [p.name for p in tmp_path.iterdir()] == ["small.toml"]


@pytest.mark.parametrize(("name", "says"), [("nothing.toml", "no such file or folder"), ("bad.toml", "unknown key 'colour'")])
def test_a_file_that_is_no_case_is_wrong_usage(tmp_path: Path, name: str, says: str) -> None:
    (tmp_path / "bad.toml").write_text(f"{to_toml(replace(CASE, family=FAMILIES['mqa']))}colour = 3\n")

    with pytest.raises(InputError, match=f"{name}: .*{says}"):
        read(tmp_path / name)


# Places


@pytest.mark.parametrize(
    ("case", "row", "expected"),
    [
        (CASE, 2, ("sees the last key, key 31", "its keys end with page 1, the last page, which is full")),
        (CASE, 0, ("the diagonal: the keys after 29 are hidden from it",)),
        (
            CASE,
            1,
            ("the diagonal: the keys after 30 are hidden from it", "its keys lack one of filling whole tiles of 16 and 32"),
        ),
        (replace(CASE, q_lens=(3, 12)), 3, ("sees no key (more queries than keys)",)),
        (replace(CASE, q_lens=(3, 9)), 3, ("sees one key, key 0", "the diagonal: the keys after 0 are hidden from it")),
        (
            replace(CASE, kv_lens=(33, 9)),
            2,
            ("one key reaches into page 2", "its keys reach one into the next tiles of 16 and 32"),
        ),
        (replace(CASE, kv_lens=(40, 9), q_lens=(31, 1)), 0, ("its keys end at 1/4 of the sequence's",)),
        (replace(CASE, kv_lens=(40, 9), q_lens=(31, 1)), 16, ("the first row of a query tile of 16",)),
        (replace(CASE, kv_lens=(40, 9), q_lens=(31, 1)), 15, ("the last row of a query tile of 16",)),
        (
            replace(CASE, family=replace(FAMILY, window=(15, 0))),
            2,
            (
                "the window's left edge is key 16; 16 keys before it are hidden",
                "the window's right edge is key 31",
                "its first key is the first of page 1",
            ),
        ),
        (
            replace(CASE, family=replace(FAMILY, window=(31, -1))),
            2,
            ("the window's left edge is key 0; it reaches exactly the first key",),
        ),
        (replace(CASE, kv_lens=(46, 9), q_lens=(30, 1)), 4, ()),
    ],
)
def test_a_row_lies_on_the_edges_that_it_lies_on(case: Case, row: int, expected: tuple[str, ...]) -> None:
    found = edges(case, place(case, row))

    assert set(expected) <= set(found)
    assert expected or set(found) == {"the diagonal: the keys after 20 are hidden from it"}


def test_a_place_is_that_of_the_plan() -> None:
    at = place(CASE, 4)

    assert (at.sequence, at.query, at.q_len, at.kv_len, at.position) == (1, 1, 5, 9, 5)
    assert (at.first, at.last, at.keys) == (0, 6, 6)


# Again


def once(case: Case, kernel: str, folder: Path) -> Replayed:
    return replay(read(save(case, folder, {"kernel": f"{WRONG}:{kernel}"})), "", "cpu")[0]


@pytest.fixture(scope="module")
def lost(tmp_path_factory: pytest.TempPathFactory) -> Replayed:
    """A kernel that loses the last key where pages are full, on a case where the first sequence's are."""
    return once(CASE, "last_key_lost_where_pages_are_full", tmp_path_factory.mktemp("lost"))


def test_a_saved_fault_is_seen_again(lost: Replayed) -> None:
    assert lost.judged is not None and lost.judged.faults and lost.refused == ""
    lines = replayed_text(lost).splitlines()

    assert lines[0].startswith("WRONG  ") and lines[0].endswith(":last_key_lost_where_pages_are_full")
    assert in_words(CASE) in lines[1]
    assert "page 1, the last page, which is full" in lines[4]
    assert lines[5].startswith("errors   max e ") and "e_det" in lines[5]
    assert any(line.startswith("> row ") and "*" in line for line in lines)


def test_the_exit_status_is_that_of_the_worst_case(lost: Replayed) -> None:
    judged = lost.judged
    assert judged is not None
    looked_at = replace(lost, judged=replace(judged, faults=(), inspect=judged.faults))
    skipped = replace(lost, judged=None, refused="no page size 16")

    assert [status(those) for those in ([lost], [skipped, lost], [looked_at], [skipped, looked_at])] == [1, 1, 0, 0]
    assert replayed_text(looked_at).startswith("INSPECT  ")


def test_the_neighbours_are_those_of_the_worst_element(lost: Replayed) -> None:
    around = lost.around
    assert around is not None and lost.judged is not None and lost.judged.seen.candidate is not None
    worst = lost.judged.seen.candidate.worst
    i, j = around.rows.index(around.at[0]), around.columns.index(around.at[1])

    assert around.at == (worst.row, worst.column) and around.head == worst.head
    assert (float(around.got[i, j]), float(around.want[i, j])) == (worst.got, worst.want)
    assert float(around.units[i, j]) == worst.units > 1
    right = [k for k, row in enumerate(around.rows) if row >= 3]  # of the second sequence, whose last page is not full
    assert right and bool((around.units[right] <= 1).all())
    assert around.got.shape == (len(around.rows), len(around.columns))


def test_a_right_kernel_is_fine_and_a_case_it_cannot_take_is_skipped(tmp_path: Path) -> None:
    for case in (CASE, replace(CASE, name="huge pages", page_size=512)):
        save(case, tmp_path, {"kernel": "nobody.py:nothing"})
    skipped, fine = replay(read(tmp_path), f"{WRONG}:textbook", "cpu")

    assert replayed_text(skipped) == f"SKIPPED  {tmp_path}/huge pages.toml  {WRONG}:textbook: no page size 512"
    assert replayed_text(fine).startswith("FINE  ") and fine.judged is not None and not fine.judged.faults
    assert fine.around is not None and bool((fine.around.units <= 1).all())


def test_cases_that_are_all_refused_are_wrong_usage(lost: Replayed) -> None:
    huge = replace(lost.file, case=replace(CASE, page_size=512))

    with pytest.raises(InputError, match=r"cannot take any of these cases \(no page size 512\)"):
        replay([huge], f"{WRONG}:textbook", "cpu")


def test_a_wrong_lse_shows_the_heads_beside_it(tmp_path: Path) -> None:
    case = replace(CASE, family=replace(FAMILY, sinks=True), sinks="below", q_lens=(1,), kv_lens=(0,), tail_rows=0)
    one = once(case, "sink_of_head_0_for_all", tmp_path)

    assert one.around is not None and one.around.head == -1 and one.around.columns[0] <= one.around.at[1]
    assert torch.equal(one.around.got[0], one.around.got[0, :1].expand(len(one.around.columns)))
    assert "around   LSE, rows by heads" in replayed_text(one)


def test_a_crash_leaves_no_numbers(tmp_path: Path) -> None:
    one = once(replace(CASE, family=replace(FAMILY, softcap=5.0)), "crashes_on_softcap", tmp_path)
    text = replayed_text(one)

    assert one.around is None and one.judged is not None
    assert "wrong    crash: its process died" in text and "errors   none measured: it gave no result" in text


def test_a_file_that_names_no_kernel_asks_for_one(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"small\.toml: names no kernel; say which: oracle replay .*small\.toml KERNEL"):
        replay(read(save(CASE, tmp_path, {})), "", "cpu")
