"""Trains the small Gemma 4 of checkpoints/gemma4-mini on the documents that ci/corpus.py gathered.

    python ci/train_gemma4.py --steps 4000 --short-steps 2500 --out FOLDER      on one GPU
    python ci/train_gemma4.py --card                                            write the model card's figures again

The model is transformers' own Gemma4ForCausalLM.  Every step sees `--batch` sequences of `--length` tokens; the first
`--short-steps` steps cut the same number of tokens into sequences of 1024, which are faster.  A sequence is <bos> and then
consecutive tokens of the stream; the stream is all documents in a seeded order, each <bos> text <eos>, shuffled anew each epoch.
<bos> is never a target.  The same seed gives the same initial weights and the same data in the same order; sums on a GPU may
differ in their last bits from run to run.

Perplexity is exp of the mean of -ln p, in fp32, over every token of every held-out document; <bos> and <eos> are not scored.  A
document is cut into windows of `--length` tokens: <bos> and the next `--length` - 1 tokens, each predicted from those before it
in its window.
"""

from __future__ import annotations

import argparse
import json
import math
import platform
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers
import torch
import transformers
from corpus import BOS, EOS, MODEL, PAD, TRAIN, VOCABULARY, encode, heldout_texts, training_texts
from numpy.typing import NDArray
from torch import Tensor

Tokens = NDArray[np.uint16]
SHORT = 1024
WARMUP = 200  # steps
BETAS = (0.9, 0.95)
WEIGHT_DECAY = 0.1  # of matrices; none of norms and embeddings
CLIP = 1.0  # norm of the whole gradient
REPORT = 50  # steps between points of the loss curve
UNSCORED = -100


def configuration() -> transformers.Gemma4TextConfig:
    """The shape: what a kernel sees is as in the released Gemma 4, all else as narrow as 12 MB in bf16 allow."""
    shape: dict[str, Any] = {
        "vocab_size": VOCABULARY,
        "hidden_size": 160,
        "intermediate_size": 640,
        "num_hidden_layers": 4,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "num_attention_heads": 8,
        "head_dim": 256,
        "num_key_value_heads": 2,
        "global_head_dim": 512,
        "num_global_key_value_heads": 1,
        "attention_k_eq_v": True,
        "sliding_window": 1024,
        "max_position_embeddings": 8192,
        "final_logit_softcapping": 30.0,
        "hidden_size_per_layer_input": 0,
        "vocab_size_per_layer_input": VOCABULARY,
        "tie_word_embeddings": True,
        "pad_token_id": PAD,
        "eos_token_id": EOS,
        "bos_token_id": BOS,
    }
    return transformers.Gemma4TextConfig(**shape)


def initial_model(seed: int) -> Any:
    """A Gemma4ForCausalLM with seeded fp32 weights, on the CPU, attention in transformers' "eager" way."""
    torch.manual_seed(seed)
    model: Any = transformers.Gemma4ForCausalLM(configuration())  # in torch's default dtype, fp32
    model.set_attn_implementation("eager")
    for layer in model.model.layers:
        attention = layer.self_attn
        # Scores are not scaled by 1/sqrt(d): the norms of Q and K must hold that, or attention starts as a hard choice.
        for norm in (attention.q_norm, attention.k_norm):
            torch.nn.init.constant_(norm.weight, attention.head_dim**-0.25)
    return model


def sequences(documents: Sequence[Tokens], length: int, seed: int, epoch: int) -> Tokens:
    """(N, length) token ids of one epoch in seeded order: the stream cut into pieces, less what the last piece lacks."""
    generator = np.random.default_rng((seed, length, epoch))
    parts = [part for index in generator.permutation(len(documents)) for part in (documents[index], np.array([EOS], np.uint16))]
    stream = np.concatenate(parts)[generator.integers(length) :]
    count = len(stream) // length
    return stream[: count * length].reshape(count, length)[generator.permutation(count)]


def batches(documents: Sequence[Tokens], size: int, length: int, seed: int) -> Iterator[Tensor]:
    """Endless (size, length) int64 target ids; an epoch's last sequences that fill no batch are left out."""
    epoch = 0
    while True:
        pieces = sequences(documents, length, seed, epoch)
        for start in range(0, len(pieces) - size + 1, size):
            yield torch.from_numpy(pieces[start : start + size].astype(np.int64))
        epoch += 1


def inputs_of(targets: Tensor) -> tuple[Tensor, Tensor]:
    """What the model sees and what it must predict, both (B, L): <bos> in front of the targets, and <bos> no target."""
    front = torch.full_like(targets[:, :1], BOS)
    return torch.cat([front, targets[:, :-1]], 1), targets.masked_fill(targets == BOS, UNSCORED)


def loss_of(model: Any, targets: Tensor, reduction: str = "mean") -> Tensor:
    """Cross entropy, nats, of (B, L) targets, fp32; its mean, or with "sum" its sum, over all that are not <bos>."""
    seen, wanted = inputs_of(targets)
    logits = model(input_ids=seen, use_cache=False).logits.float()
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1), wanted.flatten(), ignore_index=UNSCORED, reduction=reduction)


@torch.inference_mode()
def perplexity(model: Any, documents: Sequence[Tokens], length: int) -> tuple[float, int, float]:
    """Perplexity as on top of this file, the number of tokens scored, and the sum of their -ln p."""
    total, count = 0.0, 0
    for document in documents:
        text = torch.from_numpy(document[1:].astype(np.int64)).to(model.device)
        for window in torch.split(text, length - 1):
            total += float(loss_of(model, window[None], "sum"))
            count += len(window)
    return math.exp(total / count), count, total


def rate_at(step: int, steps: int, peak: float) -> float:
    """The learning rate of step 0..steps-1: linear warm-up, then half a cosine down to a hundredth of the peak."""
    if step < WARMUP:
        return peak * (step + 1) / WARMUP
    done = (step - WARMUP) / max(1, steps - WARMUP)
    return peak * (0.01 + 0.99 * 0.5 * (1 + math.cos(math.pi * done)))


def optimizer_of(model: torch.nn.Module, rate: float, *, fused: bool) -> torch.optim.Optimizer:
    """AdamW; weight decay on the matrices of the layers only."""
    named = dict(model.named_parameters())
    decayed = [p for name, p in named.items() if p.ndim == 2 and "embed" not in name]
    others = [p for name, p in named.items() if p.ndim != 2 or "embed" in name]
    groups = [{"params": decayed, "weight_decay": WEIGHT_DECAY}, {"params": others, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=rate, betas=BETAS, fused=fused)


def train(asked: argparse.Namespace, documents: Sequence[Tokens], heldout: Sequence[Tokens]) -> tuple[Any, dict[str, Any]]:
    """The trained model (fp32) and its record.  Prints loss and tokens/s every 50 steps."""
    device = torch.device(asked.device)
    model = initial_model(asked.seed).to(device).train()
    optimizer = optimizer_of(model, asked.rate, fused=device.type == "cuda")
    short = min(SHORT, asked.length)
    tokens_a_step = asked.batch * asked.length
    long_data = batches(documents, asked.batch, asked.length, asked.seed)
    short_data = batches(documents, tokens_a_step // short, short, asked.seed)
    curve: list[dict[str, Any]] = []
    scores: list[dict[str, Any]] = []
    sums = torch.zeros((), device=device)
    begin = last = time.perf_counter()
    for step in range(asked.steps):
        for group in optimizer.param_groups:
            group["lr"] = rate_at(step, asked.steps, asked.rate)
        is_short = step < asked.short_steps
        whole = next(short_data if is_short else long_data)
        together = asked.micro * (asked.length // short if is_short else 1)
        for part in torch.split(whole.to(device), together):
            with torch.autocast(device.type, torch.bfloat16):
                loss = loss_of(model, part) * (len(part) / len(whole))
            loss.backward()  # type: ignore[no-untyped-call]
            sums += loss.detach()
        torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if (step + 1) % REPORT == 0 or step + 1 == asked.steps:
            since = len(curve) and curve[-1]["step"]
            mean = float(sums) / (step + 1 - since)
            now = time.perf_counter()
            curve.append({"step": step + 1, "loss": round(mean, 5), "length": short if is_short else asked.length})
            speed = tokens_a_step * (step + 1 - since) / (now - last)
            print(f"step {step + 1}/{asked.steps}  loss {mean:.4f}  {speed:,.0f} tokens/s  {now - begin:.0f} s", flush=True)
            sums.zero_()
            last = now
        if (step + 1) % asked.every == 0 and step + 1 < asked.steps:
            with torch.autocast(device.type, torch.bfloat16):
                found = perplexity(model.eval(), heldout, asked.length)[0]
            model.train()
            scores.append({"step": step + 1, "perplexity": round(found, 4)})
            print(f"step {step + 1}/{asked.steps}  held-out perplexity {found:.3f}", flush=True)
            last = time.perf_counter()
    tokens = sum(len(ids) + 1 for ids in documents)
    record = {
        "steps": asked.steps,
        "short_steps": asked.short_steps,
        "length": asked.length,
        "short_length": short,
        "tokens_a_step": tokens_a_step,
        "tokens_seen": tokens_a_step * asked.steps,
        "training_documents": len(documents),
        "training_tokens": tokens,
        "training_sha256": sha256(TRAIN.read_bytes()).hexdigest(),
        "seed": asked.seed,
        "rate": asked.rate,
        "warmup": WARMUP,
        "betas": BETAS,
        "weight_decay": WEIGHT_DECAY,
        "clip": CLIP,
        "seconds": round(time.perf_counter() - begin, 1),
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else platform.machine(),
        "versions": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "tokenizers": tokenizers.__version__,
            "numpy": np.__version__,
        },
        "curve": curve,
        "heldout": scores,
    }
    if device.type == "cuda":
        record["peak_gib"] = round(torch.cuda.max_memory_allocated(device) / 2**30, 1)
    return model, record


def save(model: Any, folder: Path) -> None:
    """Writes config.json, generation_config.json and the weights in bf16, one safetensors file."""
    folder.mkdir(parents=True, exist_ok=True)
    model.config._attn_implementation = "sdpa"
    model.to(torch.bfloat16).save_pretrained(folder)


def figures_of(record: Mapping[str, Any], trigram: Mapping[str, Any], corpus: Mapping[str, Any]) -> str:
    """The generated part of the model card, Markdown, from training.json, trigram.json and training_documents.json."""
    final, versions = record["final"], record["versions"]
    lines = [
        "| on the held-out documents | perplexity | bits per byte |",
        "|---|---|---|",
        f"| this model, bf16 as shipped | {final['perplexity']:.2f} | {final['bits_per_byte']:.3f} |",
        f"| trigram, modified Kneser-Ney (`ci/trigram.py`) | {trigram['perplexity']:.2f} | {trigram['bits_per_byte']:.3f} |",
        "",
        f"Both score the same {final['tokens']:,} tokens; the trigram counted the documents that the model was trained on.",
        "",
        f"Trained for {record['steps']:,} steps of {record['tokens_a_step']:,} tokens, the first {record['short_steps']:,} in"
        f" sequences of {record['short_length']:,} and the others of {record['length']:,} tokens:"
        f" {record['tokens_seen'] / 1e6:.0f} million tokens, {record['tokens_seen'] / record['training_tokens']:.1f} times the"
        f" {record['training_tokens'] / 1e6:.1f} million of {record['training_documents']:,} documents.",
        f"AdamW, peak rate {record['rate']:g}, {record['warmup']} steps of warm-up, cosine, weight decay"
        f" {record['weight_decay']}, gradients clipped at {record['clip']}; bf16 autocast, fp32 weights; seed {record['seed']}.",
        f"{record['seconds']:.0f} s on one {record['device']}; torch {versions['torch']},"
        f" transformers {versions['transformers']}.",
        f"SHA-256 of `model.safetensors`: `{record['weights_sha256']}` ({record['weights_bytes']:,} bytes).",
        "",
        "![Loss](loss.svg)",
        "",
        "| step | sequence | training loss, nats | held-out perplexity |",
        "|---|---|---|---|",
    ]
    scores = {row["step"]: row["perplexity"] for row in record["heldout"]} | {record["steps"]: final["perplexity"]}
    rows = [row for row in record["curve"] if row["step"] in scores]
    lines += [f"| {row['step']} | {row['length']} | {row['loss']:.3f} | {scores[row['step']]:.2f} |" for row in rows]
    lines += ["", "| package | version | licence | training documents | MB |", "|---|---|---|---|---|"]
    for row in corpus["packages"]:
        cells = (row["package"], row["version"], row["licence"], f"{row['documents']:,}", f"{row['bytes'] / 1e6:.2f}")
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def curve_svg(record: Mapping[str, Any]) -> str:
    """The loss curve as a picture: training loss of each point, and ln of the held-out perplexities, over steps."""
    training = [(row["step"], row["loss"]) for row in record["curve"]]
    heldout = [(row["step"], math.log(row["perplexity"])) for row in record["heldout"]]
    heldout.append((record["steps"], math.log(record["final"]["perplexity"])))
    low, high = math.floor(min(y for _, y in training + heldout)), math.ceil(max(y for _, y in training + heldout))

    def place(x: float, y: float) -> str:
        return f"{60 + 620 * x / record['steps']:.1f},{20 + 300 * (high - y) / (high - low):.1f}"

    def line(points: Sequence[tuple[float, float]], colour: str) -> str:
        return f'<polyline fill="none" stroke="{colour}" stroke-width="2" points="{" ".join(place(*p) for p in points)}"/>'

    parts = ['<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 700 370" font-family="sans-serif" font-size="13">']
    parts.append('<rect width="700" height="370" fill="#fff"/>')
    for y in range(low, high + 1):
        parts.append(line([(0, y), (record["steps"], y)], "#ddd"))
        parts.append(f'<text x="50" y="{place(0, y).split(",")[1]}" text-anchor="end">{y}</text>')
    for x in (0, record["steps"] // 2, record["steps"]):
        parts.append(f'<text x="{place(x, 0).split(",")[0]}" y="340" text-anchor="middle">{x}</text>')
    parts += [line(training, "#4477aa"), line(heldout, "#cc3311")]
    parts.append('<text x="370" y="360" text-anchor="middle">steps</text>')
    parts.append('<text x="670" y="40" text-anchor="end" fill="#4477aa">training loss, nats per token</text>')
    parts.append('<text x="670" y="58" text-anchor="end" fill="#cc3311">held out</text></svg>')
    return "\n".join(parts) + "\n"


def card(folder: Path) -> None:
    """Writes loss.svg and the generated part of README.md in `folder` again, from the records there."""
    record, trigram, corpus = (
        json.loads((folder / name).read_text()) for name in ("training.json", "trigram.json", "training_documents.json")
    )
    page = folder / "README.md"
    figures = figures_of(record, trigram, corpus)
    text = re.sub(
        r"(<!-- figures -->\n).*(<!-- end -->)",
        lambda m: m[1] + figures + m[2],
        page.read_text(encoding="utf-8"),
        flags=re.DOTALL,
    )
    page.write_text(text, encoding="utf-8")
    (folder / "loss.svg").write_text(curve_svg(record), encoding="utf-8")


def main() -> None:
    """Trains, saves, and scores what was saved; or writes the card."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=4000)
    parser.add_argument("--short-steps", type=int, default=2500, help="of these, at 1024 tokens")
    parser.add_argument("--length", type=int, default=4096, help="tokens of a sequence")
    parser.add_argument("--batch", type=int, default=8, help="sequences of --length in a step")
    parser.add_argument("--micro", type=int, default=8, help="sequences of --length at once; bounds the memory")
    parser.add_argument("--rate", type=float, default=3e-3, help="peak learning rate")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--every", type=int, default=500, help="steps between scores of the held-out documents")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--out", type=Path, default=MODEL)
    parser.add_argument("--card", action="store_true", help="train nothing; write the figures of README.md")
    asked = parser.parse_args()
    if asked.card:
        card(MODEL)
        return
    texts = heldout_texts()
    heldout = encode(list(texts.values()))
    model, record = train(asked, encode(training_texts()), heldout)
    save(model, asked.out)
    shipped = transformers.AutoModelForCausalLM.from_pretrained(asked.out, dtype=torch.bfloat16).to(asked.device).eval()
    found, tokens, total = perplexity(shipped, heldout, asked.length)
    size = sum(len(text.encode()) for text in texts.values())
    record["final"] = {"perplexity": found, "tokens": tokens, "bits_per_byte": total / math.log(2) / size}
    weights = (asked.out / "model.safetensors").read_bytes()
    record |= {"weights_sha256": sha256(weights).hexdigest(), "weights_bytes": len(weights)}
    (asked.out / "training.json").write_text(json.dumps(record, indent=1) + "\n")
    print(f"held-out perplexity of the saved bf16 weights {found:.3f} over {tokens} tokens; {len(weights):,} bytes", flush=True)


if __name__ == "__main__":
    main()
