"""Blocks of text: as many as asked for, from every document in turn, none overlapping."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_models import tokenizer

from oracle.checkpoints.loading import CheckpointError
from oracle.checkpoints.texts import beginning, cut, parse_blocks, read_documents, scored, tokens_sha256


@pytest.fixture(scope="module")
def plain() -> Any:
    return tokenizer(pytest.importorskip("transformers"))


@pytest.fixture(scope="module")
def with_bos() -> Any:
    return tokenizer(pytest.importorskip("transformers"), begins=True)


@given(
    sizes=st.lists(st.integers(0, 200), min_size=1, max_size=5),
    counts=st.dictionaries(st.integers(2, 40), st.integers(1, 4), min_size=1, max_size=2),
    bos=st.booleans(),
)
@settings(max_examples=30)
def test_blocks_are_pieces_of_their_documents_and_do_not_overlap(
    plain: Any, with_bos: Any, sizes: list[int], counts: dict[int, int], bos: bool
) -> None:
    """A document is digits of a counter, so a piece tells where it is from."""
    used, first = (with_bos, [1]) if bos else (plain, [])
    documents = {f"{i}.txt": "".join(chr(33 + (j * 7 + j // 13 + i) % 90) for j in range(n)) for i, n in enumerate(sizes)}
    try:
        blocks = cut(documents, used, counts)
    except CheckpointError as error:
        assert "the text is too short" in str(error)
        return
    lengths = [len(block.tokens) for block in blocks]
    assert lengths == sorted(lengths) and {n: lengths.count(n) for n in counts} == counts
    taken: dict[int, list[tuple[int, ...]]] = {}
    for block in blocks:
        assert list(block.tokens[: len(first)]) == first
        taken.setdefault(block.document, []).append(block.tokens[len(first) :])
    for i, pieces in taken.items():
        whole = used(documents[f"{i}.txt"], add_special_tokens=False)["input_ids"]
        text = " ".join(map(str, whole)) + " "
        assert all(" ".join(map(str, piece)) + " " in text for piece in pieces)
        assert sum(map(len, pieces)) <= len(whole)


def test_every_document_that_is_long_enough_gives_blocks_in_turn(plain: Any) -> None:
    blocks = cut({"a": "a" * 50, "b": "b" * 5, "c": "c" * 50}, plain, {10: 5})

    assert [block.document for block in blocks] == [0, 2, 0, 2, 0]


def test_a_text_that_is_too_short_says_what_it_has(plain: Any) -> None:
    with pytest.raises(CheckpointError, match="2 blocks of 10 tokens, 3 were asked for; it has 29 tokens in 1 documents"):
        cut({"a": "a" * 29}, plain, {10: 3})


def test_the_scored_positions_are_all_but_the_last_of_each_block(with_bos: Any) -> None:
    blocks = cut({"a": "abcdefgh" * 3, "b": "hgfedcba" * 3}, with_bos, {4: 2, 9: 1})
    text = scored(blocks, ["a", "b"])

    assert text.block.tolist() == [0] * 3 + [1] * 3 + [2] * 8
    assert text.position.tolist() == [0, 1, 2, 0, 1, 2, *range(8)]
    assert text.token.tolist() == [t for block in blocks for t in block.tokens[1:]]
    assert text.document.tolist() == [block.document for block in blocks for _ in block.tokens[1:]]
    assert text.documents == ("a", "b") and text.blocks == tuple(block.tokens for block in blocks)
    assert text.block.dtype == torch.int64


def test_a_tokenizer_that_puts_a_token_before_every_text_does_so_before_every_block(plain: Any, with_bos: Any) -> None:
    assert (beginning(plain), beginning(with_bos)) == ([], [1])


def test_the_hash_is_of_the_tokens_and_their_blocks(plain: Any) -> None:
    hashes = {tokens_sha256(cut({"a": text}, plain, counts)) for text in ("abcdef", "abcdeg") for counts in ({3: 2}, {2: 3})}

    assert len(hashes) == 4


@pytest.mark.parametrize(("text", "counts"), [("64x512,4x4096", {512: 64, 4096: 4}), ("1x2", {2: 1}), ("2x8,3x8", {8: 5})])
def test_blocks_are_written_count_by_length(text: str, counts: dict[int, int]) -> None:
    assert parse_blocks(text) == counts


@pytest.mark.parametrize("text", ["", "64", "0x8", "8x0", "8x1", "x8", "8x8,", "8 x 8"])
def test_other_texts_for_blocks_are_told(text: str) -> None:
    with pytest.raises(CheckpointError, match="expected COUNTxLENGTH, such as 64x512,4x4096"):
        parse_blocks(text)


def test_documents_are_files_and_the_text_files_of_folders(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    for name in ("b.txt", "a.txt", "c.rst"):
        (tmp_path / "folder" / name).write_text(name)
    (tmp_path / "own.md").write_text("own")

    assert list(read_documents([tmp_path / "folder", tmp_path / "own.md"])) == ["a.txt", "b.txt", "own.md"]


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [("absent.txt", None, "cannot be read: No such file"), ("latin.txt", b"caf\xe9", "is no UTF-8 text: byte 3 is 0xe9")],
)
def test_a_file_that_is_no_text_is_told(tmp_path: Path, name: str, content: bytes | None, said: str) -> None:
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(CheckpointError, match=said):
        read_documents([tmp_path / name])


def test_a_folder_without_texts_and_a_name_twice_are_told(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"has no \.txt file"):
        read_documents([tmp_path])
    (tmp_path / "a.txt").write_text("a")
    with pytest.raises(CheckpointError, match="another file has that name too"):
        read_documents([tmp_path, tmp_path / "a.txt"])
