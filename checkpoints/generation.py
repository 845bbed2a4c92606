"""A prompt read at once and tokens produced one by one, as a server does it, by a variant of a checkpoint; and the prompts."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from oracle.checkpoints.loading import CheckpointError, load_model
from oracle.checkpoints.lockstep import fresh
from oracle.checkpoints.paged import Run, paged, scattered, step
from oracle.checkpoints.random_models import RANDOM_MODELS, random_model
from oracle.checkpoints.texts import cut, read_documents
from oracle.checkpoints.variants import Subject, Variant

if TYPE_CHECKING:
    from transformers import PreTrainedModel

Make = Callable[[Variant, Tensor], Run]


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompted:
    """A model, and a prompt for it."""

    subject: Subject
    prompt: Tensor  # (tokens,) int64, on the model's device
    about: str  # where the weights and the prompt are from


@dataclass(frozen=True, slots=True, kw_only=True)
class Generated:
    """What one generation took, and gave."""

    first_s: float  # from the prompt to the first token, known on the host
    later_s: tuple[float, ...]  # of each later token
    tokens: tuple[int, ...]


def prompted(checkpoint: Path, texts: Sequence[Path], tokens: int, new_tokens: int, device: str, layers: int | None) -> Prompted:
    """The checkpoint, or the random model of that name with so many layers, and `tokens` tokens to read.

    A checkpoint reads the beginning of the first text that is long enough, a random model random tokens.  Raises CheckpointError.
    """
    if str(checkpoint) in RANDOM_MODELS and not checkpoint.exists():
        model = random_model(RANDOM_MODELS[str(checkpoint)], layers, device)
        random = torch.Generator().manual_seed(0)
        prompt = torch.randint(model.config.vocab_size, (tokens,), generator=random)
        about = f"{checkpoint} with {model.config.num_hidden_layers} layers of random weights, {tokens:,} random tokens"
    else:
        if layers is not None:
            raise CheckpointError(f"{checkpoint}: --depth is for random models ({', '.join(RANDOM_MODELS)})")
        model, tokenizer = load_model(checkpoint, "bf16", attention="sdpa", device=device)
        (block,) = cut(read_documents(texts), tokenizer, {tokens: 1})
        prompt = torch.tensor(block.tokens)
        about = f"{checkpoint.name}, {tokens:,} tokens of {', '.join(path.name for path in texts)}"
    _check_fits(model, checkpoint, tokens + new_tokens)
    return Prompted(subject=Subject(model), prompt=prompt.to(model.device), about=about)


def _check_fits(model: PreTrainedModel, checkpoint: Path, tokens: int) -> None:
    limit = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    if limit is not None and tokens > limit:
        raise CheckpointError(
            f"{checkpoint}: {tokens} tokens in all; the model's context is {limit}: ask for --prompt-tokens less"
        )


def generate(one: Prompted, variant: Variant, count: int, make: Make = fresh, later: Variant | None = None) -> Generated:
    """The prompt read in one step from an empty cache, then the likeliest token `count` times, whatever it is.

    Steps after the first call the kernels of `later`, where that is given.  Raises CheckpointError as `step` does.
    """
    with paged(one.subject.model), torch.inference_mode():
        return _generated(list(_stream(one, variant, count, make, later)))


def generate_in_turns(
    one: Prompted, variants: Sequence[Variant], count: int, make: Make = fresh, later: Variant | None = None
) -> list[Generated]:
    """What `generate` gives of each variant, taken in turns: the prompts, and then token by token, the order turned every time.

    Steps of one moment share what the host does meanwhile: pauses and clocks that last longer than a token's time are in all of
    them alike.  The caches of all variants are held at once.
    """
    with paged(one.subject.model), torch.inference_mode():
        streams = [_stream(one, variant, count, make, later) for variant in variants]
        steps: list[list[tuple[float, int]]] = [[] for _ in variants]
        for number in range(count):
            turn = list(zip(streams, steps, strict=True))
            for stream, taken in turn if number % 2 == 0 else reversed(turn):
                taken.append(next(stream))
        return [_generated(taken) for taken in steps]


def _stream(one: Prompted, variant: Variant, count: int, make: Make, later: Variant | None) -> Iterator[tuple[float, int]]:
    """Seconds and the token of each step; for use inside `paged` and torch.inference_mode()."""
    new = one.prompt
    run = make(variant, scattered(1, len(one.prompt) + count, one.prompt.device))
    if one.prompt.device.type == "cuda":
        torch.cuda.synchronize()
    for _ in range(count):
        start = time.perf_counter()
        (logits,) = step(one.subject.model, run, [new], last=True)
        new = logits[-1].argmax()[None]
        token = int(new)  # waits for the device
        yield time.perf_counter() - start, token
        if later is not None:
            run.kernels = later.kernels


def _generated(steps: Sequence[tuple[float, int]]) -> Generated:
    first_s, *later_s = (seconds for seconds, _ in steps)
    return Generated(first_s=first_s, later_s=tuple(later_s), tokens=tuple(token for _, token in steps))
