"""Texts as blocks of tokens: what a drift report is measured on."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from oracle.checkpoints.loading import CheckpointError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """Tokens of one document that a model reads from an empty cache."""

    document: int  # index into the documents' names
    tokens: tuple[int, ...]  # first those that the tokenizer puts before every text


@dataclass(frozen=True, slots=True, kw_only=True)
class Text:
    """The scored positions of a run, in the order in which every configuration's divergences stand.  All (N,) int64."""

    block: Tensor  # number of the block, from 0
    document: Tensor  # index into `documents`
    position: Tensor  # of the predicting token in its block, from 0
    token: Tensor  # id of the token that is to be predicted
    documents: tuple[str, ...]  # names
    blocks: tuple[tuple[int, ...], ...]  # the token ids of each block


def read_documents(paths: Sequence[Path]) -> dict[str, str]:
    """Name -> text of every UTF-8 text file named; of a folder, its .txt files in order of name.  Raises CheckpointError."""
    found: dict[str, str] = {}
    for path in paths:
        files = sorted(path.glob("*.txt")) if path.is_dir() else [path]
        if not files:
            raise CheckpointError(f"{path}: has no .txt file")
        for file in files:
            try:
                text = file.read_text(encoding="utf-8")
            except OSError as error:
                raise CheckpointError(f"{file}: cannot be read: {error.strerror}") from error
            except UnicodeDecodeError as error:
                raise CheckpointError(
                    f"{file}: is no UTF-8 text: byte {error.start} is {error.object[error.start]:#04x}"
                ) from None
            if file.name in found:
                raise CheckpointError(f"{file}: another file has that name too; documents are told apart by it")
            found[file.name] = text
    return found


def parse_blocks(text: str) -> dict[int, int]:
    """Length -> number of blocks, from a text such as "64x512,4x4096".  Raises CheckpointError."""
    counts: dict[int, int] = {}
    for part in text.split(","):
        if not (match := re.fullmatch(r"([1-9]\d*)x([1-9]\d*)", part)) or int(match[2]) < 2:
            raise CheckpointError(f"blocks {text!r}: got {part!r}; expected COUNTxLENGTH, such as 64x512,4x4096")
        counts[int(match[2])] = counts.get(int(match[2]), 0) + int(match[1])
    return counts


def cut(documents: Mapping[str, str], tokenizer: PreTrainedTokenizerBase, counts: Mapping[int, int]) -> list[Block]:
    """`counts[length]` blocks of each length, in turn from every document, none overlapping; the longest come last.

    Raises CheckpointError where the text is too short.
    """
    begin = beginning(tokenizer)
    tokens = [_ids(tokenizer, text) for text in documents.values()]
    used = [0] * len(tokens)
    blocks: list[Block] = []
    for length in sorted(counts, reverse=True):
        need = length - len(begin)
        taken: list[Block] = []
        while len(taken) < counts[length]:
            open_ones = [i for i in range(len(tokens)) if len(tokens[i]) - used[i] >= need]
            if not open_ones:
                raise CheckpointError(
                    f"the text is too short: {len(taken)} blocks of {length} tokens, {counts[length]} were asked for; "
                    f"it has {sum(map(len, tokens))} tokens in {len(tokens)} documents; give more with --text, or ask for fewer"
                )
            for i in open_ones[: counts[length] - len(taken)]:
                taken.append(Block(document=i, tokens=tuple(begin + tokens[i][used[i] : used[i] + need])))
                used[i] += need
        blocks = taken + blocks
    return blocks


def scored(blocks: Sequence[Block], names: Sequence[str]) -> Text:
    """The positions of the blocks that predict a token: all but the last of each."""
    lengths = torch.tensor([len(block.tokens) - 1 for block in blocks])
    number = torch.repeat_interleave(torch.arange(len(blocks)), lengths)
    return Text(
        block=number,
        document=torch.tensor([block.document for block in blocks])[number],
        position=torch.cat([torch.arange(int(n)) for n in lengths]),
        token=torch.cat([torch.tensor(block.tokens[1:]) for block in blocks]),
        documents=tuple(names),
        blocks=tuple(block.tokens for block in blocks),
    )


def tokens_sha256(blocks: Sequence[Block]) -> str:
    """SHA-256 over the blocks' token ids."""
    return hashlib.sha256("\n".join(" ".join(map(str, block.tokens)) for block in blocks).encode()).hexdigest()


def beginning(tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """The token ids that the tokenizer itself puts before every text: <bos> or none."""
    ids: list[int] = tokenizer("a", verbose=False)["input_ids"]
    plain = _ids(tokenizer, "a")
    return ids[: ids.index(plain[0])]


def _ids(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    ids: list[int] = tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
    return ids
