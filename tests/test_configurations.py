"""The grammar of configurations: what is written is what runs, and whatever else is written is told from it."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from oracle.checkpoints.configurations import ATTENTIONS, KV_FORMATS, WEIGHTS, chosen_layers, configuration, plugged
from oracle.checkpoints.loading import CheckpointError

FILE = Path(__file__).with_name("contract_kernels.py")
KINDS = ("sliding", "global", "sliding", "sliding", "global")


@given(
    weights=st.sampled_from(sorted(WEIGHTS)),
    attention=st.sampled_from(["", "sdpa-math", "dir/my_kernel.py:attention", "package.module:kernel", *sorted(ATTENTIONS)]),
    kv=st.sampled_from(["", *KV_FORMATS]),
    layers=st.sampled_from(["", "global", "sliding", "0", "0,2-4"]),
)
def test_every_word_has_its_place(weights: str, attention: str, kv: str, layers: str) -> None:
    text = "+".join([weights, *filter(None, (attention, kv))]) + (f"@{layers}" if layers else "")
    found = configuration(text)

    assert (found.weights, found.attention, found.kv, found.layers, found.text) == (weights, attention, kv, layers, text)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("f8", "weights 'f8' are unknown; did you mean fp8"),
        ("", "weights '' are unknown; there are bf16, fp8, fp8-weights; expected WEIGHTS"),
        ("bf16+kv-fp4", "cache format 'kv-fp4' is unknown or named twice; there is kv-fp8"),
        ("bf16+kv-fp8+kv-fp8", "unknown or named twice"),
        ("bf16+kv-fp8+int8-attention", "'int8-attention' is one word too many"),
        ("bf16+int8-attention+other-attention", "'other-attention' is one word too many"),
        ("bf16@first", "got layers 'first'; expected global, sliding, or numbers such as 0,3-5"),
        ("bf16@", "got layers ''"),
    ],
)
def test_what_is_not_in_the_grammar_is_told(text: str, said: str) -> None:
    with pytest.raises(CheckpointError, match=said):
        configuration(text)


@pytest.mark.parametrize(
    ("layers", "chosen"), [("", {0, 1, 2, 3, 4}), ("global", {1, 4}), ("sliding", {0, 2, 3}), ("3", {3}), ("0,2-4", {0, 2, 3, 4})]
)
def test_layers_are_chosen_by_kind_or_number(layers: str, chosen: set[int]) -> None:
    text = f"bf16+other-attention@{layers}" if layers else "bf16+other-attention"
    assert chosen_layers(configuration(text), KINDS) == chosen


@pytest.mark.parametrize("text", ["fp8@5", "fp8@3-9", "fp8@4-3"])
def test_layers_that_the_model_does_not_have_are_an_error(text: str) -> None:
    with pytest.raises(CheckpointError, match="it has 0 to 4, 3 sliding and 2 global"):
        chosen_layers(configuration(text), KINDS)


def test_a_model_without_a_window_has_no_sliding_layers() -> None:
    with pytest.raises(CheckpointError, match="no such layer"):
        chosen_layers(configuration("fp8@sliding"), ("global",) * 2)


def test_only_some_layers_means_their_weights_too() -> None:
    only = configuration("fp8+other-attention").only([2, 0])

    assert (only.text, only.layers, only.whole_layers) == ("fp8+other-attention@0,2", "0,2", True)


def test_every_word_for_attention_is_a_kernel() -> None:
    for word in ATTENTIONS:
        assert {"cu_seqlens_q", "seqused_k", "page_table", "softmax_scale", "window_size"} <= plugged(word).takes


def test_kernels_are_named_as_oracle_accept_names_them() -> None:
    assert plugged("sdpa-math").target == "oracle.kernels.torch_sdpa:sdpa_math"
    assert plugged(f"{FILE}:plain").record.head_dims == (16, 32, 64, 128)
    assert plugged("").target == plugged("sdpa-flash").target


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("int8-atention", "no such kernel.*words for attention are other-attention, int8-attention"),
        (f"{FILE}:absent", "no absent in"),
        ("nowhere.py:kernel", "no such file"),
        ("json:dumps", r"json:dumps: takes \*\*kwargs and has no record"),
        ("bisect:insort", "bisect:insort: the kernel contract's cu_seqlens_q is not among its keyword arguments"),
    ],
)
def test_what_is_no_kernel_is_told(name: str, said: str) -> None:
    with pytest.raises(CheckpointError, match=said):
        plugged(name)
