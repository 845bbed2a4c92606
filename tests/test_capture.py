"""Capturing q, k and v of a layer, and loading the checkpoint it is a layer of.

The models are tiny, random and built here.  What makes a capture right: exact attention on it, then the layer's own output
projection, gives what the layer itself gives.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import socket
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_models import LAYERS, TINY, build, deepseek3, gemma2, gemma4, gpt_oss, llama, save
from torch import Tensor

from oracle.captured import Capture, load_capture, save_capture
from oracle.checkpoints.capture import Handed, capture, capture_command, record
from oracle.checkpoints.loading import CheckpointError, load_model

TEXT = "Heads, tokens and windows: the same text, the same bits. " * 4
TOKENS = list(range(3, 33))


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    """These models are far too small for threads to help."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def hf() -> Any:
    return pytest.importorskip("transformers")


@pytest.fixture(scope="module")
def folder(hf: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Llama with grouped kv heads and a tokenizer of characters and "th", as save_pretrained leaves them."""
    return save(hf, build(hf, llama(hf)), tmp_path_factory.mktemp("checkpoints") / "tiny-llama")


def exact(h: Handed | Capture) -> Tensor:
    """softmax(q k^T scale) v in fp64 by the kernel contract: (tokens, q_heads, head_dim_v)."""
    q, k, v = (t.double().transpose(0, 1) for t in (h.q, h.k, h.v))
    group = q.shape[0] // k.shape[0]
    s = q @ k.repeat_interleave(group, 0).mT * h.softmax_scale
    if h.softcap:
        s = h.softcap * torch.tanh(s / h.softcap)
    row, key = torch.arange(s.shape[1])[:, None], torch.arange(s.shape[2])
    left, right = h.window
    hidden = torch.zeros(s.shape[1:], dtype=torch.bool)
    hidden |= h.causal & (key > row)
    hidden |= (left >= 0) & (key < row - left)
    hidden |= (right >= 0) & (key > row + right)
    s = s.masked_fill(hidden, -torch.inf)
    if h.sinks is not None:
        s = torch.cat([s, h.sinks.double()[:, None, None].expand(-1, s.shape[1], 1)], 2)
    p = torch.softmax(s, 2)[:, :, : k.shape[1]]
    return (p @ v.repeat_interleave(group, 0)).transpose(0, 1)


def own_output(model: Any, layer: int, tokens: list[int]) -> tuple[Any, Tensor]:
    """The layer's output projection, and what its attention block returns in an ordinary forward pass: (tokens, hidden)."""
    block = model.get_decoder().layers[layer].self_attn
    kept: list[Tensor] = []
    handle = block.register_forward_hook(lambda _module, _args, result: kept.append(result[0][0]))
    with torch.no_grad():
        model(input_ids=torch.tensor([tokens]), use_cache=False)
    handle.remove()
    return block.o_proj, kept[0]


def distance(h: Handed | Capture, projection: Any, own: Tensor, u: float) -> float:
    """Largest |o_proj(exact attention) - own| as a multiple of what rounding allows in an arithmetic of unit roundoff u.

    A logit is wrong by (d + 4) u |q| |k| scale, so p by twice that and n u, relatively; p, the output of attention and that of
    the projection are rounded to u once more, sums over h d terms add h d u32.
    """
    n, heads, d = h.q.shape
    u32 = 2.0**-24
    peak = float(h.q.double().norm(dim=2).max() * h.k.double().norm(dim=2).max()) * abs(h.softmax_scale)
    relative = 2 * (d + 4) * u32 * peak + (n + heads * d) * u32 + 4 * u
    weight = projection.weight.detach().double()
    limit = weight.abs().sum(1) * float(h.v.double().abs().max()) * relative
    out = exact(h).reshape(n, -1) @ weight.T
    if projection.bias is not None:
        out = out + projection.bias.detach().double()
        limit = limit + projection.bias.detach().double().abs() * u
    return float(((out - own.double()).abs() / limit).max())


@pytest.mark.parametrize("layer", [0, 1])
@pytest.mark.parametrize(
    ("config", "attention"),
    # sdpa has neither a soft cap nor sinks
    [(c, "sdpa") for c in (llama, gemma4, deepseek3)] + [(c, "eager") for c in (llama, gemma2, gemma4, gpt_oss, deepseek3)],
)
def test_exact_attention_on_what_is_recorded_gives_the_layers_own_output(
    hf: Any, config: Callable[[Any], Any], layer: int, attention: str
) -> None:
    model = build(hf, config(hf), attention)
    projection, own = own_output(model, layer, TOKENS)
    handed = record(model, TOKENS, layer)
    assert distance(handed, projection, own, 2.0**-24) <= 1
    assert handed.attention == attention
    assert torch.equal(own, own_output(model, layer, TOKENS)[1]), "recording changed the model"
    # The same with one thing wrong must be far off, or the line above says nothing.
    wrong = [replace(handed, causal=False, window=(-1, -1)), replace(handed, softmax_scale=handed.softmax_scale * 1.1)]
    wrong += [replace(handed, window=(handed.window[0] + 1, 0))] if handed.window[0] >= 0 else []
    wrong += [replace(handed, softcap=0.0)] if handed.softcap else []
    wrong += [replace(handed, sinks=None)] if handed.sinks is not None else []
    for other in wrong:
        assert distance(other, projection, own, 2.0**-24) > 10


@pytest.mark.parametrize(
    ("config", "layer", "scale", "window", "softcap", "sinks", "heads", "dims"),
    [
        (llama, 0, 0.25, (-1, -1), 0.0, False, (4, 2), (16, 16)),
        (gemma2, 0, 1 / 3, (7, 0), 5.0, False, (4, 2), (16, 16)),
        (gemma2, 1, 1 / 3, (-1, -1), 5.0, False, (4, 2), (16, 16)),
        (gemma4, 0, 1.0, (7, 0), 0.0, False, (4, 2), (16, 16)),
        (gemma4, 1, 1.0, (-1, -1), 0.0, False, (4, 1), (32, 32)),
        (gpt_oss, 0, 0.25, (7, 0), 0.0, True, (4, 2), (16, 16)),
        (gpt_oss, 1, 0.25, (-1, -1), 0.0, True, (4, 2), (16, 16)),
        (deepseek3, 1, 24**-0.5, (-1, -1), 0.0, False, (4, 4), (24, 16)),
    ],
)
def test_the_layers_settings_are_read_in_the_terms_of_the_contract(
    hf: Any,
    config: Callable[[Any], Any],
    layer: int,
    scale: float,
    window: tuple[int, int],
    softcap: float,
    sinks: bool,
    heads: tuple[int, int],
    dims: tuple[int, int],
) -> None:
    h = record(build(hf, config(hf)), TOKENS, layer)
    assert h.softmax_scale == pytest.approx(scale, rel=1e-15)
    assert (h.causal, h.window, h.softcap) == (True, window, softcap)
    assert h.q.shape == (len(TOKENS), heads[0], dims[0])
    assert h.k.shape == (len(TOKENS), heads[1], dims[0])
    assert h.v.shape == (len(TOKENS), heads[1], dims[1])
    assert (None if h.sinks is None else (h.sinks.dtype, h.sinks.shape)) == ((torch.float32, (4,)) if sinks else None)
    # A text shorter than the window says nothing about it; it is recorded all the same.
    assert record(build(hf, config(hf)), TOKENS[:5], layer).window == window


def test_a_bidirectional_layer_is_not_causal(hf: Any) -> None:
    config = hf.Gemma3TextConfig(**TINY, sliding_window=8, layer_types=LAYERS, use_bidirectional_attention=True)
    model = build(hf, config)
    for layer, window in ((0, (4, 4)), (1, (-1, -1))):  # transformers halves the window and counts it both ways
        h = record(model, TOKENS, layer)
        assert (h.causal, h.window) == (False, window)
        projection, own = own_output(model, layer, TOKENS)
        assert distance(h, projection, own, 2.0**-24) <= 1


def test_layers_that_the_contract_cannot_express_are_refused(hf: Any) -> None:
    chunked = build(hf, hf.Llama4TextConfig(**TINY, attention_chunk_size=8, num_local_experts=2))
    with pytest.raises(CheckpointError, match=r"layer 0: its mask is not causal=True with window \(-1, -1\)"):
        record(chunked, TOKENS, 0)
    own_mechanism = build(hf, hf.BloomConfig(vocab_size=96, hidden_size=32, n_layer=2, n_head=4))
    with pytest.raises(CheckpointError, match="BloomForCausalLM does not use transformers' attention interface"):
        record(own_mechanism, TOKENS, 0)
    hybrid = build(hf, hf.Lfm2Config(**TINY, layer_types=["conv", "full_attention"]))
    with pytest.raises(CheckpointError, match="layer 0 runs no attention that transformers dispatches"):
        record(hybrid, TOKENS, 0)
    assert record(hybrid, TOKENS, 1).q.shape == (30, 4, 16)

    model = build(hf, llama(hf))
    block = model.get_decoder().layers[1].self_attn
    whole = block.forward
    block.forward = lambda *a, **k: whole(*a, **k, position_bias=torch.zeros(1))
    with pytest.raises(CheckpointError, match="layer 1 passes position_bias to attention"):
        record(model, TOKENS, 1)
    block.forward = lambda *a, **k: whole(*a, **{**k, "attention_mask": torch.full((1, 1, 30, 30), -0.5)})
    with pytest.raises(CheckpointError, match="layer 1 adds a bias to its logits"):
        record(model, TOKENS, 1)


def test_a_layer_or_text_out_of_range_is_refused(hf: Any) -> None:
    model = build(hf, llama(hf))
    for layer in (-1, 2):
        with pytest.raises(CheckpointError, match=f"layer {layer} is out of range: the model has layers 0 to 1"):
            record(model, TOKENS, layer)
    with pytest.raises(CheckpointError, match="no tokens"):
        record(model, [], 0)
    with pytest.raises(CheckpointError, match="65 tokens are more than the model's context of 64"):
        record(model, [5] * 65, 0)
    model.set_attn_implementation("flex_attention")
    with pytest.raises(CheckpointError, match="'flex_attention'; a capture needs sdpa or eager"):
        record(model, TOKENS, 0)


@pytest.mark.parametrize("dtype", ["bf16", "fp16", "fp32"])
def test_a_checkpoint_on_disk_is_captured_as_it_runs(folder: Path, dtype: str) -> None:
    c = capture(folder, 1, TEXT, 40, dtype, command="made so")
    assert (c.dtype, c.tokens) == (dtype, 40)
    assert (c.q.shape, c.k.shape, c.v.shape) == ((40, 4, 16), (40, 2, 16), (40, 2, 16)), "kv heads are not repeated"
    assert all(t.is_contiguous() and not t.requires_grad and not t.is_inference() for t in (c.q, c.k, c.v))
    model, tokenizer = load_model(folder, dtype)
    tokens = tokenizer(TEXT)["input_ids"][:40]
    projection, own = own_output(model, 1, tokens)
    assert distance(c, projection, own, {"bf16": 2.0**-8, "fp16": 2.0**-11, "fp32": 2.0**-24}[dtype]) <= 1
    assert c.text_sha256 == hashlib.sha256(TEXT.encode()).hexdigest()
    weights = hashlib.sha256((folder / "model.safetensors").read_bytes()).hexdigest()
    assert c.weights_sha256 == hashlib.sha256(f"{weights}  model.safetensors\n".encode()).hexdigest()
    assert (c.model, c.model_type, c.layer, c.attention, c.command) == ("tiny-llama", "llama", 1, "sdpa", "made so")
    assert (c.torch_version, len(c.tokenizer_sha256)) == (torch.__version__, 64)
    family = c.family
    assert (family.name, family.q_heads, family.kv_heads, family.head_dim, family.scale) == ("tiny-llama-layer01", 4, 2, 16, 0.25)


def test_layers_differ_and_a_rerun_does_not(folder: Path, tmp_path: Path) -> None:
    names = []
    for number, layer in enumerate((0, 1, 1)):
        names.append(tmp_path / f"{number}.safetensors")
        save_capture(capture(folder, layer, TEXT, 40), names[-1])
    assert names[1].read_bytes() == names[2].read_bytes()
    a, b = load_capture(names[0]), load_capture(names[1])
    for name in ("q", "k", "v"):
        assert not torch.equal(getattr(a, name), getattr(b, name))
    assert a.text_sha256 == b.text_sha256


def test_a_short_text_is_taken_whole(folder: Path) -> None:
    assert capture(folder, 0, "four", 40).tokens == 4
    with pytest.raises(CheckpointError, match="tiny-llama: the text has no tokens"):
        capture(folder, 0, "", 40)
    with pytest.raises(CheckpointError, match="max_tokens is 0"):
        capture(folder, 0, "four", 0)
    with pytest.raises(CheckpointError, match="attention 'flash' cannot be captured from; choose sdpa or eager"):
        capture(folder, 0, "four", 4, attention="flash")


def test_a_gguf_file_gives_what_its_safetensors_give(
    hf: Any, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gguf = pytest.importorskip("gguf")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    file = tmp_path / "tiny.gguf"
    model, tokenizer = load_model(folder, "fp32")
    words = [word for word, _ in sorted(tokenizer.get_vocab().items(), key=lambda item: item[1])]
    w = gguf.GGUFWriter(file, "llama")
    w.add_block_count(2)
    w.add_context_length(64)
    w.add_embedding_length(32)
    w.add_feed_forward_length(48)
    w.add_head_count(4)
    w.add_head_count_kv(2)
    w.add_key_length(16)
    w.add_value_length(16)
    w.add_layer_norm_rms_eps(model.config.rms_norm_eps)
    w.add_rope_dimension_count(16)
    w.add_rope_freq_base(10000.0)
    w.add_vocab_size(96)
    w.add_tokenizer_model("gpt2")
    w.add_tokenizer_pre("smollm")
    w.add_token_list(words)
    w.add_token_types([gguf.TokenType.CONTROL if number < 3 else gguf.TokenType.NORMAL for number in range(96)])
    w.add_token_merges(["t h"])
    w.add_pad_token_id(0)
    w.add_bos_token_id(1)
    w.add_eos_token_id(2)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, 2)
    for name, tensor in model.state_dict().items():
        array = tensor.float().numpy()
        if name.endswith(("q_proj.weight", "k_proj.weight")):  # GGUF interleaves the two halves that RoPE rotates
            array = array.reshape(-1, 2, 8, 32).swapaxes(1, 2).reshape(array.shape)
        w.add_tensor(names.get_name(name, try_suffixes=(".weight",)), array)
    w.write_header_to_file()
    w.write_kv_data_to_file()
    w.write_tensors_to_file()
    w.close()
    mine, theirs = capture(file, 1, TEXT, 40, "fp32"), capture(folder, 1, TEXT, 40, "fp32")
    for name in ("q", "k", "v"):
        assert torch.equal(getattr(mine, name), getattr(theirs, name))
    assert (mine.model, mine.weights_sha256) == ("tiny", hashlib.sha256(file.read_bytes()).hexdigest())

    short = tmp_path / "short.gguf"
    short.write_bytes(file.read_bytes()[:3000])
    with pytest.raises(CheckpointError, match=r"short\.gguf: cannot be loaded"):
        load_model(short)


def spoiled(folder: Path, where: Path, **files: str | bytes | None) -> Path:
    """A copy of `folder` at `where` with files replaced, or left out where None; `__` in a name stands for a dot."""
    where.mkdir()
    for file in folder.iterdir():
        (where / file.name).write_bytes(file.read_bytes())
    for name, content in files.items():
        file = where / name.replace("__", ".")
        if content is None:
            file.unlink()
        else:
            file.write_bytes(content.encode() if isinstance(content, str) else content)
    return where


def test_what_is_no_checkpoint_is_said_in_one_line(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"nowhere: no such file or folder"):
        load_model(tmp_path / "nowhere")
    with pytest.raises(CheckpointError, match=r"not a checkpoint: it has no config\.json"):
        load_model(tmp_path)
    (tmp_path / "notes.txt").write_text("GGML")
    with pytest.raises(CheckpointError, match=r"notes\.txt: not a checkpoint: a file must be GGUF"):
        load_model(tmp_path / "notes.txt")
    bare = spoiled(folder, tmp_path / "bare", model__safetensors=None)
    with pytest.raises(CheckpointError, match=r"bare: not a checkpoint: it has no \.safetensors file"):
        load_model(bare)
    with pytest.raises(CheckpointError, match="dtype 'int3' is unknown; choose from bf16, fp16, fp32"):
        load_model(folder, "int3")
    broken: dict[str, dict[str, str | bytes | None]] = {
        "cut": {"model__safetensors": (folder / "model.safetensors").read_bytes()[:1000]},
        "torn": {"config__json": "{"},
        "odd": {"config__json": '{"model_type": "no such type"}'},
        "mute": {"tokenizer__json": None, "tokenizer_config__json": None},
    }
    for name, files in broken.items():
        with pytest.raises(CheckpointError, match=f"{name}: cannot be loaded: ") as caught:
            load_model(spoiled(folder, tmp_path / name, **files))
        assert "\n" not in str(caught.value)


def test_a_device_that_is_not_here_is_said_in_one_line(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for device in ("cuda", "auto"):
        with pytest.raises(CheckpointError, match=f"device {device}: there is no CUDA device here; use --device cpu"):
            load_model(folder, device=device)
    with pytest.raises(CheckpointError, match="device 'tpu' is unknown; choose from cpu, cuda, auto"):
        load_model(folder, device="tpu")


def test_weights_that_are_missing_are_not_made_up(folder: Path, tmp_path: Path) -> None:
    from safetensors.torch import load_file, save

    lost = "model.layers.1.self_attn.q_proj.weight"
    weights = load_file(folder / "model.safetensors")
    del weights[lost]
    holed = spoiled(folder, tmp_path / "holed", model__safetensors=save(weights, {"format": "pt"}))
    with pytest.raises(CheckpointError, match=f"holed: 1 weights are missing or of another shape, {re.escape(lost)} first"):
        load_model(holed)


def test_pickled_weights_and_foreign_code_are_never_run(folder: Path, tmp_path: Path) -> None:
    marker = tmp_path / "ran"
    spell = f"cposix\nsystem\n(S'touch {marker}'\ntR.".encode()
    where = spoiled(folder, tmp_path / "pickled", model__safetensors=None, pytorch_model__bin=spell)
    with pytest.raises(CheckpointError, match=r"pickled weights \(pytorch_model\.bin\) are never read"):
        load_model(where)
    config = json.loads((folder / "config.json").read_text()) | {
        "model_type": "own",
        "auto_map": {"AutoConfig": "own.Config", "AutoModelForCausalLM": "own.Model"},
    }
    code = f"open({str(marker)!r}, 'w')\nfrom transformers import LlamaConfig as Config, LlamaForCausalLM as Model\n"
    where = spoiled(folder, tmp_path / "coded", config__json=json.dumps(config), own__py=code)
    with pytest.raises(CheckpointError, match="coded: cannot be loaded"):
        load_model(where)
    with pytest.raises(CheckpointError, match="attention 'someone/kernels' is unknown to transformers; choose from"):
        load_model(folder, attention="someone/kernels")
    for asking in ({"_attn_implementation": "someone/kernels"}, {"text_config": [{"attn_implementation": "someone/kernels"}]}):
        config = json.loads((folder / "config.json").read_text()) | asking
        where = spoiled(folder, tmp_path / next(iter(asking)), config__json=json.dumps(config))
        with pytest.raises(CheckpointError, match=r"its config\.json asks for attention 'someone/kernels'"):
            load_model(where)
    assert not marker.exists()


def test_without_transformers_the_error_says_what_to_install(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(CheckpointError, match=r"pip install 'attention-oracle\[checkpoints\]'"):
        load_model(folder)


def test_loading_stays_off_the_network(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tried: list[object] = []
    monkeypatch.setattr(socket.socket, "connect", lambda _socket, address: tried.append(address))
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    load_model(folder)
    assert os.environ["HF_HUB_OFFLINE"] == "1"
    assert tried == []


def test_the_command_that_is_kept_names_no_folder() -> None:
    command = capture_command("/some/where/model.gguf", 3, "texts/my file", 640, "bf16")
    assert command == "oracle capture model.gguf --layer 3 --text 'my file' --max-tokens 640 --dtype bf16"
