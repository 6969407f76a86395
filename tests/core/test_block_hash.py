# SPDX-License-Identifier: Apache-2.0
"""Block hashes: byte-equal to upstream's, chained, and different wherever the content is."""

import hashlib
import logging
import pickle
from types import SimpleNamespace

import cbor2
import numpy as np
import pytest
import torch
from kv_helpers import make_kv_request, mm_item

from vllmx.core import block_hash
from vllmx.core.block_hash import (
    BlockHashListWithBlockSize,
    generate_block_hash_extra_keys,
    get_block_hash,
    get_group_id,
    get_hash_fn_by_name,
    get_request_block_hasher,
    hash_block_tokens,
    init_none_hash,
    make_block_hash_with_group_id,
    maybe_convert_block_hash,
    need_extra_keys,
    sha256,
    tensor_data,
)
from vllmx.exceptions import UserError

# Recorded from upstream 0.25.0 with PYTHONHASHSEED=0: NONE_HASH, the hash of tokens 1 2 3 4 as a
# first block, and that of 5 6 7 300000 after it with the extra keys ("salt",).
UPSTREAM = {
    "sha256": (
        "1973e23848344dc43a988a9b478663803cfffe1243480253f9a3cf004b14aa7c",
        "762b2e7e1520febd3a0aedb7358e8602facf3924440e18538fce057e23bae91d",
        "2209cc6315fe8c84f4176bcc5bddc8bd11026adc960bfe5ceaac7d81b765a0bf",
    ),
    "sha256_cbor": (
        "4e1195df020de59e0d65a33a4279f1183e7ae4e5d980e309f8b55adff2e61c3e",
        "c9d58ba695280d69b243e1e0df813136ca9196b286fb1a021e0b2e028ef071cb",
        "8cbc1e697cd21211a32f44ff310490ad8dbd59bd56900f1edde97c92795f168a",
    ),
    "xxhash": (
        "6fb31cc38bba6066183f7f2104b9c051",
        "f3856cedd7e636094750c4546e855397",
        "09cfc295411f09aa820b82fe702d8603",
    ),
    "xxhash_cbor": (
        "1ebe36576dcb573f26b99533a20aaeca",
        "0a8577df5ee3430515a8cc1f6e3ac52e",
        "86828d15b7e01a610b364371a1afd8ce",
    ),
}


@pytest.fixture(autouse=True)
def restore_none_hash():
    yield
    init_none_hash(sha256)


@pytest.mark.parametrize("name", UPSTREAM)
def test_hashes_equal_upstream_byte_for_byte(name, monkeypatch):
    monkeypatch.setenv("PYTHONHASHSEED", "0")
    hash_fn = get_hash_fn_by_name(name)
    init_none_hash(hash_fn)
    first = hash_block_tokens(hash_fn, None, [1, 2, 3, 4])
    second = hash_block_tokens(hash_fn, first, [5, 6, 7, 300000], ("salt",))
    assert (block_hash.NONE_HASH.hex(), first.hex(), second.hex()) == UPSTREAM[name]


def test_sha256_cbor_is_that_of_canonical_cbor_written_by_hand(monkeypatch):
    monkeypatch.setenv("PYTHONHASHSEED", "0")
    hash_fn = get_hash_fn_by_name("sha256_cbor")
    init_none_hash(hash_fn)
    none_hash = hashlib.sha256(b"\x61" + b"0").digest()  # text of length 1
    assert none_hash == block_hash.NONE_HASH
    # Array of 3: 32 bytes, array of 4 small integers, null.
    raw = b"\x83" + b"\x58\x20" + none_hash + b"\x84\x01\x02\x03\x04" + b"\xf6"
    assert raw == cbor2.dumps((none_hash, (1, 2, 3, 4), None), canonical=True)
    assert hash_block_tokens(hash_fn, None, [1, 2, 3, 4]) == hashlib.sha256(raw).digest()


def test_sha256_is_that_of_the_pickle():
    raw = pickle.dumps((b"parent", (1, 2), ("a",)), protocol=pickle.HIGHEST_PROTOCOL)
    assert hash_block_tokens(sha256, b"parent", [1, 2], ("a",)) == hashlib.sha256(raw).digest()


def test_none_hash_is_random_without_a_seed_and_cbor_says_so(monkeypatch, caplog):
    monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    seen = set()
    for _ in range(3):
        init_none_hash(sha256)
        seen.add(block_hash.NONE_HASH)
    assert len(seen) == 3 and all(len(value) == 32 for value in seen)
    with caplog.at_level(logging.WARNING):
        init_none_hash(sha256)
        assert not caplog.records
        init_none_hash(get_hash_fn_by_name("sha256_cbor"))
    assert "PYTHONHASHSEED" in caplog.text


def test_unknown_or_missing_hash_function_says_what_to_do(monkeypatch):
    with pytest.raises(UserError, match=r"Unsupported hash function: md5.*sha256_cbor"):
        get_hash_fn_by_name("md5")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(UserError, match="pip install xxhash"):
        get_hash_fn_by_name("xxhash_cbor")


def test_hashes_are_chained_and_taken_of_full_blocks_only():
    request = make_kv_request("a", list(range(11)))
    assert len(request.block_hashes) == 2
    first = hash_block_tokens(sha256, None, [0, 1, 2, 3])
    second = hash_block_tokens(sha256, first, [4, 5, 6, 7])
    assert request.block_hashes == [first, second]
    request.append_output_token_ids(11)
    assert request.block_hashes == [first, second, hash_block_tokens(sha256, second, range(8, 12))]
    other = make_kv_request("b", [9, *range(1, 8)])
    assert other.block_hashes[1] != second


def test_generated_tokens_hash_like_prompt_tokens():
    whole = make_kv_request("a", list(range(16)))
    grown = make_kv_request("b", list(range(5)))
    for token in range(5, 16):
        grown.append_output_token_ids(token)
    assert grown.block_hashes == whole.block_hashes


def test_group_id_is_packed_behind_the_hash():
    key = make_block_hash_with_group_id(b"\x01" * 32, 258)
    assert key == b"\x01" * 32 + b"\x00\x00\x01\x02"
    assert get_block_hash(key) == b"\x01" * 32 and get_group_id(key) == 258


def test_event_hash_is_the_low_64_bits():
    digest = hashlib.sha256(b"x").digest()
    assert maybe_convert_block_hash(digest) == int.from_bytes(digest, "big") % 2**64


def extra_keys(request, start=0, end=4, mm_idx=0):
    return generate_block_hash_extra_keys(request, start, end, mm_idx)


def test_salt_is_in_the_first_block_only_and_chained_on():
    request = make_kv_request("a", range(8), cache_salt="s")
    assert extra_keys(request) == (("s",), 0)
    assert extra_keys(request, 4, 8) == (None, 0)
    plain = make_kv_request("b", range(8))
    assert not set(plain.block_hashes) & set(request.block_hashes)


def test_no_two_sources_give_the_same_keys():
    """A salt that spells an adapter's name or an image's hash must not hit its blocks."""
    tokens = list(range(64))
    lora = SimpleNamespace(lora_name="x", adapter_id=1, name="x")
    requests = [
        make_kv_request("plain", tokens),
        make_kv_request("salt", tokens, cache_salt="x"),
        make_kv_request("other salt", tokens, cache_salt="y"),
        make_kv_request("lora", tokens, lora_request=lora),
        make_kv_request("lora and salt", tokens, lora_request=lora, cache_salt="x"),
        make_kv_request("image", tokens, mm_features=[mm_item("x", 0, 4)]),
        make_kv_request("image elsewhere", tokens, mm_features=[mm_item("x", 1, 4)]),
        make_kv_request("embeds", tokens, prompt_embeds=np.zeros((64, 2), np.float32)),
    ]
    assert [need_extra_keys(r) for r in requests] == [False, *[True] * 6, False]
    firsts = [request.block_hashes[0] for request in requests]
    assert len(set(firsts)) == len(firsts)
    same = make_kv_request("same salt", tokens, cache_salt="x")
    assert same.block_hashes == requests[1].block_hashes


def test_adapter_is_in_every_block():
    lora = SimpleNamespace(lora_name="x")
    request = make_kv_request("a", range(8), lora_request=lora)
    assert extra_keys(request)[0] == extra_keys(request, 4, 8)[0] == (("lora", "x"),)


def test_multimodal_keys_name_items_by_their_offset_in_the_block():
    items = [mm_item("a", 0, 5), mm_item("b", 10, 5)]
    request = make_kv_request("r", range(20), mm_features=items)
    assert extra_keys(request, 0, 5, 0) == ((("a", 0),), 1)
    assert extra_keys(request, 3, 8, 0) == ((("a", -3),), 1)
    assert extra_keys(request, 6, 10, 0) == (None, 1)
    assert extra_keys(request, 0, 15, 0) == ((("a", 0), ("b", 10)), 2)
    assert extra_keys(request, 0, 12, 0) == ((("a", 0), ("b", 10)), 1)
    assert extra_keys(request, 12, 16, -1) == ((("b", -2),), 2)
    assert extra_keys(request, 16, 20, -1) == (None, -1)


def test_prompt_embeddings_are_hashed_block_by_block():
    embeds = np.arange(16, dtype=np.float32).reshape(8, 2)
    request = make_kv_request("a", [0] * 8, prompt_embeds=embeds)
    keys, _ = extra_keys(request, 4, 8)
    assert keys == (hashlib.sha256(embeds[4:8].tobytes()).digest(),)
    changed = embeds.copy()
    changed[7, 1] += 1
    other = make_kv_request("b", [0] * 8, prompt_embeds=changed)
    assert other.block_hashes[0] == request.block_hashes[0]
    assert other.block_hashes[1] != request.block_hashes[1]


def test_prompt_embeddings_of_torch_hash_as_those_of_numpy_and_once():
    embeds = np.arange(16, dtype=np.float32).reshape(8, 2)
    tensor = torch.tensor(embeds, requires_grad=True)
    request = make_kv_request("a", [0] * 8, prompt_embeds=tensor)
    assert extra_keys(request, 0, 4) == extra_keys(
        make_kv_request("b", [0] * 8, prompt_embeds=embeds), 0, 4
    )
    with torch.no_grad():
        tensor.zero_()
    assert extra_keys(request, 0, 4)[0] == (hashlib.sha256(embeds[:4].tobytes()).digest(),)
    half = torch.arange(6, dtype=torch.bfloat16).reshape(3, 2)
    assert bytes(tensor_data(half.t())) == half.t().contiguous().view(torch.uint8).numpy().tobytes()
    assert bytes(tensor_data(half[3:])) == b""


def test_items_that_join_a_prompt_later_are_all_in_its_hashes():
    """A session's next piece of prompt may hold several; each must be in the keys of its block."""
    whole = make_kv_request("a", [0] * 16, mm_features=[mm_item("x", 4, 4), mm_item("y", 8, 4)])
    session = make_kv_request("b", [0] * 4)
    session.mm_features = whole.mm_features
    session.append_output_token_ids([0] * 12)
    assert session.block_hashes == whole.block_hashes


def test_large_blocks_use_the_hash_at_their_end():
    hashes = [bytes([i]) for i in range(7)]
    large = BlockHashListWithBlockSize(hashes, 2, 6)
    assert len(large) == 2 and list(large) == [hashes[2], hashes[5]]
    assert large[0] == hashes[2] and large[-1] == hashes[5]
    assert large[1:] == [hashes[5]] and large[:9] == [hashes[2], hashes[5]]
    with pytest.raises(IndexError):
        large[2]
    with pytest.raises(AssertionError):
        BlockHashListWithBlockSize(hashes, 2, 5)


def test_hasher_has_nothing_to_do_between_borders():
    hasher = get_request_block_hasher(4, sha256)
    request = make_kv_request("a", range(7))
    assert hasher(request) == []
