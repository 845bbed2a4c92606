"""What a drift report costs, and whether its error bars keep their promise on the checkpoint itself: part of `make bench`.

Nothing here passes or fails; docs/bench.md holds one run.
"""

from __future__ import annotations

import resource
import subprocess
import sys
import time

import torch

from oracle.checkpoints import shipped
from oracle.checkpoints.clusters import coverage
from oracle.checkpoints.configurations import configuration
from oracle.checkpoints.decision import operating_curve
from oracle.checkpoints.drift import Asked, measure
from oracle.checkpoints.loading import load_model
from oracle.checkpoints.lockstep import batched, lockstep
from oracle.checkpoints.ranks import Ranks
from oracle.checkpoints.texts import cut, parse_blocks, read_documents
from oracle.checkpoints.variants import Subject

SHORT = "16x512"  # blocks for the overhead
LONG = "280x512"  # nearly all blocks of this length that the held-out text has
INCUMBENT, CANDIDATE = "fp8", "bf16+int8-attention"
DRAWN = (16, 64)
RESAMPLES = 1000
REPEATS = 5


def report() -> None:
    """Seconds and peak memory of the report that was asked for nothing."""
    start = time.perf_counter()
    subprocess.run([sys.executable, "-m", "oracle", "drift"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, check=True)
    took = time.perf_counter() - start
    peak = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 2**20
    print(f"oracle drift, nothing asked: {took:.1f} s, {peak:.2f} GiB")


def overhead() -> None:
    """The model in lockstep with itself, beside two plain forward passes over the same tokens, in turn."""
    model, tokenizer = load_model(shipped.folder(), "bf16", attention="sdpa")
    subject = Subject(model)
    same = subject.variant(configuration("bf16"))
    blocks = cut(read_documents((shipped.text(),)), tokenizer, parse_blocks(SHORT))
    batches = batched(blocks)
    shares = []
    for _ in range(REPEATS):
        start = time.perf_counter()
        for _finished in lockstep(subject, same, [same], blocks, batches):
            pass
        middle = time.perf_counter()
        with torch.inference_mode():
            for batch in batches:
                tokens = torch.tensor([blocks[i].tokens for i in batch])
                for _pass in range(2):
                    model(input_ids=tokens, use_cache=False)
        shares.append((time.perf_counter() - middle) / (middle - start))
    each = ", ".join(f"{share:.2f}" for share in shares)
    print(f"lockstep of bf16 with itself, {SHORT} tokens: {each} of the throughput of two plain forward passes")


def error_bars() -> None:
    """How often the intervals of a few blocks hold the mean of a long run, and how often the decision errs at its margin."""
    asked = Asked(
        checkpoint=shipped.folder(), configurations=(INCUMBENT, CANDIDATE), texts=(shipped.text(),), blocks=LONG, floor=""
    )
    drift = measure(asked, Ranks(), lambda what, done, total: None)
    block = drift.text.block.numpy()
    runs = {row.configuration: row.divergence.kl.numpy() for row in drift.rows}
    print(f"a long run of {LONG} tokens, {RESAMPLES} samples of its blocks:")
    for name, kl in runs.items():
        covered = ", ".join(f"{coverage(kl, block, count, RESAMPLES, 0):.3f} from {count} blocks" for count in DRAWN)
        print(f"  {name}: mean KL {kl.mean():.5f}, held by its 95 % interval in {covered}")
    curve = operating_curve(
        runs[CANDIDATE], runs[INCUMBENT], block, ratios=(0.9, 1.0, 1.1), blocks_drawn=DRAWN, resamples=RESAMPLES, seed=0
    )
    for rates in curve:
        ruled = f"accepts {rates.accept:.3f}, rejects {rates.reject:.3f}"
        print(f"  {CANDIDATE} at {rates.ratio:g} of what {INCUMBENT} allows, {rates.blocks} blocks: {ruled}")


def main() -> None:
    """Prints all figures."""
    report()
    overhead()
    error_bars()


if __name__ == "__main__":
    main()
