# SPDX-License-Identifier: Apache-2.0
"""The flag table: complete, unambiguous, and reading each kind of value."""

import math
from pathlib import Path

import pytest

from vllmx.cli_args import ENGINE_COMMANDS, SHORT, check_value, fields, flags, leaf_keys, parse_text
from vllmx.exceptions import UserError
from vllmx.upstream_flags import NOT_BUILT, SHORT_NOT_BUILT, not_built

UPSTREAM_FLAGS = """
    model tokenizer dtype max_model_len max_num_seqs max_num_batched_tokens gpu_memory_utilization
    block_size enable_prefix_caching kv_cache_dtype seed host port served_model_name api_key
    disable_log_stats chat_template enforce_eager load_format download_dir skip_tokenizer_init
    trust_remote_code quantization max_logprobs logprobs_mode generation_config hf_overrides
    override_generation_config num_gpu_blocks_override kv_cache_memory_bytes attention_backend
    prefix_caching_hash_algo enable_chunked_prefill scheduling_policy async_scheduling
    tensor_parallel_size pipeline_parallel_size data_parallel_size compilation_config worker_cls
    disable_uvicorn_access_log uvicorn_log_level cudagraph_capture_sizes stream_interval
    max_num_partial_prefills long_prefill_token_threshold disable_sliding_window ir_op_priority
""".split()


def test_no_bare_flag_means_two_things() -> None:
    by_key = {flag.field.key: name for name, flag in flags().items()}
    assert len(by_key) == len(flags())
    leaf_names = [key.split(".")[-1] for key in leaf_keys()]
    repeated = {name for name in leaf_names if leaf_names.count(name) > 1}
    # seed: the engine's, as upstream's EngineArgs has it; that of checkpoint is --checkpoint-dir
    for name in repeated & set(flags()):
        assert flags()[name].field.key in ("model.seed", "model.model", "parity.output_dir")
    assert flags()["sampling_seed"].field.key == "sampling.seed"


@pytest.mark.parametrize("name", UPSTREAM_FLAGS)
def test_upstream_spelling_is_known(name: str) -> None:
    assert name in flags()


def test_every_key_has_a_flag_or_a_reason_to_have_none() -> None:
    without = set(leaf_keys()) - {flag.field.key for flag in flags().values()}
    nodes = {key.split(".")[0] for key in without}
    # Upstream takes these nodes as one JSON object each: --kv-transfer-config.
    as_json = {"kv_transfer", "kv_events", "speculative", "structured_outputs", "reasoning"}
    assert nodes <= {"model", "bench", "checkpoint", "parity", "debug"} | as_json
    assert {key for key in without if key.startswith(("model.", "bench."))} == {
        "model.name",
        "bench.kind",
        *(key for key in leaf_keys() if key.startswith("model.source.")),
    }


def test_no_flag_is_said_to_be_upstreams_alone() -> None:
    assert not NOT_BUILT & flags().keys()
    assert not SHORT_NOT_BUILT & SHORT.keys()
    assert not_built("--max-num-seqs") == not_built("-tp") == ""
    assert not_built("--kv-offloading-size") and not_built("kv_offloading_size")


def test_sampling_flags_are_for_commands_that_sample() -> None:
    for name in ("temperature", "max_tokens", "top_p", "sampling_seed", "stop", "n"):
        assert flags()[name].commands == {"generate", "chat", "complete", "bench"}
    assert flags()["max_num_seqs"].commands == ENGINE_COMMANDS
    assert flags()["port"].commands == {"serve"}


def test_every_field_has_a_docstring_for_help() -> None:
    assert [key for key, spec in fields().items() if not spec.doc] == []


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("4096", 4096),
        ("1k", 1000),
        ("1K", 1024),
        ("32k", 32000),
        ("25.6k", 25600),
        ("2M", 2 << 20),
        ("1g", 10**9),
        ("auto", -1),
        ("AUTO", -1),
        ("-1", -1),
        ("None", None),
    ],
)
def test_max_model_len_forms(text: str, value: int) -> None:
    assert parse_text(fields()["model.max_model_len"], "--max-model-len", text) == value


@pytest.mark.parametrize("text", ["1.5K", "k", "1kk", "", "4096.0", "1e3", "0x10"])
def test_max_model_len_refuses(text: str) -> None:
    with pytest.raises(UserError, match=r"--max-model-len: needs a whole number"):
        parse_text(fields()["model.max_model_len"], "--max-model-len", text)


def test_only_upstreams_numbers_have_a_suffix() -> None:
    with pytest.raises(UserError):
        parse_text(fields()["scheduler.max_num_seqs"], "--max-num-seqs", "1k")


def test_float_accepts_nan_so_that_the_range_check_can_name_it() -> None:
    value = parse_text(fields()["cache.gpu_memory_utilization"], "--x", "nan")
    assert math.isnan(value)


@pytest.mark.parametrize(
    ("key", "value", "result"),
    [
        ("scheduler.max_num_seqs", 4, 4),
        ("model.max_model_len", "32k", 32000),
        ("cache.gpu_memory_utilization", 1, 1.0),
        ("cache.enable_prefix_caching", False, False),
        ("model.served_model_name", "a", ["a"]),
        ("model.served_model_name", ("a", "b"), ["a", "b"]),
        ("compilation.cudagraph_capture_sizes", [1, 2], [1, 2]),
        ("compilation.cudagraph_capture_sizes", [], []),
        ("model.hf_overrides", {"a": {"b": 1}}, {"a": {"b": 1}}),
        ("model.tokenizer", None, None),
        ("model.tokenizer", "", ""),
        ("model.tokenizer", Path("/a/b"), "/a/b"),
        ("observability.log_stats", False, False),
    ],
)
def test_python_value_of_the_right_type(key: str, value: object, result: object) -> None:
    assert check_value(fields()[key], key, value) == result


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("scheduler.max_num_seqs", True),
        ("scheduler.max_num_seqs", 1.5),
        ("scheduler.max_num_seqs", None),
        ("cache.enable_prefix_caching", 0),
        ("cache.enable_prefix_caching", "false"),
        ("cache.gpu_memory_utilization", True),
        ("model.tokenizer", 7),
        ("model.served_model_name", [1]),
        ("compilation.cudagraph_capture_sizes", ["1"]),
        ("model.hf_overrides", [1]),
        ("scheduler.max_num_seqs", {"a": 1}),
    ],
)
def test_python_value_of_the_wrong_type_is_named(key: str, value: object) -> None:
    with pytest.raises(UserError, match=f"{key}: needs"):
        check_value(fields()[key], key, value)


def test_torch_dtype_is_taken_as_its_name() -> None:
    class dtype:
        def __str__(self) -> str:
            return "torch.bfloat16"

    assert check_value(fields()["model.dtype"], "dtype", dtype()) == "bfloat16"
