"""How far two next-token distributions stand apart, token by token.  Natural logarithms, fp64, the whole vocabulary.

With x and y the logits of the reference and the candidate less their largest, a = sum exp(x), b = sum exp(y), p = exp(x) / a and
q = exp(y) / b, the log-ratio of one vocabulary entry is log(p / q) = (x - y) + log(b / a), so that

    KL(p || q) = sum(exp(x) (x - y)) / a + log(b / a)        (Kullback and Leibler 1951)
    KL(q || p) = sum(exp(y) (y - x)) / b - log(b / a)
    JS(p, q)   = (KL(p || m) + KL(q || m)) / 2,  m = (p + q) / 2        (Lin 1991)

need two exponentials and one logarithm for each entry, and equal logits give exactly 0.  What rounding leaves of a KL or a JS is
of the order of 1e-15 nats whatever the size of the logits.  A value below that may come out negative; it is not clamped, since a
clamp would turn noise around 0 into a positive mean.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields

import torch
from torch import Tensor

BEST = 5  # tokens that `agree5` looks at
SLICE = {"cpu": 1 << 17}  # logits worked on at a time: 1 MiB in fp64, so that the five temporaries stay in cache
SLICE_ELSEWHERE = 1 << 24  # 128 MiB in fp64: an accelerator wants few and large launches
_MASKED = -1e300  # stands for -inf: its exponential is 0, and twice it is still finite
_TINY = 1e-300  # keeps 0 / 0 out of entries whose two probabilities underflow


@dataclass(frozen=True, slots=True, kw_only=True)
class Divergence:
    """One candidate against the reference, at each scored token.  All (N,), on the device of the logits.

    A token is `finite` when both rows of logits are free of NaN and +inf, mask (-inf) the same entries, and do not mask the true
    token.  An entry masked in both counts 0 log 0 = 0.  One masked in one row only makes a KL infinite, in one direction or the
    other, so that the token is not finite.  Where a token is not finite its other columns are NaN, or False.
    """

    kl: Tensor  # float64, KL(reference || candidate), nats
    kl_reverse: Tensor  # float64, KL(candidate || reference), nats
    js: Tensor  # float64, Jensen-Shannon, nats: at most ln 2
    agree1: Tensor  # bool: the same best token; of equal logits the lowest id is the best, as in llama.cpp
    agree5: Tensor  # float64: share of the reference's five best that are among the candidate's; ties for fifth place count as in
    nll_reference: Tensor  # float64, -log p of the true next token
    nll_candidate: Tensor  # float64
    confidence: Tensor  # float64: the reference's largest probability
    finite: Tensor  # bool


COLUMNS = {f.name: torch.bool if f.name in ("agree1", "finite") else torch.float64 for f in fields(Divergence)}  # name -> dtype


def divergence(reference: Tensor, candidate: Tensor, following: Tensor) -> Divergence:
    """The divergence of `candidate` (N, V) from `reference` (N, V), logits of any floating dtype, at each of N tokens.

    `following` (N,) int64 holds the true next tokens.  The logits are left as they are.  Rows are worked on in slices, so the
    temporaries take the same few MiB whatever N is; a row's result does not depend on its neighbours.  Raises ValueError when the
    shapes do not fit together, or a true token lies outside the vocabulary.
    """
    if reference.ndim != 2 or reference.shape != candidate.shape or following.shape != reference.shape[:1]:
        got = ", ".join(str(tuple(t.shape)) for t in (reference, candidate, following))
        raise ValueError(f"divergence: got shapes {got}, expected (N, V), (N, V) and (N,)")
    tokens, vocabulary = reference.shape
    if not bool(((following >= 0) & (following < vocabulary)).all()):
        raise ValueError(f"divergence: a true token lies outside the vocabulary of {vocabulary}")
    rows = max(1, SLICE.get(reference.device.type, SLICE_ELSEWHERE) // max(1, vocabulary))
    slices = [slice(start, start + rows) for start in range(0, max(1, tokens), rows)]
    return joined([_slice(reference[rows], candidate[rows], following[rows]) for rows in slices])


def joined(parts: Sequence[Divergence]) -> Divergence:
    """The divergences of all `parts`, at least one, one after the other."""
    return from_tensors({field.name: torch.cat([getattr(part, field.name) for part in parts]) for field in fields(Divergence)})


def to_tensors(d: Divergence) -> dict[str, Tensor]:
    """The columns of `d` by name, as safetensors stores them."""
    return {field.name: getattr(d, field.name) for field in fields(Divergence)}


def from_tensors(columns: Mapping[str, Tensor]) -> Divergence:
    """The divergence that `to_tensors` took apart.  Raises ValueError for other columns, dtypes, or lengths."""
    if sorted(columns) != sorted(COLUMNS):
        raise ValueError(f"divergence: got columns {sorted(columns)}, expected {sorted(COLUMNS)}")
    for name, column in columns.items():
        dtype = COLUMNS[name]
        if column.dtype != dtype or column.shape != columns["kl"].shape or column.ndim != 1:
            raise ValueError(
                f"divergence: column {name} is {column.dtype} {tuple(column.shape)}, expected {dtype}, all of one length"
            )
    return Divergence(**columns)


def _slice(reference: Tensor, candidate: Tensor, following: Tensor) -> Divergence:
    """As `divergence`, all rows at once."""
    result = _measured(reference.double(), candidate.double(), following)
    odd = (~result.finite).nonzero().flatten()
    if not len(odd):
        return result
    columns = to_tensors(result)
    for column in columns.values():
        column[odd] = False if column.dtype == torch.bool else math.nan
    # NaN and infinities are rare, so only the rows where one shows are looked at again, for masks that both share
    x, y, true = reference[odd].double(), candidate[odd].double(), following[odd, None]
    masked = x == -math.inf
    shared = (masked == (y == -math.inf)).all(1) & (x < math.inf).all(1) & (y < math.inf).all(1)
    usable = (shared & ~masked.gather(1, true).squeeze(1)).nonzero().flatten()
    if len(usable):
        x, y, masked = x[usable], y[usable], masked[usable]
        again = _measured(x.masked_fill_(masked, _MASKED), y.masked_fill_(masked, _MASKED), following[odd[usable]])
        for name, column in columns.items():
            column[odd[usable]] = getattr(again, name)
    return result


def _measured(x: Tensor, y: Tensor, following: Tensor) -> Divergence:
    """The divergence of rows of fp64 logits; right where every logit is finite, and never `finite` where one is not."""
    agree1, agree5 = _agreement(x, y)
    x, y = x - x.amax(1, keepdim=True), y - y.amax(1, keepdim=True)
    true = following[:, None]
    x_true, y_true = x.gather(1, true).squeeze(1), y.gather(1, true).squeeze(1)
    difference = x - y
    p, q = x.exp_(), y.exp_()
    a, b = p.sum(1, keepdim=True), q.sum(1, keepdim=True)
    p.div_(a)
    q.div_(b)
    log_ratio = difference.add_((b / a).log_())  # log(p / q)
    work = p * log_ratio
    kl = work.sum(1)
    kl_reverse = torch.mul(q, log_ratio, out=work).sum(1).neg_()
    js = _jensen_shannon(p, q, log_ratio, work)
    a, b = a.squeeze(1), b.squeeze(1)
    nll_reference, nll_candidate = a.log() - x_true, b.log() - y_true
    total = kl + kl_reverse + js + nll_reference + nll_candidate
    return Divergence(
        kl=kl,
        kl_reverse=kl_reverse,
        js=js,
        agree1=agree1,
        agree5=agree5,
        nll_reference=nll_reference,
        nll_candidate=nll_candidate,
        confidence=1 / a,  # the largest logit less itself is 0
        finite=total.isfinite(),
    )


def _jensen_shannon(p: Tensor, q: Tensor, log_ratio: Tensor, work: Tensor) -> Tensor:
    """(R,) Jensen-Shannon divergence of the rows of `p` and `q`, (R, V); overwrites all that it is given.

    With s >= t the two probabilities of an entry, log m = log s + u with u = log1p(-(s - t) / 2 s), so that what the entry adds,
    (p log(p / m) + q log(q / m)) / 2, is -(u (s + t) + t |log(p / q)|) / 2: exact where t is 0, and 0 where s = t.
    """
    s, t = torch.maximum(p, q, out=work), torch.minimum(p, q, out=q)
    u = torch.sub(t, s, out=p)
    u.div_(s.mul_(2).add_(_TINY)).log1p_()
    s.mul_(0.5).add_(t)
    u.mul_(s).addcmul_(t, log_ratio.abs_())
    return u.sum(1).mul_(-0.5)


def _agreement(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """(R,) bool, the same best entry; and (R,) float64, the share of the best of `x` (R, V) that are among the best of `y`."""
    most = min(BEST, x.shape[1])
    top_x, top_y = x.topk(min(most + 1, x.shape[1]), 1), y.topk(min(most + 1, x.shape[1]), 1)
    agree1 = top_x.indices[:, 0] == top_y.indices[:, 0]
    least_x, least_y = top_x.values[:, most - 1, None], top_y.values[:, most - 1, None]
    agree5 = (y.gather(1, top_x.indices[:, :most]) >= least_y).double().mean(1)
    # topk promises no order among equals, so rows with a tie that matters are looked at again
    tied = torch.zeros_like(agree1)
    for values in (top_x.values, top_y.values):
        tied |= (values[:, :1] == values[:, 1:2]).any(1) | (values[:, most - 1 : most] == values[:, most : most + 1]).any(1)
    if bool(tied.any()):
        rows = tied.nonzero().flatten()
        x, y = x[rows], y[rows]
        agree1[rows] = x.argmax(1) == y.argmax(1)
        best = x >= least_x[rows]
        agree5[rows] = (best & (y >= least_y[rows])).sum(1) / best.sum(1).double()
    return agree1, agree5
