# SPDX-License-Identifier: Apache-2.0
# upstream: vllm/v1/core/kv_cache_utils.py, vllm/utils/hashing.py @ v0.25.0
"""Hashes that name the content of KV blocks, so that equal prefixes are found again.

The hash of a block covers its tokens, its extra keys and the hash of the block before it, hence
the whole prefix. Values are byte-equal to upstream's for the same PYTHONHASHSEED.
"""

from __future__ import annotations

import hashlib
import importlib.util
import logging
import os
import pickle
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NewType, overload

import cbor2

from vllmx import platform
from vllmx.exceptions import UserError
from vllmx.multimodal import get_mm_features_in_window

if TYPE_CHECKING:
    from vllmx.request import Request

logger = logging.getLogger(__name__)

BlockHash = NewType("BlockHash", bytes)
"""Hash of a prefix that ends at a block border."""

BlockHashWithGroupId = NewType("BlockHashWithGroupId", bytes)
"""A BlockHash followed by the KV cache group, 4 bytes big-endian: the key of the prefix cache."""

ExternalBlockHash = bytes | int
"""A block hash as consumers of KV events see it."""

NONE_HASH: BlockHash
"""What stands before the first block; set by `init_none_hash`."""


def sha256(input: Any) -> bytes:
    """SHA-256 of the pickle of `input`."""
    return hashlib.sha256(pickle.dumps(input, protocol=pickle.HIGHEST_PROTOCOL)).digest()


def sha256_cbor(input: Any) -> bytes:
    """SHA-256 of the canonical CBOR of `input`; the same in every language."""
    return hashlib.sha256(cbor2.dumps(input, canonical=True)).digest()


def xxhash(input: Any) -> bytes:
    """128-bit XXH3 of the pickle of `input`; fast, but not made to resist forged collisions."""
    from xxhash import xxh3_128_digest

    return xxh3_128_digest(pickle.dumps(input, protocol=pickle.HIGHEST_PROTOCOL))


def xxhash_cbor(input: Any) -> bytes:
    """128-bit XXH3 of the canonical CBOR of `input`."""
    from xxhash import xxh3_128_digest

    return xxh3_128_digest(cbor2.dumps(input, canonical=True))


_HASH_FUNCTIONS = {fn.__name__: fn for fn in (sha256, sha256_cbor, xxhash, xxhash_cbor)}


def get_hash_fn_by_name(hash_fn_name: str) -> Callable[[Any], bytes]:
    """The hash function that `cache.prefix_caching_hash_algo` names; UserError if unusable."""
    if hash_fn_name not in _HASH_FUNCTIONS:
        raise UserError(
            f"Unsupported hash function: {hash_fn_name}. Set cache.prefix_caching_hash_algo to "
            f"one of {', '.join(_HASH_FUNCTIONS)}."
        )
    if hash_fn_name.startswith("xxhash") and importlib.util.find_spec("xxhash") is None:
        raise UserError(
            f"cache.prefix_caching_hash_algo={hash_fn_name}: xxhash is required; install it with "
            "`pip install xxhash` or choose sha256."
        )
    return _HASH_FUNCTIONS[hash_fn_name]


def init_none_hash(hash_fn: Callable[[Any], bytes]) -> None:
    """Set NONE_HASH: random, or from PYTHONHASHSEED for hashes that other processes share."""
    global NONE_HASH
    seed = platform.hash_seed()
    if seed is not None:
        NONE_HASH = BlockHash(hash_fn(seed))
        return
    if hash_fn in (sha256_cbor, xxhash_cbor):
        logger.warning(
            "PYTHONHASHSEED is not set, so the CBOR block hashes of this process differ from "
            "those of any other; set it to share them."
        )
    NONE_HASH = BlockHash(os.urandom(32))


def make_block_hash_with_group_id(block_hash: BlockHash, group_id: int) -> BlockHashWithGroupId:
    """The prefix-cache key of `block_hash` in group `group_id`."""
    return BlockHashWithGroupId(block_hash + group_id.to_bytes(4, "big"))


def get_block_hash(key: BlockHashWithGroupId) -> BlockHash:
    """The hash within a prefix-cache key."""
    return BlockHash(key[:-4])


def get_group_id(key: BlockHashWithGroupId) -> int:
    """The KV cache group within a prefix-cache key."""
    return int.from_bytes(key[-4:], "big")


def maybe_convert_block_hash(hash_bytes: BlockHash) -> ExternalBlockHash:
    """The hash as KV events carry it: its last 8 bytes as an integer, upstream's default."""
    return int.from_bytes(hash_bytes[-8:], "big")


def need_extra_keys(request: Request) -> bool:
    """Whether more than tokens decides what the blocks of `request` hold."""
    return (
        bool(request.mm_features)
        or request.lora_request is not None
        or request.cache_salt is not None
    )


def _mm_extra_keys(
    request: Request, start: int, end: int, mm_idx: int
) -> tuple[list[tuple[str, int]], int]:
    """Keys of the multimodal items that overlap tokens [start, end), and where to go on.

    Items lie in the order of their offsets. `mm_idx` < 0 counts from the last one. The offset is
    part of the key, as an item's placeholders are all one token.
    """
    features = request.mm_features
    keys: list[tuple[str, int]] = []
    if not features:
        return keys, mm_idx
    last = features[-1].mm_position
    if last.offset + last.length <= start:
        return keys, mm_idx
    if mm_idx < 0:
        mm_idx += len(features)
        assert mm_idx >= 0
    while mm_idx < len(features):
        feature = features[mm_idx]
        offset = feature.mm_position.offset
        item_end = offset + feature.mm_position.length
        if offset >= end:
            break
        if item_end > start:
            keys.append((feature.identifier, offset - start))
            if item_end > end:
                break
        mm_idx += 1
    return keys, mm_idx


def tensor_data(tensor: Any) -> memoryview:
    """The bytes of a numpy array or a torch tensor, row by row."""
    if hasattr(tensor, "tobytes"):
        return memoryview(tensor.tobytes())
    flat = tensor.detach().flatten().cpu().contiguous()
    # Its torch.uint8, as core/ does not import torch; numpy has no bfloat16.
    return flat.view(flat[:0].byte().dtype).numpy().data


def _prompt_embeds_key(request: Request, start: int, end: int) -> bytes:
    """SHA-256 of the prompt's embeddings at positions [start, end)."""
    digest = request.prompt_embeds_hashes.get((start, end))
    if digest is None:
        assert request.prompt_embeds is not None
        digest = hashlib.sha256(tensor_data(request.prompt_embeds[start:end])).digest()
        request.prompt_embeds_hashes[start, end] = digest
    return digest


def generate_block_hash_extra_keys(
    request: Request, start_token_idx: int, end_token_idx: int, start_mm_idx: int
) -> tuple[tuple[Any, ...] | None, int]:
    """What else decides the content of tokens [start, end), and the next multimodal index.

    A key of one source never equals one of another: adapters are ("lora", name), multimodal items
    (identifier, offset), the salt a string, prompt embeddings ([tokens, hidden]) bytes.
    Upstream has the bare adapter name, which a salt can imitate. The salt is in the first block
    only, as the chain carries it on.
    """
    keys: list[Any] = []
    if request.lora_request:
        keys.append(("lora", request.lora_request.lora_name))
    mm_keys, next_mm_idx = _mm_extra_keys(request, start_token_idx, end_token_idx, start_mm_idx)
    keys += mm_keys
    if start_token_idx == 0 and request.cache_salt:
        keys.append(request.cache_salt)
    if request.prompt_embeds is not None:
        keys.append(_prompt_embeds_key(request, start_token_idx, end_token_idx))
    return (tuple(keys) if keys else None), next_mm_idx


def hash_block_tokens(
    hash_function: Callable[[Any], bytes],
    parent_block_hash: BlockHash | None,
    curr_block_token_ids: Sequence[int],
    extra_keys: tuple[Any, ...] | None = None,
) -> BlockHash:
    """Hash of a full block after `parent_block_hash` (None: it is the first)."""
    parent = parent_block_hash or NONE_HASH
    return BlockHash(hash_function((parent, tuple(curr_block_token_ids), extra_keys)))


def get_request_block_hasher(
    hash_block_size: int, caching_hash_fn: Callable[[Any], bytes]
) -> Callable[[Request], list[BlockHash]]:
    """A function that hashes the blocks of a request that are full and have no hash yet.

    Hashes are taken every `hash_block_size` tokens; groups with larger blocks use every n-th.
    """

    def request_block_hasher(request: Request) -> list[BlockHash]:
        block_hashes = request.block_hashes
        start = len(block_hashes) * hash_block_size
        num_tokens = request.num_tokens
        if start + hash_block_size > num_tokens:
            return []
        plain = not need_extra_keys(request) and request.prompt_embeds is None
        extra_keys = None
        mm_idx = 0
        if not plain:
            mm_idx, _ = get_mm_features_in_window(request.mm_features, start, start)
        parent = block_hashes[-1] if block_hashes else None
        new_hashes = []
        for end in range(start + hash_block_size, num_tokens + 1, hash_block_size):
            if not plain:
                extra_keys, mm_idx = generate_block_hash_extra_keys(request, start, end, mm_idx)
            tokens = request.all_token_ids[start:end]
            parent = hash_block_tokens(caching_hash_fn, parent, tokens, extra_keys)
            new_hashes.append(parent)
            start = end
        return new_hashes

    return request_block_hasher


class BlockHashListWithBlockSize(Sequence[BlockHash]):
    """`block_hashes`, taken every `hash_block_size` tokens, seen as those of larger blocks.

    A hash covers the whole prefix, so the hash of a large block is that of the last small one in
    it. Nothing is copied.
    """

    def __init__(
        self, block_hashes: list[BlockHash], hash_block_size: int, target_block_size: int
    ) -> None:
        assert target_block_size % hash_block_size == 0
        self.block_hashes = block_hashes
        self.scale_factor = target_block_size // hash_block_size

    def __len__(self) -> int:
        return len(self.block_hashes) // self.scale_factor

    @overload
    def __getitem__(self, idx: int) -> BlockHash: ...

    @overload
    def __getitem__(self, idx: slice) -> list[BlockHash]: ...

    def __getitem__(self, idx: int | slice) -> BlockHash | list[BlockHash]:
        scale = self.scale_factor
        chosen = range(len(self))[idx]
        if isinstance(chosen, range):
            return [self.block_hashes[(i + 1) * scale - 1] for i in chosen]
        return self.block_hashes[(chosen + 1) * scale - 1]


BlockHashList = list[BlockHash] | BlockHashListWithBlockSize
