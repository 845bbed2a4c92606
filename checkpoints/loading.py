"""Loading a causal language model and its tokenizer from files on this machine, through transformers."""

from __future__ import annotations

import importlib
import json
import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Any

from oracle.checkpoints.converted import ConversionError, converted
from oracle.errors import InputError

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

DTYPES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}  # names here -> names in torch
DEVICES = {
    "cpu": "the CPU",
    "cuda": "one CUDA device; under torchrun one for each process",
    "auto": "all CUDA devices, layer by layer, as accelerate shares them out",
}
INSTALL = "pip install 'attention-oracle[checkpoints]'"


class CheckpointError(InputError):
    """A checkpoint cannot be used as asked; one line that names it and says why."""


def transformers() -> Any:
    """The transformers package, told to stay off the network.  Raises CheckpointError, saying what to install, without it."""
    os.environ["HF_HUB_OFFLINE"] = "1"  # read when huggingface_hub is first imported
    try:
        with without_remarks():
            importlib.import_module("transformers.modeling_utils")  # which imports torchao, where that is installed
            return importlib.import_module("transformers")
    except ImportError as error:
        raise CheckpointError(f"checkpoints need transformers ({error}): {INSTALL}") from error


def load_model(
    path: str | os.PathLike[str], dtype: str = "bf16", *, attention: str | None = None, device: str = "cpu"
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """The model at `path` in evaluation mode on `device` (a key of DEVICES), its weights in `dtype`, and its tokenizer.

    `path` is a Hugging Face folder with safetensors weights, or a .gguf file (dequantised): the first load of one converts it
    into the user's cache folder, and is slow.  `dtype` is "bf16", "fp16" or "fp32".  `attention` is a name that transformers
    has an attention function for ("sdpa", "eager", or one registered before); None is transformers' own choice for the model.
    Nothing is downloaded, no pickle is read and no code of the checkpoint runs.
    Raises CheckpointError.
    """
    where = Path(path)
    check_files(where)
    if dtype not in DTYPES:
        raise CheckpointError(f"dtype {dtype!r} is unknown; choose from {', '.join(DTYPES)}")
    hf = transformers()
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    known = sorted({"eager", *ALL_ATTENTION_FUNCTIONS.keys()})
    # Any other name is one that transformers would take for a repository of kernels, and import code from it.
    if attention is not None and attention not in known:
        raise CheckpointError(f"attention {attention!r} is unknown to transformers; choose from {', '.join(known)}")
    if foreign := sorted(_attention_names(where) - {*known}):
        raise CheckpointError(f"{where}: its config.json asks for attention {foreign[0]!r}, which is not in transformers itself")
    if where.is_dir():
        return read_files(where, dtype, attention=attention, device=device)
    try:
        with _quiet(hf):
            files = converted(where, lambda: read_files(where, "fp32"))
    except ConversionError as error:
        raise CheckpointError(str(error)) from error
    return read_files(files, dtype, attention=attention, name=where, device=device)


def read_files(
    files: Path, dtype: str, *, attention: str | None = None, name: Path | None = None, device: str = "cpu"
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """What `load_model` returns, as transformers reads it from a folder, or slowly from a .gguf file.

    Nothing is checked before.  `name` is what an error names, by default `files`.  Raises CheckpointError.
    """
    hf, where = transformers(), name or files
    import torch

    folder, gguf = (str(files.parent), {"gguf_file": files.name}) if files.is_file() else (str(files), {})
    common = {"local_files_only": True, "trust_remote_code": False, **gguf}
    try:
        with _quiet(hf):
            model, report = hf.AutoModelForCausalLM.from_pretrained(
                folder,
                dtype=getattr(torch, DTYPES[dtype]),
                attn_implementation=attention,
                use_safetensors=True,
                output_loading_info=True,
                device_map=_device_map(device),
                **common,
            )
            tokenizer = hf.AutoTokenizer.from_pretrained(folder, **common)
    except ImportError as error:
        raise CheckpointError(f"{where}: it needs a package that is not here ({_first_line(error)}): {INSTALL}") from error
    except Exception as error:  # transformers raises nearly every kind for a broken checkpoint
        raise CheckpointError(f"{where}: cannot be loaded: {type(error).__name__}: {_first_line(error)}") from error
    # transformers fills weights that the files lack with random numbers, and only remarks on it.
    if absent := sorted(map(str, {*report["missing_keys"], *report["mismatched_keys"]})):
        raise CheckpointError(f"{where}: {len(absent)} weights are missing or of another shape, {absent[0]} first")
    if (off := [name for name, parameter in model.named_parameters() if parameter.device.type == "meta"]) or (
        device != "cpu" and any(parameter.device.type == "cpu" for parameter in model.parameters())
    ):
        what = f"{len(off)} weights are off" if off else "some are on the CPU"
        raise CheckpointError(f"{where}: it does not fit the devices here ({what}); use more of them, or --device cpu")
    return model.eval(), tokenizer


def _device_map(device: str) -> dict[str, str] | str | None:
    """What transformers calls the device; "cuda" is this process's own under torchrun.  Raises CheckpointError."""
    import torch

    if device not in DEVICES:
        raise CheckpointError(f"device {device!r} is unknown; choose from {', '.join(DEVICES)}")
    if device == "cpu":
        return None
    if not torch.cuda.is_available():
        raise CheckpointError(f"device {device}: there is no CUDA device here; use --device cpu")
    return "auto" if device == "auto" else {"": f"cuda:{os.environ.get('LOCAL_RANK', '0')}"}


def check_files(where: Path) -> None:
    """Returns when `where` looks like a checkpoint that `load_model` reads.  Raises CheckpointError otherwise."""
    if not where.exists():
        raise CheckpointError(f"{where}: no such file or folder")
    try:
        if where.is_file():
            with where.open("rb") as stream:
                magic = stream.read(4)
            if magic != b"GGUF":
                raise CheckpointError(f"{where}: not a checkpoint: a file must be GGUF; for safetensors name the folder it is in")
            return
        names = {entry.name for entry in where.iterdir()}
    except OSError as error:
        raise CheckpointError(f"{where}: cannot be read: {error.strerror}") from error
    if "config.json" not in names:
        raise CheckpointError(f"{where}: not a checkpoint: it has no config.json (for GGUF name the file)")
    if not any(name.endswith(".safetensors") for name in names):
        pickles = sorted(name for name in names if name.endswith((".bin", ".pt", ".pth", ".ckpt")))
        if pickles:
            raise CheckpointError(f"{where}: pickled weights ({pickles[0]}) are never read; convert them to safetensors")
        raise CheckpointError(f"{where}: not a checkpoint: it has no .safetensors file")


def weights_sha256(path: str | os.PathLike[str]) -> str:
    """SHA-256 of a .gguf file; of a folder, SHA-256 over the lines `sha256  name` of its .safetensors files in order of name."""
    where = Path(path)
    if where.is_file():
        return _file_sha256(where)
    lines = "".join(f"{_file_sha256(file)}  {file.name}\n" for file in sorted(where.glob("*.safetensors")))
    return sha256(lines.encode()).hexdigest()


def tokenizer_sha256(tokenizer: PreTrainedTokenizerBase) -> str:
    """SHA-256 of the tokenizer's vocabulary: one line `id token` for each, in order of id."""
    vocabulary: dict[str, int] = tokenizer.get_vocab()
    lines = "".join(f"{number} {token!r}\n" for token, number in sorted(vocabulary.items(), key=lambda item: (item[1], item[0])))
    return sha256(lines.encode()).hexdigest()


def _attention_names(where: Path) -> set[str]:
    """What the config.json of the folder `where` sets attention to, in its parts too; empty for a file or a torn config."""
    try:
        parts: list[Any] = [json.loads((where / "config.json").read_bytes())]
    except (OSError, ValueError):  # transformers says what is wrong with it
        return set()
    names = set()
    while parts:
        part = parts.pop()
        parts += part.values() if isinstance(part, dict) else part if isinstance(part, list) else []
        if isinstance(part, dict):
            names |= {value for key, value in part.items() if key.endswith("attn_implementation") and isinstance(value, str)}
    return names


def _file_sha256(file: Path) -> str:
    digest = sha256()
    with file.open("rb") as stream:
        while chunk := stream.read(1 << 22):
            digest.update(chunk)
    return digest.hexdigest()


def _first_line(error: Exception) -> str:
    return (str(error).strip() or repr(error)).splitlines()[0]


@contextmanager
def without_remarks() -> Iterator[None]:
    """Inside, nothing below an error is logged: torchao remarks on each GPU library that it cannot load."""
    level = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        yield
    finally:
        logging.disable(level)


@contextmanager
def _quiet(hf: Any) -> Iterator[None]:
    """Inside, transformers shows neither progress bars nor remarks below an error; after, it does as before."""
    logging = hf.utils.logging
    level, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(level)
        if bars:
            logging.enable_progress_bar()
