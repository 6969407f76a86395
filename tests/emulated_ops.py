# SPDX-License-Identifier: Apache-2.0
"""Seven ops emulated in bfloat16: a golden, honest other ways to compute it, and planted faults.

Storage is bfloat16, arithmetic float32, truth float64. Each scenario is a regime of one op; the
faults are those that kernels were found to have.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np

F4 = np.float32
Values = np.ndarray


def b(x: Values) -> Values:
    """Rounded to bfloat16, to nearest even, kept as float32."""
    bits = np.asarray(x, F4).view(np.uint32)
    with np.errstate(over="ignore"):
        bits = bits + 0x7FFF + (bits >> 16 & 1)
    kept = (bits & 0xFFFF0000).astype(np.uint32).view(F4)
    return np.where(np.isfinite(x), kept, np.asarray(x, F4)).astype(F4)


def cut(x: Values) -> Values:
    """Truncated to bfloat16."""
    return (np.asarray(x, F4).view(np.uint32) & np.uint32(0xFFFF0000)).view(F4).copy()


def b_sum(values: Values, axis: int = -1) -> Values:
    """A sum that is rounded to bfloat16 at each step."""
    parts = np.moveaxis(values, axis, 0)
    total = np.zeros(parts.shape[1:], F4)
    for part in parts:
        total = b(total + part)
    return total


def fp8(x: Values) -> Values:
    """Rounded to the four significant bits that an fp8 of 4 exponent bits has."""
    fraction, exponent = np.frexp(x)
    return np.ldexp(np.rint(fraction * 16) / 16, exponent).astype(F4)


def put(x: Values, place: object, value: object) -> Values:
    """A copy of x with x[place] = value."""
    copy = x.copy()
    copy[place] = value
    return copy


@dataclass
class Scenario:
    """One op in one regime; values are float32 on the bfloat16 grid, the truth float64."""

    name: str
    truth: Values
    golden: Values
    honest: dict[str, Values]
    faults: dict[str, Values]


def _rng(seed: int, *more: int) -> np.random.Generator:
    return np.random.default_rng((seed, *more))


def rms_norm(seed: int) -> Iterator[Scenario]:
    regimes = {"plain": (1.0, 0.0), "tinyvar": (1e-3, 0.0), "outlier": (0.5, 0.5)}
    for number, (name, (std, mean)) in enumerate(regimes.items()):
        rng = _rng(seed, 1, number)
        x = b(rng.normal(mean, std, (16, 1024)))
        if name == "outlier":
            x[:, -3:] = b(rng.normal(0, 20, (16, 3)))
        w = b(1 + 0.2 * rng.normal(size=1024))
        variance = (x * x).mean(-1, keepdims=True, dtype=F4)

        def norm(v=variance, eps=1e-6, x=x, w=w, cast=b, mid=b):
            return cast(mid(x / np.sqrt(v + F4(eps))) * w)

        x8 = x.astype(float)
        golden = norm()
        part = (x * x).reshape(16, 8, 128).sum(-1, dtype=F4).sum(-1, dtype=F4)[:, None] / F4(1024)
        inverse = (1 / np.sqrt((x8**2).mean(-1, keepdims=True) + 1e-6)).astype(F4)
        centred = b(
            b((x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + F4(1e-6))) * w
        )
        yield Scenario(
            f"rms_norm/{name}",
            x8 / np.sqrt((x8**2).mean(-1, keepdims=True) + 1e-6) * w.astype(float),
            golden,
            {"in parts": norm(v=part), "by the inverse": b(b(x * inverse) * w)},
            {
                "other epsilon": norm(eps=1e-5),
                "no epsilon": norm(eps=0.0),
                "sum in bf16": norm(v=b_sum(x * x)[:, None] / F4(1024)),
                "n - 1": norm(v=variance * F4(1024 / 1023)),
                "tail dropped": norm(v=(x[:, :-8] ** 2).sum(-1, keepdims=True) / F4(1024)),
                "mean subtracted": centred,
                "stale variance": norm(v=put(variance, 5, variance[4])),
                "no weight": norm(w=np.ones_like(w)),
                "truncated": norm(cast=cut),
                "stale row": put(golden, 7, golden[6]),
                "one NaN": put(golden, (3, 5), np.nan),
                "zero": np.zeros_like(golden),
            },
        )


def silu_mul(seed: int) -> Iterator[Scenario]:
    for number, (name, std) in enumerate({"plain": 1.0, "wide": 6.0, "small": 0.02}.items()):
        rng = _rng(seed, 2, number)
        a, u = b(rng.normal(0, std, (16, 1024))), b(rng.normal(0, std, (16, 1024)))

        def silu(z, factor=1.0):
            return z / (1 + np.exp(-F4(factor) * z))

        a8 = a.astype(float)
        golden = b(b(silu(a)) * u)
        gelu = 0.5 * a * (1 + np.tanh(F4(0.7978846) * (a + F4(0.044715) * a**3)))
        yield Scenario(
            f"silu_mul/{name}",
            a8 / (1 + np.exp(-a8)) * u.astype(float),
            golden,
            {
                "rounded once": b(silu(a) * u),
                "by tanh": b(b(0.5 * a * (1 + np.tanh(0.5 * a))) * u),
            },
            {
                "gelu": b(b(gelu) * u),
                "halves swapped": b(b(silu(u)) * a),
                "factor 1.01": b(b(silu(a, 1.01)) * u),
                "clamped": b(b(silu(np.minimum(a, 7))) * u),
                "stale tail": np.concatenate([golden[:, :-32], golden[:, -64:-32]], 1),
                "truncated": cut(b(silu(a)) * u),
                "relu": b(np.maximum(a, 0) * u),
                "exp in bf16": b(b(a / b(1 + b(np.exp(-a)))) * u),
                "zero": np.zeros_like(golden),
            },
        )


LONG = [
    0,
    1,
    255,
    256,
    257,
    1023,
    4095,
    4097,
    8191,
    16383,
    20001,
    32767,
    32769,
    36001,
    40000,
    40959,
]


def rope(seed: int) -> Iterator[Scenario]:
    for number, (name, listed) in enumerate({"short": range(16), "long": LONG}.items()):
        positions = np.array(listed)
        q = b(_rng(seed, 3, number).normal(0, 1, (16, 4, 128)))

        def angles(at=positions, theta=1e6, cast=b):
            wave = (1 / theta ** (np.arange(0, 128, 2) / 128)).astype(F4).astype(float)
            angle = np.asarray(at, float)[:, None] * wave
            return cast(np.cos(angle))[:, None], cast(np.sin(angle))[:, None]

        def turn(c, s, x=q, mid=b, cast=b):
            first, second = x[..., :64], x[..., 64:]
            return np.concatenate(
                [cast(mid(first * c) - mid(second * s)), cast(mid(second * c) + mid(first * s))], -1
            )

        def same(x):
            return x

        cos, sin = angles()
        exact = angles(cast=same)
        golden = turn(cos, sin)
        pairs = q.copy()
        pairs[..., ::2] = b(q[..., ::2] * cos - q[..., 1::2] * sin)
        pairs[..., 1::2] = b(q[..., 1::2] * cos + q[..., ::2] * sin)
        yield Scenario(
            f"rope/{name}",
            turn(*exact, x=q.astype(float), mid=same, cast=same),
            golden,
            {
                "fused": turn(cos, sin, mid=same),
                "float32 table": turn(*angles(cast=lambda x: x.astype(F4)), mid=same),
            },
            {
                "pairs": pairs,
                "other base": turn(*angles(theta=5e5)),
                "next position": turn(*angles(positions + 1)),
                "other way": turn(cos, -sin),
                "bf16 positions": turn(*angles(b(positions))),
                "f16 positions": turn(*angles(np.minimum(positions, 65504).astype(np.float16))),
                "half rotated": np.concatenate([golden[..., :32], q[..., 32:]], -1),
                "clamped": turn(*angles(np.minimum(positions, 32767))),
                "last token missed": put(golden, -1, q[-1]),
                "zero": np.zeros_like(golden),
            },
        )


def gemm(seed: int) -> Iterator[Scenario]:
    for number, name in enumerate(("plain", "outlier")):
        rng = _rng(seed, 4, number)
        a, w = b(rng.normal(0, 1, (16, 1024))), b(rng.normal(0, 0.03, (1024, 256)))
        if name == "outlier":
            a[:, -1] *= 30
            w[-1] = b(w[-1] * 4)
            a[:, 512] *= 8
            a = b(a)
        golden = b(a @ w)
        tiles = [a[:, i : i + 128] @ w[i : i + 128] for i in range(0, 1024, 128)]
        narrow = np.zeros_like(golden)
        for i in range(0, 1024, 32):
            narrow = b(narrow + a[:, i : i + 32] @ w[i : i + 32])
        short, shorter = put(a, np.s_[:, -32:], 0), put(a, np.s_[:, -1:], 0)
        yield Scenario(
            f"gemm/{name}",
            a.astype(float) @ w.astype(float),
            golden,
            {"split K": b(sum(tiles)), "backwards": b(a[:, ::-1] @ w[::-1])},
            {
                "last tile dropped": b(short @ w),
                "last K dropped": b(shorter @ w),
                "sum in bf16": narrow,
                "parts in bf16": b_sum(np.stack([b(tile) for tile in tiles]), 0),
                "last columns zero": put(golden, np.s_[:, -8:], 0),
                "row twice": put(golden, 11, golden[10]),
                "1% more": b(a @ w * F4(1.01)),
                "0.3% more": b(a @ w * F4(1.003)),
                "truncated": cut(a @ w),
                "fp8 activations": b(fp8(a) @ w),
                "a tile twice": b(a @ w + a[:, 128:160] @ w[128:160]),
                "zero": np.zeros_like(golden),
            },
        )


def attention(seed: int) -> Iterator[Scenario]:
    regimes = {"flat": (300, 1.0), "peaked": (257, 6.0), "newest": (256, 3.0), "short": (17, 2.0)}
    heads, kv_heads, dim, new = 8, 2, 64, 4
    for number, (name, (context, std)) in enumerate(regimes.items()):
        rng = _rng(seed, 5, number)
        q = b(rng.normal(0, std, (new, heads, dim)))
        k, v = (b(rng.normal(0, 1, (context + 4, kv_heads, dim))) for _ in "kv")
        if name == "newest":
            for i in range(new):
                aim = k[context - new + i].repeat(heads // kv_heads, axis=0)
                q[i] = b(aim * 0.6 + q[i] * 0.2)

        def attend(
            scale=0.125, k=k, v=v, q=q, shift=0, skip=0, leak=0, window=None, dtype=F4, **how
        ):
            out = np.zeros((new, heads, dim), dtype)
            head_of = how.get("head_of", lambda h: h // 4)
            for i in range(new):
                end = len(k) - 2 * new + i + 1 + shift
                start = skip if window is None else max(0, end - window)
                for h in range(heads):
                    keys, values = (x[start:end, head_of(h)].astype(dtype) for x in (k, v))
                    if leak:
                        nothing = np.zeros((leak, dim), dtype)
                        keys, values = (np.concatenate([x, nothing]) for x in (keys, values))
                    score = keys @ q[i, h].astype(dtype) * dtype(scale)
                    out[i, h] = how.get("reduce", plainly)(score, values)
            return out

        def plainly(score, values):
            weight = np.exp(score - score.max())
            return weight / weight.sum() @ values

        def in_tiles(score, values, rescale=True, cast=b):
            top, total, out = -np.inf, F4(0), np.zeros(dim, F4)
            for j in range(0, len(score), 64):
                tile = score[j : j + 64]
                newer = max(top, tile.max())
                weight = np.exp(tile - newer)
                keep = np.exp(top - newer) if rescale else float(np.isfinite(top))
                total, out = (
                    total * keep + weight.sum(),
                    out * keep + cast(weight) @ values[j : j + 64],
                )
                top = newer
            return out / total

        golden = b(attend())
        moved = (
            np.concatenate([k[16:32], k[:16], k[32:]])
            if context > 40
            else k[[1, 0, *range(2, context + 4)]]
        )
        yield Scenario(
            f"attention/{name}",
            attend(dtype=np.float64),
            golden,
            {
                "flash": b(attend(reduce=in_tiles)),
                "split": b(attend(reduce=lambda s, x: in_tiles(s, x, cast=lambda w: w))),
                "scaled query": b(attend(q=b(q * F4(0.125)), scale=1.0)),
            },
            {
                "sees the future": b(attend(shift=1)),
                "newest dropped": b(attend(shift=-1)),
                "oldest dropped": b(attend(skip=1)),
                "1% sharper": b(attend(scale=0.125 * 1.01)),
                "unscaled": b(attend(scale=1.0)),
                "other groups": b(attend(head_of=lambda h: h % 2)),
                "one pad seen": b(attend(leak=1)),
                "16 pads seen": b(attend(leak=16)),
                "no rescale": b(attend(reduce=lambda s, x: in_tiles(s, x, rescale=False))),
                "window one short": b(attend(window=context - new - 1)),
                "stale row": put(golden, 2, golden[1]),
                "last tile dropped": b(attend(shift=-min(16, context // 2))),
                "blocks swapped": b(attend(k=moved)),
                "zero": np.zeros_like(golden),
            },
        )


def moe_combine(seed: int) -> Iterator[Scenario]:
    for number, (name, sharp) in enumerate({"flat": 0.3, "peaked": 3.0}.items()):
        rng = _rng(seed, 6, number)
        logits = rng.normal(0, sharp, (16, 64))
        chosen = np.argsort(-logits, 1)[:, :8]
        p = np.exp(logits - logits.max(1, keepdims=True))
        raw = np.take_along_axis(p / p.sum(1, keepdims=True), chosen, 1)
        w = (raw / raw.sum(1, keepdims=True)).astype(F4)
        y = b(rng.normal(0, 1, (16, 8, 512)))

        def mix(w=w, y=y):
            return (y * w[..., None]).sum(1, dtype=F4)

        sigmoid = 1 / (1 + np.exp(-np.take_along_axis(logits, chosen, 1)))
        golden = b(mix())
        yield Scenario(
            f"moe_combine/{name}",
            (y.astype(float) * w[..., None].astype(float)).sum(1),
            golden,
            {
                "backwards": b((y * w[..., None])[:, ::-1].sum(1, dtype=F4)),
                "rounded products": b(b(y * w[..., None]).sum(1, dtype=F4)),
            },
            {
                "not normalised": b(mix(raw.astype(F4))),
                "last expert dropped": b(mix(put(w, np.s_[:, -1], 0))),
                "dropped for a token": b(mix(put(w, (13, -1), 0))),
                "two weights swapped": b(mix(w[:, [0, 1, 2, 3, 4, 5, 7, 6]])),
                "first two swapped": b(mix(w[:, [1, 0, 2, 3, 4, 5, 6, 7]])),
                "token dropped": put(golden, 9, 0),
                "weights in bf16": b(mix(b(w))),
                "sum in bf16": b(b_sum(b(y * w[..., None]), 1)),
                "sigmoid": b(mix((sigmoid / sigmoid.sum(1, keepdims=True)).astype(F4))),
                "zero": np.zeros_like(golden),
            },
        )


def softmax(seed: int) -> Iterator[Scenario]:
    for number, (name, std) in enumerate({"flat": 1.0, "peaked": 4.0}.items()):
        x = b(_rng(seed, 7, number).normal(0, std, (8, 4096)))
        shifted = x - x.max(-1, keepdims=True)
        e = np.exp(shifted)
        total = e.sum(-1, keepdims=True, dtype=F4)
        e8 = np.exp(shifted.astype(float))
        two = np.exp2(shifted * F4(1.4426950408889634))
        warm = np.exp(shifted * F4(1.01))
        golden = b(e / total)
        yield Scenario(
            f"softmax/{name}",
            e8 / e8.sum(-1, keepdims=True),
            golden,
            {
                "by powers of two": b(two / two.sum(-1, keepdims=True)),
                "by the inverse": b(e * (1 / total)),
            },
            {
                "zero": np.zeros_like(golden),
                "uniform": np.full_like(golden, 1 / 4096),
                "moved by one": np.roll(golden, 1, -1),
                "sum in bf16": b(e / b_sum(e)[:, None]),
                "tail dropped": b(e / e[:, :-64].sum(-1, keepdims=True)),
                "1% sharper": b(warm / warm.sum(-1, keepdims=True)),
                "truncated": cut(e / total),
            },
        )


OPS: tuple[Callable[[int], Iterator[Scenario]], ...] = (
    *(rms_norm, silu_mul, rope, gemm, attention, moe_combine, softmax),
)


def scenarios(seed: int) -> Iterator[Scenario]:
    """Every op in every regime with the numbers of `seed`."""
    for op in OPS:
        yield from op(seed)
