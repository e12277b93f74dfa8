"""A file's bytes as memory, made present before they are used: a drive that fails is an error then, and no signal."""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import sys
from typing import Final

import torch
from torch import Tensor

from vramfit.positioned import PositionedFile

_WILL_NEED, _NOT_NEEDED, _POPULATE_TO_READ, _POPULATE_TO_WRITE = 3, 4, 22, 23  # Linux' mman.h; the last two since 5.14
_PAGE: Final = mmap.PAGESIZE


class MappedFile:
    """The first `nbytes` of a file. What is written to it is written to the file, when the system finds time.

    A page of a mapping that cannot be read, or for which a disk has no room, ends the process by a signal when it is
    touched. Asked for beforehand it is an OSError.
    """

    @staticmethod
    def of(file: PositionedFile, nbytes: int) -> MappedFile | None:
        """None where pages cannot be asked for: on other systems, older kernels, some file systems."""
        if not sys.platform.startswith("linux") or not nbytes:
            return None
        try:
            made = MappedFile(file, nbytes)
            made.present(0, 1, changes=True)
        except (OSError, ValueError):
            return None
        return made

    def __init__(self, file: PositionedFile, nbytes: int) -> None:
        """Raises OSError, ValueError."""
        self._whole = torch.frombuffer(mmap.mmap(file.descriptor, nbytes), dtype=torch.uint8)
        self._advise = ctypes.CDLL(None, use_errno=True).madvise  # which lets other threads run meanwhile
        self._advise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]

    def present(self, offset: int, nbytes: int, *, changes: bool) -> Tensor:
        """Those bytes, in memory from here on; `changes`: they are going to be written. Raises OSError."""
        if nbytes:
            self._ask(offset, nbytes, _WILL_NEED)
            self._ask(offset, nbytes, _POPULATE_TO_WRITE if changes else _POPULATE_TO_READ)
        return self.part(offset, nbytes)

    def part(self, offset: int, nbytes: int) -> Tensor:
        """Those bytes, wherever they are: to be made present before they are touched."""
        return self._whole[offset : offset + nbytes]

    def leave(self, offset: int, nbytes: int) -> None:
        """Those bytes are the file's alone again: the process no longer has them in memory. Raises OSError."""
        if nbytes:
            self._ask(offset, nbytes, _NOT_NEEDED)

    def is_at(self, offset: int, tensor: Tensor) -> bool:
        """Whether `tensor` is what lies there."""
        return tensor.data_ptr() == self._whole.data_ptr() + offset

    def _ask(self, offset: int, nbytes: int, advice: int) -> None:
        first = offset // _PAGE * _PAGE
        if self._advise(self._whole.data_ptr() + first, offset + nbytes - first, advice):
            number = ctypes.get_errno()
            number = errno.EIO if number == errno.EFAULT else number  # what a page that cannot be had is called here
            raise OSError(number, os.strerror(number))
