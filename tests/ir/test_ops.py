# SPDX-License-Identifier: Apache-2.0
"""Every provider of every op against the op's definition, on the op's own inputs."""

import copy

import pytest
import torch

from vllmx.ir.op import REFERENCE, IrOp, IrOpImpl, OpContext
from vllmx.ir.select import load_ops

CASES = 8
TOKEN_BY_TOKEN = {"recurrent_gated_delta_rule": 2}
"""Cases of ops over which Triton's interpreter takes a second for each few tokens."""
WRITTEN = ("key_cache", "value_cache", "conv_states", "conv_state", "ssm_state")
"""Arguments that ops write in place."""
OPS = load_ops()
PROVIDERS = [(op, impl) for op in OPS.values() for impl in op.impls.values()]
OTHERS = [(op, impl) for op, impl in PROVIDERS if impl.provider not in (REFERENCE, "flashinfer")]
"""FlashInfer's kernels have no interpreter: tests/gpu/test_flashinfer.py runs them."""


def name(pair: object) -> str:
    return f"{pair.op.name}-{pair.provider}" if isinstance(pair, IrOpImpl) else pair.name


def inputs_of(op: IrOp, case: int, dtype: torch.dtype) -> dict:
    generator = torch.Generator().manual_seed(case)
    return op.generate_inputs(case, dtype, "cpu", generator)


def outputs_of(impl: IrOpImpl, inputs: dict) -> list[torch.Tensor]:
    """What `impl` returns and, for an op that writes in place, what it wrote."""
    inputs = copy.deepcopy(inputs)
    kept = dict(inputs)
    if impl.prepare is not None:
        inputs["prepared"] = impl.prepare(*(inputs.pop(k) for k in impl.op.static_args))
    result = impl.op.canonical(impl.fn(**inputs))
    written = [] if impl.op.name == "paged_attention" else [kept[k] for k in WRITTEN if k in kept]
    results = result if isinstance(result, tuple) else (result,)
    return [t for t in results if t is not None] + written


def test_every_op_has_inputs_and_a_reference() -> None:
    for op in OPS.values():
        assert op.generate_inputs is not None, op.name
        assert REFERENCE in op.impls
        outputs = outputs_of(op.impls[REFERENCE], inputs_of(op, 0, torch.float32))
        assert all(torch.isfinite(out).all() for out in outputs)


def test_the_ops_of_a_dense_decoder_are_all_there() -> None:
    assert set(OPS) >= {
        "rms_norm",
        "fused_add_rms_norm",
        "silu_and_mul",
        "gelu_and_mul",
        "rotary_embedding",
        "reshape_and_cache",
        "paged_attention",
        "linear",
        "embedding",
        "dequantize_gguf",
    }
    assert sum("triton" in op.impls for op in OPS.values()) >= 3


REFUSED_IN_FLOAT32 = {
    ("fused_post_conv_prep", "triton"),
    ("recurrent_gated_delta_rule", "triton"),
}
"""By what an H200 showed; tests/kernels/test_delta_rule.py looks at them all the same."""


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("pair", OTHERS, ids=lambda pair: name(pair[1]))
def test_provider_agrees_with_the_reference(
    pair: tuple[IrOp, IrOpImpl], dtype: torch.dtype
) -> None:
    op, impl = pair
    tolerance = op.tolerances[dtype]
    tried = 0
    interpreted = impl.provider.startswith("triton")
    for case in range(TOKEN_BY_TOKEN.get(op.name, CASES) if interpreted else CASES):
        inputs = inputs_of(op, case, dtype)
        # Triton's interpreter stands in for a GPU; the others are asked as the engine asks.
        device = "cuda" if interpreted else "cpu"
        if impl.refusal(OpContext(device, dtype, op.facts_of(**inputs))) is not None:
            continue
        tried += 1
        want = outputs_of(op.impls[REFERENCE], inputs)
        got = outputs_of(impl, inputs)
        for w, g in zip(want, got, strict=True):
            assert g.dtype == w.dtype and g.shape == w.shape
            torch.testing.assert_close(g, w, atol=tolerance.atol, rtol=tolerance.rtol)
    if dtype == torch.float32 and (op.name, impl.provider) not in REFUSED_IN_FLOAT32:
        assert tried, f"{name(impl)} was never tried"


@pytest.mark.parametrize("pair", OTHERS, ids=lambda pair: name(pair[1]))
def test_a_planted_fault_in_the_reference_is_seen(pair: tuple[IrOp, IrOpImpl]) -> None:
    """The comparison has teeth: a result scaled by 1 + 1e-3 is outside float32's tolerance."""
    op, _ = pair
    tolerance = op.tolerances[torch.float32]
    seen = 0
    for case in range(CASES):
        for want in outputs_of(op.impls[REFERENCE], inputs_of(op, case, torch.float32)):
            if not want.is_floating_point():
                continue
            seen += not torch.allclose(want * 1.001, want, atol=tolerance.atol, rtol=tolerance.rtol)
    assert seen >= CASES // 2


def test_a_provider_with_other_parameters_is_refused() -> None:
    with pytest.raises(ValueError, match=r"takes \['x', 'w'\], the op takes \['x'"):
        OPS["rms_norm"].register_impl("wrong")(lambda x, w: x)
    assert "wrong" not in OPS["rms_norm"].impls


def test_a_provider_is_registered_once() -> None:
    with pytest.raises(ValueError, match="already has a provider cpu"):
        OPS["silu_and_mul"].register_impl("cpu")(lambda x: x)
