# SPDX-License-Identifier: Apache-2.0
"""Witness inputs of the paged cache and of attention over it.

Blocks lie out of order, and whatever no request may read holds NaN, block 0 aside: that one stays
zero, as in the engine. Contexts straddle blocks; queries point at their newest or oldest key.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from .inputs import Arguments, CaseTable, Maker

CASES = CaseTable()


# ------------------------------------------------------------------------ writing the cache


def _write(
    m: Maker, slots: np.ndarray, blocks: int, block_size: int, heads: int, head_size: int
) -> Arguments:
    count = len(slots)
    empty = np.full((blocks, block_size, heads, head_size), np.nan)
    return {
        "key": m.float(m.normal("key", count, heads, head_size)),
        "value": m.float(m.normal("value", count, heads, head_size)),
        "key_cache": m.float(empty),
        "value_cache": m.float(empty),
        "slot_mapping": m.ints(slots),
    }


@CASES.add("reshape_and_cache", "plain", cells=("slots out of order",))
def _(m: Maker) -> Arguments:
    return _write(m, m.order("slots", 64)[:33], 4, 16, 2, 32)


@CASES.add("reshape_and_cache", "padded", cells=("padding tokens",))
def _(m: Maker) -> Arguments:
    slots = m.order("slots", 48)[:17]
    slots[[0, 5, 16]] = -1
    return _write(m, slots, 3, 16, 3, 32)


@CASES.add("reshape_and_cache", "sliced", cells=("key and value sliced",), strided=("key", "value"))
def _(m: Maker) -> Arguments:
    return _write(m, np.array([63, 0, 15, 16, 31, 47, 48]), 4, 16, 1, 64)


@CASES.add("reshape_and_cache", "one_token", cells=("rows=1", "last slot"))
def _(m: Maker) -> Arguments:
    return _write(m, np.array([47]), 3, 16, 2, 32)


# ----------------------------------------------------------- norm, rotation and cache in one


def _prepared(
    m: Maker,
    positions: list[int],
    slots: list[int],
    heads: tuple[int, int] = (3, 1),
    head_size: int = 64,
    normed: bool = True,
    neox: bool = True,
) -> Arguments:
    count, (query_heads, kv_heads) = len(positions), heads
    t = m.uniform("angle", max(positions) + 2, head_size // 2) * 2.0 - 1.0
    table = np.concatenate([(1 - t * t) / (1 + t * t), 2 * t / (1 + t * t)], 1)
    empty = np.full((max(slots) // 16 + 1, 16, kv_heads, head_size), np.nan)
    qkv = m.normal("qkv", count, (query_heads + 2 * kv_heads) * head_size, std=2.0)
    weights = m.normal("weights", 2, head_size, std=0.3, mean=1.0)
    return {
        "qkv": m.float(qkv),
        "query_weight": m.float(weights[0]) if normed else None,
        "key_weight": m.float(weights[1]) if normed else None,
        "epsilon": 1e-6,
        "positions": m.ints(positions),
        "cos_sin_cache": m.float(table, "f32"),
        "key_cache": m.float(empty),
        "value_cache": m.float(empty),
        "slot_mapping": m.ints(slots),
        "is_neox_style": neox,
    }


@CASES.add("qk_norm_rope_cache", "normed", cells=("GQA 3:1", "slots out of order"))
def _(m: Maker) -> Arguments:
    return _prepared(m, list(range(250, 261)), m.order("slots", 32)[:11].tolist())


@CASES.add("qk_norm_rope_cache", "plain", cells=("no norm", "positions fall"))
def _(m: Maker) -> Arguments:
    slots = [5, 17, 31, 0, 16, 15, 3, 30, 8, 9, 21]
    return _prepared(m, [4095, 3, 3, 0, 17, 2049, 8, 1, 256, 255, 1023], slots, normed=False)


@CASES.add("qk_norm_rope_cache", "padded", cells=("padding tokens",))
def _(m: Maker) -> Arguments:
    return _prepared(m, [7, 0, 40, 0, 9, 0], [17, -1, 3, -1, 16, -1], heads=(4, 2))


@CASES.add("qk_norm_rope_cache", "one_token", cells=("rows=1", "head_size=256"))
def _(m: Maker) -> Arguments:
    return _prepared(m, [1023], [15], heads=(8, 1), head_size=256)


@CASES.add("qk_norm_rope_cache", "pairs", cells=("pairs rotated, not halves",))
def _(m: Maker) -> Arguments:
    slots = m.order("slots", 16)[:9].tolist()
    return _prepared(m, list(range(9)), slots, heads=(4, 1), neox=False)


# -------------------------------------------------------------------------------- attention


@dataclass(frozen=True)
class Batch:
    """Shapes of one batch: query lengths and lengths with the cache, a request each."""

    query_lens: tuple[int, ...]
    seq_lens: tuple[int, ...]
    heads: int = 4
    kv_heads: int = 1
    head_size: int = 64
    block_size: int = 16
    window: int | None = None
    cap: float | None = None
    chunk: int | None = None


def _places(m: Maker, batch: Batch) -> tuple[np.ndarray, list[np.ndarray]]:
    """Block table, int32 [num_reqs, width], and the slots of each request's tokens."""
    counts = [-(-length // batch.block_size) for length in batch.seq_lens]
    order = m.order("blocks", sum(counts) + 2) + 1
    table = np.zeros((len(counts), max(counts) + 1), np.int64)
    slots, start = [], 0
    for row, count in enumerate(counts):
        table[row, :count] = order[start : start + count]
        start += count
        token = np.arange(batch.seq_lens[row])
        block = table[row, token // batch.block_size]
        slots.append(block * batch.block_size + token % batch.block_size)
    return table, slots


def _attention(m: Maker, batch: Batch, aim: int | None = None, std: float = 1.0) -> Arguments:
    """aim: the key that each query points at, counted from its newest (0); None: no key. In chunks
    the queries point at the first key of theirs and at the one before it, in turns."""
    table, slots = _places(m, batch)
    num_blocks = int(sum(-(-n // batch.block_size) for n in batch.seq_lens)) + 3
    shape = (num_blocks * batch.block_size, batch.kv_heads, batch.head_size)
    keys, values = np.full(shape, np.nan), np.full(shape, np.nan)
    keys[: batch.block_size] = values[: batch.block_size] = 0.0
    query = m.normal("query", sum(batch.query_lens), batch.heads, batch.head_size, std=std)
    first = 0
    for row, (queries, length) in enumerate(zip(batch.query_lens, batch.seq_lens)):
        keys[slots[row]] = m.normal(f"key{row}", length, *shape[1:])
        values[slots[row]] = m.normal(f"value{row}", length, *shape[1:])
        seen = np.arange(length - queries, length)
        target = None
        if batch.chunk is not None:
            target = np.maximum(seen - seen % batch.chunk - seen % 2, 0)
        elif aim is not None:
            target = np.maximum(seen - aim, 0) if aim >= 0 else np.minimum(seen, -1 - aim)
        if target is not None:
            pointed = keys[slots[row][target]].repeat(batch.heads // batch.kv_heads, axis=1)
            query[first : first + queries] = 0.2 * query[first : first + queries] + 0.6 * pointed
        first += queries
    paged = (num_blocks, batch.block_size, batch.kv_heads, batch.head_size)
    return {
        "query": m.float(query),
        "key_cache": m.float(keys.reshape(paged)),
        "value_cache": m.float(values.reshape(paged)),
        "block_table": m.ints(table, "i32"),
        "query_start_loc": m.ints(np.cumsum([0, *batch.query_lens]), "i32"),
        "seq_lens": m.ints(batch.seq_lens, "i32"),
        "scale": batch.head_size**-0.5,
        "sliding_window": batch.window,
        "soft_cap": batch.cap,
        **({} if batch.chunk is None else {"attention_chunk_size": batch.chunk}),
    }


@CASES.add("paged_attention", "decode", cells=("contexts 1 15 16 17 256 257 300", "GQA 4:1"))
def _(m: Maker) -> Arguments:
    return _attention(m, Batch((1,) * 8, (1, 15, 16, 17, 256, 257, 300, 64), heads=8, kv_heads=2))


@CASES.add("paged_attention", "flat", cells=("nearly equal weights", "context 300"))
def _(m: Maker) -> Arguments:
    return _attention(m, Batch((8,), (300,), heads=8, kv_heads=2), std=0.2)


@CASES.add("paged_attention", "peaked", cells=("one key takes nearly all",))
def _(m: Maker) -> Arguments:
    return _attention(m, Batch((1, 6, 1), (257, 33, 40), heads=4, kv_heads=1), std=6.0)


@CASES.add("paged_attention", "newest", cells=("newest key",))
def _(m: Maker) -> Arguments:
    return _attention(m, Batch((1, 1, 7, 3), (256, 16, 17, 20), heads=4, kv_heads=2), aim=0)


@CASES.add("paged_attention", "oldest", cells=("oldest key",))
def _(m: Maker) -> Arguments:
    return _attention(m, Batch((1, 1, 7, 3), (250, 17, 33, 48), heads=4, kv_heads=2), aim=-1)


@CASES.add("paged_attention", "mixed", cells=("prefill, chunk and decode in one batch", "GQA 3:1"))
def _(m: Maker) -> Arguments:
    return _attention(m, Batch((1, 13, 1, 6), (33, 29, 2, 6), heads=3, kv_heads=1))


@CASES.add("paged_attention", "many_heads", cells=("no groups", "head_size=32", "block 32"))
def _(m: Maker) -> Arguments:
    batch = Batch((1, 9, 2), (31, 9, 65), heads=6, kv_heads=6, head_size=32, block_size=32)
    return _attention(m, batch)


@CASES.add("paged_attention", "wide_heads", cells=("head_size=256", "block 8"))
def _(m: Maker) -> Arguments:
    batch = Batch((1, 5), (70, 21), heads=2, kv_heads=1, head_size=256, block_size=8)
    return _attention(m, batch)


@CASES.add("paged_attention", "window", cells=("window of 16, contexts 15 16 17 18 250",))
def _(m: Maker) -> Arguments:
    batch = Batch((1,) * 5 + (6,), (15, 16, 17, 18, 250, 40), window=16)
    return _attention(m, batch, aim=15)


@CASES.add("paged_attention", "window_edge", cells=("the key just outside the window",))
def _(m: Maker) -> Arguments:
    batch = Batch((1, 1, 9, 20), (100, 34, 41, 20), heads=4, kv_heads=2, window=8)
    return _attention(m, batch, aim=8)


@CASES.add("paged_attention", "cap", cells=("soft cap", "window"))
def _(m: Maker) -> Arguments:
    batch = Batch((1, 9, 1), (90, 24, 17), heads=4, kv_heads=2, window=32, cap=5.0)
    return _attention(m, batch, std=4.0)


@CASES.add("paged_attention", "sinks", cells=("sinks that take much, little and nothing", "window"))
def _(m: Maker) -> Arguments:
    batch = Batch((1, 1, 13, 6), (250, 3, 29, 6), heads=4, kv_heads=2, window=64)
    # The kernels that it is recorded from take bfloat16.
    sinks = m.float(np.array([4.0, 0.5, -1.0, -40.0]), "bf16")
    return {**_attention(m, batch), "sinks": sinks}


@CASES.add("paged_attention", "chunks", cells=("the key just before the chunk", "chunks of 32"))
def _(m: Maker) -> Arguments:
    batch = Batch((1, 1, 1, 1, 40, 9), (31, 32, 33, 250, 40, 70), kv_heads=2, chunk=32)
    return _attention(m, batch)


@CASES.add("paged_attention", "slopes", cells=("a slope for each of 6 heads, GQA 3:1",))
def _(m: Maker) -> Arguments:
    batch = Batch((1, 1, 13, 6), (250, 3, 29, 300), heads=6, kv_heads=2)
    slopes = m.float(2.0 ** -np.arange(1, 7), "f32")
    return {**_attention(m, batch, std=2.0), "alibi_slopes": slopes}


# ------------------------------------------------- a decode step from the projection on, in one


def _decode(
    m: Maker,
    batch: Batch,
    normed: bool = True,
    max_seq_len: int = 512,
    own: float = 0.0,
) -> Arguments:
    """own: how much of a request's queries its new key has. The table of a padding request is an
    old one, with a block of another request."""
    table, slots = _places(m, batch)
    table[np.array(batch.seq_lens) == 0] = table[0]
    count, kv_heads, head_size = len(batch.seq_lens), batch.kv_heads, batch.head_size
    positions = [max(length - 1, 0) for length in batch.seq_lens]
    last = [int(of[-1]) if len(of) else -1 for of in slots]
    shape = (batch.heads, kv_heads)
    inputs = _prepared(m, positions, last, shape, head_size, normed)
    if own:
        heads = inputs["qkv"].values().reshape(count, -1, head_size)
        grouped = heads[:, : batch.heads].reshape(count, kv_heads, -1, head_size)
        heads[:, batch.heads : batch.heads + kv_heads] += own * grouped.sum(axis=2)
        inputs["qkv"] = m.float(heads.reshape(count, -1))
    num_blocks = int(sum(-(-n // batch.block_size) for n in batch.seq_lens)) + 3
    rows = num_blocks * batch.block_size
    for name in ("key_cache", "value_cache"):
        cache = np.full((rows, kv_heads, head_size), np.nan)
        cache[: batch.block_size] = 0.0
        for row, of in enumerate(slots):
            # The slot of the new token holds what was there before.
            known = of[:-1]
            cache[known] = m.normal(f"{name}{row}", len(known), kv_heads, head_size)
        inputs[name] = m.float(cache.reshape(num_blocks, batch.block_size, kv_heads, head_size))
    del inputs["is_neox_style"]
    return {
        **inputs,
        "block_table": m.ints(table, "i32"),
        "seq_lens": m.ints(batch.seq_lens, "i32"),
        "max_seq_len": max_seq_len,
        "scale": head_size**-0.5,
    }


def _batch(*seq_lens: int, **facts: int) -> Batch:
    """Of one new token a request."""
    return Batch((1,) * len(seq_lens), seq_lens, **facts)


# Goldens hold whole caches and are small files: few tokens, in small blocks.


@CASES.add(
    "qk_norm_rope_decode", "normed", cells=("contexts 1 7 8 9 17", "GQA 2:1"), strided=("qkv",)
)
def _(m: Maker) -> Arguments:
    return _decode(m, _batch(1, 7, 8, 9, 17, heads=4, kv_heads=2, head_size=32, block_size=8))


@CASES.add("qk_norm_rope_decode", "plain", cells=("no norm", "GQA 4:1", "contexts 63 64 65"))
def _(m: Maker) -> Arguments:
    return _decode(m, _batch(63, 64, 65, head_size=32, block_size=4), normed=False)


@CASES.add("qk_norm_rope_decode", "padded", cells=("padding requests", "GQA 3:1"))
def _(m: Maker) -> Arguments:
    return _decode(m, _batch(5, 0, 8, 0, 9, heads=6, kv_heads=2, block_size=4))


@CASES.add("qk_norm_rope_decode", "first_token", cells=("rows=1", "context 1", "head_size=256"))
def _(m: Maker) -> Arguments:
    batch = _batch(1, heads=8, kv_heads=1, head_size=256, block_size=4)
    return _decode(m, batch, max_seq_len=1)


@CASES.add("qk_norm_rope_decode", "no_groups", cells=("no groups", "head_size=32"))
def _(m: Maker) -> Arguments:
    return _decode(m, _batch(3, 16, 4, 5, 9, heads=3, kv_heads=3, head_size=32, block_size=4))


@CASES.add("qk_norm_rope_decode", "wide_heads", cells=("head_size=128", "contexts 5 8"))
def _(m: Maker) -> Arguments:
    return _decode(m, _batch(5, 8, heads=2, kv_heads=1, head_size=128, block_size=8))


@CASES.add("qk_norm_rope_decode", "long", cells=("context 193",))
def _(m: Maker) -> Arguments:
    batch = _batch(193, heads=2, kv_heads=1, head_size=32, block_size=8)
    return _decode(m, batch, max_seq_len=193)


@CASES.add("qk_norm_rope_decode", "newest", cells=("the new key takes most", "GQA 8:1"))
def _(m: Maker) -> Arguments:
    return _decode(m, _batch(16, 9, 8, 2, heads=8, kv_heads=1, block_size=8), own=0.3)
