"""The knob: an environment variable for each family of layers, which puts a kernel in the incumbent's place there.

    ORACLE_GLOBAL_ATTN=my_kernel.py:attention oracle roofline CHECKPOINT

Unset, empty or `off`, the layers call the incumbent itself, the same function with the same arguments.  Any other word must name
a kernel that is here; nothing falls back.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import replace

import torch

from oracle.checkpoints.configurations import Plugged, configuration, plugged
from oracle.checkpoints.loading import CheckpointError
from oracle.checkpoints.variants import Subject, Variant
from oracle.contract import REQUIRED
from oracle.kernels.table import KERNELS, unavailable

KNOBS = {"global": "ORACLE_GLOBAL_ATTN", "sliding": "ORACLE_SLIDING_ATTN"}  # kind of layer -> environment variable
OFF = "off"


def turned(subject: Subject, environment: Mapping[str, str]) -> Variant:
    """The checkpoint as it loads, with the kernels that the knobs in `environment` name.

    Raises CheckpointError: an unknown kernel, one that cannot run here, or a knob for a family of which the model has no layer.
    """
    incumbent = subject.variant(configuration("bf16"))
    chosen = {}
    for kind, knob in KNOBS.items():
        word = environment.get(knob, "").strip()
        if word in ("", OFF):
            continue
        if kind not in subject.kinds:
            raise CheckpointError(f"{knob}={word}: the model has no {kind} layer; unset it, or set it to {OFF}")
        try:
            chosen[kind] = available(word, subject.model.device.type)
        except CheckpointError as problem:
            raise CheckpointError(f"{knob}: {problem}; {OFF} is the incumbent") from None
    kernels = {layer: chosen.get(subject.kinds[layer], own) for layer, own in incumbent.kernels.items()}
    return replace(incumbent, kernels=kernels)


def available(name: str, device: str) -> Plugged:
    """The kernel of that name, imported into this process, which runs on `device` ("cpu" or "cuda") here.

    Raises CheckpointError where there is none, or it cannot run.
    """
    if device == "cuda" and not torch.cuda.is_available():
        raise CheckpointError("device cuda: there is no CUDA device here; use --device cpu")
    if name in KERNELS and (why := unavailable(KERNELS[name], device)):
        raise CheckpointError(f"{name}: {why}; `oracle kernels` lists what can run here")
    kernel = plugged(name, device)
    if device not in kernel.record.devices:
        raise CheckpointError(f"{name}: declares the devices {', '.join(kernel.record.devices)}; got {device}")
    named = inspect.signature(kernel.function).parameters.values()
    needs = [p.name for p in named if p.kind is p.KEYWORD_ONLY and p.default is p.empty and p.name not in REQUIRED]
    if needs:
        raise CheckpointError(f"{name}: asks for {needs[0]}, which the contract does not name and a model does not have")
    return kernel
