# SPDX-License-Identifier: Apache-2.0
"""What claims that a row's result depends on the row alone is held to it, bit by bit."""

import copy

import pytest
import torch
from interpreter import multiply_row_by_row

from vllmx.attention.batch_invariant import VARIANTS
from vllmx.config import KernelConfig
from vllmx.exceptions import UserError
from vllmx.ir.op import IrOp, IrOpImpl, OpContext
from vllmx.ir.row_by_row import row_by_row
from vllmx.ir.select import NOBODY, OpTable, explain, load_ops

OPS = load_ops()
ROWS = 70
COUNTS = (1, 2, 3, 7, 8, 16, 17, 33, 64, 65)
ROW_OPS = {
    # op: (arguments with a row for each token, what to draw)
    "rms_norm": ("x",),
    "fused_add_rms_norm": ("x", "x_residual"),
    "silu_and_mul": ("x",),
    "gelu_and_mul": ("x",),
    "linear": ("x",),
    "embedding": ("input_ids",),
    "rotary_embedding": ("positions", "query", "key"),
    "rms_norm_gated": ("x", "z"),
    "mul_sigmoid": ("x", "gate"),
    "topk_softmax": ("gating_output",),
    "fused_qk_rmsnorm_rope_gate": ("q_gate", "k", "positions"),
}
CLAIMS = [
    (OPS[name], impl)
    for name in ROW_OPS
    for impl in OPS[name].impls.values()
    if impl.batch_invariant
]


def drawn(op: str, width: int, dtype: torch.dtype, form: str) -> dict:
    generator = torch.Generator().manual_seed(width)

    def normal(*shape: int) -> torch.Tensor:
        return (torch.randn(*shape, generator=generator) * 2).to(dtype)

    angles = torch.arange(90).unsqueeze(1) * torch.logspace(0, -3, width // 4)
    return {
        "rms_norm": lambda: {"x": normal(ROWS, width), "weight": normal(width), "epsilon": 1e-6},
        "fused_add_rms_norm": lambda: {
            "x": normal(ROWS, width),
            "x_residual": normal(ROWS, width),
            "weight": normal(width),
            "epsilon": 1e-6,
        },
        "silu_and_mul": lambda: {"x": normal(ROWS, width)},
        "gelu_and_mul": lambda: {"x": normal(ROWS, width), "approximate": form},
        "linear": lambda: {
            "x": normal(ROWS, width),
            "weight": normal(70, width),
            "bias": normal(70) if form == "tanh" else None,
        },
        "embedding": lambda: {
            "input_ids": torch.arange(ROWS) * 3 % 50,
            "weight": normal(50, width),
        },
        "rms_norm_gated": lambda: {
            "x": normal(ROWS, width),
            "weight": normal(width),
            "z": normal(ROWS, width),
            "epsilon": 1e-6,
        },
        "mul_sigmoid": lambda: {"x": normal(ROWS, width), "gate": normal(ROWS, width)},
        "topk_softmax": lambda: {
            "gating_output": normal(ROWS, width),
            "topk": 4,
            "renormalize": form == "tanh",
        },
        "fused_qk_rmsnorm_rope_gate": lambda: {
            "q_gate": normal(ROWS, 2 * width),
            "k": normal(ROWS, width),
            "q_weight": normal(width // 2),
            "k_weight": normal(width // 2),
            "cos_sin_cache": torch.cat((angles.cos(), angles.sin()), dim=-1),
            "positions": torch.arange(ROWS) + 3,
            "epsilon": 1e-6,
        },
        "rotary_embedding": lambda: {
            "positions": torch.arange(ROWS) + 3,
            "query": normal(ROWS, width),
            "key": normal(ROWS, width),
            "head_size": width // 2,
            "cos_sin_cache": torch.cat((angles.cos(), angles.sin()), dim=-1),
            "is_neox_style": form == "tanh",
        },
    }[op]()


def run(impl: IrOpImpl, inputs: dict) -> tuple[torch.Tensor, ...]:
    inputs = copy.deepcopy(inputs)
    if impl.prepare is not None:
        inputs["prepared"] = impl.prepare(*(inputs.pop(k) for k in impl.op.static_args))
    got = (impl.invariant_fn or impl.fn)(**inputs)
    return tuple(t for t in (got if isinstance(got, tuple) else (got,)) if t is not None)


def rows_of(inputs: dict, names: tuple[str, ...], rows: slice) -> dict:
    return inputs | {name: inputs[name][rows] for name in names}


def accepted(impl: IrOpImpl, inputs: dict, dtype: torch.dtype) -> bool:
    device = impl.batch_invariant[0]
    facts = impl.op.facts_of(**inputs)
    return impl.refusal(OpContext(device, dtype, facts)) is None


@pytest.fixture
def threads(request):
    """Threads of torch; Triton's interpreter runs a program after another whatever there are."""
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def _products(monkeypatch: pytest.MonkeyPatch) -> None:
    multiply_row_by_row(monkeypatch)


def threads_of(provider: str) -> tuple[int, ...]:
    return (1,) if provider.startswith("triton") else (1, 2)


@pytest.mark.parametrize(
    ("pair", "threads"),
    [
        pytest.param(pair, n, id=f"{n} threads-{pair[0].name}-{pair[1].provider}")
        for pair in CLAIMS
        for n in threads_of(pair[1].provider)
    ],
    indirect=["threads"],
)
def test_a_row_alone_and_among_others(pair: tuple[IrOp, IrOpImpl], threads: int) -> None:
    op, impl = pair
    names, tried = ROW_OPS[op.name], 0
    interpreted = impl.provider.startswith("triton")
    counts = (1, 17, 65) if interpreted else COUNTS
    looked_at = [0, 1, 5, 16, 33, 64, 69] if interpreted else list(range(ROWS))
    for width in (164,) if interpreted else (64, 100, 576, 1536):
        for form in ("none", "tanh"):
            inputs = drawn(op.name, width, torch.float32, form)
            if not accepted(impl, inputs, torch.float32):
                continue
            tried += 1
            alone = {i: run(impl, rows_of(inputs, names, slice(i, i + 1))) for i in looked_at}
            for count in counts:
                for start in (0, ROWS - count):
                    got = run(impl, rows_of(inputs, names, slice(start, start + count)))
                    for i in set(looked_at) & set(range(start, start + count)):
                        for part, want in zip(got, alone[i], strict=True):
                            row = part[i - start : i - start + 1]
                            assert torch.equal(row, want), (width, form, count, start, i)
    assert tried


def test_the_probe_sees_a_kernel_that_is_chosen_by_the_number_of_rows() -> None:
    """Negative controls: a library's matrix product, and a norm that switches at 64 rows."""
    inputs = drawn("linear", 576, torch.float32, "none")
    fn = OPS["linear"].fn
    whole = fn(**inputs)
    alone = torch.cat([fn(**rows_of(inputs, ("x",), slice(i, i + 1))) for i in range(ROWS)])
    assert not torch.equal(whole, alone)
    norm = OPS["rms_norm"].impls["cpu"]
    assert not norm.batch_invariant
    inputs = drawn("rms_norm", 576, torch.float32, "none")
    few = run(norm, rows_of(inputs, ("x",), slice(0, 8)))[0]
    assert not torch.equal(run(norm, inputs)[0][:8], few)


# ---------------------------------------------------------------- attention

LENGTHS = (1, 5, 16, 33, 70)
"""Tokens of each request in the end."""


def cache_of(head_size: int, block_size: int) -> dict:
    generator = torch.Generator().manual_seed(head_size)
    width = -(-max(LENGTHS) // block_size)
    blocks = torch.randperm(width * len(LENGTHS), generator=generator) + 1
    shape = (width * len(LENGTHS) + 1, block_size, 2, 2, head_size)
    cache = torch.randn(shape, generator=generator)
    queries = [torch.randn(n, 4, head_size, generator=generator) * 2 for n in LENGTHS]
    table = blocks.view(len(LENGTHS), width).int()
    return {"cache": cache, "table": table, "queries": queries}


def attend(backend, made: dict, batch: list[tuple[int, int, int]], **how) -> list[torch.Tensor]:
    """batch: (request, first new token, one past the last) -> outputs of each."""
    parts = [made["queries"][r][a:b] for r, a, b in batch]
    starts = torch.tensor([0, *(b - a for _, a, b in batch)]).cumsum(0).int()
    out = backend.op_call(
        query=torch.cat(parts),
        key_cache=made["cache"][:, :, 0],
        value_cache=made["cache"][:, :, 1],
        block_table=made["table"][[r for r, _, _ in batch]],
        query_start_loc=starts,
        seq_lens=torch.tensor([b for _, _, b in batch], dtype=torch.int32),
        scale=0.2,
        **how,
    )
    return list(out.split([b - a for _, a, b in batch]))


@pytest.mark.parametrize(
    ("name", "threads"),
    [(name, n) for name in VARIANTS for n in threads_of(name)],
    indirect=["threads"],
)
@pytest.mark.parametrize("how", [{}, {"sliding_window": 9}, {"soft_cap": 5.0}], ids=str)
def test_attention_of_a_token_whoever_shares_the_step(name: str, how: dict, threads: int) -> None:
    backend, devices = VARIANTS[name]
    assert backend.refusal(OpContext(devices[-1], torch.float32, {"head_size": 32})) is True
    for head_size, block_size in ((32, 16), (64, 8))[: 1 if name == "triton" else 2]:
        made = cache_of(head_size, block_size)
        # Each token as a decode of its own.
        want = [
            torch.cat([attend(backend, made, [(r, i, i + 1)], **how)[0] for i in range(n)])
            for r, n in enumerate(LENGTHS)
        ]
        whole = [(r, 0, n) for r, n in enumerate(LENGTHS)]
        # The runner brings the shortest first.
        mixed = [(4, 69, 70), (2, 15, 16), (1, 3, 5), (3, 20, 33)]
        chunks = [(4, 0, 7)], [(4, 7, 40), (3, 0, 33)], [(3, 30, 33), (4, 40, 70)]
        for batch in ([w] for w in whole), [whole], [mixed], chunks:
            for step in batch:
                for (r, a, b), got in zip(step, attend(backend, made, step, **how), strict=True):
                    assert torch.equal(got, want[r][a:b]), (step, r)


@pytest.mark.parametrize("name", VARIANTS)
def test_attention_variants_agree_with_the_definition(name: str) -> None:
    backend, _ = VARIANTS[name]
    for case in range(7):
        inputs = OPS["paged_attention"].generate_inputs(
            case, torch.float32, "cpu", torch.Generator().manual_seed(case)
        )
        want = OPS["paged_attention"].fn(**inputs)
        torch.testing.assert_close(backend.op_call(**inputs), want, atol=1e-5, rtol=1e-5)


def test_attention_as_it_is_by_default_does_depend_on_the_chunk() -> None:
    made = cache_of(64, 16)
    impl = OPS["paged_attention"].impls["sdpa"]
    assert not impl.batch_invariant

    class Sdpa:
        op_call = staticmethod(impl.fn)

    whole = attend(Sdpa, made, [(4, 0, 70)])[0]
    chunked = torch.cat([attend(Sdpa, made, [(4, a, a + 7)])[0] for a in range(0, 70, 7)])
    assert not torch.equal(whole, chunked)


# ---------------------------------------------------------------- the choice


def table(device: str, **config) -> OpTable:
    return OpTable(KernelConfig(batch_invariant=True, **config), device, torch.float32)


def test_what_depends_on_the_batch_is_refused_with_that_reason() -> None:
    with pytest.raises(UserError, match=r"rms_norm: provider cpu cannot be used: .*other rows"):
        table("cpu", ir_op_priority={"rms_norm": ["cpu"]}).choose("rms_norm")
    with pytest.raises(UserError, match=r"attention.backend=sdpa: .*kernel.batch_invariant"):
        table("cpu").choose_attention("sdpa", head_size=64)
    with pytest.raises(UserError, match="op qk_norm_rope_decode: no provider takes it on cuda"):
        table("cuda").choose("qk_norm_rope_decode", head_size=64)


def chosen(device: str, dtype: torch.dtype, **config) -> dict[str, str]:
    return {choice.op: choice.provider for choice in explain(KernelConfig(**config), device, dtype)}


def test_the_providers_of_each_device() -> None:
    cpu = chosen("cpu", torch.float32, batch_invariant=True)
    fbgemm = OPS["linear"].impls["fbgemm"]
    assert cpu["linear"] == ("fbgemm" if fbgemm.batch_invariant else "torch")
    assert cpu["paged_attention"] == "native"
    assert cpu["rms_norm"] == "native" and cpu["linear_add"] == NOBODY
    gpu = chosen("cuda", torch.bfloat16, batch_invariant=True)
    assert gpu["linear"] == "triton_fixed" and gpu["paged_attention"] == "triton"
    assert gpu["rms_norm"] == "triton" and gpu["rms_norm_linear"] == NOBODY
    plain = chosen("cuda", torch.bfloat16)
    assert plain["linear"] == "torch" and plain["linear_add"] == "triton"


def test_fbgemm_claims_it_where_there_is_avx512_alone() -> None:
    claims = OPS["linear"].impls["fbgemm"].batch_invariant == ("cpu",)
    assert claims == (torch.backends.cpu.get_cpu_capability() == "AVX512")


def test_the_torch_definition_is_called_for_each_row() -> None:
    calls = []

    def fn(x, y, factor=2, other=None):
        calls.append((len(x), len(y), factor))
        return x * factor, None if other is None else other[:1] + y

    each = row_by_row(fn, "x", "y")
    x, y = torch.arange(6.0).view(3, 2), torch.ones(3, 1)
    out, nothing = each(x, y=y, factor=3)
    assert torch.equal(out, x * 3) and nothing is None
    assert calls == [(1, 1, 3)] * 3
    assert each(x[:0], y[:0])[0].shape == (0, 2)
    assert row_by_row(lambda a: a + 1)(x).equal(x + 1)
