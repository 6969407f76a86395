# SPDX-License-Identifier: Apache-2.0
"""The GGUF reader reads what gguf's writer writes, and refuses everything else by name."""

import random
import struct
import time

import gguf
import numpy as np
import pytest

from vllmx.exceptions import CheckpointError, ModelNotFoundError, UserError
from vllmx.ir.ggml import BLOCK_SIZES, GGMLType
from vllmx.model_loader.gguf_reader import GGUFReader

Q8_0 = gguf.GGMLQuantizationType.Q8_0


@pytest.fixture
def sample(write_gguf):
    tensors = {
        "a.weight": np.arange(12, dtype=np.float32).reshape(3, 4),
        "b.weight": (np.arange(4 * 68, dtype=np.uint8).reshape(4, 68), Q8_0),
        "c.weight": np.arange(5, dtype=np.float16),
    }
    metadata = {
        "x.int": 7,
        "x.float": 0.5,
        "x.flag": False,
        "x.text": "gr\u00fc\u00df \U0001f642",
        "x.words": ["a", "", "\u00e9"],
        "x.numbers": [1, 2, 3],
        "x.floats": [0.5, -1.0],
        "x.flags": [True, False],
    }
    return write_gguf(tensors, metadata)


def test_metadata_and_tensors_are_read_as_written(sample) -> None:
    reader = GGUFReader(sample)
    values = reader.metadata
    assert values["general.architecture"] == "llama"
    assert (values["x.int"], values["x.float"], values["x.flag"]) == (7, 0.5, False)
    assert values["x.text"] == "gr\u00fc\u00df \U0001f642"
    assert values["x.words"] == ["a", "", "\u00e9"]
    assert values["x.numbers"].tolist() == [1, 2, 3]
    assert values["x.floats"].tolist() == [0.5, -1.0]
    assert values["x.flags"].tolist() == [True, False]
    assert list(reader.tensors) == ["a.weight", "b.weight", "c.weight"]
    info = reader.tensors["b.weight"]
    assert (info.shape, info.qtype, info.nbytes) == ((4, 64), GGMLType.Q8_0, 4 * 68)
    assert reader.data("a.weight").view("<f4").tolist()[1] == [4, 5, 6, 7]
    assert reader.data("b.weight").ravel().tolist() == [i % 256 for i in range(4 * 68)]
    assert reader.data("c.weight").view("<f2").ravel().tolist() == [0, 1, 2, 3, 4]


def test_writing_to_the_data_does_not_change_the_file(sample) -> None:
    before = sample.read_bytes()
    GGUFReader(sample).data("a.weight")[:] = 0
    assert sample.read_bytes() == before


def test_version_2_reads_like_version_3(sample) -> None:
    data = bytearray(sample.read_bytes())
    data[4:8] = struct.pack("<I", 2)
    sample.write_bytes(data)
    reader = GGUFReader(sample)
    assert reader.version == 2
    assert len(reader.tensors) == 3


@pytest.mark.parametrize("alignment", [8, 32, 64, 4096])
def test_tensor_offsets_follow_the_alignment(write_gguf, alignment) -> None:
    tensors = {f"t{i}": np.full(3, i, np.float32) for i in range(4)}
    reader = GGUFReader(write_gguf(tensors, alignment=alignment))
    for i in range(4):
        assert reader.tensors[f"t{i}"].offset % alignment == 0
        assert reader.data(f"t{i}").view("<f4").ravel().tolist() == [i] * 3


def test_block_sizes_equal_ggufs() -> None:
    theirs = {GGMLType(int(k)): v for k, v in gguf.GGML_QUANT_SIZES.items() if int(k) in ours()}
    assert {k: BLOCK_SIZES[k] for k in theirs} == theirs
    assert all(kind.name == gguf.GGMLQuantizationType(kind).name for kind in theirs)


def ours() -> set[int]:
    return {int(kind) for kind in BLOCK_SIZES}


def header(num_tensors: int, num_values: int, version: int = 3) -> bytes:
    return b"GGUF" + struct.pack("<IQQ", version, num_tensors, num_values)


def text(value: str) -> bytes:
    return struct.pack("<Q", len(value)) + value.encode()


def entry(name: str, sizes: list[int], qtype: int, offset: int) -> bytes:
    return (
        text(name)
        + struct.pack("<I", len(sizes))
        + b"".join(struct.pack("<Q", size) for size in sizes)
        + struct.pack("<IQ", qtype, offset)
    )


PAD = bytes(4096)
U32_KEY = text("k") + struct.pack("<II", 4, 1)
BAD = {
    "empty": (b"", "empty"),
    "magic": (b"GGML" + PAD, "starts with b'GGML'"),
    "header cut": (b"GGUF\x03\x00", "bytes are needed"),
    "version 1": (header(0, 0, 1) + PAD, "version 1 is not supported"),
    "version 9": (header(0, 0, 9) + PAD, "version 9 is not supported"),
    "big endian": (header(0, 0, 3 << 24) + PAD, "big-endian"),
    "too many keys": (header(0, 1 << 40) + PAD, "metadata entries cannot fit"),
    "too many tensors": (header(1 << 62, 0) + PAD, "tensors cannot fit"),
    "long string": (header(0, 1) + struct.pack("<Q", 1 << 60) + PAD, "runs past the end"),
    "not UTF-8": (header(0, 1) + struct.pack("<Q", 2) + b"\xff\xfe" + PAD, "not UTF-8"),
    "unknown kind": (header(0, 1) + text("k") + struct.pack("<I", 77) + PAD, "value type 77"),
    "key twice": (header(0, 2) + U32_KEY * 2 + PAD, "occurs twice"),
    "huge numbers": (
        header(0, 1) + text("k") + struct.pack("<IIQ", 9, 4, 1 << 50) + PAD,
        "bytes are needed",
    ),
    "huge words": (
        header(0, 1) + text("k") + struct.pack("<IIQ", 9, 8, 1 << 50) + PAD,
        "cannot fit",
    ),
    "nested": (
        header(0, 1) + text("k") + struct.pack("<I", 9) + struct.pack("<IQ", 9, 1) * 200 + PAD,
        "nested too deeply",
    ),
    "alignment": (
        header(0, 1) + text("general.alignment") + struct.pack("<II", 4, 33) + PAD,
        "not a power of two",
    ),
    "no dimension": (header(1, 0) + entry("t", [], 0, 0) + PAD, "has 0 dimensions"),
    "five dimensions": (header(1, 0) + entry("t", [1] * 5, 0, 0) + PAD, "has 5 dimensions"),
    "zero size": (header(1, 0) + entry("t", [4, 0], 0, 0) + PAD, "empty dimension"),
    "unknown type": (header(1, 0) + entry("t", [4], 99, 0) + PAD, "unknown ggml type 99"),
    "odd row": (header(1, 0) + entry("t", [33], 8, 0) + PAD, "no multiple of Q8_0's 32"),
    "unaligned": (header(1, 0) + entry("t", [4], 0, 5) + PAD, "not aligned to 32"),
    "outside": (header(1, 0) + entry("t", [4], 0, 1 << 40) + PAD, "ends at byte"),
    "huge tensor": (header(1, 0) + entry("t", [1 << 60] * 4, 0, 0) + PAD, "ends at byte"),
    "tensor twice": (
        header(2, 0) + entry("t", [4], 0, 0) + entry("t", [4], 0, 32) + PAD,
        "occurs twice",
    ),
    "overlap": (
        header(2, 0) + entry("t", [64], 0, 0) + entry("u", [4], 0, 32) + PAD,
        "overlaps tensor 't'",
    ),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_file_is_refused_with_file_place_and_problem(tmp_path, case) -> None:
    data, problem = BAD[case]
    path = tmp_path / "bad.gguf"
    path.write_bytes(data)
    with pytest.raises(CheckpointError, match=problem) as caught:
        GGUFReader(path)
    assert str(path) in str(caught.value)


def test_missing_file_and_folder_are_user_errors(tmp_path) -> None:
    with pytest.raises(ModelNotFoundError, match="no such file"):
        GGUFReader(tmp_path / "absent.gguf")
    with pytest.raises(UserError, match="cannot be read"):
        GGUFReader(tmp_path)


def test_every_truncation_is_refused(sample, tmp_path) -> None:
    data = sample.read_bytes()
    end = max(info.offset + info.nbytes for info in GGUFReader(sample).tensors.values())
    cut = tmp_path / "cut.gguf"
    for size in range(0, end, 7):
        cut.write_bytes(data[:size])
        with pytest.raises(CheckpointError):
            GGUFReader(cut)


def test_random_damage_never_gives_another_error(sample, tmp_path) -> None:
    data = sample.read_bytes()
    draw = random.Random(0)
    path = tmp_path / "damaged.gguf"
    refused = 0
    for _ in range(600):
        damaged = bytearray(data)
        for _ in range(draw.choice((1, 1, 2, 8))):
            damaged[draw.randrange(min(len(data), 900))] = draw.choice((0, 1, 0x7F, 0xFF, 9, 8))
        path.write_bytes(damaged)
        try:
            reader = GGUFReader(path)
        except CheckpointError:
            refused += 1
            continue
        for name, info in reader.tensors.items():
            assert reader.data(name).nbytes == info.nbytes
    assert refused > 150


@pytest.mark.slow
def test_real_metadata_is_read_fast(real_model) -> None:
    path = real_model("smollm2-135m")
    seconds = []
    for _ in range(3):
        start = time.perf_counter()
        reader = GGUFReader(path)
        seconds.append(time.perf_counter() - start)
    assert len(reader.metadata["tokenizer.ggml.tokens"]) == 49152
    assert len(reader.tensors) == 272
    assert min(seconds) < 0.5  # 0.05 on a quiet machine; gguf.GGUFReader takes 3.4
