# SPDX-License-Identifier: Apache-2.0
"""The gated delta net's ops and layer: states, pieces, batches, dtypes."""

import copy

import pytest
import torch

from vllmx.config import KernelConfig, RunConfig, VllmConfig, finalize
from vllmx.exceptions import CheckpointError, UserError
from vllmx.ir.ops.gated_delta_rule import prefills_in_chunks
from vllmx.ir.select import OpTable, load_ops
from vllmx.layers.gated_delta_net import InterleavedLinear, QwenGatedDeltaNetAttention
from vllmx.models.hf_config import HFConfig

OPS = load_ops()
RULES = ("recurrent_gated_delta_rule", "chunk_gated_delta_rule")
VALUES = {
    "model_type": "qwen3_next",
    "hidden_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 32,
    "rms_norm_eps": 1e-6,
}


def inputs_of(op: str, case: int, dtype: torch.dtype = torch.float32) -> dict:
    return OPS[op].generate_inputs(case, dtype, "cpu", torch.Generator().manual_seed(case))


def config_of(config: HFConfig) -> VllmConfig:
    vllm_config = finalize(RunConfig())
    vllm_config.model_config.hf_config = config
    return vllm_config


def layer_of(dtype: torch.dtype = torch.float32, **values: object) -> QwenGatedDeltaNetAttention:
    config = HFConfig({**VALUES, **values})
    ops = OpTable(KernelConfig(default_priority=["torch"]), "cpu", dtype)
    return QwenGatedDeltaNetAttention(
        config, vllm_config=config_of(config), ops=ops, prefix="model.layers.0.linear_attn"
    )


def test_float32_takes_the_recurrence_and_halves_take_chunks() -> None:
    assert not prefills_in_chunks(torch.float32)
    assert layer_of()._prefill is OPS["recurrent_gated_delta_rule"].fn
    for dtype in (torch.bfloat16, torch.float16):
        assert prefills_in_chunks(dtype)
        assert layer_of(dtype)._prefill is OPS["chunk_gated_delta_rule"].fn


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("case", range(4))
def test_chunks_are_the_recurrence(case: int, dtype: torch.dtype) -> None:
    found = []
    for rule in RULES:
        inputs = inputs_of(rule, case, dtype)
        found.append((OPS[rule].fn(**inputs), inputs["ssm_state"]))
    (want, want_state), (got, got_state) = found
    torch.testing.assert_close(got, want, atol=1e-5 if dtype == torch.float32 else 4e-3, rtol=1e-2)
    torch.testing.assert_close(got_state, want_state, atol=5e-5, rtol=1e-4)


def in_pieces(op: str, inputs: dict, sizes: list[int]) -> torch.Tensor:
    """One request, run piece by piece."""
    state = "conv_states" if op.startswith("causal") else "ssm_state"
    flat = [k for k in ("x", "q", "k", "v", "g", "beta") if k in inputs]
    found, start = [], 0
    for size in sizes:
        part = {**inputs, **{k: inputs[k][start : start + size] for k in flat}}
        part["query_start_loc"] = torch.tensor([0, size], dtype=torch.int32)
        part["has_initial_state"] = torch.tensor([start > 0]) | inputs["has_initial_state"]
        found.append(OPS[op].fn(**part))
        start += size
    assert part[state] is inputs[state]
    return torch.cat(found)


@pytest.mark.parametrize("sizes", [[130], [1, 129], [64, 66], [63, 1, 1, 65], [65, 65]])
@pytest.mark.parametrize("rule", RULES)
def test_a_prompt_in_pieces_is_the_prompt_in_one(rule: str, sizes: list[int]) -> None:
    inputs = inputs_of(rule, 3)
    pieces = copy.deepcopy(inputs)
    want, got = OPS[rule].fn(**inputs), in_pieces(rule, pieces, sizes)
    limit = 0.0 if rule.startswith("recurrent") else 2e-6
    torch.testing.assert_close(got, want, atol=limit, rtol=0)
    torch.testing.assert_close(pieces["ssm_state"], inputs["ssm_state"], atol=limit, rtol=0)


@pytest.mark.parametrize("sizes", [[1, 1, 3], [2, 3], [4, 1]])
def test_a_convolution_in_pieces_is_that_in_one(sizes: list[int]) -> None:
    inputs = inputs_of("causal_conv1d_fn", 0)
    pieces = copy.deepcopy(inputs)
    want, got = OPS["causal_conv1d_fn"].fn(**inputs), in_pieces("causal_conv1d_fn", pieces, sizes)
    assert torch.equal(got, want)
    assert torch.equal(pieces["conv_states"], inputs["conv_states"])


def test_a_decode_is_a_prompt_of_one_token() -> None:
    """Bit by bit in float32: the token's place in a batch, or in a prompt, does not matter."""
    inputs = inputs_of("causal_conv1d_update", 0)
    alone = copy.deepcopy(inputs)
    got = OPS["causal_conv1d_update"].fn(**inputs)
    want = OPS["causal_conv1d_fn"].fn(
        x=alone["x"],
        weight=alone["weight"],
        bias=alone["bias"],
        conv_states=alone["conv_state"],
        query_start_loc=torch.tensor([0, 1]),
        cache_indices=alone["conv_state_indices"],
        has_initial_state=torch.tensor([True]),
    )
    assert torch.equal(got, want) and torch.equal(inputs["conv_state"], alone["conv_state"])


@pytest.mark.parametrize("op", ["causal_conv1d_fn", *RULES])
def test_a_request_that_begins_does_not_read_what_its_block_holds(op: str) -> None:
    state = "conv_states" if op.startswith("causal") else "ssm_state"
    found = []
    for filling in (float("nan"), 7.0):
        inputs = inputs_of(op, 0)
        inputs[state].fill_(filling)
        out = OPS[op].fn(**inputs)
        block = int(inputs.get("state_indices", inputs.get("cache_indices"))[0])
        found.append((out, inputs[state][block]))
        assert torch.isfinite(out).all() and torch.isfinite(inputs[state][block]).all()
    for first, second in zip(*found):
        assert torch.equal(first, second)


def test_padding_writes_nothing_and_reads_as_zero() -> None:
    for op, key, state in (
        ("causal_conv1d_update", "conv_state_indices", "conv_state"),
        ("fused_recurrent_gated_delta_rule_packed_decode", "ssm_state_indices", "ssm_state"),
    ):
        inputs = inputs_of(op, 1)
        assert inputs[key][-1] == 0
        inputs[state][0] = float("nan")
        others = [b for b in range(1, len(inputs[state])) if b not in inputs[key].tolist()]
        before = inputs[state].clone()
        out = OPS[op].fn(**inputs)
        assert (out[-1] == 0).all() and torch.isfinite(out).all()
        assert inputs[state][0].isnan().all() and torch.equal(inputs[state][others], before[others])


def test_states_are_of_the_dtypes_that_config_and_flags_say() -> None:
    assert layer_of(torch.bfloat16).get_state_dtype() == (torch.bfloat16, torch.float32)
    named = layer_of(torch.bfloat16, mamba_ssm_dtype="bfloat16")
    assert named.get_state_dtype() == (torch.bfloat16, torch.bfloat16)
    assert layer_of().get_state_shape() == ((256, 3), (4, 32, 32))
    with pytest.raises(CheckpointError, match="mamba_ssm_dtype is 'int8'"):
        layer_of(mamba_ssm_dtype="int8")


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"linear_num_value_heads": 3}, "3 linear value heads cannot share 2 key heads"),
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu'"),
        ({"output_gate_type": "tanh"}, "output_gate_type is 'tanh'"),
        ({"linear_key_head_dim": "32"}, "'linear_key_head_dim' is '32'"),
    ],
)
def test_what_changes_the_maths_and_is_not_served_stops_the_load(
    values: dict, message: str
) -> None:
    with pytest.raises(CheckpointError, match=message):
        layer_of(**values)


def test_interleaved_rows_are_put_part_by_part() -> None:
    ops = OpTable(KernelConfig(default_priority=["torch"]), "cpu", torch.float32)
    layer = InterleavedLinear(
        1, [4, 4, 8], 2, vllm_config=config_of(HFConfig(VALUES)), ops=ops, prefix="in_proj"
    )
    rows = torch.tensor([0, 1, 4, 5, 8, 9, 10, 11, 2, 3, 6, 7, 12, 13, 14, 15.0])
    assert layer.load_weight("weight", None, rows[:, None], "in_proj.weight")
    layer.pack()
    assert layer(torch.ones(1, 1))[0].tolist() == list(range(16))


def test_chunks_are_refused_where_results_must_not_depend_on_the_batch() -> None:
    """Where a prompt is cut, and so its chunks, depends on what shares its steps."""
    config = KernelConfig(batch_invariant=True)
    assert OpTable(config, "cpu", torch.float32).bind("recurrent_gated_delta_rule")
    with pytest.raises(UserError, match=r"chunk_gated_delta_rule.*batch_invariant"):
        OpTable(config, "cpu", torch.bfloat16).bind("chunk_gated_delta_rule")
