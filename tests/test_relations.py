"""Relations hold of exact arithmetic and of correct kernels; each has a wrong kernel that it alone rejects, and a control."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from dataclasses import fields, replace
from typing import Any, cast

import pytest
import torch
from torch import Tensor

from oracle.contract import OPTIONAL, Call, Precision, Record
from oracle.isolation.outcome import Failure, FailureKind, Returned
from oracle.isolation.process import KernelProcess
from oracle.measure import Truth, tell
from oracle.pool import Fill, lay_out, without_fill
from oracle.references.arithmetic import Arithmetic
from oracle.references.emulator import emulate
from oracle.references.roundoff import Roundoff
from oracle.relations import judge, table
from oracle.relations.judge import Related, bases, planned_relations, relate, shows
from oracle.relations.sides import Side
from oracle.relations.table import RELATIONS, Level, refuses
from oracle.scope import Scope
from oracle.streams import Stream
from oracle.trial import Trial, contract_of
from oracle.verdict import Reason

ALL = frozenset(OPTIONAL)
RECORD = Record(head_dims=(16, 24), page_sizes=(8, 16), groups=(2,))
SCOPE = Scope(record=RECORD, parameters=ALL)

Answer = tuple[Tensor, Tensor]  # live rows of out and of the LSE
Body = Callable[[Call, dict[Any, Any]], Answer]  # given the call, and what the kernel keeps between calls

_right: dict[str, Answer] = {}
_truths: dict[tuple[str, Roundoff], Truth] = {}


def digest(call: Call) -> str:
    """Of all that a call holds, by value and stride."""
    total = hashlib.sha256()
    for field in fields(call):
        value = getattr(call, field.name)
        if isinstance(value, Tensor) and field.name != "out":
            total.update(repr(value.stride()).encode() + bytes(value.contiguous().view(torch.uint8).numpy().data))
        elif field.name != "out":
            total.update(repr(value).encode())
    return total.hexdigest()


def right(call: Call) -> Answer:
    """A textbook kernel's answer, worked out once."""
    key = digest(call)
    if key not in _right:
        _right[key] = emulate(call, Arithmetic())
    out, lse = _right[key]
    return out.clone(), lse.clone()


def told(call: Call, rows: Tensor, roundoff: Roundoff) -> Truth:
    """The exact answer, worked out once: the same calls are put to every kernel."""
    key = digest(call), roundoff
    if key not in _truths:
        _truths[key] = tell(call, rows, roundoff)
    return _truths[key]


@pytest.fixture(autouse=True)
def truths_told_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(judge, "tell", told)


class Local:
    """In place of a kernel's process: a kernel of this file."""

    def __init__(self, body: Body) -> None:
        self.body, self.kept = body, dict[Any, Any]()

    def call(self, call: Call, timeout_s: float, want_lse: bool = False) -> Returned | Failure:
        live_out, live_lse = self.body(call, self.kept)
        out = torch.zeros(*call.q.shape[:2], call.v_cache.shape[-1], dtype=live_out.dtype)
        lse = torch.zeros(call.q.shape[:2])
        out[: len(live_out)], lse[: len(live_lse)] = live_out, live_lse
        return Returned(out=out, out_storage=None, lse=lse, seconds=0.0, changed_inputs=())


def put(body: Body, record: Record = RECORD, *names: str, parameters: frozenset[str] = ALL, once: bool = False) -> Related:
    """What the relations of these names, or all, show of a kernel; `once` on one base each."""
    trial = Trial(cast(KernelProcess, Local(body)), record)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(table, "RELATIONS", {name: replace(RELATIONS[name], quick=once) for name in names or RELATIONS})
        return relate(trial, Scope(record=record, parameters=parameters), seed=0, quick=once)


def laid(side: Side) -> Call:
    made = lay_out(side.case, side.material, fill=Fill.STALE, salt=0)
    return without_fill(replace(made, call=side.change(made.call)))


def exact(side: Side, record: Record) -> Truth:
    return told(laid(side), torch.arange(side.case.total_q), contract_of(record, side.case))


# What holds

SCOPES = {
    "plain": SCOPE,
    "a group of 3, fp16, one page size": Scope(
        record=Record(dtypes=("fp16",), head_dims=(32,), page_sizes=(16,), groups=(3,)), parameters=ALL
    ),
    "8-bit P and caches, kv scales only": Scope(
        record=replace(RECORD, cache_dtypes=("e4m3",), precision=Precision(p_format="e4m3", p_scale=256.0)),
        parameters=ALL - {"q_scale"},
    ),
    "thresholds": Scope(record=replace(RECORD, thresholds=(9, 70)), parameters=ALL),
}


@pytest.mark.parametrize(
    ("scope", "name"),
    [(scope, name) for scope in list(SCOPES)[:3] for name in RELATIONS]
    + [("thresholds", "batch-size"), ("thresholds", "chunks")],
)
def test_exact_arithmetic_keeps_every_relation_and_shows_every_control(scope: str, name: str) -> None:
    """A side that shares the base's truth has its exact answer; a control has visibly another one; the kernel can take all."""
    relation, asked = RELATIONS[name], SCOPES[scope]
    if refuses(relation, asked) is not None:
        assert name == "page-size" and len(asked.record.page_sizes) == 1
        return
    for base, stream in bases(name, relation, asked, 0):
        truth = exact(base, asked.record)
        sides, controls = (make(base, stream, asked) for make in (relation.sides, relation.controls))
        for side in (base, *sides, *controls):
            assert asked.refuses(side.case) is None
        for side in sides:
            if not side.own:
                own = exact(side, asked.record).exact
                torch.testing.assert_close(side.read(truth.exact.out, own.out, factor=side.factor), truth.exact.out)
                torch.testing.assert_close(side.read(truth.exact.lse, own.lse), truth.exact.lse)
        for control in controls:
            assert shows(truth, exact(control, asked.record), control.rows, lse=True)
        assert controls


def test_own_truths_are_what_the_relation_says() -> None:
    """V = 1 is 1; a far softcap moves less than both bounds; two parts of the keys merge to the whole."""

    def truths(name: str) -> tuple[Truth, list[Truth]]:
        base, stream = next(iter(bases(name, RELATIONS[name], SCOPE, 0)))
        return exact(base, RECORD), [exact(side, RECORD) for side in RELATIONS[name].sides(base, stream, SCOPE)]

    ones, others = truths("ones-v")
    for truth in (ones, *others):
        torch.testing.assert_close(truth.exact.out, torch.ones_like(truth.exact.out))
    none, (far,) = truths("softcap-of-all")
    assert bool(((none.exact.out - far.exact.out).abs() < far.bound.b).all())
    whole_, parts = truths("lse-merges")
    lse = torch.stack([part.exact.lse for part in parts])
    weights = (lse - lse.logsumexp(0)).exp()[..., None]
    torch.testing.assert_close((weights * torch.stack([part.exact.out for part in parts])).sum(0), whole_.exact.out)


def chooses_by_all_it_may(call: Call, kept: dict[Any, Any]) -> Answer:
    """Tiles, splits and order by batch, lengths, padding, page size, options, strides and head: by everything but values."""
    q_lens, kv_lens = lens(call)
    lone = len(q_lens) < 3 or max(kv_lens) > 500
    wide = call.window_size != (-1, -1) or not call.causal or call.sinks is not None or call.page_table.shape[1] > 60
    tile = call.k_cache.shape[1] if set(q_lens) == {1} else 128 if wide else 64
    splits = 4 if lone or call.q.shape[0] > 120 or call.softcap > 0 else 1
    strided = not call.k_cache.is_contiguous()
    out, lse = emulate(call, Arithmetic(tile=max(16, tile), splits=splits, reverse=strided))
    others = emulate(call, Arithmetic(tile=max(16, tile), reverse=not strided))
    out[:, ::2], lse[:, ::2] = others[0][:, ::2], others[1][:, ::2]
    return out, lse


@pytest.mark.parametrize(
    ("body", "invariant"),
    [
        (lambda call, kept: right(call), True),
        (lambda call, kept: emulate(call, Arithmetic(tile=128, splits=3, lazy=8.0, exp2="poly3", tanh="approx")), True),
        (chooses_by_all_it_may, False),
    ],
    ids=["textbook", "as far from it as a correct kernel gets", "other paths for other shapes"],
)
def test_a_correct_kernel_breaks_nothing_and_is_put_to_everything(body: Body, invariant: bool) -> None:
    related = put(body)

    assert related.findings == ()
    assert related.notes[1].startswith("batch-invariant in 21 comparisons" if invariant else "not batch-invariant: ")
    assert related.ran == planned_relations(SCOPE, quick=False)
    assert set(related.ran) == set(RELATIONS)


def test_a_kernel_without_options_is_put_to_the_rest() -> None:
    scope = Scope(record=RECORD, parameters=frozenset())
    related = put(lambda call, kept: right(call), parameters=frozenset())

    assert related.findings == () and related.ran == planned_relations(scope, quick=False)
    assert set(RELATIONS) - set(related.ran) == {
        "window-of-all", "sinks-of-nothing", "softcap-of-all", "causal-last-query", "scales-times-4", "lse-merges",
    }  # fmt: skip


# What is wrong: one kernel for each relation, which the others do not reject


def broken(answer: Answer) -> Answer:
    return answer[0] * 1.25 + 0.5, answer[1]


def one_place_off(answer: Answer) -> Answer:
    """The next number up in the first element: other bits, and nothing that an error would show."""
    answer[0].view(torch.int16).view(-1)[0] += 1
    return answer


def lens(call: Call) -> tuple[tuple[int, ...], tuple[int, ...]]:
    return tuple(call.cu_seqlens_q.diff().tolist()), tuple(call.seqused_k.tolist())


def where(wrong: Callable[[Call], bool], fault: Callable[[Answer], Answer] = broken) -> Body:
    return lambda call, kept: fault(right(call)) if wrong(call) else right(call)


def plan_kept_by_checksum(call: Call, kept: dict[Any, Any]) -> Answer:
    key = call.q.shape, call.page_table.shape, int(call.page_table.sum())
    return right(replace(call, page_table=kept.setdefault(key, call.page_table)))


def scale_from_head_dim(call: Call, kept: dict[Any, Any]) -> Answer:
    own = call.q.shape[-1] ** -0.5
    return right(replace(call, softmax_scale=own) if call.k_scale is None and call.softmax_scale > own / 5 else call)


def window_loses_the_first_key(call: Call, kept: dict[Any, Any]) -> Answer:
    longest = int(call.seqused_k.max())
    wide = call.window_size[0] >= longest - 1
    return right(replace(call, window_size=(longest - 2, 0)) if wide else call)


def right_in_its_first_place(call: Call, kept: dict[Any, Any]) -> Answer:
    if lens(call)[0] != (3, 3, 3, 3):
        return right(call)
    first_seen = kept.setdefault(lens(call), digest(call))
    return right(call) if digest(call) == first_seen else broken(right(call))


def tied_to_a_page_size(call: Call, kept: dict[Any, Any]) -> Answer:
    size = call.k_cache.shape[1]
    if len(lens(call)[0]) != 4:
        return right(call)
    return right(call) if kept.setdefault(lens(call), size) == size else broken(right(call))


def tied_to_its_heads(call: Call, kept: dict[Any, Any]) -> Answer:
    """The same numbers in other heads."""
    if call.k_cache.shape[2] != 3:
        return right(call)
    rows = call.q[: int(call.cu_seqlens_q[-1])].double()
    same = kept.setdefault((lens(call), float(rows.sum().mul(2**20).round())), rows)
    return right(call) if torch.equal(same, rows) else broken(right(call))


def values_between(call: Call, low: float, high: float) -> bool:
    v = call.v_cache.float()
    return call.v_scale is None and low < float(v.min()) and float(v.max()) < high


def drifts_in_parts(call: Call, kept: dict[Any, Any]) -> Answer:
    """The LSE of a second call on four decode steps is a little off."""
    out, lse = right(call)
    if lens(call)[0] == (1, 1, 1, 1):
        kept["calls"] = kept.get("calls", 0) + 1
        lse = lse + 0.01 * (kept["calls"] % 4 > 1)
    return out, lse


def longest_kept_by_table(call: Call, kept: dict[Any, Any]) -> Answer:
    """Keys past the longest sequence of the first call with this table are lost: a length that a plan or a graph has kept."""
    key = tuple(call.q.shape), tuple(call.page_table.flatten().tolist())
    longest = kept.setdefault(key, int(call.seqused_k.max()))
    return right(replace(call, seqused_k=call.seqused_k.clamp(max=longest)))


def kept_without_the_dtype(call: Call, kept: dict[Any, Any]) -> Answer:
    """A call seen before one of another dtype or head dim is answered otherwise after it."""
    kind = call.q.dtype, call.q.shape[-1]
    kept["changes"] = kept.get("changes", 0) + (kept.get("kind", kind) != kind)
    kept["kind"] = kind
    return right(call) if kept.setdefault(digest(call), kept["changes"]) == kept["changes"] else one_place_off(right(call))


WRONG: dict[str, Body] = {
    "page-table": plan_kept_by_checksum,
    "chunks": where(lambda c: len(lens(c)[0]) == 1 and 4 < lens(c)[0][0] < lens(c)[1][0]),
    "q-times-4": scale_from_head_dim,
    "window-of-all": window_loses_the_first_key,
    "sinks-of-nothing": where(lambda c: c.sinks is not None and float(c.sinks.max()) < -1e3),
    "softcap-of-all": where(lambda c: c.softcap > 100),
    "causal-last-query": where(lambda c: not c.causal and set(lens(c)[0]) == {1}),
    "more-keys": longest_kept_by_table,
    "batch-position": right_in_its_first_place,
    "batch-mates": where(lambda c: len(lens(c)[1]) == 1 and 149 < lens(c)[1][0] < 300),
    "batch-size": where(lambda c: len(lens(c)[1]) == 64),
    "split-count": where(lambda c: len(lens(c)[1]) == 1 and lens(c)[1][0] > 900),
    "padding": where(lambda c: c.q.shape[0] - int(c.cu_seqlens_q[-1]) > 100),
    "page-size": tied_to_a_page_size,
    "layout": where(lambda c: c.k_cache.stride(2) > c.k_cache.stride(1)),
    "shared-prefix": where(lambda c: len(lens(c)[0]) == 3 and len(set(c.page_table[:, 0].tolist())) == 1),
    "kv-heads": tied_to_its_heads,
    "v-times-power-of-2": where(
        lambda c: values_between(c, 14.0, 1e3) or values_between(c, 1.2, 7.0), one_place_off
    ),
    "scales-times-4": where(lambda c: c.k_scale is not None and c.softmax_scale < c.q.shape[-1] ** -0.5 / 3, one_place_off),
    "ones-v": where(lambda c: values_between(c, 0.99, 1.01)),
    "lse-merges": drifts_in_parts,
    "a-b-a": kept_without_the_dtype,
}  # fmt: skip


@pytest.mark.parametrize("name", RELATIONS)
def test_every_relation_has_a_fault_that_it_alone_sees(name: str) -> None:
    related = put(WRONG[name], once=True)

    assert {f.case for f in related.findings} == {name}
    reasons = {f.reason for f in related.findings}
    assert (Reason.ERROR if name == "ones-v" else Reason.RELATION) in reasons
    assert reasons <= {Reason.ERROR, Reason.RELATION, Reason.OPTION_IGNORED}
    assert all(f.text and f.size > 0 for f in related.findings)


@pytest.mark.parametrize("name", RELATIONS)
def test_a_change_that_must_show_and_does_not_is_a_finding(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every control of every relation, with the base's answer given to it."""
    answer: Callable[[Any, Side], Any] = judge._Judge._answer
    given: dict[str, Any] = {}
    controls: set[str] = set()
    relation = RELATIONS[name]

    def noted(base: Side, stream: Stream, scope: Scope) -> tuple[Side, ...]:
        sides = relation.controls(base, stream, scope)
        controls.update(side.text for side in sides)
        return sides

    def ignoring(self: Any, side: Side) -> Any:
        own = answer(self, side)
        if not side.text:
            given["base"] = own
        base = given["base"]
        if side.text not in controls or (name == "a-b-a" and side.case.dtype != base.side.case.dtype):
            return own
        return replace(own, out=base.out[side.rows], lse=base.lse[side.rows])

    monkeypatch.setattr(judge._Judge, "_answer", ignoring)
    monkeypatch.setattr(table, "RELATIONS", {name: replace(relation, controls=noted)})
    related = relate(Trial(cast(KernelProcess, Local(lambda call, kept: right(call))), RECORD), SCOPE, seed=0)

    ignored = [f for f in related.findings if f.reason is Reason.OPTION_IGNORED]
    assert {f.text.split(":")[0] for f in ignored} == controls != set()
    assert ignored == list(related.findings)


def ignoring(**without: Any) -> Body:
    return lambda call, kept: right(replace(call, **without))


@pytest.mark.parametrize(
    ("name", "body", "text"),
    [
        ("window-of-all", ignoring(window_size=(-1, -1)), "with a window of ("),
        ("softcap-of-all", ignoring(softcap=0.0), "with a softcap of 2"),
        ("sinks-of-nothing", ignoring(sinks=None), "with sinks of 0"),
        ("causal-last-query", ignoring(causal=True), "not causal"),
        ("q-times-4", ignoring(softmax_scale=0.25), "with the softmax scale / 8"),
    ],
)
def test_an_option_that_is_taken_and_ignored_is_said_to_be(name: str, body: Body, text: str) -> None:
    found = put(body, RECORD, name).findings

    assert any(f.reason is Reason.OPTION_IGNORED and f.case == name and f.text.startswith(text) for f in found)


def test_a_control_that_shows_but_is_wrong_is_a_broken_relation() -> None:
    found = put(where(lambda c: c.softcap == 2.0), RECORD, "softcap-of-all").findings

    assert {f.reason for f in found} == {Reason.RELATION}
    assert found[0].text.startswith("with a softcap of 2: e = ")


def test_a_base_that_is_wrong_is_an_error_and_nothing_more_is_asked() -> None:
    related = put(lambda call, kept: broken(right(call)), RECORD, "window-of-all", "chunks")

    assert {(f.reason, f.case) for f in related.findings} == {(Reason.ERROR, "window-of-all"), (Reason.ERROR, "chunks")}
    assert related.calls == 4 and set(related.ran.values()) == {0}


def test_a_merge_that_misses_the_whole_is_seen_without_the_reference(monkeypatch: pytest.MonkeyPatch) -> None:
    """An LSE in base 2 that says it is a natural one, with nothing measured."""
    monkeypatch.setattr(Trial, "measured_findings", lambda *_: [])
    found = put(lambda call, kept: (right(call)[0], right(call)[1] * 1.4426950408889634), RECORD, "lse-merges").findings

    assert [f.reason for f in found if "merged by LSE, the parts miss the whole by" in f.text] == [Reason.RELATION] * len(found)
    assert {f.text.rpartition("first at ")[2][:3] for f in found} == {"out", "lse"}


# Levels


def splits_a_lone_sequence(call: Call, kept: dict[Any, Any]) -> Answer:
    return emulate(call, Arithmetic(splits=4, tile=16)) if len(call.seqused_k) == 1 else right(call)


def test_batch_invariance_is_reported_and_demanded_only_where_declared() -> None:
    names = [name for name, r in RELATIONS.items() if r.level is Level.ROW]
    plain = put(splits_a_lone_sequence, RECORD, *names)
    declared = put(splits_a_lone_sequence, replace(RECORD, batch_invariant=True), *names)

    assert plain.findings == () and plain.ran == {name: plain.ran[name] for name in names}
    assert plain.notes[1].startswith("not batch-invariant: batch-mates, with sequence 0 alone: other bits in ")
    assert {(f.reason, f.case) for f in declared.findings} == {
        (Reason.BATCH_VARIANT, "batch-mates"), (Reason.BATCH_VARIANT, "split-count"),
    }  # fmt: skip
    invariant = put(lambda call, kept: right(call), RECORD, *names)
    assert invariant.notes[1:] == ("batch-invariant in 21 comparisons, undeclared: the record may say batch_invariant = True",)
    assert put(lambda call, kept: right(call), replace(RECORD, batch_invariant=True), *names).notes == invariant.notes[:1]


@pytest.mark.parametrize("name", ["batch-position", "batch-mates", "batch-size", "split-count", "padding"])
@pytest.mark.parametrize("other", [Arithmetic(tile=128), Arithmetic(splits=4)], ids=["tile", "splits"])
def test_another_tile_or_split_moves_bits_of_some_base_whatever_the_seed(name: str, other: Arithmetic) -> None:
    """Else a kernel that chooses them by its batch would look invariant: sequences of one tile or two heads are too little."""
    for seed in range(3):
        calls = [
            without_fill(lay_out(base.case, base.material, fill=Fill.STALE, salt=0))
            for base, _ in bases(name, RELATIONS[name], SCOPE, seed)
        ]
        assert any(not torch.equal(emulate(call, other)[0], right(call)[0]) for call in calls), seed


def test_other_bits_that_need_not_stay_are_told_by_relation() -> None:
    related = put(lambda call, kept: emulate(call, Arithmetic(tile=call.k_cache.shape[1])), RECORD, "page-size", "chunks")

    assert related.findings == ()
    assert related.notes == (
        "relations: 2 judged, on 4 bases by 18 calls",
        "right with other bits, as correct kernels may be: page-size",
    )


@pytest.mark.parametrize("name", ["page-table", "shared-prefix", "a-b-a", "v-times-power-of-2"])
def test_bits_are_demanded_as_far_as_the_record_declares_them(name: str) -> None:
    """Of kernels whose bits vary, never; under page ids that may move bits, not of relations between page ids."""

    def varies(call: Call, kept: dict[Any, Any]) -> Answer:
        kept["calls"] = kept.get("calls", 0) + 1
        out, lse = right(call)
        return (out, torch.nextafter(lse, lse + 1)) if kept["calls"] % 2 == 0 else (out, lse)

    pages = RELATIONS[name].level is Level.PAGES
    assert put(varies, RECORD, name).findings != ()
    assert put(varies, replace(RECORD, deterministic=False), name).findings == ()
    assert (put(varies, replace(RECORD, page_invariant=False), name).findings == ()) == pages


# What is asked


def test_the_quick_profile_asks_a_few_relations_once() -> None:
    few = planned_relations(SCOPE, quick=True)
    trial = Trial(cast(KernelProcess, Local(lambda call, kept: right(call))), RECORD)
    related = relate(trial, SCOPE, seed=0, quick=True)

    assert 3 <= len(few) <= 6 and set(few.values()) == {1} and related.ran == few and related.findings == ()
    assert related.calls <= 28


def test_the_same_seed_makes_the_same_calls_and_another_makes_others() -> None:
    def calls(seed: int) -> Iterator[str]:
        for name, relation in RELATIONS.items():
            for base, stream in bases(name, relation, SCOPE, seed):
                sides = (*relation.sides(base, stream, SCOPE), *relation.controls(base, stream, SCOPE))
                yield from (digest(laid(side)) for side in (base, *sides))

    assert list(calls(1)) == list(calls(1))
    assert not set(calls(1)) & set(calls(2))


def test_a_call_that_gives_no_result_is_a_finding_and_the_relation_did_not_run() -> None:
    class Failing(Local):
        def call(self, call: Call, timeout_s: float, want_lse: bool = False) -> Returned | Failure:
            if call.softcap > 0:
                return Failure(kind=FailureKind.SIGNAL, text="its process was ended by SIGSEGV")
            return super().call(call, timeout_s, want_lse)

    trial = Trial(cast(KernelProcess, Failing(lambda call, kept: right(call))), RECORD)
    related = relate(trial, SCOPE, seed=0)

    assert {(f.reason, f.case) for f in related.findings} == {(Reason.CRASH, "softcap-of-all")}
    assert related.ran["softcap-of-all"] == 0 and related.ran["window-of-all"] == 2
    assert related.findings[0].text == "its process was ended by SIGSEGV with a softcap of 1000"


def test_after_ten_findings_no_more_is_asked() -> None:
    asked: list[str] = []
    trial = Trial(cast(KernelProcess, Local(lambda call, kept: broken(right(call)))), RECORD)
    related = relate(trial, SCOPE, seed=0, progress=asked.append)

    assert len(related.findings) >= 10 and len(asked) < len(RELATIONS)
