"""Where the tensors of a call lie in the arena: every storage ends where a guard page begins.

In the kernel's process a guard page can be neither read nor written, so an access past the end of a tensor's storage ends that
process.  What is left over of the page before a storage is filled with ones, and must be so after the call.
"""

from __future__ import annotations

import mmap
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from oracle.isolation.faults import Fault
from oracle.isolation.shared import Arena, TensorSpec, dtype_name, storage_bytes
from oracle.isolation.sparse import Extents, extents, is_sparse

ALIGNMENT = 16  # bytes, of the start of a storage: vectorised kernels rely on it; so up to 15 bytes lie before the guard page
START = mmap.PAGESIZE  # of the first storage; the arena's first page is for notes


@dataclass(frozen=True, slots=True)
class Packing:
    """Tensors laid out in an arena, each distinct storage once."""

    specs: dict[str, TensorSpec]  # by the name of the argument
    storages: dict[int, memoryview]  # the parent's own bytes, by their place in the arena
    sparse: dict[int, Extents]  # of each sparse storage what may differ from 0, in its own bytes
    end: int  # first free byte, the start of a page

    @property
    def guards(self) -> tuple[int, ...]:
        """The guard page of each storage, by its start in the arena."""
        return tuple(_guard(at, len(own)) for at, own in self.storages.items())

    @property
    def backing(self) -> Extents:
        """What must be there of the arena, by whole pages, ascending."""
        found: list[tuple[int, int]] = []
        for at, own in self.storages.items():
            if at in self.sparse:
                found += [(_page(at + start), _page(at + stop + mmap.PAGESIZE - 1)) for start, stop in self.sparse[at]]
            else:
                found.append((_page(at), _guard(at, len(own)) + mmap.PAGESIZE))
        return tuple(found)

    def write(self, arena: Arena) -> None:
        """The arena holds every storage; it has room for them, and zeros where a storage is sparse."""
        for at, own in self.storages.items():
            arena.blank(_page(at), at - _page(at))
            for start, stop in self._parts(at):
                arena.put(at + start, own[start:stop])
            arena.blank(at + len(own), _guard(at, len(own)) - at - len(own))

    def changed(self, arena: Arena, written: str) -> tuple[str, ...]:
        """Names of the tensors, other than `written`, of which the arena holds other bytes than were put there.

        Where only bytes between the elements or beside the storage changed, and where a storage is sparse, all tensors of that
        storage are named; except in the storage of `written`, where bytes between the elements are the caller's to judge.
        """
        free = self.specs[written].at if written in self.specs else None
        names: set[str] = set()
        for at, own in self.storages.items():
            if (users := self._users(at, written)) == []:
                continue
            if at != free and not self._margins_hold(arena, at, len(own)):
                names.update(users)
            elif all(arena.same(at + start, own[start:stop]) for start, stop in self._parts(at)):
                continue
            elif at in self.sparse:
                names.update(users)
            else:
                differs = arena.copy(at, len(own)) != torch.frombuffer(own, dtype=torch.uint8)
                hit = [name for name in users if bool(_element_bytes(differs, self.specs[name]).any())]
                names.update(hit if hit or at == free else users)
        return tuple(name for name in self.specs if name in names)

    def words(self, fault: Fault) -> str:
        """Which tensor's end a fault lies beyond, and by how much; "" where it lies in no guard page."""
        for at, own in self.storages.items():
            guard = _guard(at, len(own))
            if guard <= fault.offset < guard + mmap.PAGESIZE:
                users = [name for name, spec in self.specs.items() if spec.at == at and spec.nbytes]
                size = getattr(torch, self.specs[users[0]].dtype).itemsize
                element = (fault.offset - at) // size
                past = (element + 1) * size - len(own)
                what = "writing" if fault.writing else "reading"
                end = f"{past} bytes past the end of {' and '.join(users)}"
                return f"{what} {end} (element {element:,} of a storage of {len(own) // size:,})"
        return ""

    def _parts(self, at: int) -> Extents:
        """What may differ from 0 of the storage at `at`, in its own bytes."""
        return self.sparse[at] if at in self.sparse else ((0, len(self.storages[at])),)

    def _margins_hold(self, arena: Arena, at: int, nbytes: int) -> bool:
        end = at + nbytes
        return arena.is_blank(_page(at), at - _page(at)) and arena.is_blank(end, _guard(at, nbytes) - end)

    def _users(self, at: int, written: str) -> list[str]:
        return [name for name, spec in self.specs.items() if spec.at == at and spec.nbytes > 0 and name != written]


def pack(tensors: Mapping[str, Tensor]) -> Packing:
    """`tensors` laid out in an arena from START on.  Raises ValueError for one that is not on the CPU."""
    specs: dict[str, TensorSpec] = {}
    storages: dict[int, memoryview] = {}
    sparse: dict[int, Extents] = {}
    places: dict[tuple[int, int], int] = {}  # address and size of a storage -> its place
    end = START
    for name, tensor in tensors.items():
        if tensor.device.type != "cpu":
            raise ValueError(f"{name}: on {tensor.device}, expected the CPU; the kernel's process moves it to its device")
        storage = tensor.untyped_storage()
        key = storage.data_ptr(), storage.nbytes()
        if storage.nbytes() and key not in places:
            room = -(-storage.nbytes() // ALIGNMENT) * ALIGNMENT
            guard = _page(end + room + mmap.PAGESIZE - 1)
            places[key] = guard - room
            own = storage_bytes(tensor)
            storages[guard - room] = own.numpy().data
            if is_sparse(own):
                sparse[guard - room] = extents(own)
            end = guard + mmap.PAGESIZE
        specs[name] = TensorSpec(
            at=places.get(key, end),
            nbytes=storage.nbytes(),
            dtype=dtype_name(tensor.dtype),
            shape=tuple(tensor.shape),
            strides=tensor.stride(),
            offset=int(tensor.storage_offset()),
        )
    return Packing(specs, storages, sparse, end)


def _page(at: int) -> int:
    return at // mmap.PAGESIZE * mmap.PAGESIZE


def _guard(at: int, nbytes: int) -> int:
    """The first byte of the guard page of a storage."""
    return _page(at + nbytes + mmap.PAGESIZE - 1)


def _element_bytes(flat: Tensor, spec: TensorSpec) -> Tensor:
    """The entries of `flat` (nbytes,) that belong to the tensor of `spec`: (*shape, itemsize)."""
    size = getattr(torch, spec.dtype).itemsize
    return flat.as_strided((*spec.shape, size), (*(s * size for s in spec.strides), 1), spec.offset * size)
