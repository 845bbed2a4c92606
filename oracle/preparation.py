"""Preparing many trials on the same cases: inputs and exact answers are computed once and kept."""

from __future__ import annotations

from oracle.cases import Case
from oracle.contract import Record
from oracle.material import Material, material
from oracle.measure import Truth, tell
from oracle.pool import Fill, lay_out, without_fill
from oracle.references.attention import Exact
from oracle.references.bound import bound
from oracle.references.roundoff import tie_width
from oracle.rows import sample_rows
from oracle.trial import Prepare, Prepared, contract_of


def shared_preparation() -> Prepare:
    """What `oracle.trial.prepare` gives, bit for bit, in a fraction of its time where a case comes again."""
    materials: dict[Case, Material] = {}
    answers: dict[tuple[object, ...], Exact] = {}

    def prepare(case: Case, record: Record) -> Prepared:
        if case not in materials:
            materials[case] = material(case)
        laid = lay_out(case, materials[case], fill=Fill.STALE, salt=0, writes_padding=record.writes_padding)
        r, rows, call = contract_of(record, case), sample_rows(case, case.rows or 40), without_fill(laid)
        key = (case, tie_width(r), r.smooth_k, r.qk_block, r.u_v > 0)
        if key not in answers:
            answers[key] = tell(call, rows, r).exact
        softcap, head_dim = call.softcap > 0, call.q.shape[2]
        limits = bound(answers[key], r, softcap=softcap, head_dim=head_dim)
        truth = Truth(exact=answers[key], bound=limits, roundoff=r, rows=rows, softcap=softcap, head_dim=head_dim)
        return Prepared(case=case, material=materials[case], laid=laid, truth=truth)

    return prepare
