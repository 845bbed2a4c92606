"""Captured attention inputs: q, k and v of one layer of a real model, and the file that holds them.

A capture is one sequence.  The file is a safetensors file of the tensors `q`, `k`, `v` (and `sinks`), with everything else as
strings in its metadata (`docs/captures.md` lists them), so that reading one needs neither the checkpoint nor transformers.

    python -m oracle.captured FILE...    prints how peaked the attention in each file is
"""

from __future__ import annotations

import json
import math
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from oracle.errors import InputError
from oracle.families import Family

if TYPE_CHECKING:
    from torch import Tensor

VERSION = "1"
_TEXTS = (
    "model",
    "model_type",
    "attention",
    "text_sha256",
    "weights_sha256",
    "tokenizer_sha256",
    "transformers_version",
    "torch_version",
    "command",
)  # fields that are strings and stand in the metadata under their own names
_HEADER_NAMES = {"torch.bfloat16": "BF16", "torch.float16": "F16", "torch.float32": "F32"}
_DTYPE_NAMES = {"torch.bfloat16": "bf16", "torch.float16": "fp16", "torch.float32": "fp32"}


class CaptureError(InputError):
    """A capture or its file is not what it should be; one line, with the file where there is one."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Capture:
    """What one layer hands to attention for one sequence: after RoPE and q/k norm, before kv heads are repeated.

    Shapes: q (tokens, q_heads, head_dim); k (tokens, kv_heads, head_dim); v (tokens, kv_heads, head_dim_v), one dtype of
    bf16, fp16 and fp32, contiguous, on the CPU, finite; sinks (q_heads,) float32.
    Raises CaptureError when made of anything else.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    softmax_scale: float  # multiplies q.k
    causal: bool
    window: tuple[int, int] = (-1, -1)  # (left, right), both included, -1 = no limit
    softcap: float = 0.0  # 0 = off
    sinks: Tensor | None = None
    model: str = ""  # name of the checkpoint's file or folder, without where it lay
    model_type: str = ""  # as the checkpoint's configuration has it: "llama", "gemma4_text"
    layer: int = 0  # from 0
    attention: str = ""  # attention of the layers below, on which q, k and v depend: "sdpa" or "eager"
    text_sha256: str = ""  # of the text's UTF-8 bytes, whole, however many tokens were used
    weights_sha256: str = ""
    tokenizer_sha256: str = ""
    transformers_version: str = ""
    torch_version: str = ""
    command: str = ""  # the command that makes this capture again

    def __post_init__(self) -> None:
        if problem := _problem(self):
            raise CaptureError(problem)

    @property
    def tokens(self) -> int:
        """Length of the sequence."""
        return self.q.shape[0]

    @property
    def dtype(self) -> str:
        """Format of q, k and v: "bf16", "fp16" or "fp32"."""
        return _DTYPE_NAMES[str(self.q.dtype)]

    @property
    def family(self) -> Family:
        """The layer type, named after model and layer."""
        return Family(
            name=f"{self.model}-layer{self.layer:02d}",
            q_heads=self.q.shape[1],
            kv_heads=self.k.shape[1],
            head_dim=self.q.shape[2],
            head_dim_v=self.v.shape[2],
            scale=self.softmax_scale,
            causal=self.causal,
            window=self.window,
            softcap=self.softcap,
            sinks=self.sinks is not None,
            source=f"{self.model}, layer {self.layer}, captured",
        )


def _problem(c: Capture) -> str | None:
    """What keeps `c` from being a capture, or None."""
    import torch

    named = {"q": c.q, "k": c.k, "v": c.v}
    for name, t in named.items():
        if t.ndim != 3 or 0 in t.shape:
            return f"{name} has shape {tuple(t.shape)}, expected (tokens, heads, head_dim), none of them 0"
    if len({t.shape[0] for t in named.values()}) != 1:
        return f"q, k and v have {c.q.shape[0]}, {c.k.shape[0]} and {c.v.shape[0]} tokens, expected one number"
    if c.k.shape[1] != c.v.shape[1] or c.q.shape[1] % c.k.shape[1]:
        return f"q, k and v have {c.q.shape[1]}, {c.k.shape[1]} and {c.v.shape[1]} heads: kv heads must be equal and divide q's"
    if c.q.shape[2] != c.k.shape[2]:
        return f"q has head_dim {c.q.shape[2]} but k has {c.k.shape[2]}"
    dtypes = {str(t.dtype) for t in named.values()}
    if len(dtypes) != 1 or not dtypes <= _DTYPE_NAMES.keys():
        return f"q, k and v are {', '.join(str(t.dtype) for t in named.values())}, expected one of bf16, fp16, fp32"
    if c.sinks is not None:
        if c.sinks.shape != (c.q.shape[1],) or c.sinks.dtype != torch.float32:
            return f"sinks are {c.sinks.dtype} {tuple(c.sinks.shape)}, expected float32 ({c.q.shape[1]},), one for each q head"
        named["sinks"] = c.sinks
    for name, t in named.items():
        if t.device.type != "cpu" or not t.is_contiguous():
            return f"{name} is not a contiguous CPU tensor"
        if not bool(torch.isfinite(t).all()):
            return f"{name} has values that are not finite"
    if not math.isfinite(c.softmax_scale):
        return f"softmax_scale is {c.softmax_scale}, expected a finite number"
    if not 0 <= c.softcap < math.inf:
        return f"softcap is {c.softcap}, expected 0 (off) or a positive number"
    if len(c.window) != 2 or min(c.window) < -1:
        return f"window is {c.window}, expected (left, right), each -1 (no limit) or more"
    if c.layer < 0:
        return f"layer is {c.layer}, expected 0 or more"
    return None


def save_capture(capture: Capture, file: str | os.PathLike[str]) -> None:
    """`file` holds `capture`; the same capture gives the same bytes.  A file already there is replaced whole."""
    import torch

    meta = {name: getattr(capture, name) for name in _TEXTS} | {
        "capture_version": VERSION,
        "softmax_scale": float(capture.softmax_scale).hex(),
        "causal": "true" if capture.causal else "false",
        "window": f"{capture.window[0]},{capture.window[1]}",
        "softcap": float(capture.softcap).hex(),
        "layer": str(capture.layer),
    }
    # Written here because the safetensors library writes its metadata in an order that changes from run to run.
    tensors = [("q", capture.q), ("k", capture.k), ("v", capture.v)]
    if capture.sinks is not None:
        tensors.insert(0, ("sinks", capture.sinks))  # the widest dtype first keeps every tensor aligned
    header: dict[str, object] = {"__metadata__": dict(sorted(meta.items()))}
    blobs = []
    end = 0
    for name, t in tensors:
        blob = t.detach().view(torch.uint8).numpy().tobytes()
        header[name] = {"dtype": _HEADER_NAMES[str(t.dtype)], "shape": list(t.shape), "data_offsets": [end, end + len(blob)]}
        blobs.append(blob)
        end += len(blob)
    head = json.dumps(header, separators=(",", ":")).encode()
    head += b" " * (-len(head) % 8)
    target = Path(file)
    part = target.with_name(f"{target.name}.{os.getpid()}.part")
    try:
        part.write_bytes(len(head).to_bytes(8, "little") + head + b"".join(blobs))
        part.replace(target)
    finally:
        part.unlink(missing_ok=True)


def load_capture(file: str | os.PathLike[str]) -> Capture:
    """The capture in `file`, checked.  Raises CaptureError, naming the file, for anything that is not one."""
    from safetensors import SafetensorError, safe_open

    where = Path(file)
    if not where.is_file():
        raise CaptureError(f"{where}: no such file")
    try:
        with safe_open(where, framework="pt") as opened:
            meta: dict[str, str] = opened.metadata() or {}
            tensors: dict[str, Tensor] = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118 (no mapping)
    except (SafetensorError, OSError) as error:
        raise CaptureError(f"{where}: not a safetensors file: {error}") from error
    version = meta.get("capture_version")
    if version != VERSION:
        raise CaptureError(f"{where}: not a capture of version {VERSION}: its metadata has capture_version {version!r}")
    missing = [name for name in ("q", "k", "v") if name not in tensors]
    unknown = sorted(tensors.keys() - {"q", "k", "v", "sinks"})
    if missing or unknown:
        raise CaptureError(f"{where}: expected tensors q, k, v and perhaps sinks, got {sorted(tensors)}")
    try:
        left, right = meta["window"].split(",")
        return Capture(
            q=tensors["q"],
            k=tensors["k"],
            v=tensors["v"],
            sinks=tensors.get("sinks"),
            **_texts(meta),
            softmax_scale=float.fromhex(meta["softmax_scale"]),
            causal={"true": True, "false": False}[meta["causal"]],
            window=(int(left), int(right)),
            softcap=float.fromhex(meta["softcap"]),
            layer=int(meta["layer"]),
        )
    except CaptureError as error:
        raise CaptureError(f"{where}: {error}") from error
    except (KeyError, ValueError) as error:
        raise CaptureError(f"{where}: metadata missing or malformed: {error}") from error


def _texts(meta: dict[str, str]) -> dict[str, Any]:
    return {name: meta[name] for name in _TEXTS}


def shipped() -> dict[str, Path]:
    """The captures that come with the package: name without suffix -> file, in order of name."""
    return {file.stem: file for file in sorted((Path(__file__).parent / "captures").glob("*.safetensors"))}


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """How peaked the attention of a capture is.  Over all heads and all rows but the first, which sees one key."""

    logit_sd: float  # standard deviation of the logits within a row, root mean square over rows
    largest_logit: float  # magnitude, over all live pairs
    largest_p: float  # largest probability of a row, mean over rows
    first_p: float  # probability of the first token, mean over rows
    first_p_heads: tuple[float, float]  # the same for the head with the least and the head with the most
    keys: float  # exp(entropy), the number of keys a row attends to, median over rows


def figures(capture: Capture) -> Figures:
    """The figures of `capture`, in fp64.  Logits are q.k times the scale, then capped; a sink takes part in the softmax."""
    import torch

    n, heads = capture.tokens, capture.q.shape[1]
    if n < 2:
        raise CaptureError("figures need a capture of two tokens or more")
    pos = torch.arange(n)
    live = visible(pos[:, None], pos[None, :], capture.causal, capture.window)
    count = live.sum(1).double()
    variances, largest, first, keys, peak = [], [], [], [], 0.0
    for head in range(heads):
        k = capture.k[:, head // (heads // capture.k.shape[1])].double()
        z = capture.q[:, head].double() @ k.T * capture.softmax_scale
        if capture.softcap:
            z = capture.softcap * torch.tanh(z / capture.softcap)
        peak = max(peak, float(z[live].abs().max()))
        mean = z.where(live, torch.zeros(())).sum(1) / count
        variances.append((z - mean[:, None]).square().where(live, torch.zeros(())).sum(1) / count)
        z = z.masked_fill(~live, -math.inf)
        if capture.sinks is not None:
            z = torch.cat([z, capture.sinks[head].double().expand(n, 1)], 1)
        p = torch.softmax(z, 1)
        largest.append(p[:, :n].amax(1))
        first.append(p[:, 0])
        keys.append(torch.special.entr(p).sum(1).exp())
    first_heads = torch.stack(first)[:, 1:].mean(1)
    return Figures(
        logit_sd=float(torch.stack(variances)[:, 1:].mean().sqrt()),
        largest_logit=peak,
        largest_p=float(torch.stack(largest)[:, 1:].mean()),
        first_p=float(first_heads.mean()),
        first_p_heads=(float(first_heads.min()), float(first_heads.max())),
        keys=float(torch.stack(keys)[:, 1:].median()),
    )


def visible(row: Tensor, key: Tensor, causal: bool, window: tuple[int, int]) -> Tensor:
    """True where the query at position `row` sees the key at position `key`, by the kernel contract; shapes broadcast."""
    left, right = window
    seen = key <= row if causal else (key == key) & (row == row)
    if left >= 0:
        seen = seen & (key >= row - left)
    if right >= 0:
        seen = seen & (key <= row + right)
    return seen


HEADING = (
    "| capture | tokens | logit sd | largest logit | largest p | p of token 0 | head with least, most | keys |\n"
    "|---|---|---|---|---|---|---|---|"
)


def table_row(name: str, tokens: int, f: Figures) -> str:
    """One row under HEADING."""
    return (
        f"| {name} | {tokens} | {f.logit_sd:.2f} | {f.largest_logit:.1f} | {f.largest_p:.3f} | {f.first_p:.3f} "
        f"| {f.first_p_heads[0]:.3f}, {f.first_p_heads[1]:.3f} | {f.keys:.1f} |"
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Prints the figures of each file named (all shipped captures without any).  Returns 0, or 2 when one cannot be read."""
    files = [Path(a) for a in (sys.argv[1:] if arguments is None else arguments)] or list(shipped().values())
    try:
        rows = [table_row(file.stem, (c := load_capture(file)).tokens, figures(c)) for file in files]
    except CaptureError as error:
        print(f"oracle.captured: {error}", file=sys.stderr)
        return 2
    print("\n".join([HEADING, *rows]))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
