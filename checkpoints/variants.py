"""A loaded checkpoint, and the ways in which configurations run it: one copy of the weights serves them all."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from oracle.checkpoints.configurations import Configuration, Plugged, chosen_layers, plugged
from oracle.checkpoints.projections import Projections, Weights, layers_of, projections, quantised

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@dataclass(frozen=True, slots=True, kw_only=True)
class Variant:
    """A configuration of one loaded checkpoint."""

    configuration: Configuration
    kernels: Mapping[int, Plugged]  # of every layer
    weights: Weights  # of the layers whose projections differ from the checkpoint's
    eight_bit: frozenset[int]  # layers with an e4m3 cache

    @property
    def must_drift(self) -> bool:
        """Whether it rounds somewhere that the checkpoint as loaded does not, so that no drift at all means it did not run."""
        rounds = (k.record.precision for k in self.kernels.values())
        return bool(self.weights or self.eight_bit) or any(p.qk_format or p.v_format for p in rounds)


@dataclass(slots=True)
class Subject:
    """A model in evaluation mode, and what its configurations share."""

    model: PreTrainedModel
    given: Mapping[str, Plugged] = field(default_factory=dict, repr=False)  # attention word -> the kernel it means
    kinds: tuple[str, ...] = ()  # "global" or "sliding", layer by layer
    modules: Projections = field(default_factory=dict, repr=False)
    _kernels: dict[str, Plugged] = field(default_factory=dict, repr=False)
    _quantised: dict[str, Weights] = field(default_factory=dict, repr=False)

    def __post_init__(self) -> None:
        self.kinds, self.modules = kinds(self.model), projections(self.model)

    def variant(self, config: Configuration) -> Variant:
        """The configuration made ready; what is quantised once is kept.  Raises CheckpointError where it does not fit."""
        chosen, whole = chosen_layers(config, self.kinds), frozenset(range(len(self.kinds)))
        bare = not (config.attention or config.kv)
        own, theirs = self._kernel(""), self._kernel(config.attention)
        weights: Weights = {}
        if config.weights != "bf16":
            if config.weights not in self._quantised:
                self._quantised[config.weights] = quantised(self.model, config.weights)
            # layers narrow what stands last: the attention and the cache where there are any, else the weights
            narrowed = chosen if bare or config.whole_layers else whole
            weights = {i: w for i, w in self._quantised[config.weights].items() if i in narrowed}
        return Variant(
            configuration=config,
            kernels={i: theirs if i in chosen else own for i in whole},
            weights=weights,
            eight_bit=chosen if config.kv else frozenset(),
        )

    def _kernel(self, attention: str) -> Plugged:
        if attention not in self._kernels:
            self._kernels[attention] = self.given.get(attention) or plugged(attention, self.model.device.type)
        return self._kernels[attention]

    def shapes(self) -> tuple[str, ...]:
        """One line a layer: what its attention looks like."""
        return tuple(_shape(kind, layer) for kind, layer in zip(self.kinds, layers_of(self.model), strict=True))


def kinds(model: PreTrainedModel) -> tuple[str, ...]:
    """ "global" or "sliding" for each decoder layer."""
    text: Any = model.config.get_text_config()
    named = getattr(text, "layer_types", None)
    if named is None:
        named = ["sliding_attention" if getattr(text, "sliding_window", None) else "full_attention"] * len(layers_of(model))
    return tuple("sliding" if name == "sliding_attention" else "global" for name in named)


def _shape(kind: str, layer: torch.nn.Module) -> str:
    attention: Any = getattr(layer, "self_attn", None)
    if attention is None or not hasattr(attention, "q_proj"):
        return kind
    dim = attention.head_dim
    q_heads, kv_heads = attention.q_proj.out_features // dim, attention.k_proj.out_features // dim
    window = getattr(attention, "sliding_window", None)
    shared = ", V is K before its norm" if getattr(attention, "use_alternative_attention", False) else ""
    return f"{kind}, {q_heads} q heads, {kv_heads} kv heads, head dim {dim}{f', window {window}' if window else ''}{shared}"
