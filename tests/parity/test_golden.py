# SPDX-License-Identifier: Apache-2.0
"""Golden files and the inputs that they name: same bytes every time, and no damage goes unseen."""

import json
import struct

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from parity import golden, inputs
from parity.digests import canonical
from parity.dtypes import Array, array, rounded, ulp
from parity.golden import GoldenError

VALUES = array(np.random.default_rng(3).normal(size=(4, 8)), "bf16")
TENSORS = {"out.out": VALUES, "out.ids": Array("i32", np.arange(5, dtype=np.int32))}
INPUT = array(np.ones((2, 2)), "f32")
FACTS = {
    "schema": 1,
    "kind": "op",
    "feature": "op.example",
    "case": "plain",
    "dtype": "bf16",
    "class": "norm",
    "cells": [],
    "args": {"epsilon": 1e-6},
    "tensors": {
        "in.x": golden.describe(INPUT, False),
        **{name: golden.describe(value, True) for name, value in TENSORS.items()},
    },
    "oracle": dict.fromkeys(golden.PROVENANCE, "1"),
}
DATA = golden.pack(FACTS, TENSORS)


def rebuilt(facts: dict, tensors: dict) -> bytes:
    """A file whose own hash is right, whatever else is not."""
    import hashlib

    body = {key: value for key, value in facts.items() if key != "sha256"}
    body["sha256"] = hashlib.sha256(canonical(body)).hexdigest()
    return golden.pack_tensors(tensors, body)


def test_a_golden_is_the_same_bytes_and_comes_back_whole():
    assert golden.pack(FACTS, dict(reversed(TENSORS.items()))) == DATA
    found = golden.unpack(DATA)
    assert found.outputs().keys() == {"out", "ids"}
    assert found.outputs()["out"].tobytes() == VALUES.tobytes()
    assert found.input_shas() == {"x": INPUT.sha256}
    assert found.facts["args"] == {"epsilon": 1e-6}


def test_other_readers_of_safetensors_read_it(tmp_path):
    path = tmp_path / "one.safetensors"
    path.write_bytes(DATA)
    loaded = load_file(path)
    assert loaded["out.out"].dtype == torch.bfloat16
    assert loaded["out.out"].float().numpy().tolist() == VALUES.values().tolist()
    with safe_open(str(path), "pt") as file:
        assert list(file.metadata()) == ["vllmx"]


def _header(data: bytes, change) -> bytes:
    size = struct.unpack_from("<Q", data)[0]
    header = json.loads(data[8 : 8 + size])
    change(header)
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + data[8 + size :]


DAMAGE = {
    "empty": b"",
    "cut": DATA[:-7],
    "cut in the header": DATA[:100],
    "longer": DATA + b"\0" * 8,
    "a bit of a tensor": DATA[:-3] + bytes([DATA[-3] ^ 4]) + DATA[-2:],
    "a fact changed": DATA.replace(b"op.example", b"op.exampel"),
    "a second metadata key": _header(DATA, lambda h: h["__metadata__"].update(note="x")),
    "no metadata": _header(DATA, lambda h: h.pop("__metadata__")),
    "laid out otherwise": _header(DATA, lambda h: None),
    "a tensor more": rebuilt(FACTS, {**TENSORS, "out.more": VALUES}),
    "a tensor less": rebuilt(FACTS, {"out.out": VALUES}),
    "another tensor": rebuilt(FACTS, {**TENSORS, "out.out": array(VALUES.values() * 2, "bf16")}),
    "no oracle": rebuilt({**FACTS, "oracle": {}}, TENSORS),
    "a null in the oracle": rebuilt(
        {**FACTS, "oracle": {**FACTS["oracle"], "torch": None}}, TENSORS
    ),
    "another schema": rebuilt({**FACTS, "schema": 0}, TENSORS),
    "a pickle": b"\x80\x04}\x94.",
}


@pytest.mark.parametrize("name", DAMAGE)
def test_a_damaged_golden_is_refused(name):
    assert DAMAGE[name] != DATA
    with pytest.raises(GoldenError):
        golden.unpack(DAMAGE[name])


def test_a_golden_says_all_of_its_provenance():
    for name in golden.PROVENANCE:
        oracle = {key: value for key, value in FACTS["oracle"].items() if key != name}
        with pytest.raises(GoldenError, match=f"oracle.{name}"):
            golden.pack({**FACTS, "oracle": oracle}, TENSORS)


def test_a_golden_larger_than_allowed_is_not_written(tmp_path):
    big = {"out.out": Array("f32", np.zeros((200, 100), np.float32))}
    facts = {**FACTS, "tensors": {"out.out": golden.describe(big["out.out"], True)}}
    with pytest.raises(GoldenError, match="65536 are allowed"):
        golden.write(tmp_path / "big.safetensors", golden.pack(facts, big))
    assert list(tmp_path.iterdir()) == []


def test_the_index_names_every_file_and_a_stray_is_found(tmp_path):
    golden.write(tmp_path / "example" / "plain.bf16.safetensors", DATA)
    golden.write_index(tmp_path)
    name = "example/plain.bf16.safetensors"
    assert golden.read_index(tmp_path) == {name: golden.unpack(DATA).sha256}
    (tmp_path / "example" / "notes.txt").write_text("x")
    assert golden.strays(tmp_path, {name}) == ["example/notes.txt"]
    (tmp_path / golden.INDEX).write_text("[]")
    with pytest.raises(GoldenError, match="no index"):
        golden.read_index(tmp_path)


# ------------------------------------------------------------------------- dtypes and inputs


def test_rounding_equals_torchs():
    rng = np.random.default_rng(5)
    values = np.concatenate(
        [
            rng.normal(size=2000) * 10.0 ** rng.integers(-44, 38, 2000),
            [0.0, -0.0, np.inf, -np.inf, np.nan, 3.4e38, 1e-40, 65519.9, 65520.0, 1.00390625],
        ]
    )
    for name, dtype in (("bf16", torch.bfloat16), ("f16", torch.float16), ("f32", torch.float32)):
        # float32 first, so that torch rounds once as well.
        single = values.astype(np.float32).astype(np.float64)
        want = torch.from_numpy(single).to(torch.float32).to(dtype).double().numpy()
        np.testing.assert_array_equal(rounded(single, name), want)
    # A double rounding would go the other way.
    tie = 1 + 2**-8 + 2**-40
    assert rounded(np.array([tie]), "bf16")[0] == 1 + 2**-7


def test_a_unit_in_the_last_place_is_the_distance_to_the_next_value():
    for name, dtype in (("bf16", torch.bfloat16), ("f16", torch.float16), ("f32", torch.float32)):
        values = torch.tensor([1.0, 1.5, 1000.0, 3e-5, 2**-14, 0.0], dtype=dtype)
        step = torch.nextafter(values, torch.full_like(values, torch.inf)) - values
        np.testing.assert_array_equal(ulp(values.double().numpy(), name), step.double().numpy())


def test_inputs_are_functions_of_their_names():
    maker = inputs.Maker("op", "case", "f32")
    words = [int(word) for word in maker.words("x", 2)]
    assert words == [int(word) for word in inputs.Maker("op", "case", "bf16").words("x", 2)]
    assert words != [int(word) for word in maker.words("y", 2)]
    assert words != [int(word) for word in inputs.Maker("op", "other", "f32").words("x", 2)]
    # The stream itself, as the goldens have it.
    assert words == [17550940474408035421, 4201094212751902885]
    values = maker.normal("x", 100, 100)
    assert abs(values.mean()) < 0.05 and abs(values.std() - 1) < 0.02 and abs(values).max() < 6
    assert sorted(maker.order("o", 50)) == list(range(50))
    assert set(maker.integers("i", 3, 6, 100).tolist()) == {3, 4, 5}
