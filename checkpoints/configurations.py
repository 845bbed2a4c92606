"""The grammar of a configuration, `WEIGHTS[+ATTENTION][+kv-FORMAT][@LAYERS]`, and what its words mean."""

from __future__ import annotations

import difflib
import inspect
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from hashlib import sha256
from pathlib import Path

from oracle.checkpoints.loading import CheckpointError
from oracle.contract import OPTIONAL, REQUIRED, Record
from oracle.isolation.locate import KernelImportError, KernelNotFound, load, locate
from oracle.kernels.table import KERNELS

WEIGHTS = {
    "bf16": "as the checkpoint loads",
    "fp8": "e4m3 projections, a scale a channel; inputs e4m3 as well, a scale a token (W8A8)",
    "fp8-weights": "e4m3 projections, a scale a channel; inputs stay bf16",
}
_EIGHT_BIT = "oracle.kernels.eight_bit"
ATTENTIONS: Mapping[str, tuple[str, str]] = {  # word -> target, about
    "other-attention": ("oracle.kernels.torch_sdpa:sdpa_math", "another correct BF16 kernel, whose P stays in fp32: the floor"),
    "int8-attention": (f"{_EIGHT_BIT}:int8_block", "q and k int8, a scale a block, k smoothed"),
    "int8-token-attention": (f"{_EIGHT_BIT}:int8_token", "q and k int8, a scale a token, k smoothed"),
    "fp8-attention": (f"{_EIGHT_BIT}:fp8_tensor", "q, k, P and v e4m3, a scale a tensor"),
    "fp8-head-attention": (f"{_EIGHT_BIT}:fp8_head", "q, k, P and v e4m3, a scale a sequence and kv head"),
    "fp8-block-attention": (f"{_EIGHT_BIT}:fp8_block", "q, k, P and v e4m3, a scale a block"),
    "fp8-hadamard-attention": (f"{_EIGHT_BIT}:fp8_hadamard", "q, k, P and v e4m3, q and k rotated first"),
}
KV_FORMATS = {"kv-fp8": "keys and values e4m3 in the cache, at scale 1"}
REFERENCES = {  # device -> attention of a configuration that names none
    "cpu": "oracle.kernels.torch_sdpa:sdpa_flash",
    "cuda": "oracle.kernels.triton_prefill:prefill_16",
}
KINDS = ("global", "sliding")
FORM = "WEIGHTS[+ATTENTION][+kv-FORMAT][@LAYERS]"


@dataclass(frozen=True, slots=True, kw_only=True)
class Plugged:
    """A kernel of the contract that a model's layers can call."""

    name: str  # as the user called it
    target: str  # "module:function" or "file.py:function"
    function: Callable[..., object] = field(repr=False)
    record: Record
    takes: frozenset[str]  # keyword arguments of the contract
    source_sha256: str  # of the file that it is defined in, "" where there is none


@dataclass(frozen=True, slots=True, kw_only=True)
class Configuration:
    """What one run of a checkpoint differs in from the checkpoint as it loads."""

    text: str  # as it is written
    weights: str  # a key of WEIGHTS
    attention: str = ""  # a key of ATTENTIONS, or a kernel as `oracle accept` names it; "" = the reference
    kv: str = ""  # a key of KV_FORMATS, "" = the format of k and v
    layers: str = ""  # "global", "sliding", or numbers and ranges such as "0,3-5"; "" = all
    whole_layers: bool = False  # the layers narrow the weights too, where there is an attention or a cache to narrow

    def only(self, layers: Iterable[int]) -> Configuration:
        """The same in these layers only, weights included; the others are as the checkpoint loads."""
        chosen = ",".join(str(layer) for layer in sorted(layers))
        return replace(self, text=f"{self.text.partition('@')[0]}@{chosen}", layers=chosen, whole_layers=True)


def configuration(text: str) -> Configuration:
    """The configuration that `text` means.  Raises CheckpointError, which names the words that there are."""
    body, at, layers = text.rpartition("@") if "@" in text else (text, "", "")
    words = body.split("+")
    if at and not (layers in KINDS or re.fullmatch(r"\d+(-\d+)?(,\d+(-\d+)?)*", layers)):
        raise CheckpointError(f"{text}: got layers {layers!r}; expected global, sliding, or numbers such as 0,3-5")
    if words[0] not in WEIGHTS:
        raise CheckpointError(f"{text}: weights {words[0]!r} are unknown{_near(words[0], WEIGHTS)}; expected {FORM}")
    attention = kv = ""
    for word in words[1:]:
        if word in KV_FORMATS and not kv:
            kv = word
        elif word.startswith("kv-"):
            raise CheckpointError(f"{text}: cache format {word!r} is unknown or named twice; there is {', '.join(KV_FORMATS)}")
        elif not attention and not kv:
            attention = word
        else:
            raise CheckpointError(f"{text}: {word!r} is one word too many; expected {FORM}")
    return Configuration(text=text, weights=words[0], attention=attention, kv=kv, layers=layers)


def plugged(attention: str, device: str = "cpu") -> Plugged:
    """The kernel that the word `attention` of a configuration means on "cpu" or "cuda", imported into this process.

    Raises CheckpointError for an unknown word and for a function that cannot be called by the kernel contract.
    """
    word = attention or REFERENCES[device]
    table = {name: row.target for name, row in KERNELS.items()} | {name: target for name, (target, _) in ATTENTIONS.items()}
    try:
        target = locate(word, table)
        function, module = load(target)
    except (KernelNotFound, KernelImportError) as problem:
        more = f"; words for attention are {', '.join(ATTENTIONS)}" if ":" not in word else ""
        raise CheckpointError(f"{problem}{more}") from None
    named = inspect.signature(function).parameters
    every = any(p.kind is p.VAR_KEYWORD for p in named.values())
    if every and not hasattr(function, "record"):
        raise CheckpointError(f"{word}: takes **kwargs and has no record, so nothing says what it can do")
    takes = frozenset((*REQUIRED, *OPTIONAL)) if every else frozenset(named) & {*REQUIRED, *OPTIONAL}
    if absent := [name for name in REQUIRED if name not in takes]:
        raise CheckpointError(f"{word}: the kernel contract's {absent[0]} is not among its keyword arguments")
    record = getattr(function, "record", Record())
    file = getattr(module, "__file__", None)
    return Plugged(
        name=attention or "reference",
        target=target,
        function=function,
        record=record,
        takes=takes,
        source_sha256=sha256(Path(file).read_bytes()).hexdigest() if file else "",
    )


def chosen_layers(config: Configuration, kinds: Sequence[str]) -> frozenset[int]:
    """The layers (from 0) that the configuration changes, in a model whose layers are of these kinds.

    Raises CheckpointError where the model has no such layer.
    """
    every = range(len(kinds))
    if not config.layers:
        return frozenset(every)
    if config.layers in KINDS:
        wanted = {i for i in every if (kinds[i] == "sliding") == (config.layers == "sliding")}
    else:
        wanted = set()
        for part in config.layers.split(","):
            first, _, last = part.partition("-")
            wanted |= set(range(int(first), int(last or first) + 1))
    if not wanted or not wanted <= set(every):
        raise CheckpointError(f"{config.text}: the model has no such layer; it has 0 to {len(kinds) - 1}, {_counted(kinds)}")
    return frozenset(wanted)


def _counted(kinds: Iterable[str]) -> str:
    those = list(kinds)
    return " and ".join(f"{those.count(kind)} {kind}" for kind in dict.fromkeys(those))


def _near(word: str, known: Iterable[str]) -> str:
    there = list(known)
    near = difflib.get_close_matches(word, there, n=1)
    return f"; did you mean {near[0]}?" if near else f"; there are {', '.join(there)}"
