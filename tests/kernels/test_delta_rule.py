# SPDX-License-Identifier: Apache-2.0
"""The Triton kernels of the gated delta net, interpreted with a GPU's arithmetic: upstream's
goldens within the limits of any provider, pieces, padding and blocks that hold no numbers."""

import copy
import itertools
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest
import torch

from parity.gpu_arithmetic import as_on_a_gpu
from parity.op_cells import OpCell, expected
from parity.op_replay import Lane
from vllmx.attention.backend import CommonAttentionMetadata
from vllmx.attention.backends.gdn_attn import GDNAttentionMetadataBuilder
from vllmx.config import KernelConfig, RunConfig, finalize
from vllmx.forward_context import ForwardContext, set_forward_context
from vllmx.ir.op import OpContext
from vllmx.ir.select import OpTable, load_ops
from vllmx.layers.gated_delta_net import QwenGatedDeltaNetAttention
from vllmx.layers.parameter import WeightHolder
from vllmx.models.hf_config import HFConfig

OPS = load_ops()
NAMES = (
    "causal_conv1d_fn",
    "causal_conv1d_update",
    "fused_post_conv_prep",
    "fused_recurrent_gated_delta_rule_packed_decode",
    "recurrent_gated_delta_rule",
    "chunk_gated_delta_rule",
)
DECODES = (
    ("causal_conv1d_update", "conv_state_indices", "conv_state"),
    ("fused_recurrent_gated_delta_rule_packed_decode", "ssm_state_indices", "ssm_state"),
)
PROMPTS = (
    ("causal_conv1d_fn", "cache_indices", "conv_states"),
    ("recurrent_gated_delta_rule", "state_indices", "ssm_state"),
    ("chunk_gated_delta_rule", "state_indices", "ssm_state"),
)
VALUES = {
    "model_type": "qwen3_next",
    "hidden_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 32,
    "linear_conv_kernel_dim": 4,
    "rms_norm_eps": 1e-6,
}
SEVERAL = ("mixed/bf16", "alike/f32")


@pytest.fixture(scope="module")
def lane() -> Lane:
    return Lane()


@pytest.fixture(autouse=True)
def gpu_arithmetic() -> Iterator[None]:
    with as_on_a_gpu():
        yield


def cells(op: str) -> list[OpCell]:
    """Those of a GPU, as the interpreter can compute them here; it takes long over single tokens,
    whose steps are the same in every dtype."""
    found = [replace(cell, device="cpu") for cell in expected("cuda", f"op.{op}/", "triton")]
    if op == "recurrent_gated_delta_rule":
        found = [c for c in found if c.case == "shared" or c.case_name in SEVERAL]
    return found


def inputs_of(op: str, case: int, dtype: torch.dtype = torch.float32) -> dict:
    return OPS[op].generate_inputs(case, dtype, "cpu", torch.Generator().manual_seed(case))


def run(op: str, inputs: dict, provider: str = "triton") -> torch.Tensor:
    return OPS[op].impls[provider].fn(**inputs)


@pytest.mark.parametrize("op", NAMES)
def test_upstreams_goldens(lane: Lane, op: str) -> None:
    # What a GPU is refused for what it showed (reports/gpu/lane.md), the interpreter takes.
    found = [replace(cell, refused="") for cell in cells(op)]
    assert found
    lane.prepare(found)
    rows = [lane.row(cell) for cell in found]
    assert [(row["case"], row["reason"]) for row in rows if row["verdict"] != "pass"] == []


@pytest.mark.parametrize(("op", "indices", "state"), [*DECODES, *PROMPTS])
def test_states_are_those_of_the_definition(op: str, indices: str, state: str) -> None:
    for case in (0, 1) if op.startswith("recurrent") else range(4):
        want, got = inputs_of(op, case), inputs_of(op, case)
        assert (want[indices] != 0).any()
        run(op, want, "torch")
        run(op, got)
        torch.testing.assert_close(got[state], want[state], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("number", range(3))
@pytest.mark.parametrize(("op", "indices", "state"), PROMPTS)
def test_a_prompt_in_pieces(op: str, indices: str, state: str, number: int) -> None:
    chunked = op.startswith("chunk")
    whole = inputs_of(op, 3 if chunked else 0)
    flat = [k for k in ("x", "q", "k", "v", "g", "beta") if k in whole]
    sizes = ([1, 129], [64, 66], [63, 1, 1, 65]) if chunked else ([1, 1, 3], [2, 3], [4, 1])
    pieces, found, start = copy.deepcopy(whole), [], 0
    for size in sizes[number]:
        part = {**pieces, **{k: pieces[k][start : start + size] for k in flat}}
        part["query_start_loc"] = torch.tensor([0, size], dtype=torch.int32)
        part["has_initial_state"] = torch.tensor([start > 0]) | whole["has_initial_state"]
        found.append(run(op, part))
        start += size
    want, limit = run(op, whole), 5e-6 if chunked else 0.0
    torch.testing.assert_close(torch.cat(found), want, atol=limit, rtol=0)
    torch.testing.assert_close(pieces[state], whole[state], atol=limit, rtol=0)


@pytest.mark.parametrize(("op", "indices", "state"), DECODES)
def test_padding_writes_nothing_and_reads_as_zero(op: str, indices: str, state: str) -> None:
    inputs = inputs_of(op, 1)
    assert inputs[indices][-1] == 0
    inputs[state][0] = float("nan")
    others = [b for b in range(1, len(inputs[state])) if b not in inputs[indices].tolist()]
    before = inputs[state].clone()
    out = run(op, inputs)
    assert (out[-1] == 0).all() and torch.isfinite(out).all()
    assert inputs[state][0].isnan().all() and torch.equal(inputs[state][others], before[others])


@pytest.mark.parametrize(("op", "indices", "state"), PROMPTS)
def test_a_request_that_begins_reads_no_state(op: str, indices: str, state: str) -> None:
    found = []
    for filling in (float("nan"), 7.0):
        inputs = inputs_of(op, 0)
        inputs[state].fill_(filling)
        out = run(op, inputs)
        found.append((out, inputs[state][int(inputs[indices][0])]))
        assert torch.isfinite(out).all() and torch.isfinite(found[-1][1]).all()
    for first, second in zip(*found):
        assert torch.equal(first, second)


@pytest.mark.parametrize(("op", "indices", "state"), [*DECODES, *PROMPTS[:2]])
def test_a_request_gives_its_bits_in_any_batch(op: str, indices: str, state: str) -> None:
    inputs = inputs_of(op, 1)
    alone = copy.deepcopy(inputs)
    together = run(op, inputs)
    starts = inputs.get("query_start_loc", torch.arange(len(inputs[indices]) + 1)).tolist()
    rows = ("x", "q", "k", "v", "g", "beta", "mixed_qkv", "a", "b")
    for i, (start, stop) in enumerate(itertools.pairwise(starts)):
        one = {k: v[start:stop] if k in rows else v for k, v in alone.items()}
        one[indices] = alone[indices][i : i + 1]
        if "query_start_loc" in alone:
            one["query_start_loc"] = torch.tensor([0, stop - start], dtype=torch.int32)
            one["has_initial_state"] = alone["has_initial_state"][i : i + 1]
        assert torch.equal(run(op, one), together[start:stop])
    assert torch.equal(alone[state], inputs[state])


def test_rows_may_lie_apart_and_states_in_pages() -> None:
    """As the layer hands them over: parts of wider rows, states beside others' in a page, and their
    blocks as a column of a table."""
    for op, name, indices, state in (
        ("causal_conv1d_fn", "x", "cache_indices", "conv_states"),
        ("causal_conv1d_update", "x", "conv_state_indices", "conv_state"),
        (DECODES[1][0], "mixed_qkv", "ssm_state_indices", "ssm_state"),
        ("recurrent_gated_delta_rule", "q", "state_indices", "ssm_state"),
        ("chunk_gated_delta_rule", "q", "state_indices", "ssm_state"),
    ):
        inputs = inputs_of(op, 1)
        apart = copy.deepcopy(inputs)
        x, held = apart[name], apart[state]
        apart[name] = torch.cat((x, torch.full_like(x, float("nan"))), dim=1)[:, : x.shape[1]]
        column = apart[indices]
        apart[indices] = torch.stack((column, torch.zeros_like(column)), dim=1)[:, 0]
        assert apart[indices].stride(0) == 2
        pages = torch.full((len(held), held[0].numel() + 40), float("nan"))
        pages[:, : held[0].numel()] = held.flatten(1)
        apart[state] = pages[:, : held[0].numel()].view(held.shape)
        assert torch.equal(run(op, apart), run(op, inputs))
        assert torch.equal(apart[state], inputs[state])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_gpu_takes_them_and_says_why_not(dtype: torch.dtype) -> None:
    ops = OpTable(KernelConfig(), "cuda", dtype)
    for op in NAMES:
        impl = OPS[op].impls["triton"]
        if impl.supported is True:
            assert ops.choose(op, head_k_dim=128, head_v_dim=128).provider == "triton"
        assert impl.supports(OpContext("cpu", dtype)) == "runs on a GPU, not on cpu"
    huge = OpContext("cuda", dtype, {"head_k_dim": 512, "head_v_dim": 128})
    for op in NAMES[2:]:
        assert "at most 256 elements, not 512" in OPS[op].impls["triton"].supports(huge)


def load_seeded(layer: QwenGatedDeltaNetAttention) -> None:
    """Weights of a seed, the same for every layer."""
    generator = torch.Generator().manual_seed(2)
    for module in layer.modules():
        if isinstance(module, WeightHolder):
            for (param, shard), shape in module.expected_weights().items():
                weight = torch.randn(*shape, generator=generator) * 0.3
                module.load_weight(param, shard, weight, param)
            module.pack()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_layer_of_the_kernels_is_that_of_the_definitions(dtype: torch.dtype) -> None:
    """A step with decodes and prompts, fresh ones and such that go on, as the engine makes it."""
    config = HFConfig(VALUES)
    vllm_config = finalize(RunConfig())
    vllm_config.model_config.hf_config = config
    torch.manual_seed(0)
    hidden, found = torch.randn(1 + 1 + 70 + 3, 64).to(dtype), []
    starts, lengths = np.array([0, 1, 2, 72, 75], np.int32), np.array([9, 1, 70, 40], np.int32)
    common = CommonAttentionMetadata(
        query_start_loc=torch.from_numpy(starts),
        query_start_loc_np=starts,
        seq_lens=torch.from_numpy(lengths),
        seq_lens_np=lengths,
        num_reqs=4,
        num_actual_tokens=75,
        max_query_len=70,
        max_seq_len=70,
        block_table_tensor=torch.tensor([[3, 7], [1, 7], [4, 7], [2, 7]], dtype=torch.int32)[:, :1],
        slot_mapping=torch.empty(0, dtype=torch.int64),
    )
    for provider in ("torch", "triton"):
        ops = OpTable(KernelConfig(default_priority=["torch"]), "cpu", dtype)
        layer = QwenGatedDeltaNetAttention(
            config, vllm_config=vllm_config, ops=ops, prefix="model.layers.0.linear_attn"
        )
        load_seeded(layer)
        if provider == "triton":
            for held, op in (
                ("_conv", "causal_conv1d_fn"),
                ("_conv_update", "causal_conv1d_update"),
                ("_prep", "fused_post_conv_prep"),
                ("_decode", DECODES[1][0]),
                ("_prefill", PROMPTS[1 if dtype == torch.float32 else 2][0]),
            ):
                setattr(layer, held, OPS[op].impls["triton"].fn)
        generator = torch.Generator().manual_seed(3)
        layer.bind_kv_cache(
            tuple(
                torch.randn(6, *shape, generator=generator).to(kind)
                for shape, kind in zip(layer.get_state_shape(), layer.get_state_dtype())
            )
        )
        metadata = GDNAttentionMetadataBuilder(16, torch.device("cpu")).build(common)
        with set_forward_context(ForwardContext({layer.layer_name: metadata})):
            found.append((layer(hidden.clone()), *layer.kv_cache))
    limit = 1e-5 if dtype == torch.float32 else 2e-2
    for want, got in zip(*found):
        torch.testing.assert_close(got.float(), want.float(), atol=limit, rtol=limit)
