# SPDX-License-Identifier: Apache-2.0
# upstream: vllm/v1/serial_utils.py @ v0.25.0
"""Messages of the engine as msgpack, with the data of large arrays beside it.

A message is a list of buffers. The first is msgpack; each of the others is the memory of one array
or tensor, sent as it lies and read where it arrives. torch is not imported: a process that never
did has no tensors.
"""

from __future__ import annotations

import importlib
import numbers
import pickle
import sys
from collections.abc import Sequence
from inspect import isclass
from typing import Any

import msgspec
import numpy as np
from msgspec import msgpack

from vllmx.engine import UtilityResult

CUSTOM_TYPE_PICKLE = 1
CUSTOM_TYPE_RAW_VIEW = 3

ZERO_COPY_THRESHOLD = 256
"""Bytes from which on an array has a buffer of its own."""

Buffer = bytes | bytearray | memoryview
_NATIVE = (bool, int, float, str, bytes)


class MsgpackEncoder:
    """Encodes messages. Not for several threads at once.

    allow_pickle: pickle what msgpack has no form for, functions by their name. Whoever can write to
    the socket of a decoder that allows the same can run code there.
    """

    def __init__(self, size_threshold: int | None = None, *, allow_pickle: bool = False) -> None:
        """`size_threshold`: bytes of an array that is not copied into the message any more."""
        self.encoder = msgpack.Encoder(enc_hook=self.enc_hook)
        self.size_threshold = ZERO_COPY_THRESHOLD if size_threshold is None else size_threshold
        self.allow_pickle = allow_pickle
        # Of the message in hand: hooks get no other argument than the object.
        self._buffers: list[Any] = []

    def encode(self, obj: Any) -> Sequence[Buffer]:
        """The buffers of `obj`. TypeError where a part of it has no form."""
        self._buffers = buffers = [b""]
        try:
            buffers[0] = self.encoder.encode(obj)
        finally:
            self._buffers = []
        return buffers

    def encode_into(self, obj: Any, buf: bytearray) -> Sequence[Buffer]:
        """Same as `encode` with the first buffer written into `buf`."""
        self._buffers = buffers = [buf]
        try:
            self.encoder.encode_into(obj, buf)
        finally:
            self._buffers = []
        return buffers

    def enc_hook(self, obj: Any) -> Any:
        """What stands for an object that msgspec does not know."""
        if isinstance(obj, np.ndarray) and obj.dtype.kind not in "OV":
            data = obj.data if obj.flags.c_contiguous else obj.tobytes()
            return obj.dtype.str, obj.shape, self._place(data, obj.nbytes)
        torch = sys.modules.get("torch")
        if torch is not None and isinstance(obj, torch.Tensor):
            flat = obj.detach().flatten().contiguous().cpu().view(torch.uint8).numpy()
            dtype = str(obj.dtype).removeprefix("torch.")
            return dtype, tuple(obj.shape), self._place(flat.data, obj.nbytes)
        if isinstance(obj, numbers.Real):  # of another library, or a fraction
            return int(obj) if isinstance(obj, numbers.Integral) else float(obj)
        if isinstance(obj, slice):
            return obj.start, obj.stop, obj.step
        if isinstance(obj, UtilityResult):
            types = _types_of(obj.result) if self.allow_pickle else None
            return types, obj.result
        if self.allow_pickle:
            data = pickle.dumps(obj, protocol=pickle.HIGHEST_PROTOCOL)
            return msgpack.Ext(CUSTOM_TYPE_PICKLE, data)
        raise TypeError(
            f"An object of type {type(obj).__module__}.{type(obj).__qualname__} cannot be sent to "
            "or from the engine's process; parallel.allow_insecure_serialization=true lets pickle "
            "send it."
        )

    def _place(self, data: Any, nbytes: int) -> Any:
        """Put the bytes of an array inline or into a buffer of their own, by its index."""
        if nbytes < self.size_threshold:
            return msgpack.Ext(CUSTOM_TYPE_RAW_VIEW, data)
        self._buffers.append(data)
        return len(self._buffers) - 1


class MsgpackDecoder:
    """Decodes messages of type `t`, or of plain values. Not for several threads at once.

    share_mem: arrays are views of the received buffers (and hold these in memory), not copies.
    """

    def __init__(
        self, t: Any | None = None, share_mem: bool = True, *, allow_pickle: bool = False
    ) -> None:
        args = () if t is None else (t,)
        self.decoder = msgpack.Decoder(*args, ext_hook=self.ext_hook, dec_hook=self.dec_hook)
        self.share_mem = share_mem
        self.allow_pickle = allow_pickle
        self._buffers: Sequence[Any] = ()

    def decode(self, bufs: Any) -> Any:
        """The object in `bufs`: the buffers of one message, or the only one of them."""
        if not isinstance(bufs, (list, tuple)):
            return self.decoder.decode(bufs)
        self._buffers = bufs
        try:
            return self.decoder.decode(bufs[0])
        finally:
            self._buffers = ()

    def dec_hook(self, t: type, obj: Any) -> Any:
        """Turn plain values into a `t` that msgspec does not know."""
        if not isclass(t):
            return obj
        if issubclass(t, np.ndarray):
            return self._decode_ndarray(obj)
        if t is UtilityResult:
            return self._decode_utility_result(obj)
        if t is slice:
            return slice(*obj)
        torch = sys.modules.get("torch")
        if torch is not None and issubclass(t, torch.Tensor):
            return self._decode_tensor(obj)
        return obj

    def ext_hook(self, code: int, data: memoryview) -> Any:
        """Turn msgpack's extensions into objects."""
        if code == CUSTOM_TYPE_RAW_VIEW:
            return data
        if code == CUSTOM_TYPE_PICKLE and self.allow_pickle:
            return pickle.loads(data)
        raise ValueError(f"The message holds an extension of type {code}, which is not allowed.")

    def _buffer(self, place: Any) -> Any:
        return self._buffers[place] if isinstance(place, int) else place

    def _decode_ndarray(self, obj: Any) -> np.ndarray:
        dtype, shape, place = obj
        array = np.frombuffer(self._buffer(place), dtype=dtype)
        return (array if self.share_mem else array.copy()).reshape(shape)

    def _decode_tensor(self, obj: Any) -> Any:
        import torch

        dtype, shape, place = obj
        buffer = memoryview(self._buffer(place))
        torch_dtype = getattr(torch, dtype)
        assert isinstance(torch_dtype, torch.dtype), dtype
        if not buffer.nbytes:
            return torch.empty(shape, dtype=torch_dtype)
        # torch has no read-only tensors, so what may not be written is copied.
        if buffer.readonly or not self.share_mem or not isinstance(place, int):
            buffer = memoryview(bytearray(buffer))
        flat = torch.frombuffer(buffer, dtype=torch.uint8)
        return flat.view(torch_dtype).view(shape)

    def _decode_utility_result(self, obj: Any) -> UtilityResult:
        types, result = obj
        if types is not None:
            if not self.allow_pickle:
                raise TypeError(
                    "The result of a utility call is of a type of its own: set "
                    "parallel.allow_insecure_serialization=true to receive it."
                )
            result = self._restore(types, result)
        return UtilityResult(result)

    def _restore(self, types: Any, value: Any) -> Any:
        """Give the parts of `value` the types that `_types_of` noted."""
        if types is None:
            return value
        if isinstance(types, list):
            return [self._restore(t, v) for t, v in zip(types, value, strict=True)]
        if isinstance(types, dict):
            return {key: self._restore(types[key], value[key]) for key in value}
        module, _, qualname = types.partition(":")
        found: Any = importlib.import_module(module)
        for name in qualname.split("."):
            found = getattr(found, name)
        return msgspec.convert(value, found, dec_hook=self.dec_hook)


def _types_of(value: Any) -> Any:
    """`module:qualname` of each part of nested lists and dicts that is no plain value; None where
    all of them are."""
    if value is None or type(value) in _NATIVE:
        return None
    if type(value) is list:
        types: Any = [_types_of(item) for item in value]
        return types if any(t is not None for t in types) else None
    if type(value) is dict:
        types = {key: _types_of(item) for key, item in value.items()}
        return types if any(t is not None for t in types.values()) else None
    return f"{type(value).__module__}:{type(value).__qualname__}"
