"""Weights in safetensors files, read where they lie: any tensor, or some of its rows, without the rest of the file.

Bytes are read with positioned reads, not through a memory map: a file that is cut off while a run is on is then an
error that can be told, where a map would end the process.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Iterator, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor

from vramfit.engine.later import Later
from vramfit.errors import ModelError
from vramfit.models.files import check_safetensors, weight_files
from vramfit.positioned import PositionedFile

DTYPES: Final = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}

FORMATS: Final = {dtype: name for name, dtype in DTYPES.items()}
"""What a file calls a format."""

_PIECE: Final = 16 * 2**20
"""Bytes read at once where numbers are converted on the way."""

_HEADER_MULTIPLE: Final = 64
"""Bytes: where the numbers of a file that is mapped into memory begin is then where processors like them to."""


class WeightFile:
    """One safetensors file, kept open. What it was when it was opened is what it must still be when it is read."""

    def __init__(self, path: Path) -> None:
        check_safetensors(path)
        self.path = path
        self._file = PositionedFile(path)
        self._known = self._file.state()

    def read_into(self, offset: int, into: Tensor) -> None:
        """Fill a contiguous CPU tensor with the bytes from `offset` on. Raises ModelError when the file has changed."""
        view = into.view(-1).view(torch.uint8).numpy().data
        try:
            read = self._file.read_into(offset, view)
        except OSError as error:
            raise ModelError(
                f"{self.path} cannot be read ({error.strerror or error})", "Check the drive, then resume the run."
            ) from error
        now = self._file.state()
        if read < len(view) or now != self._known:
            raise ModelError(
                f"{self.path} has changed since the run began: it has {now[0]:,} bytes, it had {self._known[0]:,}",
                "Put the file back as it was and resume the run.",
            )


@dataclass(frozen=True, kw_only=True)
class StoredTensor:
    """Where one tensor lies: its file, its first byte, its shape and format."""

    name: str
    file: WeightFile = field(repr=False)
    offset: int
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def numbers(self) -> int:
        return int(torch.Size(self.shape).numel())

    @property
    def nbytes(self) -> int:
        return self.numbers * self.dtype.itemsize

    def read(self) -> Tensor:
        """The tensor, in its own format, on the CPU."""
        found = torch.empty(self.shape, dtype=self.dtype)
        self.file.read_into(self.offset, found)
        return found

    def read_into(self, into: Tensor) -> int:
        """Copy it to a CPU tensor of its shape, converted to that one's format. Returns the bytes read."""
        if into.dtype == self.dtype and into.is_contiguous():
            self.file.read_into(self.offset, into)
            return self.nbytes
        flat = into.view(-1)
        step = max(1, _PIECE // self.dtype.itemsize)
        piece = torch.empty(min(step, self.numbers), dtype=self.dtype)
        for start in range(0, self.numbers, step):
            part = piece[: min(step, self.numbers - start)]
            self.file.read_into(self.offset + start * self.dtype.itemsize, part)
            flat[start : start + part.numel()].copy_(part)
        return self.nbytes

    def stretch(self, first: int, last: int) -> StoredTensor:
        """Its entries `first` to `last` (that one left out) along the first side."""
        width = self.nbytes // self.shape[0]
        shape = (last - first, *self.shape[1:])
        return dataclasses.replace(self, offset=self.offset + first * width, shape=shape)

    def rows(self, indices: Tensor) -> Tensor:
        """Some rows [N, ...] of it, in its own format: `indices` [N] int64, in any order."""
        width = self.numbers // self.shape[0]
        found = torch.empty((indices.numel(), *self.shape[1:]), dtype=self.dtype)
        flat = found.view(indices.numel(), width)
        for place, row in enumerate(indices.tolist()):
            self.file.read_into(self.offset + row * width * self.dtype.itemsize, flat[place])
        return found


def stored_tensors(folder: Path) -> dict[str, StoredTensor]:
    """Every tensor of a model's folder by its name in the files. Raises ModelError naming the file at fault."""
    found: dict[str, StoredTensor] = {}
    for path in weight_files(folder):
        found |= {tensor.name: tensor for tensor in _tensors_of(WeightFile(path))}
    return found


def tensors_in(path: Path) -> dict[str, StoredTensor]:
    """Every tensor of one file. Raises ModelError."""
    return {tensor.name: tensor for tensor in _tensors_of(WeightFile(path))}


class TensorsOnDisk(Mapping[str, Tensor]):
    """A file's tensors, each read when it is asked for. Raises ModelError."""

    def __init__(self, path: Path) -> None:
        self._found = tensors_in(path)

    def __getitem__(self, name: str) -> Tensor:
        return self._found[name].read()

    def __iter__(self) -> Iterator[str]:
        return iter(self._found)

    def __len__(self) -> int:
        return len(self._found)


def write_tensors(path: Path, tensors: Mapping[str, Tensor | Later]) -> int:
    """A safetensors file, written tensor by tensor: those that are read later are written from where they lie, or are
    in memory one at a time.

    Returns its size. Raises OSError.
    """
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, tensor in tensors.items():
        nbytes = math.prod(tensor.shape) * tensor.dtype.itemsize
        header[name] = {
            "dtype": FORMATS[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [end, end + nbytes],
        }
        end += nbytes
    text = json.dumps(header).encode()
    text += b" " * (-(8 + len(text)) % _HEADER_MULTIPLE)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for tensor in tensors.values():
            with tensor.lent() if isinstance(tensor, Later) else nullcontext(tensor) as found:
                file.write(_bytes_of(found))
            del found  # or it would be in memory until the next one is
        return file.tell()


def _bytes_of(tensor: Tensor) -> memoryview:
    return tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().data


def _tensors_of(file: WeightFile) -> Iterator[StoredTensor]:
    with file.path.open("rb") as opened:
        length = int.from_bytes(opened.read(8), "little")
        header: dict[str, Any] = json.loads(opened.read(length))
    header.pop("__metadata__", None)
    for name, entry in header.items():
        if entry["dtype"] not in DTYPES:
            raise ModelError(
                f"{file.path} stores {name} as {entry['dtype']}, which VRAMFit does not read",
                "Use a copy of the model in bf16, fp16 or fp32.",
            )
        yield StoredTensor(
            name=name,
            file=file,
            offset=8 + length + int(entry["data_offsets"][0]),
            shape=tuple(entry["shape"]),
            dtype=DTYPES[entry["dtype"]],
        )
