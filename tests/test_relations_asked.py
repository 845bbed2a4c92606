"""Which relations a kernel is asked for, on which bases, and how one call is cut from another."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from oracle.contract import OPTIONAL, Precision, Record
from oracle.relations.judge import bases
from oracle.relations.sides import cut, first, whole
from oracle.relations.table import RELATIONS, Relation, allowed, refuses
from oracle.scope import Scope

ALL = frozenset(OPTIONAL)
RECORD = Record(head_dims=(16, 24), page_sizes=(8, 16), groups=(2,))
SCOPE = Scope(record=RECORD, parameters=ALL)


def test_a_threshold_is_judged_on_both_sides_in_rows_and_in_keys() -> None:
    scope = Scope(record=replace(RECORD, thresholds=(9, 70)), parameters=ALL)
    asked: dict[str, set[int]] = {"batch-size": set(), "chunks": set()}
    for name, numbers in asked.items():
        for base, stream in bases(name, RELATIONS[name], scope, 0):
            for side in RELATIONS[name].sides(base, stream, scope):
                numbers |= {len(side.case.q_lens)} if name == "batch-size" else set(side.case.kv_lens)

    assert asked["batch-size"] == {8, 9, 10, 63, 64, 65, 69, 70, 71}
    assert {8, 9, 10, 69, 70, 71} <= asked["chunks"]


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"page_sizes": (16,)}, {"page-size": "one page size"}),
        (
            {"precision": Precision(v_format="e4m3")},
            {"v-times-power-of-2": "v is quantised inside", "scales-times-4": "v is quantised inside"},
        ),
        (
            {"precision": Precision(qk_format="int8")},
            {"q-times-4": "q and k are quantised inside", "scales-times-4": "q and k are quantised inside"},
        ),
    ],
)
def test_what_a_record_rules_out_is_not_asked_and_has_a_reason(change: dict[str, Any], named: dict[str, str]) -> None:
    scope = Scope(record=replace(RECORD, **change), parameters=ALL)

    assert {name: why for name, r in RELATIONS.items() if (why := refuses(r, scope))} == named
    assert set(allowed(scope, quick=False)) == set(RELATIONS) - set(named)


def test_a_kernel_that_ties_k_to_v_is_asked_for_none() -> None:
    scope = Scope(record=RECORD, parameters=ALL, extras=frozenset({"k_norm_weight"}))

    assert allowed(scope, quick=False) == {}


def test_where_scales_are_taken_the_second_base_has_an_8_bit_cache_if_the_kernel_takes_one() -> None:
    scope = Scope(record=replace(RECORD, cache_dtypes=("e4m3",)), parameters=ALL)

    for name, relation in RELATIONS.items():
        formats = [base.case.cache_dtype for base, _ in bases(name, relation, scope, 0)]
        assert formats == ["", "e4m3"][: len(formats)] if relation.scaled else set(formats) == {""}
        assert {base.case.cache_dtype for base, _ in bases(name, relation, SCOPE, 0)} == {""}


def test_every_relation_says_in_a_sentence_why() -> None:
    for relation in RELATIONS.values():
        assert isinstance(relation, Relation) and len(relation.why.split()) > 5


# Making calls


def test_all_pieces_of_a_batch_are_the_batch() -> None:
    base, _ = next(iter(bases("batch-mates", RELATIONS["batch-mates"], SCOPE, 0)))
    again = cut(base, "again", [whole(base.case, seq) for seq in range(len(base.case.q_lens))])

    assert again.case == base.case and again.material.digest() == base.material.digest()
    assert torch.equal(again.rows, base.rows)


def test_pieces_keep_the_scales_of_their_sequence() -> None:
    base, _ = next(iter(bases("batch-mates", RELATIONS["batch-mates"], SCOPE, 0)))
    last = cut(base, "", [whole(base.case, 3)])
    scale, own = base.material.k_scale, last.material.k_scale

    assert isinstance(scale, Tensor) and isinstance(own, Tensor) and torch.equal(own, scale[3:])
    assert last.rows.tolist() == list(range(base.case.total_q - 9, base.case.total_q))


def test_an_answer_is_read_into_the_bases_rows_and_heads() -> None:
    side = first(next(iter(bases("batch-mates", RELATIONS["batch-mates"], SCOPE, 0)))[0].case)
    side = replace(side, rows=torch.tensor([2, 0]), heads=torch.tensor([1, 0]), factor=0.5)
    base, answer = torch.zeros(3, 2, 1), torch.tensor([[[2.0], [4.0]], [[6.0], [8.0]]])

    assert side.read(base, answer, factor=side.factor)[:, :, 0].tolist() == [[4.0, 3.0], [0.0, 0.0], [2.0, 1.0]]
