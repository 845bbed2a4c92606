"""A drift report, measured on a tiny Gemma 4: floors, decisions, resumption, and what must not pass unseen."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_models import save_with_texts

from oracle.checkpoints import drift as drifting
from oracle.checkpoints.divergence import to_tensors
from oracle.checkpoints.drift import Asked, measure
from oracle.checkpoints.drifted import Drift
from oracle.checkpoints.journal import Journal
from oracle.checkpoints.loading import CheckpointError
from oracle.checkpoints.lockstep import Finished, batched, lockstep
from oracle.checkpoints.ranks import Ranks
from oracle.checkpoints.texts import Block
from oracle.checkpoints.waypoints import Ran

FILE = Path(__file__).with_name("contract_kernels.py")


@pytest.fixture(autouse=True)
def own_path(monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel's file brings its folder onto sys.path; it is gone after the test."""
    monkeypatch.setattr(sys, "path", [*sys.path])


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A checkpoint and a folder of texts."""
    return save_with_texts(pytest.importorskip("transformers"), tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def checkpoint(tiny: tuple[Path, Path]) -> Path:
    return tiny[0]


@pytest.fixture(scope="module")
def texts(tiny: tuple[Path, Path]) -> tuple[Path, ...]:
    return (tiny[1],)


@pytest.fixture
def asked(checkpoint: Path, texts: tuple[Path, ...], tmp_path: Path) -> Callable[..., Asked]:
    def make(*configurations: str, **other: Any) -> Asked:
        own: dict[str, Any] = {"checkpoint": checkpoint, "texts": texts, "blocks": "6x48,1x200", "work": tmp_path / "work"}
        return Asked(configurations=configurations, **own | other)

    return make


def measured(asked: Asked) -> Drift:
    return measure(asked, Ranks(), lambda what, done, total: None)


def columns(drift: Drift) -> list[dict[str, list[float]]]:
    return [{name: column.tolist() for name, column in to_tensors(row.divergence).items()} for row in drift.rows]


def test_a_report_has_a_row_for_each_configuration_beside_the_floor(asked: Callable[..., Asked]) -> None:
    drift = measured(asked("fp8", "bf16+kv-fp8@global", decisions=(("bf16+kv-fp8@global", "fp8"),)))

    assert [row.configuration for row in drift.rows] == ["bf16+other-attention", "fp8", "bf16+kv-fp8@global"]
    assert [row.floor for row in drift.rows] == [True, False, False] and drift.floor is drift.rows[0]
    assert {len(row.divergence.kl) for row in drift.rows} == {6 * 47 + 199} == {drift.text.token.numel()}
    assert all(row.figures.kl.value > 0 and row.figures.blocks == 7 for row in drift.rows)
    assert drift.rows[1].figures.kl.value > drift.rows[0].figures.kl.value
    assert (drift.decisions[0].candidate, drift.decisions[0].incumbent) == ("bf16+kv-fp8@global", "fp8")
    # 6 blocks of 48 make one step together, counted for each; the block of 200 another
    assert dict(drift.rows[2].ran) == {
        "layer 0: reference attention, own weights": 7,
        "layer 1: reference attention, own weights, e4m3 cache": 7,
    }
    assert [piece for piece in drift.pieces if piece][:3] and all(drift.pieces[i] for b in drift.text.blocks for i in b)
    assert drift.layers[1] == "global, 4 q heads, 1 kv heads, head dim 128, V is K before its norm"


def test_the_reference_against_itself_is_exactly_zero(asked: Callable[..., Asked]) -> None:
    drift = measured(asked("bf16+sdpa-flash"))
    own = drift.rows[1].divergence

    assert not own.kl.any() and not own.js.any() and bool(own.agree1.all())


def test_a_configuration_that_rounds_and_does_not_drift_is_an_error(
    asked: Callable[..., Asked], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The 8-bit weights never reach the model."""
    from contextlib import contextmanager

    @contextmanager
    def not_applied(modules: object, weights: object) -> Iterator[None]:
        yield

    monkeypatch.setattr("oracle.checkpoints.lockstep.applied", not_applied)
    with pytest.raises(
        CheckpointError, match="fp8: it rounds, and yet all 481 distributions are the reference's: it did not run"
    ):
        measured(asked("fp8"))


@pytest.mark.parametrize("after", [1, 3])
def test_a_run_that_was_stopped_goes_on_and_says_the_same(
    asked: Callable[..., Asked], monkeypatch: pytest.MonkeyPatch, after: int
) -> None:
    """Blocks of one batch are measured together again; a torn file counts for nothing."""
    monkeypatch.setattr("oracle.checkpoints.lockstep.BATCH", 96)
    whole = measured(asked("fp8"))
    seen: list[int] = []

    def until(*given: Any) -> Iterator[Finished]:
        for block in lockstep(*given):
            if len(seen) == after:
                raise KeyboardInterrupt
            seen.append(block.block)
            yield block

    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(drifting, "lockstep", until)
        measured(asked("fp8"))
    (folder,) = asked("fp8").work.iterdir()  # type: ignore[union-attr]
    torn = sorted(folder.iterdir())[-1]
    torn.write_bytes(torn.read_bytes()[:100])
    again: list[int] = []

    def counted(*given: Any) -> Iterator[Finished]:
        for block in lockstep(*given):
            again.append(block.block)
            yield block

    monkeypatch.setattr(drifting, "lockstep", counted)
    resumed = measured(asked("fp8"))

    assert columns(resumed) == columns(whole)
    assert len(again) == (7 if after == 1 else 5)  # of the first batch of two, one was torn; of the second, the third block
    assert not list(asked("fp8").work.iterdir())  # type: ignore[union-attr]


def test_a_report_names_the_source_of_every_kernel(asked: Callable[..., Asked]) -> None:
    drift = measured(asked(f"bf16+{FILE}:plain", "fp8"))

    assert drift.environment[f"{FILE}:plain"] == sha256(FILE.read_bytes()).hexdigest()
    assert drift.environment["oracle.kernels.torch_sdpa:sdpa_flash"] == drift.environment["oracle.kernels.torch_sdpa:sdpa_math"]


def test_a_kernel_that_was_edited_starts_anew(
    asked: Callable[..., Asked], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    file, measured_now = tmp_path / "kernel.py", list[int]()
    name = f"bf16+{file}:plain"

    def counted(*given: Any) -> Iterator[Finished]:
        for block in lockstep(*given):
            measured_now.append(block.block)
            if len(measured_now) == 7 and "edited" not in file.read_text():
                raise KeyboardInterrupt
            yield block

    monkeypatch.setattr(drifting, "lockstep", counted)
    file.write_text(FILE.read_text())
    with pytest.raises(KeyboardInterrupt):
        measured(asked(name))
    measured_now.clear()
    file.write_text(FILE.read_text() + "# edited\n")
    measured(asked(name))

    assert len(measured_now) == 7


def test_another_run_does_not_take_a_journals_blocks(tmp_path: Path) -> None:
    one, other = Journal.of({"weights": "a"}, tmp_path), Journal.of({"weights": "b"}, tmp_path)

    assert one.folder != other.folder and one == Journal.of({"weights": "a"}, tmp_path)


@pytest.mark.parametrize(
    ("configurations", "other", "said"),
    [
        (("fp9",), {}, "weights 'fp9' are unknown"),
        (("fp8",), {"decisions": (("bf16+kv-fp8", "fp8"),)}, r"bf16\+kv-fp8: is to be judged, but is not among"),
        (("fp8",), {"blocks": "1x300"}, "blocks of 300 tokens; the model's context is 256"),
        (("fp8",), {"blocks": "900x48"}, "the text is too short"),
        (("bf16+int8-attention@7",), {}, "the model has no such layer; it has 0 to 1, 1 sliding and 1 global"),
        ((f"bf16+{FILE}:absent",), {}, "no absent in"),
        ((f"bf16+{FILE}:no_window",), {}, "layer 0 needs window_size"),
        (("fp8",), {"waypoints": ("fp8",), "floor": ""}, "waypoints need a floor"),
        (("fp8",), {"checkpoint": Path("nowhere")}, "nowhere: no such file or folder"),
    ],
)
def test_what_does_not_fit_is_told(
    asked: Callable[..., Asked], configurations: tuple[str, ...], other: dict[str, Any], said: str
) -> None:
    with pytest.raises(CheckpointError, match=said):
        measured(asked(*configurations, **other))


def test_a_tokenizer_of_another_model_is_told(asked: Callable[..., Asked], tmp_path: Path, checkpoint: Path) -> None:
    from shutil import copytree

    copy = tmp_path / "copy"
    copytree(checkpoint, copy)
    tokenizer = json.loads((copy / "tokenizer.json").read_text())
    tokenizer["model"]["vocab"]["th"] = 500
    (copy / "tokenizer.json").write_text(json.dumps(tokenizer))
    with pytest.raises(CheckpointError, match="its tokenizer gave token 500, its model has 96: they do not belong together"):
        measured(asked("fp8", checkpoint=copy))


def test_batches_hold_equally_long_neighbours() -> None:
    blocks = [Block(document=0, tokens=(1,) * n) for n in (400, 400, 400, 400, 600, 400)]

    assert batched(blocks) == [[0, 1], [2, 3], [4], [5]]


def test_layers_are_swapped_one_by_one_and_the_control_is_zero(asked: Callable[..., Asked]) -> None:
    (found,) = measured(asked("fp8+other-attention", attribute=("fp8+other-attention",))).attributions

    assert found.control == 0.0 and [(swap.layer, swap.kind) for swap in found.swaps] == [(0, "sliding"), (1, "global")]
    total = sum(swap.kl.value for swap in found.swaps)
    assert all(swap.kl.value > 0 for swap in found.swaps) and found.additivity == pytest.approx(found.whole.value / total)
    (kept,) = found.kept
    assert found.swaps[kept].kl.value >= 0.5 * total and found.suggested == f"fp8+other-attention@{1 - kept}"
    assert found.suggested_kl == found.swaps[1 - kept].kl  # of two layers, keeping one is swapping the other


def test_a_reference_that_is_never_the_same_twice_cannot_be_attributed(asked: Callable[..., Asked]) -> None:
    name = f"bf16+{FILE}:random"
    with pytest.raises(CheckpointError, match=r"the reference drifts .* nats from itself: its kernel is not deterministic"):
        measured(asked("fp8", reference=name, attribute=("fp8",)))


def test_waypoints_stand_on_both_sides_of_the_window(asked: Callable[..., Asked], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("oracle.checkpoints.waypoints.DECODED", 4)
    monkeypatch.setattr("oracle.checkpoints.waypoints._window", lambda subject: 64)
    found = measured(asked("bf16+sdpa-flash", "fp8", waypoints=("bf16+sdpa-flash", "fp8"))).waypoints
    names = [point.name for point in found if point.configuration == "fp8"]

    assert names == [
        *(way for n in (63, 64, 65, 256) for way in (f"{n} whole", f"{n} in chunks of {n // 4 + 3}")),
        "last 4 decoded against prefilled",
        "mixed steps against serial",
    ]
    own = {point.name: point for point in found if point.configuration == "bf16+sdpa-flash"}
    assert own["64 whole"].kl == 0.0 and own["64 whole"].agree1 == 1.0 and own["64 whole"].max_logit == 0.0
    assert own["mixed steps against serial"].exact is True and own["64 whole"].exact is None
    assert all(point.kl > 0 for point in found if point.configuration == "fp8" and point.name.endswith("whole"))


def test_a_run_without_a_distribution_is_apart_and_not_exact() -> None:
    right = torch.tensor([[3.0, 1.0, 0.0], [0.0, 2.0, 1.9]])
    lost, near = right.clone(), right.clone()
    lost[0, 1], near[1, 2] = torch.nan, 2.1
    tokens = torch.tensor([0, 1])

    assert Ran(lost).against(Ran(right), tokens, 0.2)[3] == 1
    assert Ran(near).against(Ran(right), tokens, 0.2)[3] == 0  # the two best were within twice the floor
    assert Ran(near).against(Ran(right), tokens, 0.01)[3] == 1


SCRIPT = """
import json, sys, torch
from pathlib import Path
from oracle.checkpoints import lockstep
from oracle.checkpoints.drift import Asked, measure
from oracle.checkpoints.ranks import ranks
torch.set_num_threads(1)
checkpoint, texts, work, out = map(Path, sys.argv[1:5])
lockstep.BATCH = 256  # a block a batch
asked = Asked(checkpoint=checkpoint, configurations=tuple(sys.argv[5:]), texts=(texts,), blocks="4x200", work=work)
with ranks() as processes:
    drift = measure(asked, processes, lambda what, done, total: None)
    if processes.rank == 0:
        figures = [(row.figures.kl.value, row.figures.kl.se, sum(row.ran.values())) for row in drift.rows]
        out.write_text(json.dumps(figures))
"""
KILLED = """
import os, signal
from oracle.kernels.torch_sdpa import sdpa_math

calls = 0


def kernel(q, k_cache, v_cache, *, cu_seqlens_q, seqused_k, page_table, softmax_scale, causal=True, window_size=(-1, -1)):
    global calls
    calls += 1
    if calls > 2 and os.environ.get("RANK") == "1":  # in its second step
        os.kill(os.getpid(), signal.SIGKILL)
    return sdpa_math(
        q, k_cache, v_cache, cu_seqlens_q=cu_seqlens_q, seqused_k=seqused_k, page_table=page_table,
        softmax_scale=softmax_scale, causal=causal, window_size=window_size,
    )
"""
TWO = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2")


def launched(
    tiny: tuple[Path, Path], folder: Path, launch: tuple[str, ...], *configurations: str
) -> subprocess.CompletedProcess[str]:
    """A run in processes of its own, each on one thread; its figures are in `folder`/out.json."""
    folder.mkdir(exist_ok=True)
    (folder / "run.py").write_text(SCRIPT)
    places = (*map(str, tiny), str(folder / "work"), str(folder / "out.json"))
    env = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(__file__).parents[1])}
    command = [sys.executable, *launch, str(folder / "run.py"), *places, *configurations]
    return subprocess.run(command, env=env, capture_output=True, text=True, check=False)


def test_two_processes_say_what_one_says(tiny: tuple[Path, Path], tmp_path: Path) -> None:
    """Over the same batches, each on one thread."""
    said = []
    for name, launch in (("one", ()), ("two", TWO)):
        done = launched(tiny, tmp_path / name, launch, "fp8")
        assert done.returncode == 0, done.stderr
        said.append(json.loads((tmp_path / name / "out.json").read_text()))

    assert torch.tensor(said[0]).allclose(torch.tensor(said[1]), rtol=1e-6, atol=0)


def test_a_process_that_is_killed_leaves_the_finished_blocks(tiny: tuple[Path, Path], tmp_path: Path) -> None:
    """Each has two batches of one block; the other process finishes its own, or is ended by torchrun."""
    (tmp_path / "kernel.py").write_text(KILLED)
    done = launched(tiny, tmp_path, TWO, f"bf16+{tmp_path / 'kernel.py'}:kernel")
    kept = sorted(int(file.stem) for file in (tmp_path / "work").rglob("*.safetensors"))

    assert done.returncode != 0 and not (tmp_path / "out.json").exists()
    assert 1 in kept and 3 not in kept  # the first of the killed process's, and not its second
