"""How far three ways to rebuild K from V are from exact attention, beside a kernel that reads K, on drawn and captured inputs.

Two exact answers: attention over the pool's K, rounded to bf16, which is what the contract asks for; and attention over V times
the weight, not rounded, which is what the model means.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from oracle.cases import Case
from oracle.checkpoints import shipped
from oracle.contract import Call, Precision, Record
from oracle.families import FAMILIES
from oracle.kernels import shared_kv
from oracle.kernels.triton_split import split_tuned
from oracle.material import Material, material
from oracle.measure import measure, tell
from oracle.pool import Fill, lay_out, without_fill
from oracle.rows import sample_rows
from oracle.structured import CAPTURES
from oracle.trial import contract_of

Facts = dict[str, Any]

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
CAPTURE, LAYER = "gemma4-mini-layer03.safetensors", 3
KERNELS: dict[str, Callable[..., Any]] = {
    "split_tuned": split_tuned,
    "rebuilt_bf16": shared_kv.rebuilt_bf16,
    "rebuilt_fp32": shared_kv.rebuilt_fp32,
    "folded": shared_kv.folded,
}
RECORD = Record(dtypes=("bf16",), precision=Precision(eps_exp=2.0**-22, subtract_first=True))


def found() -> Facts:
    """By inputs and exact answer: errors of each kernel, and its RMS e over that of the kernel that reads K."""
    return {name: _of(case, made) for name, (case, made) in inputs().items()}


def inputs() -> dict[str, tuple[Case, Material]]:
    """Drawn inputs at the real model's shape, and those captured in the small checkpoint."""
    drawn = Case(
        name="drawn", family=FAMILIES["gemma4-global"], q_lens=(128,), kv_lens=(2048,), page_size=64, inputs="shared-kv", rows=128
    )
    family, tokens = CAPTURES[CAPTURE]
    captured = Case(
        name="captured", family=family, q_lens=(tokens,), kv_lens=(tokens,), page_size=64, inputs="captured", captured=CAPTURE,
        rows=tokens,
    )  # fmt: skip
    return {"drawn": (drawn, material(drawn)), "captured": (captured, _in_order(material(captured)))}


def _in_order(made: Material) -> Material:
    """The captured inputs with the columns that the kernels take to be rotated first, and K's norm weight beside them.

    The model rotates column i with column i + head_dim / 2, for the first eighth of them.  Columns may be in any order that q, K,
    V and the weight share: logits do not change, and the output's columns come in that order.
    """
    dim = made.q.shape[-1]
    eighth = dim // (2 * shared_kv.ROTATED)
    turned = torch.tensor([*range(eighth), *range(dim // 2, dim // 2 + eighth)])
    rest = torch.tensor([i for i in range(dim) if i not in set(turned.tolist())])
    order = torch.cat((turned, rest))
    with safe_open(shipped.folder() / "model.safetensors", "pt") as file:
        weight: Tensor = file.get_tensor(f"model.layers.{LAYER}.self_attn.k_norm.weight").float()
    q, k, v = (x[..., order].contiguous() for x in (made.q, made.k, made.v))
    return replace(made, q=q, k=k, v=v, extras={"k_norm_weight": weight[order]})


def _of(case: Case, made: Material) -> Facts:
    call = without_fill(lay_out(case, made, fill=Fill.STALE, salt=0))
    rows, roundoff = sample_rows(case, case.rows), contract_of(RECORD, case)
    answers = {name: tuple(x[rows] for x in _answer(call, name)) for name in KERNELS}
    facts: Facts = {}
    for what, asked in (("the pool's K", call), ("V times the weight", _not_rounded(call))):
        truth = tell(asked, rows, roundoff)
        measured = {name: measure(truth, asked, *answer) for name, answer in answers.items()}
        facts[what] = {
            name: {
                "rms_e": round(m.rms, 4),
                "max_e": round(m.worst.units, 3),
                "max_e_lse": round(m.worst_lse.units, 3) if m.worst_lse else None,
                "ratio": round(m.rms / measured["split_tuned"].rms, 3),
            }
            for name, m in measured.items()
        }
    return facts


def _answer(call: Call, name: str) -> tuple[Tensor, Tensor]:
    """out and lse of the plan's rows, on the CPU."""
    named = ["cu_seqlens_q", "seqused_k", "page_table", "softmax_scale", "causal", "num_seqs"]
    given = {n: call.keywords()[n] for n in named + (["k_norm_weight"] if name != "split_tuned" else [])}
    moved = {n: x.to(DEVICE) if isinstance(x, Tensor) else x for n, x in given.items()}
    out, lse = KERNELS[name](*(x.to(DEVICE) for x in (call.q, call.k_cache, call.v_cache)), **moved, return_lse=True)
    return out.cpu(), lse.cpu()


def _not_rounded(call: Call) -> Call:
    """The same with V times the weight for the unrotated columns of K, in float32: the product of two bf16 numbers is exact."""
    turned = call.q.shape[-1] // shared_kv.ROTATED
    k = call.v_cache.float() * call.extras["k_norm_weight"]
    k[..., :turned] = call.k_cache[..., :turned].float()
    return replace(call, k_cache=k)


if __name__ == "__main__":
    print(found())
