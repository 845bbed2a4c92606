"""A .gguf file as a Hugging Face folder, made once and kept in the user's cache folder.

Of a .gguf file, transformers parses every token and unpacks every weight, which is slow; of the folder, nothing.  A folder's
name holds the SHA-256 of the file and the version of transformers that read it; the folder holds the SHA-256 of each of its
files, so that a torn one is known.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from hashlib import file_digest
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from filelock import FileLock

from oracle.checkpoints.cache import cache_folder
from oracle.errors import InputError

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

SUMS = "sha256.json"  # written last: the other files' names -> their SHA-256


class ConversionError(InputError):
    """A .gguf file cannot be converted, or the folder not be kept; one line that says why."""


def converted(path: Path, read: Callable[[], tuple[PreTrainedModel, PreTrainedTokenizerBase]]) -> Path:
    """The folder with the model and the tokenizer of the .gguf file `path`: safetensors, config and tokenizer files.

    It is in the user's cache folder.  Where it is not there whole, `read` is called, which returns what transformers makes of
    the file with the weights in fp32; that is exact, so a load in another dtype rounds once, as a load of the file does.
    The folder appears whole or not at all, and of several processes one makes it while the others wait.
    Raises ConversionError, and whatever `read` raises.
    """
    folder = cache_folder("gguf") / f"{_sha256(path)}-{version('transformers')}"
    if not _whole(folder):
        _make(folder, path, read)
    return folder


def _make(folder: Path, path: Path, read: Callable[[], tuple[PreTrainedModel, PreTrainedTokenizerBase]]) -> None:
    lock = FileLock(folder.with_name(f".{folder.name}.lock"))  # the system frees it when its process dies
    with _said(folder, path):
        folder.parent.mkdir(parents=True, exist_ok=True)
        lock.acquire()
    try:
        if not _whole(folder):  # else another process made it while this one waited
            model, tokenizer = read()
            with _said(folder, path):
                _replace(folder, model, tokenizer)
    finally:
        lock.release()


def _replace(folder: Path, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> None:
    unfinished = folder.with_name(f".{folder.name}.unfinished")
    for left in (folder, unfinished):  # a torn folder, and what a killed process left
        if left.exists():
            shutil.rmtree(left)
    try:
        _save(model, tokenizer, unfinished)
        unfinished.rename(folder)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)


@contextmanager
def _said(folder: Path, path: Path) -> Iterator[None]:
    """Inside, what goes wrong is raised as ConversionError."""
    from safetensors import SafetensorError

    try:
        yield
    except (OSError, SafetensorError) as error:
        why = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        raise ConversionError(
            f"{folder.parent}: cannot be written: {why}; a .gguf file is converted there once, "
            "name another cache folder with XDG_CACHE_HOME"
        ) from error
    except Exception as error:  # transformers raises nearly every kind for a model that it cannot save
        first = (str(error).strip() or repr(error)).splitlines()[0]
        raise ConversionError(
            f"{path}: cannot be converted: {type(error).__name__}: {first}; convert it to a folder with safetensors yourself"
        ) from error


def _save(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, folder: Path) -> None:
    """The folder is there, with its sums.  transformers refuses to save a model that came from GGUF, so a plain one is made."""
    import torch

    kind: Any = type(model)
    settings = model.config.to_dict()
    settings.pop("quantization_config", None)
    with torch.device("meta"):
        plain = kind._from_config(type(model.config).from_dict(settings), dtype=torch.float32)
    plain.load_state_dict(model.state_dict(), assign=True)  # strict: no name is missing, none is left over, all shapes fit
    plain.tie_weights()
    plain.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    (folder / SUMS).write_text(json.dumps(_sums(folder), indent=1))


def _whole(folder: Path) -> bool:
    """Whether `folder` holds the files that were written, all of them, unchanged, and no other."""
    try:
        expected = json.loads((folder / SUMS).read_bytes())
        return bool(expected == _sums(folder))
    except (OSError, ValueError):
        return False


def _sums(folder: Path) -> dict[str, str]:
    return {file.name: _sha256(file) for file in sorted(folder.iterdir()) if file.name != SUMS}


def _sha256(file: Path) -> str:
    with file.open("rb") as stream:
        return file_digest(stream, "sha256").hexdigest()
