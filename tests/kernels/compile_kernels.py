# SPDX-License-Identifier: Apache-2.0
"""Compiles every Triton kernel of vllmx for a Hopper GPU; needs none. A child of test_compile.py.

Prints a JSON object: by kernel and number of its row in `KERNELS` the error, empty if there is
none, and under `refused` that of a kernel which no compiler may take.
"""

from __future__ import annotations

import importlib
import json
import os
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.experimental.gluon._runtime import GluonASTSource

TARGET = GPUTarget("cuda", 90, 32)
I32, I64, F32 = "*i32", "*i64", "*fp32"
TYPES = {
    "epsilon": "fp32",
    "scale": "fp32",
    "key_scale": "fp32",
    "value_scale": "fp32",
    "soft_cap": "fp32",
    "positions_ptr": I64,
    "slots_ptr": I64,
    "angles_ptr": F32,
    "squares_ptr": F32,
    "out_squares_ptr": F32,
    "part_ptr": F32,
    "best_ptr": F32,
    **dict.fromkeys(
        (
            "block_table_ptr",
            "blocks_ptr",
            "count_ptr",
            "groups_ptr",
            "ids_ptr",
            "input_ids_ptr",
            "place_ptr",
            "places_ptr",
            "query_start_ptr",
            "requests_ptr",
            "ring_ptr",
            "ring_slot_ptr",
            "rows_ptr",
            "seq_lens_ptr",
            "starts_ptr",
            "table_ptr",
            "tile_ptr",
            "tokens_ptr",
            "values_ptr",
        ),
        I32,
    ),
}
"""Of arguments, by name; others are bfloat16 where they are pointers, else int32."""

NORM = {"HAS_RESIDUAL": True, "HAS_WEIGHT": True, "BLOCK": 1024}
HEADS = {"HEAD_SIZE": 128, "COLUMNS": 128, "BLOCK_SIZE": 16}
ATTENTION = {**HEADS, "GROUP": 2, "HAS_CAP": False, "HAS_WINDOW": False, "WIDE": False}
ATTENTION |= {"HAS_SINKS": False, "IN_CHUNKS": False}
HOPPER = {"GROUP": 2, "BLOCK_SIZE": 16, "STAGES": 2, "REGISTERS": 216}
HOPPER_128, HOPPER_64 = {"HEAD_SIZE": 128, "KEYS": 128}, {"HEAD_SIZE": 64, "KEYS": 128}
DECODE = {**ATTENTION, "ROWS": 16, "KEYS": 64}
PREFILL = {**ATTENTION, "ROWS": 64, "TOKENS": 32, "KEYS": 32, "MASKS_ALL": False}
FIXED = {"INPUTS": 960, "ROWS": 64, "OUTPUTS": 32, "COLUMNS": 128, "HAS_BIAS": True, "WIDE": False}
STEP = {"NUM_HEADS": 16, "GROUP": 2, "ROWS": 16, "HALF": 64, "BLOCK_SIZE": 16, "KEYS": 64}
STEP |= {"NORM": True, "LIMIT": 0.0, "WIDE": False}
FEW = {"INPUTS": 1088, "ROWS": 16, "OUTPUTS": 32, "COLUMNS": 512, "SPLITS": 3, "GATED": False}
FEW |= {"ADDS": False, "NORMS": True, "PARTS": 18, "PARTS_BLOCK": 32, "ONE_ROW": False}
FEW |= {"WIDE": False}
ONE = {"ROWS": 1, "OUTPUTS": 16, "COLUMNS": 1024, "ONE_ROW": True}
WHOLE = {"INPUTS": 960, "OUTPUTS": 8, "COLUMNS": 1024, "SPLITS": 1}
GATED = {"GATED": True, "INPUTS": 1024, "OUTPUTS": 64, "COLUMNS": 256, "SPLITS": 4}
ADDS = {"ADDS": True, "NORMS": False, "PARTS": 1, "PARTS_BLOCK": 1}
CACHE = {"NUM_HEADS": 16, "NUM_KV_HEADS": 8, "HEAD_SIZE": 128, "COLUMNS": 64, "BLOCK_SIZE": 16}
CACHE |= {"HEADS": 4, "HAS_WEIGHTS": True, "LIMIT": 0.0}
GATE = {"NUM_HEADS": 16, "NUM_KV_HEADS": 2, "HEAD_SIZE": 256, "ROTARY_DIM": 64, "COLUMNS": 256}
ODD_HEADS = {"NUM_KV_HEADS": 16, "HEAD_SIZE": 80, "ROTARY_DIM": 20, "COLUMNS": 128}
GATE_WEIGHTS = {"q_weight_ptr": F32, "k_weight_ptr": F32}
FP8 = {"key_cache_ptr": "*fp8e4nv", "value_cache_ptr": "*fp8e4nv"}
CONV = {"WIDTH": 4, "HAS_BIAS": False, "SILU": True, "CHANNELS": 128}
PROMPT_CONV = CONV | {"TOKENS": 32, "REQUESTS": 8}
RULE = {"KEY_HEADS": 16, "VALUE_HEADS": 32, "KEY_SIZE": 128, "VALUE_SIZE": 128, "COLUMNS": 128}
ROWS = {**RULE, "ROWS": 32}
SYSTEMS = {k: v for k, v in RULE.items() if k != "VALUE_SIZE"} | {"CHUNK": 64, "REQUESTS": 8}
GATES = {"A_log_ptr": F32, "g_ptr": F32, "beta_ptr": F32, "state_ptr": F32}
REQUEST = {"has_state_ptr": "*u8", "from_start_ptr": F32, "to_end_ptr": F32, "inverse_ptr": F32}
SINGLES = dict.fromkeys(("q_ptr", "k_ptr", "v_ptr", "inside_ptr", "out_ptr"), F32)
SINGLE, WRITES = {"weight_ptr": F32}, {"out_ptr": I32}
EXPERTS = {"INPUTS": 960, "EXPERTS": 60, "EXPERTS_BLOCK": 64, "ROWS": 16, "OUTPUTS": 64}
EXPERTS |= {"COLUMNS": 128, "HAS_BIAS": False, "WIDE": False}
GATE_UP = {**EXPERTS, "TOPK": 4, "ACTIVATION": "silu"}
CLAMPED = {"ACTIVATION": "swigluoai_uninterleave", "HAS_BIAS": True, "ROWS": 128}
ROUTE = {"EXPERTS": 60, "BLOCK": 64, "TOPK": 6, "PLACES": 8, "SOFTMAX": True}
ROUTE |= {"RENORMALIZE": True, "HAS_BIAS": False}
WEIGHTS = {"weights_ptr": F32}
SAMPLE = dict.fromkeys(
    (
        "logits_ptr",
        "presence_ptr",
        "frequency_ptr",
        "repetition_ptr",
        "temperature_ptr",
        "top_p_ptr",
    ),
    F32,
) | dict.fromkeys(("place_ptr", "index_ptr", "seeds_ptr", "top_k_ptr"), I64)
SAMPLE |= {"in_prompt_ptr": "*i1"}
NOISE64 = {"best_ptr": "*fp64"}
VALUES, RANKS = {"IDS": 32, "BLOCK": 4096}, {"ids_ptr": I64, "ranks_ptr": I32, "scores_ptr": F32}
TOP_K = {"HAS_K": True, "PLACES": 288, "BLOCK": 4096}
NO_P = {"HAS_P": False, "top_p_ptr": None}
NO_K = {"HAS_K": False, "top_k_ptr": None, "HAS_P": True}
SUMS = {"sums_ptr": I64, "arrived_ptr": I64}
INPUTS = {"BLOCK_SIZE": 16, "BLOCK": 256}

Row = tuple[str, str, dict[str, Any], dict[str, str]]
KERNELS: list[Row] = [
    # module, kernel, constants, types that differ from TYPES
    ("triton_ops", "_rms_norm_kernel", NORM, {}),
    ("triton_ops", "_rms_norm_kernel", NORM | {"HAS_RESIDUAL": False, "HAS_WEIGHT": False}, {}),
    ("triton_ops", "_silu_and_mul_kernel", {"BLOCK": 1024}, {}),
    ("triton_ops", "_gelu_and_mul_kernel", {"BLOCK": 1024, "TANH": True}, {}),
    ("triton_ops", "_gelu_and_mul_kernel", {"BLOCK": 1024, "TANH": False}, {}),
    ("triton_ops", "_rotary_kernel", {"NEOX": True, "BLOCK": 128}, {"cache_ptr": F32}),
    ("triton_ops", "_rotary_kernel", {"NEOX": False, "BLOCK": 128}, {"cache_ptr": F32}),
    (
        "triton_cache",
        "_reshape_and_cache_kernel",
        {"BLOCK_SIZE": 16, "SIZE": 960, "COLUMNS": 1024, "LIMIT": 448.0},
        FP8,
    ),
    ("triton_cache", "_qk_norm_rope_cache_kernel", CACHE, {}),
    ("triton_cache", "_qk_norm_rope_cache_kernel", CACHE | {"LIMIT": 448.0}, FP8),
    ("triton_qk_norm_gate", "_qk_norm_rope_gate_kernel", GATE, GATE_WEIGHTS),
    ("triton_qk_norm_gate", "_qk_norm_rope_gate_kernel", GATE | ODD_HEADS, GATE_WEIGHTS),
    ("triton_attention", "_decode_kernel", DECODE | {"SPLITS": 8}, SINGLE),
    (
        "triton_attention",
        "_decode_kernel",
        DECODE | {"SPLITS": 1, "HEAD_SIZE": 96, "HAS_WINDOW": True, "HAS_CAP": True},
        SINGLE,
    ),
    # Blocks that hold a recurrent state have any number of tokens.
    ("triton_attention", "_decode_kernel", DECODE | {"SPLITS": 8, "BLOCK_SIZE": 784}, SINGLE),
    ("triton_attention", "_prefill_kernel", PREFILL | {"BLOCK_SIZE": 784}, {}),
    ("triton_attention", "_prefill_kernel", PREFILL, {}),
    ("triton_attention", "_prefill_kernel", PREFILL | {"HAS_SINKS": True}, {}),
    ("triton_attention", "_decode_kernel", DECODE | {"SPLITS": 8, "HAS_SINKS": True}, SINGLE),
    ("triton_attention", "_prefill_kernel", PREFILL | {"IN_CHUNKS": True}, {}),
    ("triton_attention", "_decode_kernel", DECODE | {"SPLITS": 8, "IN_CHUNKS": True}, SINGLE),
    ("triton_attention", "_prefill_kernel", PREFILL | {"MASKS_ALL": True}, {}),
    ("triton_fixed_linear", "_fixed_tiles_linear_kernel", FIXED, {}),
    ("triton_attention", "_prefill_kernel", PREFILL | {"HAS_WINDOW": True, "HAS_CAP": True}, {}),
    (
        "triton_attention",
        "_join_splits_kernel",
        {"HEAD_SIZE": 128, "COLUMNS": 128, "SPLITS": 8},
        SINGLE,
    ),
    ("triton_decode", "_decode_step_kernel", STEP | {"SPLITS": 1}, SINGLE),
    (
        "triton_decode",
        "_decode_step_kernel",
        STEP | {"SPLITS": 8, "NORM": False, "HALF": 32},
        SINGLE,
    ),
    (
        "triton_decode",
        "_decode_step_kernel",
        STEP | {"SPLITS": 1, "LIMIT": 448.0},
        SINGLE | {"key_ptr": "*fp8e4nv", "value_ptr": "*fp8e4nv"},
    ),
    ("triton_linear", "_few_rows_linear_kernel", FEW, {}),
    ("triton_linear", "_few_rows_linear_kernel", FEW | GATED, {}),
    ("triton_linear", "_few_rows_linear_kernel", FEW | ADDS, {}),
    ("triton_linear", "_few_rows_linear_kernel", FEW | ADDS | {"SPLITS": 1, "INPUTS": 512}, {}),
    ("triton_linear", "_few_rows_linear_kernel", FEW | ONE, {}),
    ("triton_linear", "_few_rows_linear_kernel", FEW | ONE | WHOLE | {"GATED": True}, {}),
    ("triton_linear", "_few_rows_linear_kernel", FEW | ADDS | ONE, {}),
    ("triton_moe", "_sort_kernel", {"BLOCK": 1024}, {}),
    ("triton_moe", "_gate_up_kernel", GATE_UP, {}),
    ("triton_moe", "_gate_up_kernel", GATE_UP | CLAMPED, {}),
    ("triton_moe", "_gate_up_kernel", GATE_UP | {"ACTIVATION": "gelu"}, {}),
    ("triton_moe", "_gate_up_kernel", GATE_UP | {"ACTIVATION": "gelu_tanh"}, {}),
    ("triton_moe", "_down_kernel", EXPERTS, {}),
    ("triton_moe", "_down_kernel", EXPERTS | {"HAS_BIAS": True, "ROWS": 128}, {}),
    ("triton_moe", "_combine_kernel", {"TOPK": 8, "BLOCK": 1024}, WEIGHTS),
    ("triton_router", "_route_kernel", ROUTE, WEIGHTS | {"bias_ptr": F32}),
    (
        "triton_router",
        "_route_kernel",
        ROUTE | {"SOFTMAX": False, "HAS_BIAS": True, "RENORMALIZE": False},
        WEIGHTS | {"bias_ptr": F32},
    ),
    ("triton_input", "_apply_writes_kernel", {"BLOCK": 1024}, WRITES),
    ("triton_bitmask", "_forbid_kernel", {"COLUMNS": 4096}, {"logits_ptr": F32, "mask_ptr": I32}),
    ("triton_input", "_prepare_inputs_kernel", INPUTS | {"WITH_TOKENS": True}, {}),
    ("triton_input", "_prepare_inputs_kernel", INPUTS | {"WITH_TOKENS": False}, {}),
    ("triton_input", "_prepare_states_kernel", {"BLOCK": 1024}, {"has_state_ptr": "*i1"}),
    ("triton_input", "_copy_packet_kernel", {"BLOCK": 1024}, {"out_ptr": I32, "packet_ptr": I32}),
    ("triton_ops", "_embedding_kernel", {"BLOCK": 1024}, {"table_ptr": "*bf16"}),
    ("triton_input", "_argmax_kernel", {"COLUMNS": 4096}, {}),
    ("triton_input", "_commit_argmax_kernel", {"PARTS": 38, "BLOCK": 64}, {}),
    ("triton_input", "_commit_tokens_kernel", {}, {"sampled_ptr": I64}),
    ("triton_conv1d", "_conv_prompts_kernel", PROMPT_CONV, REQUEST),
    ("triton_conv1d", "_conv_prompts_kernel", PROMPT_CONV | {"HAS_BIAS": True}, REQUEST),
    ("triton_conv1d", "_conv_update_kernel", CONV, {}),
    ("triton_conv1d", "_conv_update_kernel", CONV | {"HAS_BIAS": True, "SILU": False}, {}),
    ("triton_delta_rule", "_prep_kernel", RULE | {"TOKENS": 16}, GATES),
    ("triton_delta_rule", "_packed_decode_kernel", ROWS, GATES),
    ("triton_delta_rule", "_recurrent_kernel", ROWS, GATES | REQUEST | SINGLES),
    ("triton_chunk_rule", "_chunk_systems_kernel", SYSTEMS | {"WIDE": False}, GATES | REQUEST),
    (
        "triton_chunk_rule",
        "_chunk_systems_kernel",
        SYSTEMS | {"WIDE": False},
        GATES | REQUEST | SINGLES,
    ),
    (
        "triton_chunk_rule",
        "_chunk_states_kernel",
        ROWS | {"CHUNK": 64, "WIDE": False},
        GATES | REQUEST,
    ),
    (
        "triton_chunk_rule",
        "_chunk_states_kernel",
        ROWS | {"CHUNK": 64, "WIDE": False},
        GATES | REQUEST | SINGLES,
    ),
    ("triton_hopper_attention", "_hopper_prefill_kernel", HOPPER | HOPPER_128, {}),
    ("triton_hopper_attention", "_hopper_prefill_kernel", HOPPER | HOPPER_64, {}),
    ("triton_sample", "_penalties_kernel", {"BLOCK": 1024}, SAMPLE | {"counts_ptr": I32}),
    ("triton_top_k", "_top_k_top_p_kernel", TOP_K | {"HAS_P": True}, SAMPLE | SUMS),
    ("triton_top_k", "_top_k_top_p_kernel", TOP_K | NO_P, SAMPLE | SUMS),
    ("triton_top_k", "_top_k_top_p_kernel", TOP_K | NO_K, SAMPLE | SUMS),
    ("triton_sample", "_gumbel_kernel", {"FP64": False, "BLOCK": 1024}, SAMPLE),
    ("triton_sample", "_gumbel_kernel", {"FP64": True, "BLOCK": 1024}, SAMPLE | NOISE64),
    ("triton_sample", "_token_values_kernel", VALUES | {"LOGPROBS": True}, SAMPLE | RANKS),
    ("triton_sample", "_token_values_kernel", VALUES | {"LOGPROBS": False}, RANKS),
    (
        "triton_pages",
        "_join_pages_kernel",
        {"BLOCK": 256},
        {"page_start_ptr": I32, "indices_ptr": I32},
    ),
    ("triton_states", "_copy_states_kernel", {"BLOCK": 2048}, {"addresses_ptr": I64}),
]


@triton.jit
def _changes_shape_kernel(out_ptr, count, BLOCK: tl.constexpr):
    x = tl.arange(0, BLOCK)
    if count > 3:
        x = x[:, None]
    tl.store(out_ptr + tl.arange(0, BLOCK), tl.max(x))


def compile_kernel(kernel: Any, constants: dict[str, Any], types: dict[str, str]) -> str:
    """The error of the compiler, empty if it takes `kernel`."""
    names = kernel.arg_names
    if "DEPENDENT_LAUNCH" in names:
        constants = constants | {"DEPENDENT_LAUNCH": True}
    known = TYPES | types
    signature = {
        name: "constexpr"
        if name in constants
        else known.get(name, "*bf16" if name.endswith("_ptr") else "i32")
        for name in names
    }
    places = {(names.index(name),): value for name, value in constants.items()}
    source: Any = ASTSource(kernel, signature, places)
    options = {}
    if kernel.is_gluon():
        # Its copies are of 16 bytes, or none.
        aligned = [i for i, name in enumerate(names) if signature[name] != "constexpr"]
        known_of = {
            (i,): [["tt.divisibility", 16]] for i in aligned if signature[names[i]] != "fp32"
        }
        source = GluonASTSource(kernel, signature, places, known_of)
        options = {"num_warps": 4}
    try:
        triton.compile(source, target=TARGET, options=options)
    except Exception as error:  # whatever it is, the kernel can't be launched
        return f"{type(error).__name__}: {error}"
    return ""


def main() -> None:
    """Compile all, as many at a time as there are processors."""
    found: dict[str, Future[str]] = {}
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        for number, (module, name, constants, types) in enumerate(KERNELS):
            kernel = getattr(importlib.import_module(f"vllmx.kernels.{module}"), name)
            found[f"{module}.{name} {number}"] = pool.submit(
                compile_kernel, kernel, constants, types
            )
        found["refused"] = pool.submit(
            compile_kernel, _changes_shape_kernel, {"BLOCK": 64}, {"out_ptr": I32}
        )
    print(json.dumps({name: error.result() for name, error in found.items()}))


if __name__ == "__main__":
    main()
