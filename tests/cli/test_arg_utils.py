# SPDX-License-Identifier: Apache-2.0
"""`LLM(...)` takes the flags of the command line as keyword arguments, and names a wrong one."""

from pathlib import Path

import pytest

from vllmx.cli_args import engine_flags
from vllmx.config import RunConfig, finalize
from vllmx.engine.arg_utils import engine_args_to_config
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


def test_every_engine_flag_is_an_argument() -> None:
    for name, flag in engine_flags().items():
        if flag.field.optional:
            engine_args_to_config(**{name: None})


@pytest.mark.parametrize(
    ("kwargs", "error", "message"),
    [
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
