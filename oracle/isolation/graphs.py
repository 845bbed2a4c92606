"""A kernel behind CUDA graphs, as serving engines call it: captured once for each form of call, then replayed.

A replay repeats what the capture launched: whatever the host read from the first plan is in it for good.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

WARM_UPS = 2  # calls before a capture: the first one compiles
KEPT = 4  # graphs, each with copies of a call's tensors

Form = tuple[object, ...]


@dataclass(frozen=True, slots=True)
class _Captured:
    graph: torch.cuda.CUDAGraph
    inputs: tuple[Tensor, ...]
    result: object


class Graphed:
    """The same kernel, every answer of which comes from the replay of a graph."""

    def __init__(self, kernel: Callable[..., object]) -> None:
        self._kernel = kernel
        self._captured: OrderedDict[Form, _Captured] = OrderedDict()

    def __call__(self, *positional: object, **keywords: object) -> object:
        """What the replay for calls of this form gives, in tensors of its own; `out` is written where it was given."""
        values = [*positional, *keywords.values()]
        tensors = [value for value in values if isinstance(value, Tensor)]
        key = tuple(_form(value) for value in values) + tuple(keywords)
        if key not in self._captured:
            self._captured[key] = self._capture(tensors, positional, keywords)
        self._captured.move_to_end(key)
        if len(self._captured) > KEPT:
            self._captured.popitem(last=False)
        captured = self._captured[key]
        for static, tensor in zip(captured.inputs, tensors, strict=True):
            static.copy_(tensor)
        captured.graph.replay()
        for static, tensor in zip(captured.inputs, tensors, strict=True):
            tensor.copy_(static)  # `out`, and inputs that it should not have written
        return _own(captured.result)

    def _capture(self, tensors: list[Tensor], positional: tuple[object, ...], keywords: dict[str, object]) -> _Captured:
        copies = [_laid_out_alike(tensor) for tensor in tensors]
        static = {id(tensor): copy for tensor, copy in zip(tensors, copies, strict=True)}
        arguments = [static.get(id(value), value) for value in positional]
        named = {name: static.get(id(value), value) for name, value in keywords.items()}
        stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]  # torch's
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(WARM_UPS):
                self._kernel(*arguments, **named)
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.graph(graph):
                result = self._kernel(*arguments, **named)
        except RuntimeError as problem:
            reason = str(problem).partition("\n")[0]
            raise RuntimeError(f"cannot be captured in a CUDA graph, as --graph asks: {reason}") from problem
        return _Captured(graph, tuple(copies), result)


def _form(value: object) -> object:
    """What of an argument is fixed at capture: all of a number, of a tensor everything but what it holds."""
    if isinstance(value, Tensor):
        return tuple(value.shape), value.stride(), value.dtype
    return value


def _laid_out_alike(tensor: Tensor) -> Tensor:
    copy = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device)
    return copy.copy_(tensor)


def _own(result: object) -> object:
    """The result in tensors that the next replay does not overwrite."""
    if isinstance(result, Tensor):
        return result.clone()
    return tuple(_own(part) for part in result) if isinstance(result, tuple | list) else result
