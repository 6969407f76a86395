# SPDX-License-Identifier: Apache-2.0
"""`LLM(...)` takes the flags of the command line as keyword arguments, and names a wrong one."""

import argparse
from pathlib import Path

import pytest

from vllmx.cli_args import engine_flags
from vllmx.config import RunConfig, finalize
from vllmx.engine.arg_utils import AsyncEngineArgs, EngineArgs, engine_args_to_config
from vllmx.exceptions import UserError


def test_no_arguments_are_the_defaults() -> None:
    assert engine_args_to_config() == RunConfig()


def test_named_model_and_path() -> None:
    assert engine_args_to_config(model="smollm2-135m").model.source is not None
    for path in ("/a=b,c", Path("/a=b,c")):
        model = engine_args_to_config(model=path).model
        assert (model.model, model.source) == ("/a=b,c", None)


def test_values_arrive_under_upstreams_names() -> None:
    run = engine_args_to_config(
        model="/m",
        max_model_len=64,
        gpu_memory_utilization=1,
        enable_prefix_caching=False,
        kv_cache_dtype="float32",
        scheduling_policy="priority",
        served_model_name="x",
        disable_log_stats=True,
        compilation_config={"cudagraph_mode": "NONE"},
        hf_overrides={"num_hidden_layers": 1},
    )
    config = finalize(run)
    assert config.model_config.max_model_len == 64
    assert config.cache_config.gpu_memory_utilization == 1.0
    assert config.cache_config.enable_prefix_caching is False
    assert config.cache_config.cache_dtype == "float32"
    assert config.scheduler_config.policy == "priority"
    assert config.model_config.served_model_name == ["x"]
    assert config.observability_config.log_stats is False
    assert config.compilation_config.cudagraph_mode == "NONE"
    assert config.model_config.hf_overrides == {"num_hidden_layers": 1}


def test_a_small_budget_lowers_the_default_number_of_requests() -> None:
    assert engine_args_to_config(max_num_batched_tokens=32).scheduler.max_num_seqs == 32
    assert engine_args_to_config(max_num_batched_tokens=4096).scheduler.max_num_seqs == 128
    both = engine_args_to_config(max_num_batched_tokens=32, max_num_seqs=64)
    assert both.scheduler.max_num_seqs == 64  # refused when the engine starts


def test_an_argument_that_only_upstream_has_is_told_from_a_misspelt_one() -> None:
    with pytest.raises(TypeError, match=r"'enable_sleep_mode'\. Upstream has it"):
        engine_args_to_config(enable_sleep_mode=True)


def test_every_engine_flag_is_an_argument() -> None:
    for name, flag in engine_flags().items():
        if flag.field.optional:
            engine_args_to_config(**{name: None})


@pytest.mark.parametrize(
    ("kwargs", "error", "message"),
    [
        ({"guided_decoding_backend": "x"}, TypeError, "field of --structured-outputs-config"),
        ({"max_modl_len": 1}, TypeError, "'max_modl_len'. Did you mean max_model_len?"),
        ({"port": 8000}, TypeError, "unexpected keyword argument 'port'"),
        ({"temperature": 0}, TypeError, "unexpected keyword argument 'temperature'"),
        ({"max_model_len": "x"}, UserError, "max_model_len: needs a whole number"),
        ({"dtype": "flot32"}, UserError, "Did you mean float32?"),
        ({"enforce_eager": 1}, UserError, "enforce_eager: needs true or false"),
        ({"seed": True}, UserError, "seed: needs a whole number"),
        ({"compilation_config": {"cudagraph_mod": 1}}, UserError, "Did you mean cudagraph_mode?"),
        ({"hf_overrides": print}, UserError, "hf_overrides: needs a JSON object"),
    ],
)
def test_wrong_argument_is_named(kwargs: dict, error: type[Exception], message: str) -> None:
    with pytest.raises(error) as caught:
        engine_args_to_config(**kwargs)
    assert message in str(caught.value)


# ------------------------------------------------------------------ EngineArgs


def test_engine_args_become_the_config_of_llm() -> None:
    args = EngineArgs(max_num_seqs=3, disable_log_stats=True)
    args.block_size = 32
    config = args.create_engine_config()
    assert config.scheduler_config.max_num_seqs == 3
    assert config.cache_config.block_size == 32
    assert config.observability_config.log_stats is False
    assert config == finalize(
        engine_args_to_config(max_num_seqs=3, block_size=32, disable_log_stats=True)
    )


def test_an_argument_that_was_not_given_reads_as_its_default() -> None:
    args = EngineArgs("/m")
    assert (args.model, args.dtype, args.max_model_len) == ("/m", "auto", None)
    assert args.disable_log_stats is False
    assert (args.hf_overrides, args.served_model_name) == ({}, None)
    with pytest.raises(AttributeError, match="has no argument 'max_modl_len'"):
        args.max_modl_len  # noqa: B018


@pytest.mark.parametrize(
    "limits",
    [
        {"max_num_partial_prefills": 2},
        {"max_long_partial_prefills": 2},
        {"max_num_partial_prefills": 4, "max_long_partial_prefills": 2},
    ],
)
def test_concurrent_partial_prefills_are_refused_as_upstream_does(limits: dict[str, int]) -> None:
    with pytest.raises(NotImplementedError, match="Concurrent Partial Prefill is not supported"):
        EngineArgs(**limits).create_engine_config()
    with pytest.raises(UserError, match=f"scheduler.{next(iter(limits))}="):
        finalize(engine_args_to_config(**limits))


def test_a_threshold_above_the_longest_prompt_is_no_error() -> None:
    args = EngineArgs(long_prefill_token_threshold=10**6, max_num_partial_prefills=1)
    assert args.create_engine_config().scheduler_config.long_prefill_token_threshold == 10**6


def test_engine_args_name_a_wrong_argument() -> None:
    with pytest.raises(TypeError, match=r"EngineArgs\(\) got .*'max_modl_len'. Did you mean max_m"):
        EngineArgs(max_modl_len=1)
    with pytest.raises(TypeError, match="unexpected keyword argument 'enable_log_requests'"):
        EngineArgs(enable_log_requests=True)
    assert AsyncEngineArgs(enable_log_requests=True).enable_log_requests
    assert not AsyncEngineArgs().enable_log_requests
    args = EngineArgs()
    args.no_such_thing = 1
    with pytest.raises(TypeError, match="no_such_thing"):
        args.create_engine_config()


def test_engine_args_of_a_model_that_is_not_there_say_so(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no such folder or file"):
        EngineArgs(str(tmp_path / "nothing")).create_engine_config()


@pytest.fixture
def parser() -> argparse.ArgumentParser:
    return EngineArgs.add_cli_args(argparse.ArgumentParser(exit_on_error=False))


def test_argparse_flags_are_those_of_the_command_line(parser: argparse.ArgumentParser) -> None:
    line = (
        "--model /m --max-model-len 4k --no-enable-prefix-caching -tp 2 --disable-log-stats "
        "--served-model-name a b --gpu-memory-utilization 0.5 "
        '--hf-overrides {"num_hidden_layers":1}'
    )
    args = EngineArgs.from_cli_args(parser.parse_args(line.split()))
    assert vars(args) == {
        "model": "/m",
        "max_model_len": 4000,
        "enable_prefix_caching": False,
        "tensor_parallel_size": 2,
        "disable_log_stats": True,
        "served_model_name": ["a", "b"],
        "gpu_memory_utilization": 0.5,
        "hf_overrides": {"num_hidden_layers": 1},
    }


def test_arguments_of_an_empty_line_are_those_of_no_arguments(
    parser: argparse.ArgumentParser,
) -> None:
    parsed = parser.parse_args([])
    assert vars(EngineArgs.from_cli_args(parsed)) == {}
    assert engine_args_to_config(**vars(parsed)) == RunConfig()
    assert "--max-num-seqs" in parser.format_help()


def test_argparse_refuses_a_wrong_value(parser: argparse.ArgumentParser) -> None:
    for line, words in (
        ("--prefix-caching-hash-algo invalid", "hash-algo: 'invalid' is not one of sha256,"),
        ("--max-num-seqs many", "argument --max-num-seqs: needs a whole number, got 'many'"),
        ("--hf-overrides {", "argument --hf-overrides: needs a JSON object"),
    ):
        with pytest.raises(argparse.ArgumentError, match=words):
            parser.parse_args(line.split())
