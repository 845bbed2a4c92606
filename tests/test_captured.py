"""The file that holds a capture, the figures of one, and the captures that are shipped."""

from __future__ import annotations

import hashlib
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from oracle import captured
from oracle.captured import Capture, CaptureError, figures, load_capture, save_capture, shipped
from oracle.checkpoints.capture import capture_command

ROOT = Path(__file__).parent.parent


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    """The figures are of small matrices: on a busy machine threads only wait for each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def made(**changes: Any) -> Capture:
    """A capture of 6 tokens with everything set, changed."""
    g = torch.Generator().manual_seed(1)
    base: dict[str, Any] = {
        "q": torch.randn(6, 4, 8, generator=g).bfloat16(),
        "k": torch.randn(6, 2, 8, generator=g).bfloat16(),
        "v": torch.randn(6, 2, 16, generator=g).bfloat16(),
        "softmax_scale": 0.1,
        "causal": True,
        "window": (3, 0),
        "softcap": 30.0,
        "sinks": torch.randn(4, generator=g),
        "model": "made",
        "model_type": "none",
        "layer": 7,
        "attention": "eager",
        "text_sha256": "t",
        "weights_sha256": "w",
        "tokenizer_sha256": "k",
        "transformers_version": "5",
        "torch_version": "2",
        "command": 'with "quotes" and ünicode',
    }
    return Capture(**(base | changes))


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"sinks": None, "causal": False, "window": (-1, -1), "softcap": 0.0},
        {name: getattr(made(), name).float() for name in ("q", "k", "v")},
        {name: getattr(made(), name).half() for name in ("q", "k", "v")},
    ],
    ids=["all", "plain", "fp32", "fp16"],
)
def test_a_file_holds_all_of_a_capture_in_the_same_bytes_every_time(changes: dict[str, Any], tmp_path: Path) -> None:
    before = made(**changes)
    save_capture(before, tmp_path / "a.safetensors")
    after = load_capture(tmp_path / "a.safetensors")
    for field in fields(Capture):
        x, y = getattr(before, field.name), getattr(after, field.name)
        if isinstance(x, Tensor):
            assert x.dtype == y.dtype
            assert torch.equal(x, y)
        else:
            assert x == y
    save_capture(after, tmp_path / "b.safetensors")
    assert (tmp_path / "a.safetensors").read_bytes() == (tmp_path / "b.safetensors").read_bytes()
    assert sorted(file.name for file in tmp_path.iterdir()) == ["a.safetensors", "b.safetensors"]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"q": torch.zeros(6, 32)}, "q has shape (6, 32)"),
        ({"v": torch.zeros(6, 0, 8)}, "v has shape (6, 0, 8)"),
        ({"k": made().k[:5].clone()}, "6, 5 and 6 tokens"),
        ({"q": torch.zeros(6, 3, 8).bfloat16()}, "3, 2 and 2 heads"),
        ({"v": torch.zeros(6, 1, 8).bfloat16()}, "4, 2 and 1 heads"),
        ({"k": torch.zeros(6, 2, 9).bfloat16()}, "head_dim 8 but k has 9"),
        ({"k": torch.zeros(6, 2, 8)}, "torch.bfloat16, torch.float32, torch.bfloat16"),
        ({name: getattr(made(), name).double() for name in ("q", "k", "v")}, "expected one of bf16, fp16, fp32"),
        ({"sinks": torch.zeros(2)}, "sinks are torch.float32 (2,), expected float32 (4,)"),
        ({"sinks": torch.zeros(4).double()}, "sinks are torch.float64"),
        ({"sinks": torch.tensor([0.0, 0, 0, float("inf")])}, "sinks has values that are not finite"),
        ({"v": torch.full((6, 2, 8), float("nan")).bfloat16()}, "v has values that are not finite"),
        ({"q": made().q.transpose(0, 1).contiguous().transpose(0, 1)}, "q is not a contiguous CPU tensor"),
        ({"softmax_scale": float("nan")}, "softmax_scale is nan"),
        ({"softcap": -1.0}, "softcap is -1.0"),
        ({"softcap": float("nan")}, "softcap is nan"),
        ({"window": (-2, 0)}, "window is (-2, 0)"),
        ({"layer": -1}, "layer is -1"),
    ],
)
def test_what_is_no_capture_cannot_be_made(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(CaptureError, match=re.escape(message)):
        made(**changes)


def test_what_is_no_capture_file_is_said_with_its_name(tmp_path: Path) -> None:
    from safetensors.torch import save_file

    file = tmp_path / "c.safetensors"
    save_capture(made(), file)
    good = file.read_bytes()
    meta = json.loads(good[8 : 8 + int.from_bytes(good[:8], "little")])["__metadata__"]
    tensors = {"q": made().q, "k": made().k, "v": made().v}

    def expect(message: str) -> None:
        with pytest.raises(CaptureError, match=f"c.safetensors: {message}"):
            load_capture(file)

    for size in (0, 7, 100, len(good) - 1):
        file.write_bytes(good[:size])
        expect("not a safetensors file")
    save_file(tensors, file)
    expect("not a capture of version 1: its metadata has capture_version None")
    save_file(tensors, file, meta | {"capture_version": "2"})
    expect("not a capture of version 1: its metadata has capture_version '2'")
    for lost in tensors:
        save_file({name: t for name, t in tensors.items() if name != lost}, file, meta)
        expect("expected tensors q, k, v")
    save_file(tensors | {"bias": torch.zeros(1)}, file, meta)
    expect("expected tensors q, k, v")
    save_file(tensors | {"q": torch.zeros(6, 5, 8).bfloat16()}, file, meta)
    expect("q, k and v have 5, 2 and 2 heads")
    for name in meta:
        save_file(tensors, file, {other: value for other, value in meta.items() if other != name})
        expect("metadata missing or malformed" if name != "capture_version" else "not a capture")
    for name, value in {"window": "3", "softcap": "off", "causal": "True", "layer": "1.5", "softmax_scale": ""}.items():
        save_file(tensors, file, meta | {name: value})
        expect("metadata missing or malformed")
    save_file(tensors, file, meta | {"softmax_scale": "inf"})
    expect("softmax_scale is inf")
    with pytest.raises(CaptureError, match="lost: no such file"):
        load_capture(tmp_path / "lost")


def test_figures_are_those_of_the_softmax() -> None:
    n = 9
    flat = {"q": torch.zeros(n, 2, 4), "k": torch.ones(n, 1, 4), "v": torch.ones(n, 1, 4), "softcap": 0.0, "window": (-1, -1)}
    f = figures(made(**flat, sinks=None))
    mean = sum(1 / i for i in range(2, n + 1)) / (n - 1)
    assert (f.logit_sd, f.largest_logit) == (0.0, 0.0)
    assert (f.largest_p, f.first_p, f.keys) == pytest.approx((mean, mean, 5.0))
    with_sink = figures(made(**flat, sinks=torch.zeros(2)))
    assert with_sink.largest_p == pytest.approx(sum(1 / (i + 1) for i in range(2, n + 1)) / (n - 1))
    peaked = flat | {"q": torch.ones(n, 2, 4), "k": 50.0 * (torch.arange(n) == 0)[:, None, None].expand(n, 1, 4).contiguous()}
    f = figures(made(**peaked, sinks=None, softmax_scale=0.5))
    assert (f.largest_logit, f.largest_p, f.first_p, f.first_p_heads) == (100.0, 1.0, 1.0, (1.0, 1.0))
    two = figures(made(**(peaked | {"window": (1, 0)}), sinks=None, softmax_scale=0.5))
    assert two.first_p == pytest.approx(1 / (n - 1)), "past the window the first token is not seen"


SHIPPED: dict[str, tuple[int, int, int, int, float, Path]] = {  # name -> tokens, heads, kv heads, head dim, scale, weights' hash
    "gemma4-mini-layer03": (256, 8, 1, 512, 1.0, ROOT / "checkpoints" / "gemma4-mini" / "model.safetensors"),
    "smollm2-layer00": (640, 9, 3, 64, 0.125, ROOT / "ci" / "fetch_smollm2.sh"),
    "smollm2-layer18": (640, 9, 3, 64, 0.125, ROOT / "ci" / "fetch_smollm2.sh"),
}


def test_the_shipped_captures_are_those_of_the_document(capsys: pytest.CaptureFixture[str]) -> None:
    document = (ROOT / "docs" / "captures.md").read_text()
    assert list(shipped()) == list(SHIPPED)
    assert captured.main([]) == 0
    table = capsys.readouterr().out
    assert table in document
    for name, file in shipped().items():
        c = load_capture(file)
        tokens, heads, kv_heads, dim, scale, weights = SHIPPED[name]
        assert (c.tokens, c.dtype, c.layer, c.softmax_scale, c.causal) == (tokens, "bf16", int(name[-2:]), scale, True)
        assert (c.q.shape[1:], c.k.shape[1:], c.v.shape[1:]) == ((heads, dim), (kv_heads, dim), (kv_heads, dim))
        assert f"{hashlib.sha256(file.read_bytes()).hexdigest()}  oracle/captures/{file.name}" in document
        assert c.text_sha256 == hashlib.sha256((ROOT / "LICENSE").read_bytes()).hexdigest(), "a clone has the text"
        if weights.suffix == ".sh":
            assert c.weights_sha256 in weights.read_text()
            assert c.command == capture_command(f"{c.model}.gguf", c.layer, "LICENSE", tokens, "bf16")
        else:
            line = f"{hashlib.sha256(weights.read_bytes()).hexdigest()}  {weights.name}\n"
            assert c.weights_sha256 == hashlib.sha256(line.encode()).hexdigest()
            assert c.command == capture_command(c.model, c.layer, "LICENSE", tokens, "bf16")
        assert c.command in document
        assert file.stat().st_size < 2.7e6
    _, flat, peaked = ([cell.strip() for cell in row.split("|")] for row in table.splitlines()[2:])
    assert float(flat[8]) > 100 > 10 > float(peaked[8]), "keys a row attends to"
    assert float(flat[6]) < 0.01 < 0.5 < float(peaked[6]), "probability of the first token"


def test_figures_of_a_bad_file_are_an_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert captured.main([str(tmp_path / "none")]) == 2
    assert "none: no such file" in capsys.readouterr().err


def test_reading_a_capture_needs_no_transformers() -> None:
    code = (
        "import sys; sys.modules['transformers'] = None\nfrom oracle.captured import *\n"
        "print([load_capture(f).family.q_heads for f in shipped().values()])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    assert done.stdout == "[8, 9, 9]\n"
