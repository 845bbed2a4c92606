"""A forward pass in scopes that torch's profiler records: what kind of work, in a layer of which kind.

`scoped` puts a scope round every decoder layer, linear module, norm, rotation, kernel and cache write; time in none of the inner
ones is "other".  Scopes say where work was asked for; what it cost is read from the profile.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from enum import StrEnum
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch.profiler import record_function

from oracle.checkpoints.paged import Run
from oracle.checkpoints.projections import layers_of
from oracle.checkpoints.variants import Subject, Variant

SCOPE = "oracle scope: "  # how the names of scopes begin; then come the kind of work, a bar and the kind of layer
WHOLE = f"{SCOPE}other|"  # the scope of the whole pass
ROTATES = "apply_rotary_pos_emb"  # the function of a modelling file that rotates q and k


class Kind(StrEnum):
    """A kind of work."""

    ATTENTION = "attention"
    PROJECTIONS = "projections"  # the linear modules of the attention block
    MLP = "MLP products"
    OUTPUT = "output layer"
    NORMS = "norms"
    ROPE = "rope"
    CACHE = "cache writes"
    OTHER = "other"


def named(work: Kind, layer: str = "") -> str:
    """The name of a scope: the kind of work, and the kind of layer, "" outside the layers."""
    return f"{SCOPE}{work}|{layer}"


class ScopedRun(Run):
    """A run whose cache writes are in a scope."""

    __slots__ = ("kinds",)
    kinds: tuple[str, ...]  # of the layers

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, options: Mapping[str, Any]) -> Tensor:
        """See `Run`."""
        with record_function(named(Kind.CACHE, self.kinds[layer])):
            return super().attend(layer, q, k, v, options)


def scoped_run(kinds: tuple[str, ...], variant: Variant, table: Tensor) -> Run:
    """A run of the variant with nothing in its cache yet, its kernels and its cache writes in scopes; `kinds` are its layers'."""
    none = torch.zeros(len(table), dtype=torch.int64)
    kernels = {
        layer: replace(kernel, function=_inside(kernel.function, functools.partial(named, Kind.ATTENTION, kinds[layer])))
        for layer, kernel in variant.kernels.items()
    }
    run = ScopedRun(kernels=kernels, eight_bit=variant.eight_bit, table=table, past=none, new=none)
    run.kinds = kinds
    return run


@contextmanager
def scoped(subject: Subject) -> Iterator[None]:
    """Inside, the model's modules are in scopes; after, they are as before."""
    layers = list(layers_of(subject.model))
    kinds = {id(module): kind for layer, kind in zip(layers, subject.kinds, strict=True) for module in layer.modules()}
    names = [(layer, named(Kind.OTHER, kinds[id(layer)])) for layer in layers]
    names += [(module, named(work, kinds.get(id(module), ""))) for module, work in _works(subject.model, layers)]
    open_ones: list[tuple[str, Any]] = []

    def rotation() -> str:
        return named(Kind.ROPE, open_ones[-1][0].rpartition("|")[2] if open_ones else "")

    with ExitStack() as undo:
        for module, name in names:
            undo.callback(module.register_forward_pre_hook(functools.partial(_enter, open_ones, name)).remove)
            undo.callback(module.register_forward_hook(functools.partial(_leave, open_ones), always_call=True).remove)
        for place in {type(module).__module__ for module in subject.model.modules()}:
            modelling = importlib.import_module(place)
            if hasattr(modelling, ROTATES):
                undo.enter_context(patch.object(modelling, ROTATES, _inside(getattr(modelling, ROTATES), rotation)))
        yield


def _works(model: nn.Module, layers: Sequence[nn.Module]) -> Iterator[tuple[nn.Module, Kind]]:
    """The modules whose work has a kind."""
    attention = {id(module) for layer in layers for module in getattr(layer, "self_attn", nn.Module()).modules()}
    inner = {id(module) for layer in layers for module in layer.modules()}
    for module in model.modules():
        name = type(module).__name__
        if isinstance(module, nn.Linear):
            yield module, Kind.PROJECTIONS if id(module) in attention else Kind.MLP if id(module) in inner else Kind.OUTPUT
        elif "Norm" in name:
            yield module, Kind.NORMS
        elif "RotaryEmbedding" in name:
            yield module, Kind.ROPE


def _enter(open_ones: list[tuple[str, Any]], name: str, module: nn.Module, arguments: Any) -> None:
    scope = record_function(name)
    scope.__enter__()  # type: ignore[no-untyped-call]  # torch's
    open_ones.append((name, scope))


def _leave(open_ones: list[tuple[str, Any]], module: nn.Module, arguments: Any, result: Any) -> None:
    open_ones.pop()[1].__exit__(None, None, None)


def _inside(function: Callable[..., Any], name: Callable[[], str]) -> Callable[..., Any]:
    """The function, in a scope of the name that is given when it is called."""

    @functools.wraps(function)
    def inside(*arguments: Any, **options: Any) -> Any:
        with record_function(name()):
            return function(*arguments, **options)

    return inside
