"""Tensors in memory that two processes share.

The parent lays the storages of a call one after the other into an anonymous file, and tells the child where they lie.  The
file is sealed against shrinking: a mapping of it never loses its pages, so nothing that the child does to the file can raise
SIGBUS in the parent.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

ALIGNMENT = 512  # bytes; what torch's CUDA allocator gives, and a multiple of the CPU allocator's 64
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


def aligned(nbytes: int) -> int:
    """`nbytes`, up to the next multiple of the alignment."""
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


class Arena:
    """A file in memory, mapped.  The parent creates and grows it; the child opens the inherited file descriptor."""

    def __init__(self, fd: int) -> None:
        self.fd = fd
        self.nbytes = 0  # how much of the file this process uses; set by `reserve`, or in the child by the request
        self._map: mmap.mmap | None = None

    @classmethod
    def create(cls) -> Arena:
        """A small arena, that can grow but never shrink."""
        import fcntl  # here, so that elsewhere than on Linux the package can be imported, to say that it needs Linux

        fd = os.memfd_create("oracle-arena", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_SEAL)
        arena = cls(fd)
        arena.reserve(1)  # an empty file cannot be mapped
        return arena

    def reserve(self, nbytes: int) -> None:
        """At least `nbytes` bytes are there, backed by memory.  Raises MemoryError where the machine has not so many."""
        if nbytes <= self.nbytes:
            return
        size = -(-nbytes // _GROWTH) * _GROWTH
        try:
            # Not ftruncate: a page that cannot be had later would raise SIGBUS.
            os.posix_fallocate(self.fd, 0, size)
        except OSError as e:
            raise MemoryError(f"a call needs {size} bytes of shared memory: {e.strerror}") from e
        self.nbytes = size

    def span(self, at: int, nbytes: int) -> Tensor:
        """Bytes at..at+nbytes of the arena, as a storage of their own: (nbytes,) uint8, shared with the other process."""
        if nbytes == 0:
            return torch.empty(0, dtype=torch.uint8)
        return torch.frombuffer(self._mapped(), dtype=torch.uint8, count=nbytes, offset=at)

    # The parent copies by memoryview: torch would share the work among threads, which on a busy machine wait for one another.

    def put(self, at: int, own: Tensor) -> None:
        """The arena holds the bytes of `own` (nbytes,) uint8 at `at`."""
        memoryview(self._mapped())[at : at + own.numel()] = own.numpy().data

    def blank(self, at: int, nbytes: int) -> None:
        """Bytes at..at+nbytes are 255, which is NaN in every floating-point format."""
        memoryview(self._mapped())[at : at + nbytes] = b"\xff" * nbytes

    def copy(self, at: int, nbytes: int) -> Tensor:
        """Bytes at..at+nbytes, private: (nbytes,) uint8."""
        own = torch.empty(nbytes, dtype=torch.uint8)
        own.numpy().data[:] = memoryview(self._mapped())[at : at + nbytes]
        return own

    def same(self, at: int, pristine: Tensor) -> bool:
        """The arena holds the bytes of `pristine` (nbytes,) uint8 at `at`.

        Each byte is copied out once and compared in private memory: the child may still be writing.
        """
        own, shared = pristine.numpy().data, memoryview(self._mapped())
        return all(
            bytes(shared[at + start : at + min(start + _CHUNK, len(own))]) == bytes(own[start : start + _CHUNK])
            for start in range(0, len(own), _CHUNK)
        )

    def close(self) -> None:
        """The file is closed here; its memory is freed when nobody maps it any more."""
        self._map = None
        os.close(self.fd)

    def _mapped(self) -> mmap.mmap:
        if self._map is None or len(self._map) < self.nbytes:
            # Tensors that someone kept hold the old mapping; it goes when they go.
            self._map = None
            self._map = mmap.mmap(self.fd, self.nbytes)
        return self._map


@dataclass(frozen=True, slots=True)
class Packing:
    """Tensors laid out in an arena, each distinct storage once."""

    specs: dict[str, TensorSpec]  # by the name of the argument
    storages: dict[int, Tensor]  # the parent's own bytes, (nbytes,) uint8, by their place in the arena
    end: int  # first free byte, aligned

    def write(self, arena: Arena) -> None:
        """The arena holds every storage; it has room for them."""
        for at, own in self.storages.items():
            arena.put(at, own)

    def changed(self, arena: Arena, written: str) -> tuple[str, ...]:
        """Names of the tensors, other than `written`, of which the arena holds other bytes than were put there.

        Where only bytes between the elements changed, all tensors of that storage are named; except in the storage of
        `written`, where such bytes are the caller's to judge.
        """
        free = self.specs[written].at if written in self.specs else None
        names: set[str] = set()
        for at, own in self.storages.items():
            if own.numel() == 0 or (users := self._users(at, written)) == [] or arena.same(at, own):
                continue
            differs = arena.copy(at, own.numel()) != own
            hit = [name for name in users if bool(_element_bytes(differs, self.specs[name]).any())]
            names.update(hit if hit or at == free else users)
        return tuple(name for name in self.specs if name in names)

    def _users(self, at: int, written: str) -> list[str]:
        return [name for name, spec in self.specs.items() if spec.at == at and spec.nbytes > 0 and name != written]


def pack(tensors: Mapping[str, Tensor]) -> Packing:
    """`tensors` laid out from byte 0 of an arena.  Raises ValueError for one that is not on the CPU."""
    specs: dict[str, TensorSpec] = {}
    storages: dict[int, Tensor] = {}
    places: dict[tuple[int, int], int] = {}  # address and size of a storage -> its place
    end = 0
    for name, tensor in tensors.items():
        if tensor.device.type != "cpu":
            raise ValueError(f"{name}: on {tensor.device}, expected the CPU; the kernel's process moves it to its device")
        storage = tensor.untyped_storage()
        at = places.setdefault((storage.data_ptr(), storage.nbytes()), end) if storage.nbytes() else end
        if at == end:
            storages[at] = storage_bytes(tensor)
            end += aligned(storage.nbytes())
        specs[name] = TensorSpec(
            at=at,
            nbytes=storage.nbytes(),
            dtype=dtype_name(tensor.dtype),
            shape=tuple(tensor.shape),
            strides=tensor.stride(),
            offset=int(tensor.storage_offset()),
        )
    return Packing(specs, storages, end)


def _element_bytes(flat: Tensor, spec: TensorSpec) -> Tensor:
    """The entries of `flat` (nbytes,) that belong to the tensor of `spec`: (*shape, itemsize)."""
    size = getattr(torch, spec.dtype).itemsize
    return flat.as_strided((*spec.shape, size), (*(s * size for s in spec.strides), 1), spec.offset * size)
