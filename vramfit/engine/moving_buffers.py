"""Buffers that a forward moves (running means, power iterations): what is computed again begins with them as they were.

A recomputed block runs its forward twice in a step. Without care its running means would move twice, and what reads
such a buffer would compute with another one than the first time. So the buffers are noted before the forward, and the
second one runs on copies of them, which are thrown away.
"""

from __future__ import annotations

from types import TracebackType
from typing import Any, Final, NamedTuple

from torch import Tensor, nn

LARGEST_COPY_BYTES: Final = 2**26
_RUNNING: Final = nn.modules.batchnorm._NormBase


class _Place(NamedTuple):
    owner: int
    name: str


class MovingBuffers:
    """Those of one module. Which ones move is seen in its first forward: all are copied then, later only those."""

    def __init__(self, module: nn.Module) -> None:
        # Running statistics are moved by kernels that do not count that as a change (torch 2.13).
        self._owners = [(each._buffers, isinstance(each, _RUNNING)) for each in module.modules()]
        self._moving: set[_Place] | None = None

    def note(self) -> Noted:
        """The buffers before a forward."""
        copies, versions = {}, {}
        for owner, (buffers, _) in enumerate(self._owners):
            for name, buffer in buffers.items() if buffers else ():
                if buffer is None or buffer.nbytes > LARGEST_COPY_BYTES:
                    continue
                place = _Place(owner, name)
                versions[place] = _version(buffer)
                if self._moving is None or place in self._moving:
                    copies[place] = buffer.detach().clone()
        return Noted(self._owners, copies, versions)

    def learn(self, noted: Noted) -> None:
        """After the forward: what has moved is known from now on, and copies of what has not are let go."""
        moved = {place for place, version in noted.versions.items() if self._has_moved(place, version)}
        self._moving = moved | (self._moving or set())
        for place in noted.copies.keys() - self._moving:
            del noted.copies[place]

    def _has_moved(self, place: _Place, version: int) -> bool:
        buffers, running = self._owners[place.owner]
        now = buffers.get(place.name)
        return running or (now is not None and _version(now) != version)


class Noted:
    """A context in which the buffers are copies of what they were when they were noted, as often as it is entered."""

    def __init__(
        self, owners: list[tuple[dict[str, Any], bool]], copies: dict[_Place, Tensor], versions: dict[_Place, int]
    ) -> None:
        self._owners, self.copies, self.versions = owners, copies, versions
        self._live: dict[_Place, Tensor | None] = {}

    def __enter__(self) -> None:
        for place, copy in self.copies.items():
            buffers = self._owners[place.owner][0]
            self._live[place] = buffers[place.name]
            buffers[place.name] = copy.clone()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for place, buffer in self._live.items():
            self._owners[place.owner][0][place.name] = buffer
        self._live.clear()


def _version(tensor: Tensor) -> int:
    """How often it was changed in place. Tensors made in inference mode do not count that."""
    try:
        return tensor._version
    except RuntimeError:
        return 0
