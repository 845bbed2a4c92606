"""8-bit projections: the linear layers of a model's blocks with e4m3 weights, made by torchao.

torchao, because on the CPU as on a GPU it keeps weights and inputs as real e4m3 tensors with float32 scales and multiplies them
by torch's own scaled product; compressed-tensors rounds to 8 bits and back, with scales of 16 bits.  The output layer and the
embeddings stay as they are, as in published FP8 checkpoints.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from oracle.checkpoints.loading import INSTALL, CheckpointError, without_remarks

if TYPE_CHECKING:
    from torch import nn

MULTIPLE = 16  # of both sizes of a matrix, without which the 8-bit product does not exist

Projections = Mapping[int, Mapping[str, "nn.Linear"]]  # layer (from 0) -> name -> module
Weights = Mapping[int, Mapping[str, "nn.Parameter"]]  # layer -> name of a projection -> its weight


def layers_of(model: nn.Module) -> nn.ModuleList:
    """The decoder layers of a model, in order.  Raises CheckpointError where they cannot be found."""
    find: Any = getattr(model, "get_decoder", lambda: None)
    decoder = find()
    layers = getattr(decoder, "layers", None)
    if layers is None or not len(layers):
        raise CheckpointError(f"{type(model).__name__}: its decoder has no list of layers")
    found: nn.ModuleList = layers
    return found


def projections(model: nn.Module) -> Projections:
    """Layer (from 0) -> name -> each linear module in it."""
    from torch import nn

    found = {}
    for i, layer in enumerate(layers_of(model)):
        found[i] = {name: module for name, module in layer.named_modules() if isinstance(module, nn.Linear)}
    return found


def quantised(model: nn.Module, weights: str) -> Weights:
    """The weights of every projection as `weights` ("fp8" or "fp8-weights") keeps them; the model is as before.

    e4m3 with one float32 scale an output channel; "fp8" rounds the inputs to e4m3 too, one scale a token, at each call.
    Raises CheckpointError: torchao is missing, or a projection is of a size that no 8-bit product takes.
    """
    from torch import nn

    ao = _torchao()
    common: dict[str, Any] = {"granularity": ao.PerRow(), "mm_config": ao.Float8MMConfig()}
    if weights == "fp8":
        common["act_quant_kwargs"] = ao.QuantizeTensorToFloat8Kwargs(granularity=ao.PerRow())
    found: dict[int, dict[str, nn.Parameter]] = {}
    for layer, modules in projections(model).items():
        for name, module in modules.items():
            if any(size % MULTIPLE for size in module.weight.shape):
                shape = tuple(module.weight.shape)
                raise CheckpointError(f"layer {layer} {name}: its weight is {shape}; 8-bit products take multiples of {MULTIPLE}")
            packed = ao.Float8Tensor.from_hp(module.weight.detach(), **common)
            found.setdefault(layer, {})[name] = nn.Parameter(packed, requires_grad=False)
    return found


@contextmanager
def applied(modules: Projections, weights: Weights) -> Iterator[None]:
    """Inside, the projections of the layers of `weights` have the weights that stand there; after, their own again."""
    changed = [(modules[layer][name], weight) for layer, those in weights.items() for name, weight in those.items()]
    own: list[Any] = [module.weight for module, _ in changed]
    try:
        for module, weight in changed:
            module.weight = weight
        yield
    finally:
        for (module, _), weight in zip(changed, own, strict=True):
            module.weight = weight


def _torchao() -> Any:
    """What is used of torchao, under one name.  Raises CheckpointError, saying what to install, without it."""
    from types import SimpleNamespace

    try:
        with without_remarks():
            from torchao.float8.inference import Float8MMConfig
            from torchao.quantization import Float8Tensor, PerRow
            from torchao.quantization.quantize_.workflows.float8.float8_tensor import QuantizeTensorToFloat8Kwargs
    except ImportError as error:
        raise CheckpointError(f"fp8 weights need torchao ({error}): {INSTALL}") from error
    return SimpleNamespace(
        Float8MMConfig=Float8MMConfig,
        Float8Tensor=Float8Tensor,
        PerRow=PerRow,
        QuantizeTensorToFloat8Kwargs=QuantizeTensorToFloat8Kwargs,
    )
