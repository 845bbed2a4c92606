"""The table of relations: what each demands, why it may, how the second call is made, and a change that must show.

A relation demands no more than correct kernels keep: split-KV and tile heuristics may look at lengths, batch sizes, options
and strides, and so move bits within the bound; they may not look at values, and a power of two moves no rounding.
`oracle accept --graph` puts them to replays of CUDA graphs, whose plans change between captures and replays.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum

from oracle.contract import Record
from oracle.geometry import Lengths
from oracle.relations import changes, shapes
from oracle.relations.sides import Side, as_it_is
from oracle.scope import Scope
from oracle.streams import Stream


class Level(StrEnum):
    """What a relation demands of the second call, mapped back, beside e <= 1."""

    BITS = "the same bits"
    PAGES = "the same bits, unless the record declares that page ids move them"
    ROW = "e <= 1; the same bits where the record declares batch_invariant, else reported"
    ERROR = "e <= 1; whether the bits are the same is reported"
    MERGED = "the parts merged by their LSEs are the whole, to within the bounds of all three"


Sides = Callable[[Side, Stream, Scope], tuple[Side, ...]]


def _always(scope: Scope) -> str | None:
    return None


def _takes(*parameters: str) -> Callable[[Scope], str | None]:
    def refuses(scope: Scope) -> str | None:
        return next((f"no {name}" for name in parameters if name not in scope.parameters), None)

    return refuses


def _page_sizes(scope: Scope) -> str | None:
    return "one page size" if len(scope.record.page_sizes) < 2 else None


def _plain_v(scope: Scope) -> str | None:
    return "v is quantised inside" if scope.record.precision.v_format else None


def _plain_qk(scope: Scope) -> str | None:
    return "q and k are quantised inside" if scope.record.precision.qk_format else None


def _scales(scope: Scope) -> str | None:
    return _takes("k_scale", "v_scale")(scope) or _plain_v(scope) or _plain_qk(scope)


@dataclass(frozen=True, slots=True, kw_only=True)
class Relation:
    """A relation between calls of one kernel."""

    level: Level
    why: str  # it may demand that, in one sentence
    batches: Callable[[Stream, int, Record], list[Lengths]]  # of its bases, given the page size
    sides: Sides  # the calls that must agree with the base
    controls: Sides  # calls that must not
    inputs: str = "randn"
    kv_heads: int = 2
    scaled: bool = False  # with a scale per sequence and head where the kernel takes them
    base: Callable[[Side], Side] = as_it_is  # a change of the drawn base
    refuses: Callable[[Scope], str | None] = _always  # why a kernel of this scope cannot be asked, or None
    quick: bool = False  # in the quick profile as well, on its first base


RELATIONS: dict[str, Relation] = {
    "page-table": Relation(
        level=Level.PAGES,
        why="a token is where the table says, and shapes that stay the same say nothing of the table",
        batches=shapes.two_pages,
        base=changes.second_doubled,
        sides=changes.pages_and_table_exchanged,
        controls=changes.table_exchanged,
        inputs="offset-v",
        quick=True,
    ),
    "chunks": Relation(
        level=Level.ERROR,
        why="a row's answer follows from the keys it sees; tiles of another q_len may add in another order",
        batches=shapes.prompt,
        sides=changes.chunked,
        controls=changes.without_the_past,
        scaled=True,
        quick=True,
    ),
    "q-times-4": Relation(
        level=Level.BITS,
        why="four times q under a quarter of the scale, or of its root on either side: powers of two, which move no rounding",
        batches=shapes.mixed,
        sides=changes.q_times_scale_over,
        controls=changes.scale_over_8,
        refuses=_plain_qk,
        quick=True,
    ),
    "window-of-all": Relation(
        level=Level.ERROR,
        why="a window that holds every key hides none; its code may tile otherwise",
        batches=shapes.mixed,
        sides=changes.window_of_all,
        controls=changes.window_of_half,
        refuses=_takes("window_size"),
        quick=True,
    ),
    "sinks-of-nothing": Relation(
        level=Level.ERROR,
        why="exp(-10000 - m) is 0 in float32, so such a sink adds nothing",
        batches=shapes.short_prompt,
        sides=changes.sinks_far_below,
        controls=changes.sinks_of_zero,
        refuses=_takes("sinks"),
        quick=True,
    ),
    "softcap-of-all": Relation(
        level=Level.ERROR,
        why="a cap of 1000 moves logits of 30 by less than tanh's own error; each is held to its own exact answer",
        batches=shapes.mixed,
        sides=changes.softcap_far_above,
        controls=changes.softcap_of_two,
        inputs="peaked",
        refuses=_takes("softcap"),
    ),
    "causal-last-query": Relation(
        level=Level.ERROR,
        why="the last query of a sequence sees every key, causal or not; the masks may tile otherwise",
        batches=shapes.short_prompt,
        sides=changes.last_queries_not_causal,
        controls=changes.not_causal,
        refuses=_takes("causal"),
    ),
    "more-keys": Relation(
        level=Level.BITS,
        why="lengths are data: the same shapes and pages with other lengths, and again with the first ones",
        batches=shapes.company,
        base=changes.shortened,
        sides=changes.whole_again,
        controls=changes.other_values,
        quick=True,
    ),
    "batch-position": Relation(
        level=Level.ROW,
        why="a sequence does not see its batch-mates; a persistent schedule may split it by its place",
        batches=shapes.alike,
        sides=changes.moved,
        controls=changes.queries_moved_alone,
        scaled=True,
    ),
    "batch-mates": Relation(
        level=Level.ROW,
        why="a sequence does not see its batch-mates; the number of splits may follow from theirs",
        batches=shapes.company,
        sides=changes.alone,
        controls=changes.other_values,
        scaled=True,
    ),
    "batch-size": Relation(
        level=Level.ROW,
        why="63, 64, 65 rows, and both sides of every declared threshold, may run on other tiles or another kernel",
        batches=shapes.many_rows,
        sides=changes.fewer,
        controls=changes.first_left_out,
        kv_heads=1,
        scaled=True,
    ),
    "split-count": Relation(
        level=Level.ROW,
        why="a long sequence alone is split over more workers than in a batch, and merged by other sums",
        batches=shapes.one_long,
        sides=changes.long_alone,
        controls=changes.other_values,
        kv_heads=1,
    ),
    "padding": Relation(
        level=Level.ROW,
        why="rows, sequences and table columns past the plan are nothing; a grid may be sized by them",
        batches=shapes.mixed,
        sides=changes.padded,
        controls=changes.half_as_long,
        scaled=True,
    ),
    "page-size": Relation(
        level=Level.ERROR,
        why="the same tokens in pages of another size; tiles may be as large as pages",
        batches=shapes.company,
        sides=changes.other_page_size,
        controls=changes.other_values,
        refuses=_page_sizes,
    ),
    "layout": Relation(
        level=Level.ERROR,
        why="the same tokens under other strides, in one process: a compiled kernel or a plan may be kept without them",
        batches=shapes.mixed,
        sides=changes.other_layouts,
        controls=changes.other_values,
    ),
    "shared-prefix": Relation(
        level=Level.PAGES,
        why="prefix pages shared between sequences or copied for each hold the same tokens",
        batches=shapes.prefixed,
        base=changes.prefix_copied,
        sides=changes.prefix_shared,
        controls=changes.more_than_the_prefix_shared,
    ),
    "kv-heads": Relation(
        level=Level.ERROR,
        why="heads do not see each other; a schedule may split them by their number",
        batches=shapes.mixed,
        sides=changes.heads_moved,
        controls=changes.kv_heads_moved_alone,
        kv_heads=3,
        scaled=True,
    ),
    "v-times-power-of-2": Relation(
        level=Level.BITS,
        why="sums of P.V are linear, and a power of two is exact where nothing under- or overflows (v is near 8)",
        batches=shapes.mixed,
        sides=changes.v_times_power_of_2,
        controls=changes.v_doubled,
        inputs="offset-v",
        refuses=_plain_v,
    ),
    "scales-times-4": Relation(
        level=Level.BITS,
        why="scales are factors of the logits and of the output, and a power of two in a factor is exact",
        batches=shapes.mixed,
        sides=changes.scales_times_4_and_undone,
        controls=changes.each_scale_times_8,
        inputs="offset-v",
        scaled=True,
        refuses=_scales,
    ),
    "ones-v": Relation(
        level=Level.ERROR,
        why="the weights add up to 1, whatever they are",
        batches=shapes.mixed,
        sides=changes.keys_moved,
        controls=changes.v_doubled,
        inputs="ones-v",
    ),
    "lse-merges": Relation(
        level=Level.MERGED,
        why="the LSE says how much weight the keys of a call had, so two calls on parts of the keys give the whole",
        batches=shapes.decode,
        sides=changes.halves_of_the_keys,
        controls=changes.first_half_of_the_keys,
        refuses=_takes("return_lse"),
    ),
    "a-b-a": Relation(
        level=Level.BITS,
        why="what is kept between calls of other shapes, strides and dtypes must be kept by all that it depends on",
        batches=shapes.mixed,
        sides=changes.others_between,
        controls=changes.other_data,
        scaled=True,
    ),
}


def refuses(relation: Relation, scope: Scope) -> str | None:
    """Why a kernel of this scope cannot be asked for `relation`, in a few words, or None where it can."""
    if scope.extras:
        return f"{min(scope.extras)} ties K to V"
    return relation.refuses(scope)


def allowed(scope: Scope, *, quick: bool) -> dict[str, Relation]:
    """The relations that a kernel of this scope is asked for; of the quick profile, or all."""
    return {name: r for name, r in RELATIONS.items() if refuses(r, scope) is None and (r.quick or not quick)}
