"""A .gguf file is converted once, whole or not at all, and its folder gives the same bits as the file."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any, NoReturn

import pytest
import torch
from tiny_models import TINY, build, llama, save, tokenizer

from oracle.checkpoints.converted import converted
from oracle.checkpoints.loading import CheckpointError, load_model, read_files, weights_sha256

TEXT = "the thing that they thought"


@pytest.fixture(scope="module")
def hf() -> Any:
    return pytest.importorskip("transformers")


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder that conversions go to: not there yet, and nobody else's."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "attention-oracle" / "gguf"


@pytest.fixture(scope="module")
def file(hf: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Llama as .gguf: 4-bit and 8-bit blocks, halves and singles, so that bf16 and fp16 have something to round."""
    return write_gguf(hf, tmp_path_factory.mktemp("gguf") / "tiny.gguf")


def write_gguf(hf: Any, file: Path) -> Path:
    gguf = pytest.importorskip("gguf")
    kinds = gguf.GGMLQuantizationType
    words = sorted(tokenizer(hf).get_vocab().items(), key=lambda item: item[1])
    w = gguf.GGUFWriter(file, "llama")
    w.add_block_count(TINY["num_hidden_layers"])
    w.add_context_length(TINY["max_position_embeddings"])
    w.add_embedding_length(TINY["hidden_size"])
    w.add_feed_forward_length(TINY["intermediate_size"])
    w.add_head_count(TINY["num_attention_heads"])
    w.add_head_count_kv(TINY["num_key_value_heads"])
    w.add_key_length(TINY["head_dim"])
    w.add_value_length(TINY["head_dim"])
    w.add_layer_norm_rms_eps(1e-6)
    w.add_rope_dimension_count(TINY["head_dim"])
    w.add_rope_freq_base(10000.0)
    w.add_vocab_size(TINY["vocab_size"])
    w.add_tokenizer_model("gpt2")
    w.add_tokenizer_pre("smollm")
    w.add_token_list([word for word, _ in words])
    w.add_token_types([gguf.TokenType.CONTROL if number < 3 else gguf.TokenType.NORMAL for _, number in words])
    w.add_token_merges(["t h"])
    w.add_pad_token_id(0)
    w.add_bos_token_id(1)
    w.add_eos_token_id(2)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, TINY["num_hidden_layers"])
    for name, tensor in build(hf, llama(hf)).state_dict().items():
        array, kind = tensor.float().numpy(), kinds.F32
        if array.ndim == 2:  # blocks are 32 numbers of a row
            kind = kinds.F16 if array.shape[1] % 32 else kinds.Q4_0 if "mlp" in name else kinds.Q8_0
        packed = gguf.quants.quantize(array, kind)
        w.add_tensor(names.get_name(name, try_suffixes=(".weight",)), packed, raw_dtype=kind)
    w.write_header_to_file()
    w.write_kv_data_to_file()
    w.write_tensors_to_file()
    w.close()
    return file


def direct(file: Path) -> Callable[[], Any]:
    return lambda: read_files(file, "fp32")


def never() -> NoReturn:
    raise AssertionError("the .gguf file was read again")


def assert_same(mine: tuple[Any, Any], theirs: tuple[Any, Any]) -> None:
    """The two models and tokenizers differ in where they came from, and in nothing else."""
    weights, others = mine[0].state_dict(), theirs[0].state_dict()
    assert list(weights) == list(others) and len(weights) > 10
    for name, tensor in weights.items():
        assert tensor.dtype == others[name].dtype and torch.equal(tensor, others[name]), name
    buffers, other_buffers = dict(mine[0].named_buffers()), dict(theirs[0].named_buffers())
    assert list(buffers) == list(other_buffers) and all(torch.equal(t, other_buffers[name]) for name, t in buffers.items())
    settings, other_settings = (
        {k: v for k, v in m.config.to_dict().items() if k not in ("_name_or_path", "architectures", "quantization_config")}
        for m in (mine[0], theirs[0])
    )
    assert settings == other_settings
    assert type(mine[0]) is type(theirs[0]) and mine[0].config._attn_implementation == theirs[0].config._attn_implementation
    assert not mine[0].training and not theirs[0].training
    assert type(mine[1]) is type(theirs[1]) and mine[1].backend_tokenizer.to_str() == theirs[1].backend_tokenizer.to_str()
    assert mine[1].special_tokens_map == theirs[1].special_tokens_map
    tokens = mine[1](TEXT, return_tensors="pt").input_ids
    assert torch.equal(tokens, theirs[1](TEXT, return_tensors="pt").input_ids)
    with torch.inference_mode():
        assert torch.equal(mine[0](tokens).logits, theirs[0](tokens).logits)


# The same bits


@pytest.mark.parametrize("dtype", ["bf16", "fp16", "fp32"])
def test_the_first_load_and_later_ones_give_what_the_file_gives(hf: Any, file: Path, cache: Path, dtype: str) -> None:
    theirs = read_files(file, dtype)
    assert theirs[0].config.quantization_config is not None, "this one is read from the file"
    for _ in range(2):
        assert_same(load_model(file, dtype), theirs)
    assert weights_sha256(file) == hashlib.sha256(file.read_bytes()).hexdigest()


def test_a_bit_that_differs_is_seen(hf: Any, file: Path, cache: Path) -> None:
    mine, theirs = load_model(file, "bf16"), load_model(file, "bf16")
    weight = mine[0].state_dict()["model.layers.1.mlp.down_proj.weight"]
    weight[3, 5] = torch.nextafter(weight[3, 5], torch.tensor(9.0, dtype=weight.dtype))
    with pytest.raises(AssertionError, match=r"layers\.1\.mlp\.down_proj"):
        assert_same(mine, theirs)


# Once


def test_the_file_is_read_once(hf: Any, file: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = converted(file, direct(file))
    assert folder == cache / f"{weights_sha256(file)}-{version('transformers')}"
    assert converted(file, never) == folder
    copy = file.with_name("copy.gguf")
    copy.write_bytes(file.read_bytes())
    assert converted(copy, never) == folder, "the name of the file does not matter"
    monkeypatch.setattr("gguf.GGUFReader", never)
    load_model(file)


def test_another_file_or_another_transformers_has_another_folder(
    hf: Any, file: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = converted(file, direct(file))
    other = file.with_name("other.gguf")
    other.write_bytes(file.read_bytes() + b"\0")
    with pytest.raises(AssertionError, match="read again"):
        converted(other, never)
    monkeypatch.setattr("oracle.checkpoints.converted.version", lambda package: "0.0")
    with pytest.raises(AssertionError, match="read again"):
        converted(file, never)
    assert [entry for entry in cache.iterdir() if not entry.name.startswith(".")] == [folder]


def test_of_many_at_once_one_reads_the_file(hf: Any, file: Path, cache: Path) -> None:
    start, reads, folders = threading.Barrier(4), [], []

    def read() -> Any:
        assert not [entry for entry in cache.iterdir() if not entry.name.startswith(".")], "nothing is there before it is whole"
        reads.append(1)
        return read_files(file, "fp32")

    def convert() -> None:
        start.wait()
        folders.append(converted(file, read))

    threads = [threading.Thread(target=convert) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(reads) == 1 and len(folders) == 4 and len(set(folders)) == 1


# Whole or not at all


def spoil(folder: Path, how: str) -> None:
    weights = folder / "model.safetensors"
    content = bytearray(weights.read_bytes())
    if how == "cut":
        weights.write_bytes(content[:-7])
    elif how == "one bit":
        content[-1] ^= 1
        weights.write_bytes(content)
    elif how == "gone":
        (folder / "tokenizer.json").unlink()
    elif how == "more":
        (folder / "adapter_config.json").write_text("{}")
    elif how == "no sums":
        (folder / "sha256.json").unlink()
    else:
        (folder / "sha256.json").write_text('{"model.safe')


@pytest.mark.parametrize("how", ["cut", "one bit", "gone", "more", "no sums", "torn sums"])
def test_a_torn_folder_is_made_again(hf: Any, file: Path, cache: Path, how: str) -> None:
    folder = converted(file, direct(file))
    before = {entry.name: entry.read_bytes() for entry in folder.iterdir()}
    spoil(folder, how)
    with pytest.raises(AssertionError, match="read again"):
        converted(file, never)
    assert converted(file, direct(file)) == folder
    assert {entry.name: entry.read_bytes() for entry in folder.iterdir()} == before


def test_a_killed_process_leaves_nothing_that_is_used_or_stays(hf: Any, file: Path, cache: Path) -> None:
    code = (
        "import os, sys; from pathlib import Path; from oracle.checkpoints.converted import converted\n"
        "converted(Path(sys.argv[1]), lambda: os.kill(os.getpid(), 9))"
    )
    root = str(Path(__file__).parents[1])
    done = subprocess.run([sys.executable, "-c", code, str(file)], env=os.environ | {"PYTHONPATH": root}, check=False)
    assert done.returncode == -9
    torn = cache / f".{weights_sha256(file)}-{version('transformers')}.unfinished"
    torn.mkdir()
    (torn / "model.safetensors").write_bytes(b"half of it")
    folder = converted(file, direct(file))  # the dead process's lock does not hold it up
    assert {entry.name for entry in cache.iterdir() if not entry.name.endswith(".lock")} == {folder.name}
    assert converted(file, never) == folder


def test_a_conversion_that_fails_leaves_nothing(hf: Any, file: Path, cache: Path, tmp_path: Path) -> None:
    short = tmp_path / "short.gguf"
    short.write_bytes(file.read_bytes()[:3000])
    with pytest.raises(CheckpointError, match=r"short\.gguf: cannot be loaded") as caught:
        load_model(short)
    assert "\n" not in str(caught.value)
    assert [entry.name for entry in cache.iterdir() if not entry.name.endswith(".lock")] == []


# What cannot be


def test_a_cache_folder_that_cannot_be_written_is_named(
    hf: Any, file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "taken").write_text("a file, where a folder is needed")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "taken"))
    with pytest.raises(CheckpointError, match=r"taken/attention-oracle/gguf: cannot be written: .*XDG_CACHE_HOME$") as caught:
        load_model(file)
    assert "\n" not in str(caught.value)


def test_a_disk_that_is_full_is_named(hf: Any, file: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from safetensors import SafetensorError

    def full(*_: object, **__: object) -> NoReturn:
        raise SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)")

    monkeypatch.setattr("transformers.modeling_utils.safe_save_file", full)
    with pytest.raises(CheckpointError, match=r"gguf: cannot be written: .*No space left on device.*XDG_CACHE_HOME$"):
        load_model(file)
    assert [entry.name for entry in cache.iterdir() if not entry.name.endswith(".lock")] == []


def test_weights_that_transformers_left_packed_are_not_kept(hf: Any, file: Path, cache: Path) -> None:
    def packed() -> Any:
        model, words = read_files(file, "fp32")
        model.lm_head.weight = torch.nn.Parameter(torch.zeros(96, 34, dtype=torch.uint8), requires_grad=False)
        return model, words

    with pytest.raises(ValueError, match=r"tiny\.gguf: cannot be converted: RuntimeError: .*; convert it to a folder"):
        converted(file, packed)
    assert [entry.name for entry in cache.iterdir() if not entry.name.endswith(".lock")] == []


def test_a_folder_is_not_converted(hf: Any, cache: Path, tmp_path: Path) -> None:
    load_model(save(hf, build(hf, llama(hf)), tmp_path / "tiny"))
    assert not cache.exists()
