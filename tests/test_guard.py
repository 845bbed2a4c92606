"""One element past the end of any tensor ends the kernel's process, which says so; and pools too large for 32 bits are judged."""

from __future__ import annotations

import ctypes
import dataclasses
import itertools
import os
import platform
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NoReturn

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from oracle.cases import LAYOUTS, Case
from oracle.contract import OPTIONAL, Call, Record, contract_kernel
from oracle.families import Family
from oracle.isolation import Description, Failure, FailureKind, KernelProcess, Returned, process, worker
from oracle.isolation.faults import Fault
from oracle.isolation.packing import ALIGNMENT, START, pack
from oracle.isolation.shared import Arena
from oracle.isolation.sparse import extents, is_sparse, sparse_zeros
from oracle.references.arithmetic import Arithmetic
from oracle.references.emulator import Emulated
from oracle.scope import Scope
from oracle.suite import build
from oracle.trial import Trial, prepare
from oracle.verdict import Reason

TIMEOUT_S = 60.0
PAGE = START  # bytes of a page of memory
GIB = 1 << 30
HOLE = 1 << 20  # a page id that no test puts anything into
drawn = settings(derandomize=True, deadline=None, database=None, max_examples=60)
tells_faults = pytest.mark.skipif(platform.machine() != "x86_64", reason="the address of a fault is told on x86-64")


# Kernels, for processes that load this file


def end_of(tensor: Tensor) -> int:
    """The address of the first byte past the storage of `tensor`."""
    return tensor.untyped_storage().data_ptr() + tensor.untyped_storage().nbytes()


def ends_with(touch: Callable[[], object]) -> int:
    """The signal that ends a process which calls `touch`, 0 where none does."""
    if pid := os.fork():
        return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    touch()
    os._exit(0)


def probes(q: Tensor, k_cache: Tensor, v_cache: Tensor, *, out: Tensor, **given: Any) -> None:
    """Row i of `out`: how a process ends that reads the last element of tensor i, one past it, and that writes one past it."""
    for i, tensor in enumerate([q, k_cache, v_cache, out, *(x for x in given.values() if isinstance(x, Tensor))]):
        end, size = end_of(tensor), tensor.itemsize
        out[i, 0, 0] = ends_with(lambda: ctypes.string_at(end - size, size))  # noqa: B023
        out[i, 0, 1] = ends_with(lambda: ctypes.string_at(end, size))  # noqa: B023
        out[i, 0, 2] = ends_with(lambda: ctypes.memset(end, 0, size))  # noqa: B023


def writes_past_the_pool(q: Tensor, k_cache: Tensor, v_cache: Tensor) -> NoReturn:
    ctypes.memset(end_of(v_cache) + 6, 0, 2)
    raise AssertionError


def breaks_in_another_thread(q: Tensor, k_cache: Tensor, v_cache: Tensor) -> NoReturn:
    """Reads past the end of q in a thread that does not know the interpreter, while this one holds it and waits."""
    libc, thread = ctypes.PyDLL(None), ctypes.c_ulong()
    libc.pthread_create(ctypes.byref(thread), None, ctypes.cast(libc.strlen, ctypes.c_void_p), ctypes.c_void_p(end_of(q)))
    libc.pthread_join(thread, None)
    raise AssertionError


def signals_itself(q: Tensor, k_cache: Tensor, v_cache: Tensor) -> NoReturn:
    os.kill(os.getpid(), signal.SIGSEGV)
    time.sleep(TIMEOUT_S)
    raise AssertionError


def touches_beside(q: Tensor, k_cache: Tensor, v_cache: Tensor, *, seqused_k: Tensor) -> Tensor:
    """Writes the byte before the storage of q, and the byte after that of seqused_k, which is no multiple of 16 bytes long."""
    ctypes.memset(q.untyped_storage().data_ptr() - 1, 7, 1)
    ctypes.memset(end_of(seqused_k), 7, 1)
    return q * 2


def reads_holes(q: Tensor, k_cache: Tensor, v_cache: Tensor) -> Tensor:
    """Twice q where a page that nobody has put anything into is 0, and writes into it."""
    result = q * 2 + k_cache[HOLE].float().abs().sum() + v_cache[HOLE].float().abs().sum()
    k_cache[HOLE] = 5.0
    return result.to(q.dtype)


def narrow(change: Callable[[Call], Call]) -> Callable[..., Any]:
    """A textbook kernel that reads its pool where `change` puts the pages."""
    return contract_kernel()(lambda call, return_lse: Emulated(Arithmetic())(change(call), return_lse))


def offsets_in_32_bits(call: Call) -> Call:
    """The pages that are read where page id times page stride, in elements, wraps as an int32 does."""
    stride = call.k_cache.stride(0)
    wrapped = (call.page_table * stride).div(stride, rounding_mode="floor")
    return dataclasses.replace(call, page_table=wrapped % call.k_cache.shape[0])


def ids_in_16_bits(call: Call) -> Call:
    return dataclasses.replace(call, page_table=(call.page_table.short() % call.k_cache.shape[0]).int())


KERNELS: dict[str, Callable[..., Any]] = {
    "right": narrow(lambda call: call),
    "offsets in 32 bits": narrow(offsets_in_32_bits),
    "ids in 16 bits": narrow(ids_in_16_bits),
    **{f.__name__: f for f in (probes, touches_beside, reads_holes)},
}


def switched(q: Tensor, k_cache: Tensor, v_cache: Tensor, **given: Any) -> Any:
    """The kernel of KERNELS whose name stands in a file: many kernels for the start of one process."""
    kernel = KERNELS[Path(os.environ["KERNEL_FILE"]).read_text()]
    named = kernel.__kwdefaults__ or {}
    wanted = kernel.__code__.co_varnames[: kernel.__code__.co_argcount + kernel.__code__.co_kwonlyargcount]
    takes_all = kernel.__code__.co_flags & 8
    return kernel(q, k_cache, v_cache, **named, **{name: x for name, x in given.items() if takes_all or name in wanted})


switched.record = {}  # type: ignore[attr-defined]  # with one, a kernel may take any keyword


@pytest.fixture(scope="module")
def switch(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("guard") / "kernel"


@pytest.fixture(scope="module")
def running(switch: Path) -> Iterator[KernelProcess]:
    with KernelProcess(f"{__file__}:switched", threads=1, environment={"KERNEL_FILE": str(switch)}) as kernel:
        yield kernel


def make_call(**changes: object) -> Call:
    """Every storage is a multiple of 16 bytes long."""
    call = Call(
        q=torch.ones(16, 2, 8).bfloat16(),
        k_cache=torch.ones(3, 2, 1, 8).bfloat16(),
        v_cache=torch.ones(3, 2, 1, 8).bfloat16(),
        cu_seqlens_q=torch.tensor([0, 4, 4, 4], dtype=torch.int32),
        seqused_k=torch.tensor([4, 0, 0, 0], dtype=torch.int32),
        page_table=torch.zeros(4, 4, dtype=torch.int32),
        softmax_scale=0.5,
        sinks=torch.zeros(4),
        k_scale=torch.zeros(4, 3),
        out=torch.full((16, 2, 8), -1.0).bfloat16(),
    )
    return dataclasses.replace(call, **changes)  # type: ignore[arg-type]


# The guard pages


def test_the_last_element_of_every_tensor_can_be_read_and_the_next_neither_read_nor_written(
    running: KernelProcess, switch: Path
) -> None:
    switch.write_text("probes")

    got = running.call(make_call(), TIMEOUT_S)

    assert isinstance(got, Returned), got
    tensors = 9  # q, k_cache, v_cache, out and five keyword arguments
    assert got.out[:tensors, 0, :3].tolist() == [[0, -signal.SIGSEGV, -signal.SIGSEGV]] * tensors
    assert got.out[tensors:, 0, :3].tolist() == [[-1, -1, -1]] * (16 - tensors)


BREAKS = [
    (writes_past_the_pool, "SIGSEGV writing 8 bytes past the end of k_cache and v_cache (element 99 of a storage of 96)"),
    (breaks_in_another_thread, "SIGSEGV reading 2 bytes past the end of q (element 256 of a storage of 256) during the call"),
    (signals_itself, "SIGSEGV during the call"),
]


@tells_faults
@pytest.mark.parametrize(("kernel", "text"), BREAKS, ids=[kernel.__name__ for kernel, _ in BREAKS])
def test_a_process_that_breaks_says_at_which_tensor(kernel: Callable[..., Any], text: str) -> None:
    """Also where the thread that breaks cannot have the interpreter; and nothing where no access was at fault."""
    pool = torch.ones(3, 2, 2, 1, 8).bfloat16()
    with KernelProcess(f"{__file__}:{kernel.__name__}", threads=1) as broken:
        failure = broken.call(make_call(k_cache=pool[:, 0], v_cache=pool[:, 1]), TIMEOUT_S)

    assert isinstance(failure, Failure) and failure.kind is FailureKind.SIGNAL
    assert f"its process was ended by {text}" in failure.text


@drawn
@given(st.lists(st.integers(1, 3 * PAGE), min_size=1, max_size=4), st.integers(-20, 2 * PAGE), st.booleans())
def test_storages_end_at_guard_pages_and_only_a_fault_in_one_has_words(sizes: list[int], past: int, writing: bool) -> None:
    """Apart from the bytes up to the next multiple of the alignment."""
    tensors = {f"x{i}": torch.zeros(n, dtype=torch.uint8) for i, n in enumerate(sizes)}
    packing = pack(tensors)
    spec = packing.specs["x0"]

    assert [spec.at % ALIGNMENT for spec in packing.specs.values()] == [0] * len(sizes)
    for spec, guard in zip(packing.specs.values(), packing.guards, strict=True):
        assert guard % PAGE == 0 and 0 <= guard - (spec.at + spec.nbytes) < ALIGNMENT
    taken = sorted((s.at, s.at + s.nbytes) for s in packing.specs.values())
    pages = sorted((guard, guard + PAGE) for guard in packing.guards)
    assert all(a[1] <= b[0] for one in (taken, pages) for a, b in itertools.pairwise(one))
    assert taken[0][0] >= START and packing.end == pages[-1][1]

    spec, guard = packing.specs["x0"], packing.guards[0]
    words = packing.words(Fault(offset=guard + past, writing=writing))
    if 0 <= past < PAGE:
        element = guard + past - spec.at
        assert words.startswith("writing" if writing else "reading")
        end = f"{element + 1 - spec.nbytes} bytes past the end of x0"
        assert words.endswith(f"{end} (element {element:,} of a storage of {spec.nbytes:,})")
    else:
        assert "x0" not in words


def test_bytes_written_beside_a_storage_are_a_change_of_its_tensor(running: KernelProcess, switch: Path) -> None:
    switch.write_text("touches_beside")

    got = running.call(make_call(seqused_k=torch.tensor([4, 0, 0], dtype=torch.int32)), TIMEOUT_S)

    assert isinstance(got, Returned), got
    assert got.changed_inputs == ("q", "seqused_k")


# Sparse pools


def resident(arena: Arena) -> int:
    """Bytes of memory that the file of the arena takes."""
    return os.fstat(arena.fd).st_blocks * 512


def test_of_a_sparse_storage_only_what_is_touched_takes_memory() -> None:
    storage = sparse_zeros(64 * GIB)
    storage[5 * PAGE] = 1
    storage[-1] = 1

    assert is_sparse(storage) and not is_sparse(storage[1:]) and not is_sparse(torch.zeros(4, dtype=torch.uint8))
    assert extents(storage) == ((5 * PAGE, 6 * PAGE), (64 * GIB - PAGE, 64 * GIB))


def test_a_sparse_pool_is_forgotten_with_its_last_tensor() -> None:
    """Its files are closed."""
    before = len(os.listdir("/proc/self/fd"))
    tensor = sparse_zeros(GIB).view(torch.int16)[7:]
    assert len(os.listdir("/proc/self/fd")) > before
    del tensor

    assert len(os.listdir("/proc/self/fd")) == before


def test_a_sparse_pool_reaches_the_kernel_as_it_is_and_leaves_no_memory_behind(running: KernelProcess, switch: Path) -> None:
    """Holes are 0, what is put there arrives; a call that touches holes does not make the next one see it."""
    switch.write_text("reads_holes")
    pool = sparse_zeros(12 * GIB).view(torch.bfloat16).view(-1, 2, 2, 1, 8)
    pool[[0, -1]] = 3.0
    q = torch.arange(64).reshape(4, 2, 8).bfloat16()
    call = make_call(q=q, k_cache=pool[:, 0], v_cache=pool[:, 1], out=None)

    for _ in range(2):
        got = running.call(call, TIMEOUT_S)
        assert isinstance(got, Returned), got
        assert torch.equal(got.out, q * 2) and got.changed_inputs == ()
        assert running._child is not None
        assert resident(running._child.arena) < 16 << 20


def test_a_change_of_what_a_sparse_pool_holds_is_seen(running: KernelProcess, switch: Path) -> None:
    switch.write_text("reads_holes")
    pool = sparse_zeros(4 * GIB).view(torch.bfloat16).view(-1, 2, 2, 1, 8)
    pool[HOLE + 1] = 3.0  # in the same page of memory

    got = running.call(make_call(k_cache=pool[:, 0], v_cache=pool[:, 1], out=None), TIMEOUT_S)

    assert isinstance(got, Returned), got
    assert got.changed_inputs == ("k_cache", "v_cache")


def test_on_a_device_of_its_own_the_kernel_gets_the_parts_of_a_sparse_pool_and_they_come_back() -> None:
    """ "cpu:0" stands for one: the tensors are copied there and back as they are for any device but "cpu"."""
    pool = sparse_zeros(64 << 20).view(torch.bfloat16).view(-1, 2, 2, 1, 8)
    pool[[0, HOLE // 4]] = 3.0
    call = make_call(k_cache=pool[:, 0], v_cache=pool[:, 1])
    described = Description(
        target="", parameters=("out",), required=(), has_var_keyword=False, record=None, source_sha256=None, doc="", version=None
    )
    request = process._request(described, call, want_lse=False)
    arena = Arena.create()
    arena.reserve(request.nbytes, request.packing.backing)
    request.packing.write(arena)
    seen: list[Tensor] = []

    def kernel(q: Tensor, k_cache: Tensor, v_cache: Tensor, *, out: Tensor) -> None:
        seen.append(v_cache.float().sum((1, 2, 3)).nonzero().flatten())
        out[:] = 9.0
        k_cache[HOLE // 4] = 5.0

    worker._answer(kernel, arena, "cpu:0", request.message)

    assert seen[0].tolist() == [0, HOLE // 4]
    out = request.packing.specs["out"]
    assert bool((arena.copy(out.at, out.nbytes).view(torch.bfloat16) == 9).all())
    assert request.packing.changed(arena, "out") == ("k_cache", "v_cache")
    arena.close()


FAMILY = Family(name="far", q_heads=2, kv_heads=1, head_dim=64, head_dim_v=64, scale=0.125)
RECORD = Record()
FORMATS = (("bf16", ""), ("fp32", ""), ("bf16", "e4m3"))


@pytest.mark.parametrize(
    ("kernel", "layout", "caught"),
    [
        ("right", "far-pages", False),
        ("right", "many-pages", False),
        ("offsets in 32 bits", "far-pages", True),
        ("offsets in 32 bits", "layers-in-page", False),
        ("ids in 16 bits", "far-pages", True),
        ("ids in 16 bits", "many-pages", True),
        ("ids in 16 bits", "layers-in-page", False),
    ],
)
@pytest.mark.parametrize("q_len", [1, 3])
def test_narrow_integers_are_seen_in_the_large_pools_only(
    running: KernelProcess, switch: Path, kernel: str, layout: str, caught: bool, q_len: int
) -> None:
    switch.write_text(kernel)
    case = Case(name="far", family=FAMILY, q_lens=(q_len, 1), kv_lens=(40, 20), layout=layout)

    seen = Trial(running, RECORD, quick=True).run(prepare(case, RECORD))

    assert (Reason.ERROR in {finding.reason for finding in seen.findings}) is caught
    assert bool(seen.findings) is caught, seen.findings


def test_every_format_of_a_kernel_meets_far_pages_with_one_query_and_with_more() -> None:
    """And has every other place for its rows and pages in the covering array."""
    record = Record(dtypes=("bf16", "fp32"), cache_dtypes=("e4m3",))
    scope = Scope(record=record, parameters=frozenset(OPTIONAL))
    cases = build(scope, profile="default", seed=3).cases
    far = {(c.dtype, c.cache_dtype, max(c.q_lens) > 1) for c in cases if c.name.startswith("far-pages/")}

    assert far == {(dtype, cache, several) for dtype, cache in FORMATS for several in (False, True)}
    array = [c for c in cases if "pair-" in c.name]
    assert {c.layout for c in array} | {"many-pages"} == {c.layout for c in cases} == set(LAYOUTS)
    assert {c.tail_rows for c in array} == {0, 1, 3, 70}
    assert any(n >= c.page_size for c in array for n in c.shared)
