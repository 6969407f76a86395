# SPDX-License-Identifier: Apache-2.0
"""Reads GGUF files: metadata, tensor table, and the stored bytes of each tensor.

Little-endian files of versions 2 and 3. Every count, length and offset is checked against the
file before it is used, so a truncated or corrupt file ends in a CheckpointError that says what is
wrong and where, and never in a large allocation. Imports no torch.
"""

from __future__ import annotations

import mmap
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import numpy as np

from vllmx.exceptions import CheckpointError, ModelNotFoundError
from vllmx.ir.ggml import BLOCK_SIZES, GGMLType

MAGIC = b"GGUF"
VERSIONS = (2, 3)
DEFAULT_ALIGNMENT = 32
MAX_DIMS = 4
MAX_ARRAY_DEPTH = 4
STRING, ARRAY, BOOL = 8, 9, 7
SCALARS: dict[int, str] = {
    0: "<u1",
    1: "<i1",
    2: "<u2",
    3: "<i2",
    4: "<u4",
    5: "<i4",
    6: "<f4",
    7: "?",
    10: "<u8",
    11: "<i8",
    12: "<f8",
}
"""Metadata value type -> numpy dtype of the fixed-size ones."""


class GGUFTensorInfo(NamedTuple):
    """One entry of the tensor table."""

    name: str
    """Name in the file."""
    shape: tuple[int, ...]
    """Sizes in torch's order: rows first, the contiguous dimension last."""
    qtype: GGMLType
    """How the elements are stored."""
    offset: int
    """First byte, counted from the start of the file."""
    nbytes: int
    """Bytes stored."""


class GGUFReader:
    """The metadata and the tensor table of the GGUF file at `path`, read when constructed.

    metadata: key -> bool, int, float, str, list[str], or a read-only numpy array.
    tensors: name -> GGUFTensorInfo, in file order.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self._map = _open(self.path)
        self._size = len(self._map)
        self._pos = 0
        self._what = "header"
        self.metadata: dict[str, Any] = {}
        self.tensors: dict[str, GGUFTensorInfo] = {}
        num_tensors, num_values = self._read_header()
        self._read_metadata(num_values)
        self.alignment = self._read_alignment()
        self._read_tensor_table(num_tensors)

    def __reduce__(self) -> tuple[type[GGUFReader], tuple[Path]]:
        """Another process opens the file anew."""
        return GGUFReader, (self.path,)

    def data(self, name: str) -> np.ndarray:
        """The stored bytes of tensor `name`: uint8 [rows, bytes per row], mapped, not copied.

        The array is writable for the sake of torch, but private: writes never reach the file.
        """
        info = self.tensors[name]
        rows = 1
        for size in info.shape[:-1]:
            rows *= size
        flat = np.frombuffer(self._map, np.uint8, info.nbytes, info.offset)
        return flat.reshape(rows, info.nbytes // rows)

    def _fail(self, problem: str) -> NoReturn:
        raise CheckpointError(
            f"{self.path}: {self._what} at byte {self._pos}: {problem}. The file is truncated, "
            "corrupt or not GGUF: get it again."
        )

    def _need(self, count: int) -> None:
        if count > self._size - self._pos:
            self._fail(f"{count} bytes are needed, {self._size - self._pos} are left")

    def _unpack(self, fmt: struct.Struct) -> int:
        self._need(fmt.size)
        (value,) = fmt.unpack_from(self._map, self._pos)
        self._pos += fmt.size
        return value

    def _read_header(self) -> tuple[int, int]:
        self._need(4)
        if self._map[:4] != MAGIC:
            self._fail(f"starts with {bytes(self._map[:4])!r}, not {MAGIC!r}")
        self._pos = 4
        version = self._unpack(_U32)
        if version not in VERSIONS:
            if version & 0xFFFF == 0:
                self._fail("the file is big-endian; convert it to little-endian")
            self._fail(f"version {version} is not supported (2 and 3 are)")
        self.version = version
        num_tensors, num_values = self._unpack(_U64), self._unpack(_U64)
        # The shortest entry of either table: a one-byte name and the fixed-size fields.
        if num_values * 14 > self._size - self._pos:
            self._fail(f"{num_values} metadata entries cannot fit into {self._size} bytes")
        if num_tensors * 33 > self._size - self._pos:
            self._fail(f"{num_tensors} tensors cannot fit into {self._size} bytes")
        return num_tensors, num_values

    def _read_metadata(self, count: int) -> None:
        for index in range(count):
            self._what = f"metadata entry {index}"
            key = self._string()
            self._what = f"metadata key {key!r}"
            if key in self.metadata:
                self._fail("occurs twice")
            self.metadata[key] = self._value(self._unpack(_U32))

    def _value(self, kind: int, depth: int = 0) -> Any:
        if kind == STRING:
            return self._string()
        if kind == ARRAY:
            return self._array(depth)
        if kind not in SCALARS:
            self._fail(f"unknown value type {kind}")
        value = self._numbers(kind, 1)[0]
        return value.item()

    def _array(self, depth: int) -> Any:
        kind, count = self._unpack(_U32), self._unpack(_U64)
        if kind in SCALARS:
            return self._numbers(kind, count)
        if count * 8 > self._size - self._pos:
            self._fail(f"an array of {count} elements cannot fit into the file")
        if kind == STRING:
            return self._strings(count)
        if kind != ARRAY:
            self._fail(f"unknown array element type {kind}")
        if depth >= MAX_ARRAY_DEPTH:
            self._fail("arrays are nested too deeply")
        return [self._array(depth + 1) for _ in range(count)]

    def _numbers(self, kind: int, count: int) -> np.ndarray:
        dtype = np.dtype(SCALARS[kind])
        self._need(count * dtype.itemsize)
        if kind == BOOL:
            raw = np.frombuffer(self._map, np.uint8, count, self._pos)
            values = raw != 0
        else:
            values = np.frombuffer(self._map, dtype, count, self._pos)
        self._pos += count * dtype.itemsize
        values.flags.writeable = False
        return values

    def _string(self) -> str:
        return self._strings(1)[0]

    def _strings(self, count: int) -> list[str]:
        """Read `count` strings; the loop is the hot spot of opening a file."""
        data, position, size = self._map, self._pos, self._size
        unpack: Callable[..., tuple[int]] = _U64.unpack_from
        result = []
        try:
            for _ in range(count):
                start = position + 8
                position = start + unpack(data, position)[0]
                if position > size:
                    self._pos = start - 8
                    self._fail(f"a string of {position - start} bytes runs past the end of file")
                result.append(data[start:position].decode())
        except struct.error:
            self._pos = position
            self._fail("the file ends inside a string's length")
        except UnicodeDecodeError:
            self._pos = start
            self._fail("a string is not UTF-8")
        self._pos = position
        return result

    def _read_alignment(self) -> int:
        value = self.metadata.get("general.alignment", DEFAULT_ALIGNMENT)
        if type(value) is not int or value < 1 or value & (value - 1):
            self._what = "metadata key 'general.alignment'"
            self._fail(f"{value!r} is not a power of two")
        return value

    def _read_tensor_table(self, count: int) -> None:
        entries = []
        for index in range(count):
            self._what = f"tensor entry {index}"
            entries.append(self._tensor_entry())
        start = -(-self._pos // self.alignment) * self.alignment
        for name, shape, qtype, offset in entries:
            self._what = f"tensor {name!r}"
            if name in self.tensors:
                self._fail("occurs twice")
            self.tensors[name] = self._place(name, shape, qtype, start, offset)
        self._check_overlap()

    def _tensor_entry(self) -> tuple[str, tuple[int, ...], GGMLType, int]:
        name = self._string()
        self._what = f"tensor {name!r}"
        num_dims = self._unpack(_U32)
        if not 1 <= num_dims <= MAX_DIMS:
            self._fail(f"has {num_dims} dimensions (1 to {MAX_DIMS} are allowed)")
        sizes = [self._unpack(_U64) for _ in range(num_dims)]
        if min(sizes) < 1:
            self._fail(f"has an empty dimension: {sizes}")
        number = self._unpack(_U32)
        try:
            qtype = GGMLType(number)
        except ValueError:
            self._fail(f"unknown ggml type {number}")
        return name, tuple(reversed(sizes)), qtype, self._unpack(_U64)

    def _place(
        self, name: str, shape: tuple[int, ...], qtype: GGMLType, start: int, offset: int
    ) -> GGUFTensorInfo:
        block, block_bytes = BLOCK_SIZES[qtype]
        if shape[-1] % block:
            self._fail(f"rows of {shape[-1]} elements are no multiple of {qtype.name}'s {block}")
        if offset % self.alignment:
            self._fail(f"offset {offset} is not aligned to {self.alignment}")
        nbytes = shape[-1] // block * block_bytes
        for size in shape[:-1]:
            nbytes *= size
        if start + offset + nbytes > self._size:
            self._fail(
                f"{qtype.name} {list(shape)} ends at byte {start + offset + nbytes}, the file at "
                f"{self._size}"
            )
        return GGUFTensorInfo(name, shape, qtype, start + offset, nbytes)

    def _check_overlap(self) -> None:
        end, before = 0, ""
        for info in sorted(self.tensors.values(), key=lambda entry: entry.offset):
            if info.offset < end:
                self._what = f"tensor {info.name!r}"
                self._fail(f"overlaps tensor {before!r}")
            end, before = info.offset + info.nbytes, info.name


_U32, _U64 = struct.Struct("<I"), struct.Struct("<Q")


def _open(path: Path) -> mmap.mmap:
    """Map `path` copy-on-write."""
    try:
        with open(path, "rb") as handle:
            return mmap.mmap(handle.fileno(), 0, access=mmap.ACCESS_COPY)
    except FileNotFoundError:
        raise ModelNotFoundError(f"{path}: there is no such file.") from None
    except ValueError:
        raise CheckpointError(f"{path}: the file is empty: get it again.") from None
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error.strerror}.") from error
