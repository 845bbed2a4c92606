"""Tensors in memory that two processes share.

The parent lays the storages of a call into an anonymous file (`oracle.isolation.packing`), and tells the child where they lie.
The file is sealed against shrinking: a mapping of it never loses its pages, so nothing that the child does to the file can raise
SIGBUS in the parent.
"""

from __future__ import annotations

import ctypes
import functools
import mmap
import os
from dataclasses import dataclass

import torch
from torch import Tensor

from oracle.isolation.faults import address_of
from oracle.isolation.sparse import Extents

_GROWTH = 1 << 20  # bytes: a finer step would map the file anew for nearly every new shape
_CHUNK = 1 << 17  # bytes compared at once: fits the cache, and malloc serves it without mmap


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorSpec:
    """Where a tensor lies: all that is needed to rebuild it but its values."""

    at: int  # start of its storage in the arena, bytes
    nbytes: int  # size of its storage
    dtype: str  # "bfloat16": an attribute of torch
    shape: tuple[int, ...]
    strides: tuple[int, ...]  # elements
    offset: int  # first element in the storage, elements

    def as_json(self) -> list[object]:
        """The fields in order."""
        return [self.at, self.nbytes, self.dtype, self.shape, self.strides, self.offset]


def spec_from_json(fields: list[object]) -> TensorSpec:
    """The inverse of `as_json`.  Only the child reads specs, and the parent wrote them."""
    at, nbytes, dtype, shape, strides, offset = fields
    return TensorSpec(at=at, nbytes=nbytes, dtype=dtype, shape=shape, strides=strides, offset=offset)  # type: ignore[arg-type]


def dtype_name(dtype: torch.dtype) -> str:
    """`dtype` without its "torch."."""
    return str(dtype).removeprefix("torch.")


def storage_bytes(tensor: Tensor) -> Tensor:
    """The whole storage of `tensor`, shared with it: (nbytes,) uint8."""
    return torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage())


def rebuild(storage: Tensor, spec: TensorSpec) -> Tensor:
    """The tensor of `spec`, as a view of `storage` (nbytes,) uint8, which starts where its own storage starts."""
    dtype: torch.dtype = getattr(torch, spec.dtype)
    whole = storage.numel() // dtype.itemsize * dtype.itemsize
    return storage[:whole].view(dtype).as_strided(spec.shape, spec.strides, spec.offset)


class Arena:
    """A file in memory, mapped.  The parent creates and grows it; the child opens the inherited file descriptor.

    Its first page is for notes (`oracle.isolation.faults`), the rest for tensors.
    """

    def __init__(self, fd: int) -> None:
        self.fd = fd
        self.nbytes = 0  # how much of the file this process uses; set by `reserve`, or in the child by the request
        self._backed = 0  # bytes from the start of the file that are known to have memory
        self._map: mmap.mmap | None = None
        self._guards: tuple[int, ...] = ()  # pages of the mapping that may not be touched

    @classmethod
    def create(cls) -> Arena:
        """A small arena, that can grow but never shrink."""
        import fcntl  # here, so that elsewhere than on Linux the package can be imported, to say that it needs Linux

        fd = os.memfd_create("oracle-arena", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_SEAL)
        arena = cls(fd)
        arena.reserve(mmap.PAGESIZE, ((0, mmap.PAGESIZE),))  # an empty file cannot be mapped
        return arena

    def reserve(self, nbytes: int, extents: Extents) -> None:
        """At least `nbytes` bytes are there, those of `extents` backed by memory.

        Raises MemoryError where the machine has not so many.
        """
        # Not ftruncate alone: a page that cannot be had later would raise SIGBUS.
        try:
            for start, stop in extents:
                if start <= self._backed < stop:
                    size = _rounded(stop, _GROWTH)
                    os.posix_fallocate(self.fd, 0, size)
                    self._backed = size
                elif self._backed < start < stop:
                    os.posix_fallocate(self.fd, start, stop - start)
        except OSError as e:
            raise MemoryError(f"a call needs {sum(b - a for a, b in extents)} bytes of shared memory: {e.strerror}") from e
        if max(nbytes, self._backed) > self.nbytes:
            self.nbytes = max(_rounded(nbytes, _GROWTH), self._backed)
            if os.fstat(self.fd).st_size < self.nbytes:  # the child can grow the file too
                os.ftruncate(self.fd, self.nbytes)

    def release(self, start: int) -> None:
        """Bytes from `start` on read as zeros and take no memory until they are touched again."""
        start = _rounded(start, mmap.PAGESIZE)
        self._mapped().madvise(mmap.MADV_REMOVE, start, self.nbytes - start)
        self._backed = min(self._backed, start)

    def span(self, at: int, nbytes: int) -> Tensor:
        """Bytes at..at+nbytes of the arena, as a storage of their own: (nbytes,) uint8, shared with the other process."""
        if nbytes == 0:
            return torch.empty(0, dtype=torch.uint8)
        return torch.frombuffer(self._mapped(), dtype=torch.uint8, count=nbytes, offset=at)

    def guard(self, pages: tuple[int, ...]) -> None:
        """Whoever touches the pages that start at these bytes ends this process by SIGSEGV; no other page of the arena does."""
        base = address_of(self._mapped())
        if pages == self._guards:
            return
        for page in set(self._guards) - set(pages):
            _protect(base + page, mmap.PROT_READ | mmap.PROT_WRITE)
        for page in set(pages) - set(self._guards):
            _protect(base + page, 0)
        self._guards = pages

    # The parent copies by memoryview: torch would share the work among threads, which on a busy machine wait for one another.

    def put(self, at: int, own: memoryview) -> None:
        """The arena holds `own` at `at`."""
        memoryview(self._mapped())[at : at + len(own)] = own

    def blank(self, at: int, nbytes: int) -> None:
        """Bytes at..at+nbytes are 255, which is NaN in every floating-point format."""
        if nbytes:
            memoryview(self._mapped())[at : at + nbytes] = b"\xff" * nbytes

    def copy(self, at: int, nbytes: int) -> Tensor:
        """Bytes at..at+nbytes, private: (nbytes,) uint8."""
        own = torch.empty(nbytes, dtype=torch.uint8)
        own.numpy().data[:] = memoryview(self._mapped())[at : at + nbytes]
        return own

    def same(self, at: int, own: memoryview) -> bool:
        """The arena holds `own` at `at`.

        Each byte is copied out once and compared in private memory: the child may still be writing.
        """
        shared = memoryview(self._mapped())
        return all(
            bytes(shared[at + start : at + min(start + _CHUNK, len(own))]) == bytes(own[start : start + _CHUNK])
            for start in range(0, len(own), _CHUNK)
        )

    def is_blank(self, at: int, nbytes: int) -> bool:
        """Bytes at..at+nbytes are what `blank` makes them."""
        return not nbytes or bytes(memoryview(self._mapped())[at : at + nbytes]) == b"\xff" * nbytes

    def notes(self) -> bytes:
        """The page of notes, private."""
        return bytes(memoryview(self._mapped())[: mmap.PAGESIZE])

    def close(self) -> None:
        """The file is closed here; its memory is freed when nobody maps it any more."""
        self._map = None
        os.close(self.fd)

    def address(self) -> int:
        """Where this process has mapped the arena."""
        return address_of(self._mapped())

    def _mapped(self) -> mmap.mmap:
        if self._map is None or len(self._map) < self.nbytes:
            # Tensors that someone kept hold the old mapping; it goes when they go.
            self._map = None
            self._map = mmap.mmap(self.fd, self.nbytes)
            self._guards = ()
        return self._map


def _rounded(n: int, step: int) -> int:
    return -(-n // step) * step


def _protect(address: int, protection: int) -> None:
    """Raises OSError where the system refuses."""
    if _libc().mprotect(ctypes.c_void_p(address), ctypes.c_size_t(mmap.PAGESIZE), protection):
        raise OSError(ctypes.get_errno(), "mprotect of a guard page")


@functools.cache
def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)
