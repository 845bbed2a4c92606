"""The JSON of a drift report: by its schema whatever was measured, whole in its figures, and compared only with its like."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import asdict, fields, replace
from importlib.resources import files
from typing import Any

import jsonschema
import pytest
import torch
from drift_sample import FLOOR, measured, row_of, sample, text_of

from oracle.checkpoints.decision import Ruling, decide
from oracle.checkpoints.drifted import Attribution, Drift, Waypoint
from oracle.checkpoints.figures import Figures
from oracle.drift_json import comparable, drift_json

SCHEMA = json.loads(files("oracle").joinpath("schema/drift.schema.json").read_text())
DRIFT = sample()
BARE = replace(DRIFT, decisions=(), attributions=(), waypoints=())


def written(drift: Drift) -> Any:
    """As another program reads it."""
    return json.loads(json.dumps(drift_json(drift), allow_nan=False))


def lost(drift: Drift) -> Drift:
    """The same, every logit of a candidate's first block NaN, and of another's all of them."""
    rows = []
    for row, until in zip(drift.rows, (0, 64, len(drift.text.token), 0, 0), strict=True):
        bad = torch.arange(len(drift.text.token)) < until
        columns = {
            field.name: column.masked_fill(bad, False if column.dtype == torch.bool else math.nan)
            for field in fields(row.divergence)
            for column in [getattr(row.divergence, field.name)]
        }
        rows.append(row_of(drift.text, row.configuration, type(row.divergence)(**columns)))
    one, other = rows[2], rows[4]
    decision = decide(one.configuration, other.configuration, one.divergence, other.divergence, drift.text)
    waypoint = replace(drift.waypoints[0], kl=math.nan, max_logit=math.inf)
    swap = replace(drift.attributions[0].swaps[0], kl=one.figures.kl)
    attribution = replace(drift.attributions[0], additivity=math.nan, swaps=(swap,))
    return replace(drift, rows=tuple(rows), decisions=(decision,), waypoints=(waypoint,), attributions=(attribution,))


def one_block() -> Drift:
    """A block of two tokens: a text with nothing to compare it with."""
    text = text_of(1, 2)
    first, second = (measured(text, noise, 7) for noise in (0.1, 0.2))
    return replace(
        BARE,
        text=text,
        rows=(row_of(text, FLOOR, first), row_of(text, "fp8", second)),
        decisions=(decide("fp8", FLOOR, second, first, text),),
    )


CASES: dict[str, Callable[[], Drift]] = {
    "sample": lambda: DRIFT,
    "not finite": lambda: lost(DRIFT),
    "no floor": lambda: replace(DRIFT, rows=DRIFT.rows[1:]),
    "nothing but rows": lambda: BARE,
    "no rows": lambda: replace(BARE, rows=()),
    "one block": one_block,
    "no suggestion": lambda: replace(
        DRIFT, attributions=(replace(DRIFT.attributions[0], kept=(), suggested="", suggested_kl=None),)
    ),
    "deep identity": lambda: replace(DRIFT, identity={"sources": {"k": "a1"}, "layers": (1, 2), "seed": None}),
}


@pytest.mark.parametrize("case", CASES)
def test_it_is_valid_by_its_schema(case: str) -> None:
    jsonschema.Draft202012Validator(SCHEMA).validate(written(CASES[case]()))


def test_the_schema_is_one() -> None:
    jsonschema.Draft202012Validator.check_schema(SCHEMA)


def test_a_key_too_many_or_too_few_anywhere_is_not_valid() -> None:
    validator = jsonschema.Draft202012Validator(SCHEMA)
    inner: tuple[Callable[[Any], Any], ...] = (
        lambda d: d,
        lambda d: d["configurations"][0],
        lambda d: d["configurations"][0]["figures"],
        lambda d: d["configurations"][0]["figures"]["kl"],
        lambda d: d["configurations"][0]["figures"]["worst"][0],
        lambda d: d["configurations"][0]["figures"]["by_document"][0],
        lambda d: d["decisions"][0],
        lambda d: d["attributions"][0],
        lambda d: d["attributions"][0]["swaps"][0],
        lambda d: d["waypoints"][0],
    )
    for place in inner:
        more, fewer = written(DRIFT), written(DRIFT)
        place(more)["more"] = 1
        place(fewer).popitem()

        assert not validator.is_valid(more) and not validator.is_valid(fewer)


def test_the_schema_has_every_field_of_the_records() -> None:
    properties = SCHEMA["properties"]

    assert set(SCHEMA["$defs"]["figures"]["properties"]) == {f.name for f in fields(Figures)}
    assert set(properties["attributions"]["items"]["properties"]) == {f.name for f in fields(Attribution)}
    assert set(properties["waypoints"]["items"]["properties"]) == {f.name for f in fields(Waypoint)} | {"within_line"}
    assert properties["decisions"]["items"]["properties"]["ruling"]["enum"] == [str(r) for r in Ruling]


def test_every_figure_is_there_to_the_last_bit() -> None:
    for one, row in zip(written(DRIFT)["configurations"], DRIFT.rows, strict=True):
        worst = one["figures"].pop("worst")
        whole = json.loads(json.dumps(asdict(row.figures)))

        assert [(spot["index"], spot["kl"]) for spot in worst] == [(w["index"], w["kl"]) for w in whole.pop("worst")]
        assert one["figures"] == whole
        assert one["configuration"] == row.configuration and one["ran"] == row.ran


def test_what_is_not_finite_is_a_string() -> None:
    data = written(lost(DRIFT))
    partly, wholly = data["configurations"][1:3]

    assert partly["figures"]["not_finite"] == 64 and partly["figures"]["kl"]["value"] > 0
    assert wholly["figures"]["kl"]["value"] == wholly["figures"]["kl_max"] == "nan"
    assert (data["waypoints"][0]["kl"], data["waypoints"][0]["max_logit"]) == ("nan", "inf")
    assert data["waypoints"][0]["within_line"] is False and data["decisions"][0]["ruling"] == "reject"


def test_how_it_stands_to_the_floor_is_there() -> None:
    data = written(DRIFT)["configurations"]

    assert [one["floor"] for one in data] == [True, False, False, False, False]
    assert [one["distinguishable"] for one in data] == [None, True, True, False, True]
    assert data[1]["times_floor"] == DRIFT.rows[1].figures.kl.value / DRIFT.rows[0].figures.kl.value
    assert {one["times_floor"] for one in written(CASES["no floor"]())["configurations"]} == {None}


def test_a_worst_token_has_its_context() -> None:
    spot = written(DRIFT)["configurations"][1]["figures"]["worst"][0]
    block = DRIFT.text.blocks[spot["block"]]

    assert spot["token"] == block[spot["position"] + 1]
    assert "".join(spot["before"]) == "".join(DRIFT.pieces[t] for t in block[: spot["position"] + 1][-12:])


def test_no_array_of_all_tokens_is_in_it() -> None:
    assert len(json.dumps(written(DRIFT))) < 60_000
    assert len(json.dumps(drift_json(sample(24, 65)))) < 1.1 * len(json.dumps(drift_json(DRIFT)))


# Two reports


def changed(**identity: object) -> dict[str, Any]:
    return drift_json(replace(DRIFT, identity=dict(DRIFT.identity) | identity))


def test_a_report_may_be_compared_with_itself_and_with_other_configurations_of_the_same() -> None:
    assert comparable(drift_json(DRIFT), written(DRIFT)) == []
    assert comparable(drift_json(DRIFT), drift_json(replace(BARE, rows=DRIFT.rows[:2], environment={"command": "x"}))) == []


@pytest.mark.parametrize("key", DRIFT.identity)
def test_whatever_differs_in_what_was_measured_is_a_reason(key: str) -> None:
    assert comparable(drift_json(DRIFT), changed(**{key: "other"})) == [f"{key}: {DRIFT.identity[key]} against other"]


def test_every_difference_is_named_once() -> None:
    reasons = comparable(drift_json(DRIFT), changed(weights_sha256="d4", blocks="1x2"))

    assert [reason.partition(":")[0] for reason in reasons] == ["weights_sha256", "blocks"]


def test_what_only_one_report_names_is_a_reason() -> None:
    more = changed(sources="e5")

    assert comparable(drift_json(DRIFT), more) == ["sources: only the second report names it"]
    assert comparable(more, drift_json(DRIFT)) == ["sources: only the first report names it"]


def test_another_reference_or_format_is_a_reason_whatever_the_identity_says() -> None:
    plain = {"weights_sha256": "a1"}
    one = drift_json(replace(DRIFT, identity=plain))

    assert comparable(one, drift_json(replace(DRIFT, identity=plain, reference="fp32"))) == ["reference: bf16 against fp32"]
    assert comparable(one, one | {"format": 2}) == ["format: 1 against 2"]


def test_reports_that_say_nothing_of_what_they_measured_are_not_compared() -> None:
    nothing = drift_json(replace(DRIFT, identity={}))

    assert comparable(nothing, nothing) == ["identity: neither report says what it measured"]
