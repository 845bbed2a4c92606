"""The finished blocks of a drift run, kept so that Ctrl-C, a kill or a crash costs one batch.

A folder for each run: its name is a hash of everything that the figures depend on, so a run finds its own blocks and no other's.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from oracle.checkpoints.cache import cache_folder
from oracle.checkpoints.divergence import Divergence, from_tensors, to_tensors
from oracle.checkpoints.loading import CheckpointError
from oracle.checkpoints.lockstep import Finished


@dataclass(frozen=True, slots=True)
class Journal:
    """A folder with a safetensors file for each finished block."""

    folder: Path

    @classmethod
    def of(cls, identity: Mapping[str, object], root: Path | None = None) -> Journal:
        """The journal of the run that `identity` describes, below `root` (by default the user's cache folder)."""
        name = hashlib.sha256(json.dumps(identity, sort_keys=True, default=str).encode()).hexdigest()[:32]
        return cls((root or cache_folder("drift")) / name)

    def finished(self, blocks: int, candidates: int) -> dict[int, Finished]:
        """What is there of blocks 0 to `blocks` - 1; a file that cannot be read whole counts as absent."""
        found = {}
        for number in range(blocks):
            if (file := self._file(number)).is_file() and (block := _read(file, number, candidates)) is not None:
                found[number] = block
        return found

    def add(self, block: Finished) -> None:
        """Keeps a block: whole or not at all.  Raises CheckpointError where the folder cannot be written."""
        from safetensors.torch import save_file

        tensors: dict[str, Tensor] = {}
        for c, divergence in enumerate(block.divergences):
            tensors |= {f"{c}/{name}": tensor.contiguous() for name, tensor in to_tensors(divergence).items()}
        file = self._file(block.block)
        unfinished = file.with_name(f".{file.name}.{os.getpid()}")
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            save_file(tensors, unfinished, metadata={"seconds": json.dumps(block.seconds), "calls": json.dumps(block.calls)})
            unfinished.replace(file)
        except OSError as error:
            raise CheckpointError(
                f"{file}: cannot be written: {error.strerror}; finished blocks are kept there, name another folder with --work"
            ) from error

    def remove(self) -> None:
        """The folder is gone."""
        shutil.rmtree(self.folder, ignore_errors=True)

    def _file(self, number: int) -> Path:
        return self.folder / f"{number:06}.safetensors"


def _read(file: Path, number: int, candidates: int) -> Finished | None:
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(file, framework="pt") as opened:
            notes = opened.metadata()
            seconds = tuple(json.loads(notes["seconds"]))
            calls = tuple(tuple(layers) for layers in json.loads(notes["calls"]))
            tensors = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118  it is no mapping
    except (OSError, SafetensorError, KeyError, TypeError, ValueError):
        return None
    divergences: list[Divergence] = []
    for c in range(candidates):
        own = {name.partition("/")[2]: tensor for name, tensor in tensors.items() if name.partition("/")[0] == str(c)}
        divergences.append(from_tensors(own))
    return Finished(block=number, divergences=tuple(divergences), seconds=seconds, calls=calls)
