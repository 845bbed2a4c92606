"""What a drift report holds: one record that the terminal, JSON, Markdown and HTML are made from."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from oracle.checkpoints.decision import Decision
from oracle.checkpoints.divergence import Divergence
from oracle.checkpoints.figures import Estimate, Figures
from oracle.checkpoints.texts import Text


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One configuration, measured from the reference."""

    configuration: str
    floor: bool  # a second, equally correct kernel of the reference's own weights
    figures: Figures
    divergence: Divergence  # of every scored position
    ran: Mapping[str, int]  # "layer 0: int8-attention" -> calls, so that each layer's path shows
    tokens_per_second: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Swap:
    """One layer of a configuration swapped into the reference, all else as in the reference."""

    layer: int
    kind: str  # "global", "sliding", or "full"
    kl: Estimate  # mean KL(reference || swapped), nats


@dataclass(frozen=True, slots=True, kw_only=True)
class Attribution:
    """Where a configuration's drift comes from."""

    configuration: str
    control: float  # mean KL of the reference against itself, layer swapped for itself: exactly 0
    whole: Estimate  # of the whole configuration on the same blocks
    swaps: tuple[Swap, ...]
    additivity: float  # the whole over the sum of the swaps; 1 = layers do not interact
    kept: tuple[int, ...]  # layers that the suggestion keeps as they are in the reference
    suggested: str  # the suggested mixed configuration, "" where none helps
    suggested_kl: Estimate | None  # measured


@dataclass(frozen=True, slots=True, kw_only=True)
class Waypoint:
    """One way to run one length, against the reference run whole."""

    name: str  # "1025 whole", "4096 in chunks of 1024", "prefill against decode", ...
    configuration: str
    tokens: int
    kl: float  # mean, nats
    agree1: float  # share of positions with the same best token
    max_logit: float  # largest absolute difference of a logit
    apart: int  # positions where the best tokens differ although their gap exceeds the floor's
    exact: bool | None  # mixed against serial steps: whether every token agreed where it must; None where not asked


@dataclass(frozen=True, slots=True, kw_only=True)
class Drift:
    """A whole report."""

    reference: str  # configuration
    rows: tuple[Row, ...]  # floors included
    decisions: tuple[Decision, ...]
    attributions: tuple[Attribution, ...]
    waypoints: tuple[Waypoint, ...]
    text: Text
    pieces: tuple[str, ...]  # the tokenizer's text of each token id that occurs in `text.blocks`, by id; "" for the others
    layers: tuple[str, ...]  # "sliding, 8 q heads, 2 kv heads, head dim 256, window 1024", one a layer
    identity: Mapping[str, object]  # what must be equal for two reports to be comparable: sha256 of weights, tokens, tokenizer
    environment: Mapping[str, object]  # versions, threads, seconds, command

    @property
    def floor(self) -> Row | None:
        """The row of a second, equally correct kernel."""
        return next((row for row in self.rows if row.floor), None)
