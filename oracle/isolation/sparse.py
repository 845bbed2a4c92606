"""Storages far larger than what is ever touched of them: only pages that are written take memory.

A page pool of more than 2^31 elements has a few hundred live pages.  It lies in an anonymous file, and the system knows which
parts of the file were ever touched; everything else reads as zeros.
"""

from __future__ import annotations

import mmap
import os
import weakref

import torch
from torch import Tensor

Extents = tuple[tuple[int, int], ...]  # (start, stop) of stretches of bytes, ascending


class _Memory(mmap.mmap):
    """A mapping that knows its file: the file can tell what was touched."""

    fd: int


# By the address of its first byte: a torch storage does not say what memory it lies in.
_memories: weakref.WeakValueDictionary[int, _Memory] = weakref.WeakValueDictionary()


def sparse_zeros(nbytes: int) -> Tensor:
    """(nbytes,) uint8 of zeros, nbytes at least 1; memory is taken page by page, by what is read or written."""
    fd = os.memfd_create("oracle-pool", os.MFD_CLOEXEC)
    try:
        os.ftruncate(fd, nbytes)
        memory = _Memory(fd, nbytes)
    except BaseException:
        os.close(fd)
        raise
    memory.fd = fd
    weakref.finalize(memory, os.close, fd)
    storage = torch.frombuffer(memory, dtype=torch.uint8)
    _memories[storage.data_ptr()] = memory
    return storage


def is_sparse(storage: Tensor) -> bool:
    """Whether `storage` (nbytes,) uint8 is the whole of what a call of `sparse_zeros` gave."""
    memory = _memories.get(storage.data_ptr())
    return memory is not None and len(memory) == storage.numel()


def extents(storage: Tensor) -> Extents:
    """The bytes that were touched so far of a sparse storage, by whole pages; all others are 0."""
    return touched(_memories[storage.data_ptr()].fd, 0, storage.numel())


def touched(fd: int, start: int, stop: int) -> Extents:
    """What was ever touched of bytes start..stop of an anonymous file, by whole pages."""
    found = []
    while start < stop:
        try:
            first = os.lseek(fd, start, os.SEEK_DATA)
        except OSError:  # ENXIO: nothing past this place
            break
        if first >= stop:
            break
        start = min(os.lseek(fd, first, os.SEEK_HOLE), stop)
        found.append((first, start))
    return tuple(found)
