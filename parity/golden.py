# SPDX-License-Identifier: Apache-2.0
"""Golden files: what an oracle answered, and everything needed to ask ours the same.

One .safetensors file a case, of the format's plainest form: tensors by name, and one metadata key
`vllmx` with canonical JSON. Same content, same bytes. The JSON has the sha256 of every tensor and
one over all of itself, so a file that was cut, edited or built by hand is noticed without an index.
Inputs are not stored: their hash is, and they are drawn again from counter bits (inputs.py).
Nothing is pickled. Answers that are no tensors (texts, hashes) are a .json file a spec: canonical
JSON with the same facts and their sha256.
"""

from __future__ import annotations

import hashlib
import json
import os
import struct
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .digests import canonical
from .dtypes import Array, from_bytes

SCHEMA = 1
GOLDENS = Path(__file__).resolve().parent / "goldens"
OPS = GOLDENS / "ops"
OPS_GPU = GOLDENS / "ops_gpu"
"""Of upstream's CUDA kernels: the second lane of the ops."""
MODELS = GOLDENS / "models"
TEXT = GOLDENS / "text"
INDEX = "index.json"
REFUSED = "refused.json"
BESIDE = {INDEX, "floors.json", REFUSED}
"""Files at the top of a folder of goldens that are none themselves."""
MAX_BYTES = 64 * 1024
MODEL_MAX_BYTES = 512 * 1024
KEY = "vllmx"
NAMES = {
    "f64": "F64",
    "f32": "F32",
    "f16": "F16",
    "bf16": "BF16",
    "i64": "I64",
    "i32": "I32",
    "u8": "U8",
    "bool": "BOOL",
}
DTYPES = {name: dtype for dtype, name in NAMES.items()}
PROVENANCE = ("name", "version", "lane", "callable", "torch", "numpy", "device", "command", "reps")
REQUIRED = ("schema", "kind", "feature", "case", "dtype", "tensors", "args", "oracle", "class")
JSON_REQUIRED = ("schema", "kind", "feature", "case", "spec", "answers", "source_sha256", "oracle")


class GoldenError(ValueError):
    """A golden that is missing, damaged, or not what it says it is."""


@dataclass(frozen=True)
class Golden:
    """A golden as read: its facts, its stored tensors, and the sha256 of the file."""

    facts: dict[str, Any]
    tensors: dict[str, Array]
    sha256: str

    def outputs(self) -> dict[str, Array]:
        """The oracle's outputs by name."""
        return {k.removeprefix("out."): v for k, v in self.tensors.items() if k.startswith("out.")}

    def input_shas(self) -> dict[str, str]:
        """sha256 of each input by name."""
        tensors = self.facts["tensors"].items()
        return {k.removeprefix("in."): v["sha256"] for k, v in tensors if k.startswith("in.")}


def describe(tensor: Array, stored: bool) -> dict[str, Any]:
    """What a golden says about a tensor."""
    shape = list(tensor.shape)
    return {"dtype": tensor.dtype, "shape": shape, "sha256": tensor.sha256, "stored": stored}


def pack(facts: Mapping[str, Any], tensors: Mapping[str, Array]) -> bytes:
    """The bytes of a golden; GoldenError where facts are missing or null."""
    return pack_tensors(tensors, _signed(facts, REQUIRED))


def pack_json(facts: Mapping[str, Any]) -> bytes:
    """The bytes of a golden without tensors; GoldenError where facts are missing or null."""
    return canonical(_signed(facts, JSON_REQUIRED)) + b"\n"


def unpack_json(data: bytes) -> Golden:
    """The golden in `data`; GoldenError where a byte has changed or a fact is missing."""
    try:
        facts = json.loads(data)
        same = pack_json(facts) == data
    except GoldenError:
        raise
    except (ValueError, TypeError, AttributeError, RecursionError) as error:
        raise GoldenError(f"not a golden: {type(error).__name__}: {error}") from error
    if not same:
        raise GoldenError("its sha256 is not that of its facts, or it is not in canonical form")
    return Golden(facts, {}, hashlib.sha256(data).hexdigest())


def pack_tensors(tensors: Mapping[str, Array], facts: Mapping[str, Any]) -> bytes:
    """Bytes of a safetensors file of `tensors` with `facts` under its one metadata key."""
    header: dict[str, Any] = {"__metadata__": {KEY: canonical(facts).decode()}}
    data, offset = [], 0
    for name in sorted(tensors):
        raw = tensors[name].tobytes()
        header[name] = {
            "dtype": NAMES[tensors[name].dtype],
            "shape": list(tensors[name].shape),
            "data_offsets": [offset, offset + len(raw)],
        }
        offset += len(raw)
        data.append(raw)
    text = canonical(header)
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text + b"".join(data)


def unpack_tensors(data: bytes) -> tuple[dict[str, Array], dict[str, Any]]:
    """The inverse of `pack_tensors`; GoldenError on anything it would not write."""
    try:
        (size,) = struct.unpack_from("<Q", data)
        header = json.loads(data[8 : 8 + size])
        metadata = header.pop("__metadata__")
        facts = json.loads(metadata[KEY])
        tensors, end = {}, 0
        for name, entry in sorted(header.items()):
            first, last = entry["data_offsets"]
            if first != end:
                raise GoldenError(f"{name} does not start where the one before it ends")
            raw = data[8 + size + first : 8 + size + last]
            tensors[name] = from_bytes(DTYPES[entry["dtype"]], tuple(entry["shape"]), raw)
            end = last
    except (struct.error, KeyError, TypeError, AttributeError, ValueError) as error:
        raise GoldenError(f"not a golden: {type(error).__name__}: {error}") from error
    if len(data) != 8 + size + end:
        raise GoldenError(f"{len(data)} bytes, not the {8 + size + end} that it describes")
    if set(metadata) != {KEY}:
        raise GoldenError(f"metadata keys {sorted(metadata)}, not {KEY} alone")
    return tensors, facts


def unpack(data: bytes) -> Golden:
    """The golden in `data`; GoldenError where a hash differs or a fact is missing."""
    tensors, facts = unpack_tensors(data)
    body = {key: value for key, value in facts.items() if key != "sha256"}
    if hashlib.sha256(canonical(body)).hexdigest() != facts.get("sha256"):
        raise GoldenError("its sha256 is not that of its facts")
    _check_facts(body, REQUIRED)
    stored = {name for name, told in facts["tensors"].items() if told["stored"]}
    if stored != set(tensors):
        raise GoldenError(f"it stores {sorted(tensors)}, but describes {sorted(stored)}")
    for name, tensor in tensors.items():
        if describe(tensor, True) != facts["tensors"][name]:
            raise GoldenError(f"{name} is not the tensor that was recorded")
    if pack(facts, tensors) != data:
        raise GoldenError("it is not in canonical form")
    return Golden(facts, tensors, hashlib.sha256(data).hexdigest())


def read(path: Path) -> Golden:
    """The golden of a file; GoldenError if it is missing or damaged."""
    try:
        data = path.read_bytes()
    except OSError as error:
        raise GoldenError(f"no golden {path.name}: {error.strerror}") from error
    return _unpack(path, data)


def _unpack(path: Path, data: bytes) -> Golden:
    return unpack_json(data) if path.suffix == ".json" else unpack(data)


def write(path: Path, data: bytes, limit: int = MAX_BYTES) -> None:
    """Write a golden whole or not at all; GoldenError if it is larger than one may be."""
    if len(data) > limit:
        raise GoldenError(f"{path.name}: {len(data)} bytes, {limit} are allowed")
    _unpack(path, data)
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(f".{os.getpid()}.partial")
    partial.write_bytes(data)
    os.replace(partial, path)


def read_index(folder: Path = OPS) -> dict[str, str]:
    """sha256 of every golden of a folder by its path in it; GoldenError without a sound index."""
    try:
        index = json.loads((folder / INDEX).read_text())
        return {str(name): str(sha) for name, sha in index["goldens"].items()}
    except (OSError, ValueError, KeyError, AttributeError, TypeError) as error:
        raise GoldenError(f"no index of goldens in {folder.name}: {error}") from error


def known(folder: Path) -> dict[str, str]:
    """The index of a folder, empty without a sound one: by it a row says which golden it is of,
    also where something went wrong before the golden was read."""
    try:
        return read_index(folder)
    except GoldenError:
        return {}


def write_index(folder: Path) -> None:
    """Index what lies in `folder`."""
    found = {
        name: hashlib.sha256((folder / name).read_bytes()).hexdigest() for name in files(folder)
    }
    text = json.dumps({"schema": SCHEMA, "goldens": found}, indent=0, sort_keys=True)
    (folder / INDEX).write_text(text + "\n")


def files(folder: Path) -> list[str]:
    """Paths of the goldens that lie in `folder`, relative to it."""
    listed = (path for path in folder.rglob("*") if path.suffix in (".safetensors", ".json"))
    names = (path.relative_to(folder).as_posix() for path in listed)
    return sorted(name for name in names if name not in BESIDE)


def strays(folder: Path, expected: set[str]) -> list[str]:
    """Files of `folder` that are neither expected nor an index."""
    known = expected | BESIDE
    found = (p.relative_to(folder).as_posix() for p in folder.rglob("*") if p.is_file())
    return sorted(name for name in found if name not in known)


def _signed(facts: Mapping[str, Any], required: Sequence[str]) -> dict[str, Any]:
    """`facts` with their own sha256."""
    body = {key: value for key, value in facts.items() if key != "sha256"}
    _check_facts(body, required)
    return {**body, "sha256": hashlib.sha256(canonical(body)).hexdigest()}


def _check_facts(facts: Mapping[str, Any], required: Sequence[str]) -> None:
    missing = [name for name in required if facts.get(name) in (None, "")]
    oracle = facts.get("oracle") or {}
    missing += [f"oracle.{name}" for name in PROVENANCE if oracle.get(name) in (None, "")]
    if missing:
        raise GoldenError(f"a golden must say its {', '.join(missing)}")
    if facts["schema"] != SCHEMA:
        raise GoldenError(f"schema {facts['schema']}, not {SCHEMA}")


def declined(folder: Path) -> dict[str, str]:
    """Golden -> why its oracle does not take the case; GoldenError where the list is damaged."""
    path = folder / REFUSED
    if not path.is_file():
        return {}
    try:
        return dict(json.loads(path.read_text()))
    except (ValueError, TypeError) as error:
        raise GoldenError(f"{path.name} is damaged: {error}") from error


def write_declined(folder: Path, asked: Set[str], found: Mapping[str, str]) -> None:
    """Replace what is known of the goldens `asked` by what was `found`; of others it stays."""
    others = {name: why for name, why in declined(folder).items() if name not in asked}
    text = json.dumps({**others, **found}, indent=1, sort_keys=True)
    (folder / REFUSED).write_text(text + "\n")
