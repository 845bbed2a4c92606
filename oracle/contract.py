"""The kernel contract: what a kernel is called with, and what the record beside it promises.

The words are those of the README.  This module is the ground floor: kernels, references and the judging all use it, and it
uses none of them.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, fields
from functools import wraps
from inspect import Parameter, signature
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias, cast

if TYPE_CHECKING:
    from torch import Tensor

REQUIRED = ("cu_seqlens_q", "seqused_k", "page_table", "softmax_scale")
SCALES = ("q_scale", "k_scale", "v_scale")
OPTIONAL = ("causal", "window_size", "softcap", "sinks", *SCALES, "num_seqs", "out", "return_lse")
Answer: TypeAlias = "Tensor | tuple[Tensor, Tensor]"  # out, or out and LSE


class Kernel(Protocol):
    """What others implement: any callable with this signature, with any subset of the optional keyword arguments."""

    def __call__(
        self,
        q: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        *,
        cu_seqlens_q: Tensor,
        seqused_k: Tensor,
        page_table: Tensor,
        softmax_scale: float,
        causal: bool = True,
        window_size: tuple[int, int] = (-1, -1),
        softcap: float = 0.0,
        sinks: Tensor | None = None,
        q_scale: Tensor | float | None = None,
        k_scale: Tensor | float | None = None,
        v_scale: Tensor | float | None = None,
        num_seqs: int | None = None,
        out: Tensor | None = None,
        return_lse: bool = False,
    ) -> Tensor | tuple[Tensor, Tensor]: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """One call of a kernel, whole.

    Shapes: q (total_q, q_heads, head_dim); k_cache (num_pages, page_size, kv_heads, head_dim); v_cache the same with
    head_dim_v; cu_seqlens_q (batch + 1,), seqused_k (batch,), page_table (batch, max_pages), all int32; sinks (q_heads,)
    float32; scales float, (kv_heads,) or (batch, kv_heads) float32; out (total_q, q_heads, head_dim_v).
    """

    q: Tensor
    k_cache: Tensor
    v_cache: Tensor
    cu_seqlens_q: Tensor
    seqused_k: Tensor
    page_table: Tensor
    softmax_scale: float
    causal: bool = True
    window_size: tuple[int, int] = (-1, -1)  # (left, right), both included, -1 = no limit
    softcap: float = 0.0  # 0 = off
    sinks: Tensor | None = None
    q_scale: Tensor | float | None = None
    k_scale: Tensor | float | None = None
    v_scale: Tensor | float | None = None
    num_seqs: int | None = None  # live sequences, where the plan arrays are longer
    out: Tensor | None = None
    extras: Mapping[str, Tensor] = field(default_factory=dict)  # case extras, passed to kernels that name them

    @property
    def live_seqs(self) -> int:
        """Sequences that the plan declares live."""
        return self.seqused_k.shape[0] if self.num_seqs is None else self.num_seqs

    def keywords(self) -> dict[str, Any]:
        """Every keyword argument of the contract, extras included; the caller drops those the kernel does not name."""
        own = {f.name: getattr(self, f.name) for f in fields(self) if f.name not in ("q", "k_cache", "v_cache", "extras")}
        return own | dict(self.extras)


@dataclass(frozen=True, slots=True, kw_only=True)
class Precision:
    """The arithmetic a kernel promises (numerics.md, section 2.5).  Anything looser than the defaults narrows its doors."""

    p_format: str = "input"  # format of P before P.V: "input" (the format of q), "bf16", "fp16", "fp32", "e4m3", "int8"
    p_scale: float = 1.0  # P is multiplied by this before it is rounded
    u_acc: float = 2.0**-23  # relative error of one accumulation: 2^-24 rounds to nearest, 2^-23 truncates, 2^-13 is FP22
    eps_exp: float = 2.0**-13  # relative error of exp2; 2^-22 for the hardware's ex2.approx and for libm
    eps_tanh: float = 2.0**-11  # relative error of tanh; 2^-11 is tanh.approx
    row_sum: str = "before"  # the row sum is taken "before" or "after" P is rounded
    subtract_first: bool = False  # exp2((s - m) c), which no finite logit can break; else exp2(s c - fl(m c))
    flush_to_zero: bool = False  # subnormal P and outputs become 0
    qk_format: str | None = None  # q and k are quantised inside the kernel to "e4m3" or "int8"
    qk_block: int = 1  # tokens of k (and rows of q) that share one quantisation scale
    smooth_k: bool = False  # the mean key is taken off before k is quantised
    v_format: str | None = None  # v is quantised inside the kernel to "e4m3"


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """What the author of a kernel declares; set it as the attribute `record` of the callable.

    The defaults are what a kernel without a record has declared.  Coverage is counted over what is declared, and the first
    line of a verdict shows it.
    """

    dtypes: tuple[str, ...] = ("bf16", "fp16")  # of q, and of k and v unless the cache is 8-bit: "bf16", "fp16", "fp32"
    cache_dtypes: tuple[str, ...] = ()  # further formats of k and v, dequantised by k_scale and v_scale: "e4m3"
    head_dims: tuple[int, ...] = (64, 80, 96, 128, 256, 512)  # head_dim == head_dim_v
    uneven_head_dims: tuple[tuple[int, int], ...] = ()  # further (head_dim, head_dim_v) pairs
    page_sizes: tuple[int, ...] = (16, 64)
    groups: tuple[int, ...] | None = None  # query heads per kv head; None = any
    devices: tuple[str, ...] = ("cpu", "cuda")
    writes_padding: bool = False  # rows of `out` past the plan may be written
    finite_tails: bool = False  # needs finite values past the plan: NaN and inf fills are skipped and counted
    deterministic: bool = True  # same bits twice; False is reported and closes door 1
    page_invariant: bool = True  # other page ids for the same data give the same bits
    batch_invariant: bool = False  # a sequence has the same bits alone, in any batch, anywhere in it and with any padding
    thresholds: tuple[int, ...] = ()  # numbers of query rows or of keys where it takes another path: judged on both sides
    lse_base: str = "e"  # "e" (natural log) or "2"
    precision: Precision = Precision()
    interpreted: bool = False  # runs in an interpreter: use the quick profile


class DeclaredKernel(Kernel, Protocol):
    """A kernel with its record."""

    record: Record


def contract_kernel(
    record: Record | None = None, *, lacks: Collection[str] = (), extras: tuple[str, ...] = (), name: str = ""
) -> Callable[[Callable[[Call, bool], Answer]], DeclaredKernel]:
    """Makes a kernel of a function that is given the call, and whether the LSE is wanted.

    The kernel's signature is the contract's without the optional arguments that it `lacks`, and with the `extras` that it
    requires besides; it has the record, where one is given, and the function's name and docstring, or `name`.  Raises, when it
    is called: TypeError for an argument that it does not take, or lacks.
    """

    def decorator(run: Callable[[Call, bool], Answer]) -> DeclaredKernel:
        @wraps(run)
        def kernel(q: Tensor, k_cache: Tensor, v_cache: Tensor, **given: Any) -> Answer:
            if strange := given.keys() - takes:
                got, expected = ", ".join(sorted(strange)), ", ".join(takes)
                raise TypeError(f"{kernel.__name__}: does not take {got}; expected some of {expected}")
            if absent := required - given.keys():
                raise TypeError(f"{kernel.__name__}: not given {', '.join(sorted(absent))}")
            beside = {extra: given.pop(extra) for extra in extras}
            return_lse = given.pop("return_lse", False)
            return run(Call(q=q, k_cache=k_cache, v_cache=v_cache, extras=beside, **given), return_lse)

        whole = signature(Kernel.__call__)
        own = [p for p in whole.parameters.values() if p.name != "self" and p.name not in lacks]
        own += [Parameter(extra, Parameter.KEYWORD_ONLY) for extra in extras]
        takes = [p.name for p in own if p.kind is Parameter.KEYWORD_ONLY]
        required = {p.name for p in own if p.kind is Parameter.KEYWORD_ONLY and p.default is Parameter.empty}
        declared = cast(DeclaredKernel, kernel)
        vars(kernel)["__signature__"] = whole.replace(parameters=own)
        if record is not None:
            declared.record = record
        if name:
            kernel.__name__ = kernel.__qualname__ = name
        return declared

    return decorator
