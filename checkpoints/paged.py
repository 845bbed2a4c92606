"""Kernels of the contract inside a model of transformers, over a paged cache of keys and values.

transformers calls one function for the attention of every layer.  Here that function writes the new keys and values into the
layer's pages and calls the layer's kernel with the page table: what a serving engine does.  Pages lie scattered, and what no
token has written is NaN, so that a kernel which reads past the plan shows.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from oracle.checkpoints.configurations import Plugged
from oracle.checkpoints.loading import CheckpointError
from oracle.references.rounding import round_to

if TYPE_CHECKING:
    from transformers import PreTrainedModel

NAME = "oracle_paged"  # of this attention, to transformers
PAGE_SIZE = 16
SPARE = 3  # pages that belong to no sequence
_MASKS_AND_MORE = {"dropout", "is_causal", "position_ids", "use_cache", "output_attentions", "cache", "past_key_values"}
_USED = {"scaling", "sliding_window", "softcap", "s_aux", "shared_kv_states", "position_embeddings"}
_LONG_NAMES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}
_RUN: ContextVar[Run] = ContextVar("oracle_paged_run")


@dataclass(slots=True, kw_only=True)
class Pool:
    """The pages of one layer."""

    k: Tensor  # (pages, PAGE_SIZE, kv_heads, head_dim)
    v: Tensor  # (pages, PAGE_SIZE, kv_heads, head_dim_v)


@dataclass(slots=True, kw_only=True)
class Run:
    """One configuration on its way through some sequences: kernels, pages, and the count of its calls."""

    kernels: Mapping[int, Plugged]  # layer -> its kernel
    eight_bit: frozenset[int]  # layers whose cache holds e4m3 at scale 1
    table: Tensor  # (sequences, max_pages) int32
    past: Tensor  # (sequences,) int64, on the CPU: tokens of each sequence that are in the cache
    new: Tensor  # (sequences,) int64, on the CPU: tokens of each in the present step
    calls: Counter[int] = field(default_factory=Counter)  # layer -> calls of its kernel
    _pools: dict[int, Pool] = field(default_factory=dict)

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, options: Mapping[str, Any]) -> Tensor:
        """The layer's attention for the new tokens of all sequences, packed, whose k and v are then in the cache.

        Shapes: q (total_q, q_heads, head_dim), k and v (total_q, kv_heads, dim); returns (total_q, q_heads, head_dim_v).
        `options` are keyword arguments of the contract beyond the plan.
        """
        pool, kernel = self._written(layer, k, v), self.kernels[layer]
        starts = torch.cat((torch.zeros(1, dtype=torch.int64), self.new.cumsum(0)))
        # layers may lie on several devices, and a kernel is launched on the current one
        with torch.cuda.device_of(q):  # type: ignore[no-untyped-call]  # torch's
            out = kernel.function(
                q,
                pool.k,
                pool.v,
                cu_seqlens_q=starts.to(q.device, torch.int32),
                seqused_k=(self.past + self.new).to(q.device, torch.int32),
                page_table=self.table.to(q.device),
                **options,
            )
        self.calls[layer] += 1
        answer, expected = out[0] if isinstance(out, tuple) else out, (*q.shape[:2], v.shape[-1])
        if not isinstance(answer, Tensor) or answer.shape != expected:
            got = tuple(answer.shape) if isinstance(answer, Tensor) else type(answer).__name__
            raise CheckpointError(f"{kernel.name}: layer {layer} got {got}; expected {expected}")
        return answer.to(q.dtype)

    def positions(self) -> Tensor:
        """(total_q,) int64, on the CPU: the position of each new token in its sequence."""
        return torch.cat([torch.arange(int(p), int(p + n)) for p, n in zip(self.past, self.new, strict=True)])

    def _written(self, layer: int, k: Tensor, v: Tensor) -> Pool:
        """The layer's pages with the new k and v (total_q, kv_heads, dim) after what was there."""
        if layer not in self._pools:
            self._pools[layer] = Pool(k=self._empty(k), v=self._empty(v))
        pool = self._pools[layer]
        sequence = torch.repeat_interleave(torch.arange(len(self.new)), self.new).to(self.table.device)
        position = self.positions().to(self.table.device)
        slot = (self.table[sequence, position // PAGE_SIZE].long() * PAGE_SIZE + position % PAGE_SIZE).to(k.device)
        for pages, rows in ((pool.k, k), (pool.v, v)):
            # an e4m3 value at scale 1 is exact in 16 bits: kernels of 16-bit caches read what an 8-bit cache would hold
            pages.view(-1, *pages.shape[2:])[slot] = round_to(rows, "e4m3") if layer in self.eight_bit else rows
        return pool

    def _empty(self, new: Tensor) -> Tensor:
        pages = self.table.numel() + SPARE
        return torch.full((pages, PAGE_SIZE, *new.shape[1:]), torch.nan, dtype=new.dtype, device=new.device)


def scattered(sequences: int, tokens: int, device: torch.device) -> Tensor:
    """A page table (sequences, pages of `tokens` tokens) int32: every page once, in an order without a pattern."""
    pages = sequences * -(-tokens // PAGE_SIZE)
    order = torch.randperm(pages + SPARE, generator=torch.Generator().manual_seed(pages))
    return order[:pages].view(sequences, -1).to(device, torch.int32)


@contextmanager
def paged(model: PreTrainedModel) -> Iterator[None]:
    """Inside, the attention of every layer of `model` is that of the current run; after, what it was."""
    from transformers.masking_utils import AttentionMaskInterface
    from transformers.modeling_utils import AttentionInterface

    own = model.config._attn_implementation
    AttentionInterface.register(NAME, _attention)
    AttentionMaskInterface.register(NAME, _no_mask)
    model.set_attn_implementation(NAME)
    try:
        if model.config.get_text_config()._attn_implementation != NAME:
            raise CheckpointError(f"{type(model).__name__} does not use transformers' attention interface")
        yield
    finally:
        model.set_attn_implementation(own)


def step(model: PreTrainedModel, run: Run, new: Sequence[Tensor], *, last: bool = False) -> list[Tensor]:
    """The logits (tokens, vocabulary) of the `new` tokens (tokens,) int64 of each sequence of the run, in one packed step.

    With `last`, those of the last new token of each sequence alone (1, vocabulary), as serving takes them; each must have one.
    For use inside `paged(model)` and torch.inference_mode().  Raises CheckpointError where a layer went another way.
    """
    before = run.calls.copy()
    run.new = torch.tensor([len(tokens) for tokens in new])
    active = _RUN.set(run)
    try:
        packed, positions = torch.cat(list(new))[None], run.positions()[None]
        kept = {"logits_to_keep": (run.new.cumsum(0) - 1).to(packed.device)} if last else {}
        logits: Tensor = model(input_ids=packed, position_ids=positions.to(packed.device), use_cache=False, **kept).logits
    finally:
        _RUN.reset(active)
    run.past = run.past + run.new
    for layer, kernel in run.kernels.items():
        if (made := run.calls[layer] - before[layer]) != 1:
            raise CheckpointError(f"layer {layer}: {kernel.name} was called {made} times in one step; expected once")
    return list(torch.split(logits[0], [1] * len(new) if last else run.new.tolist()))


def _attention(
    module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **given: Any
) -> tuple[Tensor, None]:
    """What transformers calls for the attention of a layer."""
    run, layer = _RUN.get(), module.layer_idx
    kernel = run.kernels[layer]
    meant = {name for name, value in given.items() if value is not None and value is not False}
    if unknown := sorted(meant - _USED - _MASKS_AND_MORE) or (["attention_mask"] if attention_mask is not None else []):
        raise CheckpointError(f"layer {layer} passes {', '.join(unknown)} to attention, which the kernel contract does not have")
    if given.get("is_causal") is False or getattr(module, "is_causal", True) is False:
        raise CheckpointError(f"layer {layer} is not causal, so its text cannot be run in steps")
    window = given.get("sliding_window", getattr(module, "sliding_window", None))
    scaling = given.get("scaling")
    wanted: dict[str, Any] = {
        "softmax_scale": query.shape[-1] ** -0.5 if scaling is None else float(scaling),
        "causal": True,
        "window_size": (-1, -1) if window is None else (window - 1, 0),
        "softcap": float(given.get("softcap") or 0.0),
        "sinks": None if given.get("s_aux") is None else given["s_aux"].float(),
    }
    _check_declared(kernel, layer, query, value)
    idle = {"causal": True, "window_size": (-1, -1), "softcap": 0.0, "sinks": None}
    options = {name: value for name, value in wanted.items() if name in kernel.takes}
    if lost := [name for name in idle if name not in options and wanted[name] != idle[name]]:
        raise CheckpointError(f"{kernel.name}: layer {layer} needs {lost[0]}={wanted[lost[0]]}, which the kernel does not take")
    q, k, v = (packed[0].transpose(0, 1).contiguous() for packed in (query, key, value))
    return run.attend(layer, q, k, v, options)[None], None


def _check_declared(kernel: Plugged, layer: int, q: Tensor, v: Tensor) -> None:
    """Raises CheckpointError where the kernel's record does not have what the layer needs."""
    record, dims = kernel.record, (q.shape[-1], v.shape[-1])
    even = {(dim, dim) for dim in record.head_dims}
    group = q.shape[1] // v.shape[1]
    for what, got, declared in (
        ("head dims", dims, sorted(even | {*record.uneven_head_dims})),
        ("page size", PAGE_SIZE, record.page_sizes),
        ("query heads per kv head", group, record.groups or (group,)),
        ("device", q.device.type, record.devices),
        ("dtype", str(q.dtype).removeprefix("torch."), [_LONG_NAMES.get(name, name) for name in record.dtypes]),
    ):
        if got not in declared:
            raise CheckpointError(
                f"{kernel.name}: layer {layer} has {what} {got}, the kernel declares {', '.join(map(str, declared))}; "
                f"leave that layer out: @LAYERS in a configuration, --layers of `oracle accept`"
            )


def _no_mask(*_: Any, **__: Any) -> None:
    """The kernel knows its mask from the plan."""
