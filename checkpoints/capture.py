"""Capturing what one layer of a real model hands to attention."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Any

from oracle.captured import Capture, CaptureError, visible
from oracle.checkpoints.loading import CheckpointError, load_model, tokenizer_sha256, transformers, weights_sha256

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedModel

# Arguments of a transformers attention function that a capture holds, or that change nothing for one whole sequence without
# a cache in evaluation mode.  `indices` repeats what the mask says.
_HELD = {"scaling", "sliding_window", "softcap", "s_aux", "is_causal"}
_IDLE = {
    "dropout",
    "position_ids",
    "cache",
    "use_cache",
    "output_attentions",
    "output_hidden_states",
    "output_router_logits",
    "indices",
    "cu_seq_lens_q",
    "cu_seq_lens_k",
    "max_length_q",
    "max_length_k",
}


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Handed:
    """What a layer handed to attention, with the names and shapes of `oracle.captured.Capture`."""

    q: Tensor
    k: Tensor
    v: Tensor
    softmax_scale: float
    causal: bool
    window: tuple[int, int]
    softcap: float
    sinks: Tensor | None
    attention: str


def capture(
    path: str | os.PathLike[str],
    layer: int,
    text: str,
    max_tokens: int = 640,
    dtype: str = "bf16",
    *,
    attention: str | None = None,
    command: str = "",
) -> Capture:
    """What `layer` (from 0) of the checkpoint at `path` hands to attention for the first `max_tokens` tokens of `text`.

    One forward pass of one sequence, in `dtype` ("bf16", "fp16", "fp32") on the CPU, with the layers below using `attention`
    ("sdpa", "eager"; None is transformers' choice for the model).  Special tokens are added as the tokenizer does by default.
    Raises CheckpointError.
    """
    where = Path(path)
    if max_tokens < 1:
        raise CheckpointError(f"max_tokens is {max_tokens}, expected 1 or more")
    if attention not in (None, "sdpa", "eager"):
        raise CheckpointError(f"attention {attention!r} cannot be captured from; choose sdpa or eager")
    model, tokenizer = load_model(where, dtype, attention=attention)
    import torch

    tokens = tokenizer(text, truncation=True, max_length=max_tokens)["input_ids"]
    try:
        handed = record(model, tokens, layer)
        return Capture(
            q=handed.q,
            k=handed.k,
            v=handed.v,
            sinks=handed.sinks,
            softmax_scale=handed.softmax_scale,
            causal=handed.causal,
            window=handed.window,
            softcap=handed.softcap,
            model=where.resolve().name.removesuffix(".gguf"),
            model_type=model.config.get_text_config().model_type,
            layer=layer,
            attention=handed.attention,
            text_sha256=sha256(text.encode()).hexdigest(),
            weights_sha256=weights_sha256(where),
            tokenizer_sha256=tokenizer_sha256(tokenizer),
            transformers_version=transformers().__version__,
            torch_version=torch.__version__,
            command=command,
        )
    except (CheckpointError, CaptureError) as error:
        raise CheckpointError(f"{where}: {error}") from error


def capture_command(path: str | os.PathLike[str], layer: int, text: str | os.PathLike[str], max_tokens: int, dtype: str) -> str:
    """The `oracle capture` command of these arguments, `text` being a file, without the folders the files lie in.

    Folders differ from machine to machine, and a capture made again should have the same bytes.
    """
    words = [
        "oracle",
        "capture",
        Path(path).resolve().name,
        "--layer",
        str(layer),
        "--text",
        Path(text).name,
        "--max-tokens",
        str(max_tokens),
        "--dtype",
        dtype,
    ]
    return shlex.join(words)


def record(model: PreTrainedModel, tokens: Sequence[int], layer: int) -> Handed:
    """What `layer` (from 0) of `model` hands to attention for the one sequence of token ids `tokens`.

    The model runs on its own device up to that layer, with the attention it is set to, which must be "sdpa" or "eager", and is
    as before afterwards.  Raises CheckpointError: layer or token count out of range, attention that the kernel contract
    cannot express, or none that transformers dispatches.
    """
    import torch

    config = model.config.get_text_config()
    if not 0 <= layer < config.num_hidden_layers:
        raise CheckpointError(f"layer {layer} is out of range: the model has layers 0 to {config.num_hidden_layers - 1}")
    if not tokens:
        raise CheckpointError("the text has no tokens")
    limit = getattr(config, "max_position_embeddings", None)
    if limit is not None and len(tokens) > limit:
        raise CheckpointError(f"{len(tokens)} tokens are more than the model's context of {limit}")
    recorder = _Recorder(layer, config._attn_implementation)
    with recorder.installed(model), torch.inference_mode():
        try:
            model(input_ids=torch.tensor([list(tokens)], device=model.device), use_cache=False)
        except _Done:
            pass
        else:
            raise CheckpointError(f"layer {layer} runs no attention that transformers dispatches, so it cannot be recorded")
    return recorder.handed()


class _Done(Exception):
    """The layer was reached: the rest of the forward pass is not needed."""


class _Recorder:
    """Stands in for the attention function of a model: keeps the arguments of one layer, passes the others on."""

    def __init__(self, layer: int, attention: str) -> None:
        if attention not in ("sdpa", "eager"):
            raise CheckpointError(f"the model's attention is {attention!r}; a capture needs sdpa or eager")
        self.layer = layer
        self.attention = attention
        self.args: dict[str, Any] = {}
        self.module: Any = None

    @contextmanager
    def installed(self, model: PreTrainedModel) -> Iterator[None]:
        """Inside, `model` calls this recorder; after, what it called before."""
        from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, AttentionMaskInterface
        from transformers.modeling_utils import AttentionInterface

        # One name for each attention: transformers chooses the form of the mask by it.
        name = f"oracle_capture_{self.attention}"
        AttentionInterface.register(name, self)
        AttentionMaskInterface.register(name, ALL_MASK_ATTENTION_FUNCTIONS[self.attention])
        model.set_attn_implementation(name)
        try:
            if model.config.get_text_config()._attn_implementation != name:
                raise CheckpointError(f"{type(model).__name__} does not use transformers' attention interface")
            yield
        finally:
            model.set_attn_implementation(self.attention)
            AttentionInterface.register(name, _absent)

    def __call__(self, module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **rest: Any) -> Any:
        if getattr(module, "layer_idx", None) == self.layer:
            self.module = module
            self.args = {"query": query, "key": key, "value": value, "attention_mask": attention_mask, **rest}
            raise _Done
        from transformers.integrations.sdpa_attention import sdpa_attention_forward

        if self.attention == "eager":
            # Each model file has its own, which is what it falls back on when asked for "eager".
            function = sys.modules[type(module).__module__].eager_attention_forward
        else:
            function = sdpa_attention_forward
        return function(module, query, key, value, attention_mask, **rest)

    def handed(self) -> Handed:
        """The recorded arguments in the terms of the kernel contract, checked against the mask the layer was given."""
        import torch

        given = {name for name, value in self.args.items() if value is not None and value is not False}
        unknown = sorted(given - _HELD - _IDLE - {"query", "key", "value", "attention_mask"})
        if unknown:
            raise CheckpointError(f"layer {self.layer} passes {', '.join(unknown)} to attention, which a capture cannot hold")
        q, k, v = (_packed(self.args[name]) for name in ("query", "key", "value"))
        if k.shape[0] != q.shape[0]:
            raise CheckpointError(f"layer {self.layer} has {q.shape[0]} queries but {k.shape[0]} keys")
        scale = self.args.get("scaling")
        causal = self.args.get("is_causal")
        if causal is None:
            causal = getattr(self.module, "is_causal", True)
        sliding = self.args.get("sliding_window", getattr(self.module, "sliding_window", None))
        window = (-1, -1) if sliding is None else (sliding - 1, 0 if causal else sliding - 1)
        self._check_mask(q.shape[0], bool(causal), window)
        sinks = self.args.get("s_aux")
        return Handed(
            q=q,
            k=k,
            v=v,
            causal=bool(causal),
            window=window,
            attention=self.attention,
            softmax_scale=q.shape[2] ** -0.5 if scale is None else float(scale),
            softcap=float(self.args.get("softcap") or 0.0),
            sinks=None if sinks is None else sinks.detach().to("cpu", torch.float32).contiguous(),
        )

    def _check_mask(self, tokens: int, causal: bool, window: tuple[int, int]) -> None:
        """Returns when the layer's mask is the one that `causal` and `window` mean.  Raises CheckpointError otherwise."""
        import torch

        mask = self.args["attention_mask"]
        pos = torch.arange(tokens)
        said = visible(pos[:, None], pos[None, :], causal, window)
        if mask is None:  # sdpa's way of saying "as is_causal says"; eager's of saying "everything"
            given = visible(pos[:, None], pos[None, :], causal and self.attention == "sdpa", (-1, -1))
        elif mask.dtype == torch.bool:
            given = mask.cpu()
        else:
            given = (mask == 0).cpu()
            if not bool((given | (mask <= torch.finfo(mask.dtype).min / 2).cpu()).all()):
                raise CheckpointError(f"layer {self.layer} adds a bias to its logits, which a capture cannot hold")
        if not bool((given == said).all()):
            raise CheckpointError(f"layer {self.layer}: its mask is not causal={causal} with window {window}")


def _absent(*_: Any, **__: Any) -> Any:
    raise RuntimeError("no capture is running")


def _packed(t: Tensor) -> Tensor:
    """(1, heads, tokens, dim) as a contiguous CPU tensor (tokens, heads, dim) that nothing else holds."""
    import torch

    return t.detach()[0].transpose(0, 1).to("cpu").clone(memory_format=torch.contiguous_format)
