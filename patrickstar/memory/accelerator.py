"""The memory of an accelerator as a tier.

A chunk has one storage on the device for good, which is resized to nothing while the chunk is away
(as FSDP2 does): tensors over it stay valid objects, and the memory goes back to PyTorch's caching
allocator, which knows which stream may reuse it when.

`device` may be the CPU: then everything but streams and pinning runs as on an accelerator, which is
how these tiers are tested on machines without one.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from patrickstar.memory.streams import Copies, DirectCopies, StreamCopies

View = Callable[[], memoryview]


class AcceleratorTier:
    """Chunks in the memory of `device`.

    Args:
        capacity: its budget in bytes; of what chunks and other tensors take, not of what the
            allocator holds beyond that.
        copies: moves bytes between the device and CPU memory; what suits the device if not given.
    """

    fixed = True

    def __init__(
        self, name: str, capacity: int | None, device: torch.device, copies: Copies | None = None
    ) -> None:
        self.name, self.capacity, self.device = name, capacity, device
        default = DirectCopies if device.type == "cpu" else lambda: StreamCopies(device)
        self._copies: Copies = copies or default()
        self._bytes: dict[int, torch.Tensor] = {}
        self._storages: set[int] = set()

    def take(self, chunk: int, nbytes: int, *, zero: bool) -> None:
        # What the tier does is no operator of the user's, whoever watches those: the memory it
        # takes here is on the books.
        with torch._C._DisableTorchDispatch():
            flat = self._flat(chunk, nbytes, there=True)
            self._resize(flat.untyped_storage(), nbytes)
            if zero:
                flat.zero_()

    def give_back(self, chunk: int) -> None:
        self._bytes[chunk].untyped_storage().resize_(0)

    def forget(self, chunk: int) -> None:
        flat = self._bytes.pop(chunk, None)
        if flat is not None:
            self._storages.discard(flat.untyped_storage()._cdata)

    def settle(self, chunks: int, other: int) -> None:
        """What the allocator keeps is reused by chunks and operators alike."""

    def mend(self, chunks: set[int]) -> None:
        for chunk, flat in self._bytes.items():
            if chunk not in chunks:
                flat.untyped_storage().resize_(0)

    def close(self) -> None:
        # Parameters refer to the storages, and live until somebody collects the model.
        for flat in self._bytes.values():
            flat.untyped_storage().resize_(0)
        self._bytes.clear()

    def tensor(self, chunk: int, nbytes: int, dtype: torch.dtype, numel: int) -> torch.Tensor:
        with torch._C._DisableTorchDispatch():
            return _over(self._flat(chunk, nbytes).untyped_storage(), dtype, numel)

    def owns(self, storage: int) -> bool:
        return storage in self._storages

    def loading(self, chunk: int, source: View) -> Callable[[], None]:
        """What copies `source` to the chunk's place."""
        mark = self._copies.mark()
        return lambda: self._copies.copy(self._bytes[chunk], _bytes_of(source()), mark)

    def saving(self, chunk: int, target: View) -> Callable[[], None]:
        """What copies the chunk to `target`."""
        mark = self._copies.mark()
        return lambda: self._copies.copy(_bytes_of(target()), self._bytes[chunk], mark)

    def _flat(self, chunk: int, nbytes: int, *, there: bool = False) -> torch.Tensor:
        """The chunk's bytes. Kept, so that a copy under way adds no reference to the storage."""
        found = self._bytes.get(chunk)
        if found is None:
            storage = torch.UntypedStorage(0, device=self.device)  # type: ignore[no-untyped-call]
            if there:
                self._resize(storage, nbytes)
            self._storages.add(storage._cdata)
            found = self._bytes[chunk] = _over(storage, torch.uint8, nbytes)
        return found

    def _resize(self, storage: torch.UntypedStorage, nbytes: int) -> None:
        try:
            storage.resize_(nbytes)
        except torch.OutOfMemoryError:
            # The budget has room, so it is fragments of the allocator that are in the way.
            torch.accelerator.empty_cache()
            storage.resize_(nbytes)


def _over(storage: torch.UntypedStorage, dtype: torch.dtype, numel: int) -> torch.Tensor:
    """A flat tensor over a storage, whose size stays what it is."""
    nbytes = storage.nbytes()
    made = torch.empty(0, dtype=dtype, device=storage.device)
    made.set_(storage, 0, (numel,), (1,))  # enlarges a storage that is too short
    if storage.nbytes() != nbytes:
        storage.resize_(nbytes)
    return made


def _bytes_of(view: memoryview) -> torch.Tensor:
    return torch.frombuffer(view, dtype=torch.uint8)
