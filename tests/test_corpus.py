"""The evaluation text: disjoint from the training documents, licensed, as its manifest says; the rules that chose it; and what
the shipped model's records and card say of both."""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Iterator
from hashlib import sha256
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer

ROOT = Path(__file__).resolve().parent.parent
MODEL = ROOT / "checkpoints" / "gemma4-mini"
HELDOUT: list[dict[str, str]] = json.loads((MODEL / "text" / "documents.json").read_text(encoding="utf-8"))
TRAINING: dict[str, Any] = json.loads((MODEL / "training_documents.json").read_text(encoding="utf-8"))
FREE = {"PSF-2.0", "MIT", "BSD-3-Clause", "PostgreSQL", "public domain", "MIT or Apache-2.0"}


@pytest.fixture(scope="module")
def corpus() -> Iterator[ModuleType]:
    sys.path.insert(0, str(ROOT / "ci"))
    yield importlib.import_module("corpus")
    sys.path.remove(str(ROOT / "ci"))
    del sys.modules["corpus"]


@pytest.fixture(scope="module")
def training(corpus: ModuleType) -> Iterator[ModuleType]:
    pytest.importorskip("transformers")
    yield importlib.import_module("train_gemma4")
    del sys.modules["train_gemma4"]


def record(name: str) -> dict[str, Any]:
    """A record beside the weights."""
    loaded: dict[str, Any] = json.loads((MODEL / name).read_text(encoding="utf-8"))
    return loaded


def document(corpus: ModuleType, text: str, source: int = 0, name: str = "a.txt") -> Any:
    return corpus.Document(name=name, source=corpus.SOURCES[source], text=text)


def words(start: int, count: int) -> str:
    """`count` words that no other range of numbers has."""
    return " ".join(f"w{number}" for number in range(start, start + count)) + "\n"


def test_no_heldout_document_is_a_training_document() -> None:
    training = set(TRAINING["sha256"])

    assert len(training) == len(TRAINING["sha256"]) == sum(row["documents"] for row in TRAINING["packages"])
    assert not training & {row["sha256"] for row in HELDOUT}


def test_heldout_documents_are_those_of_the_manifest() -> None:
    found = {path.name: sha256(path.read_bytes()).hexdigest() for path in (MODEL / "text").glob("*.txt")}

    assert found == {row["name"]: row["sha256"] for row in HELDOUT}


def test_each_heldout_document_names_a_free_licence_whose_notice_is_beside_it() -> None:
    for row in HELDOUT:
        notice = (MODEL / "text" / row["notice"]).read_text(encoding="utf-8")

        assert row["licence"] in FREE
        assert "copyright" in notice.lower()
    assert {row["licence"] for row in TRAINING["packages"]} <= FREE


def test_the_manifest_names_the_packages_of_the_script(corpus: ModuleType) -> None:
    sources = {source.package: (source.version, source.sha256, source.licence) for source in corpus.SOURCES}

    assert sources == {row["package"]: (row["version"], row["archive_sha256"], row["licence"]) for row in TRAINING["packages"]}
    assert all(corpus.SOURCES[list(sources).index(row["package"])].heldout for row in HELDOUT)


def test_the_heldout_text_holds_64_blocks_of_512_and_8_of_4096(corpus: ModuleType) -> None:
    lengths = [len(ids) - 1 for ids in corpus.encode(list(corpus.heldout_texts().values()))]

    assert sum(length // 512 for length in lengths) >= 64
    assert sum(length // 4096 for length in lengths) >= 8


@given(text=st.text(max_size=200))
def test_the_tokenizer_gives_any_text_back_with_bos_in_front(text: str) -> None:
    tokenizer = Tokenizer.from_file(str(MODEL / "tokenizer.json"))

    ids = tokenizer.encode(text.replace("<", "")).ids

    assert ids[0] == 2
    assert tokenizer.decode(ids) == text.replace("<", "")
    assert tokenizer.get_vocab_size() == 2048


def test_transformers_loads_the_tokenizer_with_the_models_special_tokens() -> None:
    transformers = pytest.importorskip("transformers")

    tokenizer = transformers.AutoTokenizer.from_pretrained(MODEL, local_files_only=True, trust_remote_code=False)

    assert (tokenizer.pad_token_id, tokenizer.eos_token_id, tokenizer.bos_token_id) == (0, 1, 2)
    assert len(tokenizer) == 2048
    assert (
        tokenizer("def f(x):\n    return x")["input_ids"]
        == Tokenizer.from_file(str(MODEL / "tokenizer.json")).encode("def f(x):\n    return x").ids
    )
    assert tokenizer.decode(tokenizer("a  b ,c .\n")["input_ids"], skip_special_tokens=True) == "a  b ,c .\n"


def test_the_tokenizer_is_learnt_the_same_twice(corpus: ModuleType) -> None:
    texts = list(corpus.heldout_texts().values())[:3]

    assert corpus.train_tokenizer(texts).to_str() == corpus.train_tokenizer(texts).to_str()


@given(text=st.text(alphabet=st.sampled_from("aé\u0301 \t\r\n\x00\u200b<")))
def test_normalising_is_idempotent_and_leaves_no_blank_ends(corpus: ModuleType, text: str) -> None:
    once = corpus.normalised(text)

    assert corpus.normalised(once) == once
    assert once.endswith("\n") and "\r" not in once and "\n\n\n" not in once
    assert all(line == line.rstrip(" \t") for line in once.split("\n"))


def test_html_keeps_text_and_preformatted_lines_and_drops_scripts_and_navigation(corpus: ModuleType) -> None:
    page = (
        "<head><title>t</title></head><body><div class='sphinxsidebar'><div>menu</div></div><h1>One  &amp;\ntwo</h1>"
        "<p>a <b>b</b>.<pre>x  =\n  1</pre><ul><li>c<li>d</ul><script>no</script></body>"
    )

    assert corpus.normalised(corpus.text_of_html(page)) == "One & two\n\na b.\n\nx  =\n  1\n\n* c\n* d\n"


def test_equal_and_mostly_repeated_documents_are_left_out_and_the_first_stays(corpus: ModuleType) -> None:
    first, other = document(corpus, words(0, 200)), document(corpus, words(500, 200))
    again = document(corpus, words(0, 200), name="again")
    mostly = document(corpus, words(0, 150) + words(900, 50))
    half = document(corpus, words(500, 80) + words(1900, 120))

    assert corpus.without_repeats([first, other, again, mostly, half]) == [first, other, half]


def test_the_share_of_shingles_in_other_documents_is_counted_from_both_sides(corpus: ModuleType) -> None:
    whole, part = document(corpus, words(0, 112)), document(corpus, words(0, 37))  # 100 and 25 shingles
    alone = document(corpus, words(500, 50))

    assert corpus.shared_with_others([whole, part, alone]).tolist() == [0.25, 1.0, 0.0]


def test_documents_that_share_text_or_may_not_be_redistributed_are_never_held_out(corpus: ModuleType) -> None:
    closed = next(number for number, source in enumerate(corpus.SOURCES) if not source.heldout)
    able = document(corpus, words(0, 900))
    quoted = document(corpus, words(2000, 900))
    quoting = document(corpus, words(2000, 60) + words(9000, 900))
    not_free = document(corpus, words(5000, 900), source=closed)

    train, heldout = corpus.split([able, quoted, quoting, not_free])

    assert heldout == [able]
    assert train == [quoted, quoting, not_free]


def test_an_archive_with_another_hash_is_refused(corpus: ModuleType, tmp_path: Path) -> None:
    source = corpus.SOURCES[0]
    (tmp_path / f"{source.package}_{source.version}_all.deb").write_bytes(b"another")

    with pytest.raises(ValueError, match="SHA-256"):
        corpus.fetch(source, tmp_path)


def test_no_block_of_heldout_text_is_in_a_training_document_by_the_documents_own_words(corpus: ModuleType) -> None:
    """The split's own measure on the held-out documents alone: they do not share text with each other either."""
    documents = [document(corpus, text) for text in corpus.heldout_texts().values()]

    assert corpus.shared_with_others(documents).max() <= corpus.SHARED


def test_an_epoch_holds_every_piece_of_the_stream_once_in_another_order_each_epoch(training: ModuleType) -> None:
    documents = [np.arange(start, start + 40, dtype=np.uint16) for start in range(100, 2100, 40)]

    first, second = (training.sequences(documents, 8, 0, epoch) for epoch in (0, 1))

    inside = first[first > training.EOS]
    assert len(inside) == len(np.unique(inside)) > 0.99 * 2000
    assert np.array_equal(first, training.sequences(documents, 8, 0, 0))
    assert not np.array_equal(first, second[: len(first)])


def test_a_sequence_starts_with_bos_and_bos_is_never_a_target(training: ModuleType) -> None:
    seen, wanted = training.inputs_of(torch.tensor([[5, 6, training.EOS, training.BOS, 7]]))

    assert seen.tolist() == [[training.BOS, 5, 6, training.EOS, training.BOS]]
    assert wanted.tolist() == [[5, 6, training.EOS, training.UNSCORED, 7]]


def test_the_models_shape_is_gemma_4s_where_attention_sees_it(training: ModuleType) -> None:
    shape = training.configuration()
    layers = [(shape.layer_types[i], shape.per_layer_config[i]) for i in range(shape.num_hidden_layers)]

    heads = [(kind, layer.head_dim, shape.num_attention_heads // layer.num_key_value_heads) for kind, layer in layers]
    assert heads == [("sliding_attention", 256, 4), ("full_attention", 512, 8)] * 2
    assert shape.attention_k_eq_v and shape.sliding_window == 1024 and shape.max_position_embeddings >= 4096
    assert shape.rope_parameters["full_attention"]["partial_rotary_factor"] == 0.25


def test_the_shipped_weights_are_those_of_the_record_and_small() -> None:
    weights = (MODEL / "model.safetensors").read_bytes()

    assert len(weights) == record("training.json")["weights_bytes"] <= 12_000_000
    assert sha256(weights).hexdigest() == record("training.json")["weights_sha256"]


def test_the_model_predicts_the_same_tokens_clearly_better_than_the_trigram() -> None:
    final, trigram = record("training.json")["final"], record("trigram.json")

    assert final["tokens"] == trigram["tokens"]
    assert final["perplexity"] < 0.75 * trigram["perplexity"]


def test_the_cards_figures_and_curve_are_made_from_the_records(training: ModuleType) -> None:
    names = ("training.json", "trigram.json", "training_documents.json")
    figures = training.figures_of(*(record(name) for name in names))
    page = (MODEL / "README.md").read_text(encoding="utf-8")

    assert f"<!-- figures -->\n{figures}<!-- end -->" in page
    assert (MODEL / "loss.svg").read_text(encoding="utf-8") == training.curve_svg(record("training.json"))
