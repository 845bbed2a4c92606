"""Whatever a kernel does in its process, the parent gets a result in private memory or a failure that says what happened."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import importlib.util
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from oracle.contract import Call, Precision, Record
from oracle.isolation import Description, Failure, FailureKind, KernelProcess, Returned, worker
from oracle.isolation.packing import pack
from oracle.isolation.record import RecordError, record_from_json

HOSTILE = Path(__file__).with_name("hostile_kernels.py")
TIMEOUT_S = 60.0  # for calls that are expected to answer; generous, for busy machines


def hostile(name: str, **options: object) -> KernelProcess:
    return KernelProcess(f"{HOSTILE}:{name}", **options)  # type: ignore[arg-type]


def make_call(**changes: object) -> Call:
    q = torch.arange(1, 65).reshape(4, 2, 8).bfloat16()
    pool = torch.arange(256).reshape(4, 2, 4, 1, 8).bfloat16()
    call = Call(
        q=q,
        k_cache=pool[:, 0],
        v_cache=pool[:, 1],
        cu_seqlens_q=torch.tensor([0, 4], dtype=torch.int32),
        seqused_k=torch.tensor([6], dtype=torch.int32),
        page_table=torch.tensor([[1, 3]], dtype=torch.int32),
        softmax_scale=0.5,
    )
    return dataclasses.replace(call, **changes)  # type: ignore[arg-type]


def returned(outcome: Returned | Failure) -> Returned:
    assert isinstance(outcome, Returned), outcome
    return outcome


def failed(outcome: Returned | Description | Failure) -> Failure:
    assert isinstance(outcome, Failure), outcome
    return outcome


def is_gone(pid: int) -> bool:
    """Within 5 s; a zombie that init has not reaped yet is gone."""
    for _ in range(500):
        try:
            if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in "ZX":
                return True
        except FileNotFoundError:
            return True
        time.sleep(0.01)
    return False


@pytest.fixture(scope="module")
def pid_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("isolation") / "pid"


@pytest.fixture(scope="module")
def process(pid_file: Path) -> Iterator[KernelProcess]:
    """For all kernels that return: they share one process, for its start takes a second."""
    with hostile("by_name", environment={"PID_FILE": str(pid_file)}) as process:
        yield process


def ask(process: KernelProcess, kernel: str, call: Call, want_lse: bool = False) -> Returned | Failure:
    name = torch.frombuffer(bytearray(kernel.encode()), dtype=torch.uint8)
    return process.call(dataclasses.replace(call, extras={"kernel": name, **call.extras}), TIMEOUT_S, want_lse)


@pytest.fixture(scope="module")
def kernels() -> ModuleType:
    spec = importlib.util.spec_from_file_location("hostile_kernels", HOSTILE)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


# What each way to fail comes back as, and what its text says.
FAILURES = [
    ("segfault", FailureKind.SIGNAL, "its process was ended by SIGSEGV during the call"),
    ("abort", FailureKind.SIGNAL, "ended by SIGABRT"),
    ("exit_0", FailureKind.EXITED, "its process exited with status 0 during the call"),
    ("closes_its_fds", FailureKind.EXITED, "status 1 during the call"),
    ("endless_in_c", FailureKind.TIMEOUT, "no answer within 1 s; the process was killed"),
    ("memory_bomb", FailureKind.OUT_OF_MEMORY, "can't allocate memory"),
    ("returns_none", FailureKind.WRONG_RESULT, "out: returned a value of type NoneType, expected a bfloat16 tensor of shape"),
    ("floods_the_channel", FailureKind.TAMPERED, "more than 65536 bytes on its control channel"),
    ("forges_a_reply", FailureKind.TAMPERED, "its control channel during the call carries"),
    ("unclocked", FailureKind.TAMPERED, "expected a time"),
    ("misdeclared", FailureKind.BAD_DECLARATION, "record.page_sizes: got '{16}', expected a tuple"),
]


@pytest.mark.parametrize(("kernel", "kind", "text"), FAILURES, ids=[name for name, _, _ in FAILURES])
def test_every_way_to_fail_is_a_failure_of_its_kind(kernel: str, kind: FailureKind, text: str) -> None:
    with hostile(kernel, memory_limit_bytes=1 << 30) as process:
        failure = failed(process.call(make_call(), 1.0 if kind is FailureKind.TIMEOUT else TIMEOUT_S))

    assert failure.kind is kind
    assert failure.text.startswith(f"{HOSTILE}:{kernel}: ") and text in failure.text


def test_after_a_failure_the_next_call_has_a_fresh_process(process: KernelProcess, pid_file: Path) -> None:
    first = returned(ask(process, "notes_its_pid", make_call()))
    pid = int(pid_file.read_text())
    os.kill(pid, signal.SIGTERM)
    os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
    before = process.restarts

    failure = failed(ask(process, "honest", make_call()))

    assert failure.kind is FailureKind.SIGNAL and "ended by SIGTERM after the previous call" in failure.text
    assert process.restarts == before
    assert torch.equal(returned(ask(process, "honest", make_call())).out, first.out)
    assert process.restarts == before + 1


def test_a_result_is_a_private_copy(process: KernelProcess) -> None:
    call = make_call()

    one = returned(ask(process, "honest", call))
    two = returned(ask(process, "honest", dataclasses.replace(call, q=-call.q)))

    assert torch.equal(one.out, call.q * 2) and torch.equal(two.out, call.q * -2)
    assert one.out_storage is None and one.lse is None and one.changed_inputs == ()
    assert 0 <= one.seconds < TIMEOUT_S


def test_the_inputs_of_the_parent_stay_pristine(process: KernelProcess) -> None:
    call = make_call()

    first, second = (returned(ask(process, "writes_inputs", call)) for _ in range(2))

    assert first.changed_inputs == second.changed_inputs == ("q", "v_cache")
    assert torch.equal(call.q, make_call().q) and torch.equal(call.v_cache, make_call().v_cache)
    assert torch.equal(first.out, second.out)


def test_out_comes_back_with_the_storage_around_it(process: KernelProcess) -> None:
    storage = torch.full((400,), 7.0, dtype=torch.bfloat16)
    out = storage.as_strided((4, 2, 8), (64, 16, 1), 11)

    got = returned(ask(process, "honest", make_call(out=out)))

    assert torch.equal(got.out, make_call().q * 2)
    assert (got.out.stride(), got.out.storage_offset()) == (out.stride(), out.storage_offset())
    assert got.out_storage is not None and got.out_storage.shape == (800,) and got.changed_inputs == ()
    assert got.out.untyped_storage().data_ptr() == got.out_storage.data_ptr()
    after = got.out_storage.view(torch.bfloat16).clone()
    after.as_strided((4, 2, 8), (64, 16, 1), 11).fill_(7)
    assert torch.equal(after, storage) and torch.equal(storage, torch.full_like(storage, 7))


def test_a_write_between_the_elements_is_seen(process: KernelProcess) -> None:
    pool = torch.zeros(4, 8, 1, 8, dtype=torch.bfloat16)
    call = make_call(k_cache=pool[:, :2], v_cache=pool[:, 2:4], out=torch.zeros(5, 2, 8, dtype=torch.bfloat16)[:4])

    got = returned(ask(process, "writes_a_gap", call))

    assert got.changed_inputs == ("k_cache", "v_cache")
    assert got.out_storage is not None and got.out_storage.nonzero().tolist() == [[159]]


def test_a_late_write_changes_no_earlier_and_no_later_result(process: KernelProcess) -> None:
    call = make_call(out=torch.zeros(4, 2, 8, dtype=torch.bfloat16))
    negative = dataclasses.replace(call, q=-call.q)

    first, second, third = (returned(ask(process, "writes_late", c)) for c in (call, negative, negative))

    assert torch.equal(first.out, call.q * 2) and first.changed_inputs == ()
    assert "q" in second.changed_inputs and torch.equal(second.out, torch.full_like(call.q, -5))
    assert torch.equal(third.out, call.q * -2) and third.changed_inputs == ()


def test_a_patched_torch_changes_nothing_here() -> None:
    with hostile("says_nothing_true") as process:
        got = returned(process.call(make_call(), TIMEOUT_S, want_lse=True))

    assert got.lse is None  # it has no return_lse
    assert torch.equal(got.out, torch.zeros(4, 2, 8, dtype=torch.bfloat16))
    assert not torch.equal(got.out, make_call().q * 2) and not torch.allclose(got.out, make_call().q * 2)


def test_an_arena_that_the_kernel_grows_still_serves(process: KernelProcess) -> None:
    large = torch.ones(1 << 20, 1, 8, dtype=torch.bfloat16)

    for q in (make_call().q, large, make_call().q):
        assert torch.equal(returned(ask(process, "grows_the_arena", make_call(q=q))).out, q * 2)


def test_the_arena_does_not_shrink(process: KernelProcess) -> None:
    assert torch.equal(returned(ask(process, "shrinks_the_arena", make_call())).out, make_call().q * 2)


def test_a_flood_of_output_is_kept_to_the_last_lines_of_one_call(process: KernelProcess) -> None:
    for _ in range(2):
        returned(ask(process, "chatters", make_call()))
    assert process._child is not None
    lines = process._child.failure(FailureKind.EXCEPTION, "a made up failure").log.splitlines()

    assert 1 <= len(lines) <= 30 and all(len(line) <= 200 for line in lines) and lines[-1].startswith("4999 chatter")


def test_a_channel_closed_by_a_running_process_is_tampering(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("oracle.isolation.child._GRACE_S", 0.5)
    with hostile("closes_its_fds_and_waits") as process:
        failure = failed(process.call(make_call(), TIMEOUT_S))

    assert failure.kind is FailureKind.TAMPERED and "closed its control channel during the call" in failure.text


def test_an_interrupt_reaches_the_caller_and_ends_the_process_with_its_children(tmp_path: Path) -> None:
    pid_file = tmp_path / "pid"
    with hostile("interrupts_the_parent", environment={"PID_FILE": str(pid_file)}) as process:
        with pytest.raises(KeyboardInterrupt):
            process.call(make_call(), TIMEOUT_S)
        assert is_gone(int(pid_file.read_text()))


def test_a_killed_parent_takes_the_process_along(tmp_path: Path) -> None:
    pid_file = tmp_path / "pid"
    script = f"""
import importlib.util
spec = importlib.util.spec_from_file_location("test_isolation", {__file__!r})
tests = importlib.util.module_from_spec(spec)
spec.loader.exec_module(tests)
tests.hostile("endless_in_c").call(tests.make_call(), 600)
"""
    parent = subprocess.Popen([sys.executable, "-c", script], env=os.environ | {"PID_FILE": str(pid_file)})
    try:
        while not pid_file.exists():
            assert parent.poll() is None
            time.sleep(0.02)
    finally:
        parent.kill()
        parent.wait()

    assert is_gone(int(pid_file.read_text()))


def test_a_kernel_with_a_record_and_var_keyword_gets_every_keyword_and_its_failure_shows_what_it_printed() -> None:
    extras = {"k_norm_weight": torch.ones(8)}
    with hostile("sees", environment={"ORACLE_TEST": "seen"}, threads=1) as process:
        described = process.describe()
        failure = failed(process.call(make_call(extras=extras, window_size=(3, -1), sinks=torch.ones(2)), TIMEOUT_S))

    assert isinstance(described, Description) and described.has_var_keyword and described.parameters == ()
    assert described.record == Record(dtypes=("bf16",), head_dims=(8,), precision=Precision(u_acc=2.0**-13))
    assert failure.log.splitlines() == [
        "causal True", "cu_seqlens_q (2,)", "k_norm_weight (8,)", "k_scale None", "num_seqs None", "out None",
        "page_table (1, 2)", "q_scale None", "return_lse False", "seqused_k (1,)", "sinks (2,)", "softcap 0.0",
        "softmax_scale 0.5", "v_scale None", "window_size (3, -1)", "ORACLE_TEST seen", "threads 1", "stdin ''",
    ]  # fmt: skip
    assert failure.kind is FailureKind.EXCEPTION
    assert failure.text.endswith(r":sees: raised ArithmeticError: two lines and \x1b[31mred\x1b[0m")
    assert failure.traceback.startswith("Traceback (most recent call last):\n  File") and "worker.py" not in failure.traceback
    assert "\x1b" not in failure.traceback


def test_lse_comes_back_where_it_is_wanted(process: KernelProcess) -> None:
    call = make_call()

    wanted, unwanted = (returned(ask(process, "with_lse", call, want_lse)) for want_lse in (True, False))

    assert wanted.lse is not None and torch.equal(wanted.lse, call.q.float().sum(-1)) and torch.equal(wanted.out, call.q * 2)
    assert unwanted.lse is None and torch.equal(unwanted.out, call.q * 2)


def test_a_source_that_changes_under_trial_is_tampering(tmp_path: Path) -> None:
    path = tmp_path / "kernel.py"
    path.write_text("import os\ndef kernel(q, k, v): os._exit(1)\n")
    with KernelProcess(f"{path}:kernel") as process:
        assert failed(process.call(make_call(), TIMEOUT_S)).kind is FailureKind.EXITED
        path.write_text("def kernel(q, k, v): return q\n")
        failure = failed(process.call(make_call(), TIMEOUT_S))

    assert failure.kind is FailureKind.TAMPERED and "changed while it was judged" in failure.text


def test_what_cannot_be_loaded_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", list(sys.path))
    path = tmp_path / "kernel.py"
    path.write_text("import os\n\nimport no_such_module_at_all\n")

    with pytest.raises(worker.Refusal) as broken:
        worker.load_kernel(f"{path}:kernel", "cpu")
    with pytest.raises(worker.Refusal) as missing:
        worker.load_kernel(f"{HOSTILE}:honesty", "cpu")

    assert broken.value.kind is FailureKind.IMPORT_ERROR
    assert str(broken.value) == f"{path} line 3: ModuleNotFoundError: No module named 'no_such_module_at_all'"
    assert missing.value.kind is FailureKind.NOT_FOUND and "did you mean honest?" in str(missing.value)


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has the device")
def test_a_missing_device_is_told() -> None:
    with pytest.raises(worker.Refusal) as error:
        worker.load_kernel(f"{HOSTILE}:honest", "cuda")

    assert error.value.kind is FailureKind.UNAVAILABLE


def test_tensors_off_the_cpu_are_refused(process: KernelProcess) -> None:
    with pytest.raises(ValueError, match="q: on meta, expected the CPU"):
        ask(process, "honest", make_call(q=make_call().q.to("meta")))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_on_cuda_tensors_go_there_and_come_back() -> None:
    call = make_call(out=torch.full((6, 2, 8), 3.0, dtype=torch.bfloat16)[1:5])
    with hostile("by_name", device="cuda") as process:
        got = returned(ask(process, "honest", call))
        assert torch.equal(got.out, call.q * 2) and got.changed_inputs == ()
        assert got.out_storage is not None and got.out_storage.shape == (192,)
        assert returned(ask(process, "writes_inputs", make_call())).changed_inputs == ("q", "v_cache")
        assert "expected a bfloat16 tensor of shape (4, 2, 8) on cuda" in failed(ask(process, "moves_to_cpu", make_call())).text


@pytest.mark.parametrize(
    ("value", "want_lse", "text"),
    [
        (torch.zeros(3, 2, 8), False, "out: returned a float32 tensor of shape (3, 2, 8) on cpu, expected a float32 tensor of"),
        (torch.zeros(4, 2, 8).double(), False, "out: returned a float64 tensor of shape (4, 2, 8) on cpu, expected a float32"),
        (torch.zeros(4, 2, 8, device="meta"), False, "out: returned a float32 tensor of shape (4, 2, 8) on meta, expected"),
        ((torch.zeros(4, 2, 8), torch.zeros(4, 2)), False, "out: returned a value of type tuple of 2, expected a float32 tensor"),
        (torch.zeros(4, 2, 8), True, "return_lse=True returned a value of type Tensor, expected (out, lse)"),
        ((torch.zeros(4, 2, 8), torch.zeros(2, 4)), True, "lse: returned a float32 tensor of shape (2, 4) on cpu, expected"),
        ((torch.zeros(4, 2, 8), None), True, "lse: returned a value of type NoneType, expected a float32 tensor of shape (4, 2)"),
    ],
)
def test_a_wrong_result_is_told_with_what_was_expected(value: object, want_lse: bool, text: str) -> None:
    specs = pack({"out": torch.zeros(4, 2, 8), "lse": torch.zeros(4, 2)}).specs
    with pytest.raises(worker.Refusal) as error:
        for name, result in worker.results(value, {"want_lse": want_lse, "results": specs}).items():
            worker.check_result(name, result, specs[name], "cpu")

    assert error.value.kind is FailureKind.WRONG_RESULT and str(error.value).startswith(text)


class Unprintable(Exception):
    def __str__(self) -> str:
        raise RuntimeError


@pytest.mark.parametrize(
    ("error", "kind", "text"),
    [
        (Unprintable(), FailureKind.EXCEPTION, "Unprintable: <exception str() failed>"),
        (SystemExit("no"), FailureKind.EXCEPTION, "raised SystemExit: no"),
        (KeyboardInterrupt(), FailureKind.EXCEPTION, "raised KeyboardInterrupt"),
        (ValueError("\N{GREEK SMALL LETTER ALPHA}" * 10**6), FailureKind.EXCEPTION, "raised ValueError: ααα"),
        (torch.OutOfMemoryError("CUDA out of memory"), FailureKind.OUT_OF_MEMORY, "CUDA out of memory"),
        (OSError(12, "Cannot allocate memory"), FailureKind.OUT_OF_MEMORY, "Cannot allocate memory"),
        (OSError(2, "can't allocate memory"), FailureKind.EXCEPTION, "can't allocate memory"),
    ],
)
def test_any_exception_fits_into_a_reply(error: BaseException, kind: FailureKind, text: str) -> None:
    message = worker.failure_message(error)

    assert message["kind"] is kind and text in message["text"]
    assert len(json.dumps(message)) < 40_000


def test_a_kernel_is_described(kernels: ModuleType) -> None:
    described = worker.describe(kernels.honest, kernels)

    assert described == {
        "parameters": ["softmax_scale", "out"],
        "required": ["softmax_scale"],
        "has_var_keyword": False,
        "record": None,
        "source_sha256": hashlib.sha256(HOSTILE.read_bytes()).hexdigest(),
        "doc": "Twice q, whatever the scale.",
        "version": None,
    }
    assert worker.describe(kernels.with_lse, kernels)["required"] == ["return_lse"]
    partial = functools.partial(kernels.honest, softmax_scale=1)
    assert worker.describe(partial, kernels)["source_sha256"] == described["source_sha256"]


def test_a_kernel_takes_three_positional_arguments(kernels: ModuleType) -> None:
    with pytest.raises(worker.Refusal, match="takes 2 positional arguments, expected 3: q, k_cache, v_cache"):
        worker.describe(kernels.two_arguments, kernels)


DTYPES = [
    torch.bfloat16, torch.float16, torch.float32, torch.float64, torch.float8_e4m3fn, torch.float8_e5m2,
    torch.int8, torch.uint8, torch.int32, torch.int64, torch.bool,
]  # fmt: skip


@st.composite
def views(draw: st.DrawFn) -> tuple[torch.dtype, tuple[int, ...], tuple[int, ...], int]:
    """dtype, shape, strides, storage offset; strides may be 0, overlap or leave large gaps."""
    shape = tuple(draw(st.lists(st.integers(0, 5), max_size=4)))
    strides = tuple(draw(st.sampled_from([0, 1, 2, 3, 8, 40, 1000])) for _ in shape)
    return draw(st.sampled_from(DTYPES)), shape, strides, draw(st.integers(0, 70))


def extent(view: tuple[torch.dtype, tuple[int, ...], tuple[int, ...], int]) -> int:
    """Bytes of storage that the view needs."""
    dtype, shape, strides, offset = view
    last = sum((n - 1) * s for n, s in zip(shape, strides, strict=True)) if 0 not in shape else -1
    return max(0, offset + last + 1) * dtype.itemsize


@settings(max_examples=60, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(first=views(), second=views(), shared=st.booleans(), spare=st.integers(0, 33))
@example(first=(torch.float8_e4m3fn, (16, 16), (16, 1), 0), second=(torch.float32, (), (), 0), shared=False, spare=0)
@example(first=(torch.bfloat16, (0,), (1,), 0), second=(torch.bool, (0, 3), (3, 1), 0), shared=True, spare=0)
def test_any_two_views_arrive_as_they_are(
    process: KernelProcess,
    kernels: ModuleType,
    first: tuple[torch.dtype, tuple[int, ...], tuple[int, ...], int],
    second: tuple[torch.dtype, tuple[int, ...], tuple[int, ...], int],
    shared: bool,
    spare: int,
) -> None:
    """dtype, shape, strides, offset, storage size, sharing and every bit survive the way into the kernel's process."""
    nbytes = [extent(first) + spare, extent(second) + spare]
    a, b = storages = [(torch.arange(max(nbytes) if shared else n) * 37).to(torch.uint8) for n in nbytes]
    if shared:
        b = storages[1] = a
    tensors = [
        s[: s.numel() // v[0].itemsize * v[0].itemsize].view(v[0]).as_strided(*v[1:])
        for s, v in zip(storages, (first, second), strict=True)
    ]
    one, two = tensors
    want = f"{kernels.facts(one)} {kernels.facts(two)} {a.data_ptr() == b.data_ptr()} 0\n".encode()
    want += bytes(kernels.element_bytes(one).tolist()) + bytes(kernels.element_bytes(two).tolist())

    call = make_call(extras={"first": one, "second": two}, out=torch.zeros(len(want), dtype=torch.uint8))
    got = returned(ask(process, "transcript", call))

    assert bytes(got.out.tolist()) == want
    assert got.changed_inputs == ()


def test_fp8_queries_give_bf16(process: KernelProcess) -> None:
    every = torch.arange(256, dtype=torch.uint8).reshape(16, 2, 8).view(torch.float8_e4m3fn)

    got = returned(ask(process, "widens", make_call(q=every)))

    assert torch.equal(got.out.view(torch.int16), every.bfloat16().view(torch.int16))


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (3, "record: got 3, expected an object with the fields of oracle.contract.Record"),
        ({"head_dim": [64]}, "record.head_dim: no such field; did you mean head_dims?"),
        ({"colour": 1}, "record.colour: no such field; expected one of dtypes, cache_dtypes, "),
        ({"dtypes": ["bfloat16"]}, "record.dtypes: got 'bfloat16', expected one of fp32, fp16, bf16, e4m3"),
        ({"dtypes": "bf16"}, "record.dtypes: got 'bf16', expected a tuple"),
        ({"head_dims": [64, True]}, "record.head_dims: got True, expected a positive integer"),
        ({"page_sizes": [0]}, "record.page_sizes: got 0, expected a positive integer"),
        ({"uneven_head_dims": [[192, 128, 1]]}, "record.uneven_head_dims: got [192, 128, 1], expected 2 values"),
        ({"deterministic": 1}, "record.deterministic: got 1, expected true or false"),
        ({"precision": {"u_acc": float("nan")}}, "record.precision.u_acc: got nan, expected a finite number >= 0"),
        ({"precision": {"p_format": None}}, "record.precision.p_format: got None, expected a string"),
        ({"precision": []}, "record.precision: got [], expected an object with the fields of oracle.contract.Precision"),
    ],
)
def test_a_malformed_record_names_field_got_and_expected(value: object, text: str) -> None:
    with pytest.raises(RecordError) as error:
        record_from_json(value)

    assert str(error.value).startswith(text)


def test_every_record_survives_its_json() -> None:
    record = Record(
        cache_dtypes=("e4m3",), uneven_head_dims=((192, 128),), groups=(1, 8), deterministic=False, lse_base="2",
        precision=Precision(p_format="e4m3", p_scale=448, qk_format="int8", v_format="e4m3", row_sum="after"),
    )  # fmt: skip

    assert record_from_json(json.loads(json.dumps(dataclasses.asdict(record)))) == record
    assert record_from_json({}) == Record()
