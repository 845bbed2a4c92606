"""PyTorch's fused CUDA back ends of `scaled_dot_product_attention`: memory-efficient, FLASH and cuDNN.

The memory-efficient one has no GQA, FLASH no mask but torch's own lower-right causal bias, cuDNN both.  The public function
returns no LSE.

cuDNN takes no single key: torch refuses it there ("cudnn SDPA does not support key/value sequence length 1") and its dispatcher
takes another back end.  So does the adapter, the unfused one, for one key alone; the threshold is declared.
"""

from __future__ import annotations

from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.bias import causal_lower_right
from torch.nn.functional import scaled_dot_product_attention

from oracle.contract import SCALES, Answer, Call, Precision, Record, contract_kernel
from oracle.kernels.field.sequences import Attend, Dense, by_sequence

_FEWEST_KEYS_CUDNN = 2


def _attend(backend: SDPBackend) -> Attend:
    """One back end over one sequence."""

    def attend(dense: Dense) -> tuple[Tensor, None]:
        q, k, v = dense.heads_first()
        square = dense.causal and dense.pos == 0
        mask: object = None
        if not square and not dense.full:
            lower_right = backend is SDPBackend.FLASH_ATTENTION
            mask = causal_lower_right(q.shape[2], k.shape[2]) if lower_right else dense.mask()[None, None]
        alone = backend is SDPBackend.CUDNN_ATTENTION and k.shape[2] < _FEWEST_KEYS_CUDNN
        with sdpa_kernel(SDPBackend.MATH if alone else backend):
            out = scaled_dot_product_attention(
                q,
                k,
                v,
                attn_mask=mask,  # type: ignore[arg-type]  # a bias is no tensor for the type checker
                is_causal=square,
                scale=dense.call.softmax_scale,
                enable_gqa=q.shape[1] != k.shape[1],
            )
        return out[0].transpose(0, 1), None

    return attend


_PAGES = (1, 8, 16, 32, 64, 128, 256)
_LACKS = ("softcap", "sinks", *SCALES, "return_lse")


@contract_kernel(
    Record(
        head_dims=(40, 64, 80, 96, 128, 256, 512),
        uneven_head_dims=((192, 128), (128, 64)),
        page_sizes=_PAGES,
        groups=(1,),
        devices=("cuda",),
        precision=Precision(subtract_first=True),
    ),
    lacks=_LACKS,
)
def efficient(call: Call, _: bool) -> Answer:
    """Attention by torch's memory-efficient back end."""
    return by_sequence(call, _attend(SDPBackend.EFFICIENT_ATTENTION))


@contract_kernel(
    Record(head_dims=(40, 64, 80, 96, 128, 256), page_sizes=_PAGES, devices=("cuda",)), lacks=(*_LACKS, "window_size")
)
def flash(call: Call, _: bool) -> Answer:
    """Attention by torch's FLASH back end."""
    return by_sequence(call, _attend(SDPBackend.FLASH_ATTENTION))


@contract_kernel(
    Record(head_dims=(64, 80, 96, 128), page_sizes=_PAGES, devices=("cuda",), thresholds=(_FEWEST_KEYS_CUDNN,)), lacks=_LACKS
)
def cudnn(call: Call, _: bool) -> Answer:
    """Attention by torch's cuDNN back end, of one key alone by its unfused one."""
    return by_sequence(call, _attend(SDPBackend.CUDNN_ATTENTION))
