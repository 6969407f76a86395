# SPDX-License-Identifier: Apache-2.0
"""`--config FILE.yaml`: command line over file over default, and nothing in it is dropped.

Cases cli-false-overrides-config-true and yaml-false-is-not-dropped of the public reports.
"""

from pathlib import Path

import pytest

from vllmx.cli import compose_runs, parse
from vllmx.config import RunConfig
from vllmx.exceptions import UserError


def composed(*argv: str) -> RunConfig:
    ((_, run),) = compose_runs(parse(list(argv)))
    return run


@pytest.fixture
def write(tmp_path: Path):
    def write_file(text: str, name: str = "flags.yaml") -> str:
        path = tmp_path / name
        path.write_text(text)
        return str(path)

    return write_file


@pytest.mark.parametrize("in_file", ["true", "false"])
@pytest.mark.parametrize("flag", ["--enable-prefix-caching", "--no-enable-prefix-caching"])
def test_flag_wins_over_file_in_any_order_and_spelling(write, in_file: str, flag: str) -> None:
    path = write(f"enable-prefix-caching: {in_file}\n")
    expected = not flag.startswith("--no-")
    for argv in (
        [flag, "--config", path],
        ["--config", path, flag],
        ["--config=" + path, flag],
        [flag, "--config=" + path],
        ["--config", path, f"cache.enable_prefix_caching={str(expected).lower()}"],
        ["--config", path, f"--enable-prefix-caching={str(expected).lower()}"],
    ):
        assert composed("serve", *argv).cache.enable_prefix_caching is expected


def test_zero_and_empty_text_on_the_command_line_win(write) -> None:
    path = write("seed: 7\ntokenizer: there\nport: 9000\n")
    run = composed("serve", "--config", path, "--seed", "0", "--tokenizer", "", "--port=0")
    assert (run.model.seed, run.model.tokenizer, run.server.port) == (0, "", 0)


@pytest.mark.parametrize("key", ["enable-prefix-caching", "enable_prefix_caching"])
def test_false_in_file_is_kept(write, key: str) -> None:
    path = write(f"{key}: false\n")
    assert composed("serve", "--config", path).cache.enable_prefix_caching is False


def test_negated_and_inverted_flags_in_file(write) -> None:
    assert not composed(
        "serve", "--config", write("disable-log-stats: true")
    ).observability.log_stats
    assert composed("serve", "--config", write("disable-log-stats: false")).observability.log_stats
    path = write("no-enable-prefix-caching: true")
    assert composed("serve", "--config", path).cache.enable_prefix_caching is False


def test_falsy_values_whose_default_is_another(write) -> None:
    path = write(
        "max-logprobs: 0\ngeneration-config: ''\nmax-model-len: null\n"
        "cudagraph-capture-sizes: []\nhf-overrides: {}\nwatermark: 0\n"
    )
    run = composed("serve", "--config", path)
    assert run.model.max_logprobs == 0
    assert run.model.generation_config == ""
    assert run.model.max_model_len is None
    assert run.compilation.cudagraph_capture_sizes == []
    assert run.model.hf_overrides == {}


def test_nested_mapping_and_lists(write) -> None:
    path = write(
        "compilation-config:\n  cudagraph_mode: NONE\nserved-model-name: [a, b]\n"
        "hf-overrides:\n  rope_parameters: {rope_theta: 1.0}\nmax-model-len: 32k\n"
    )
    run = composed("serve", "--config", path)
    assert run.compilation.cudagraph_mode == "NONE"
    assert run.model.served_model_name == ["a", "b"]
    assert run.model.hf_overrides == {"rope_parameters": {"rope_theta": 1.0}}
    assert run.model.max_model_len == 32000


def test_model_in_file_is_a_name_or_a_path_and_yields_to_the_command_line(write) -> None:
    path = write("model: smollm2-135m\n")
    assert composed("serve", "--config", path).model.name == "smollm2-135m"
    assert composed("serve", "/a/b", "--config", path).model.model == "/a/b"
    assert composed("serve", "--config", write("model: /x=y,z\n")).model.model == "/x=y,z"


def test_group_on_the_command_line_wins_over_file(write) -> None:
    path = write("max-num-seqs: 3\nblock-size: 32\n")
    run = composed("serve", "--config", path, "scheduler=throughput")
    assert run.scheduler.max_num_seqs == 256
    assert run.cache.block_size == 32
    run = composed("serve", "--config", path, "experiment=cpu_reference")
    assert run.scheduler.max_num_seqs == 1


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("max-num-sek: 3", "no flag --max-num-sek for serve. Did you mean --max-num-seqs"),
        ("temperature: 0", "--temperature is a flag of"),
        ("max-num-seqs: three", "max-num-seqs: needs a whole number, got 'three'"),
        ("enable-prefix-caching: 1", "enable-prefix-caching: needs true or false, got 1"),
        ("seed: null", "seed: needs a whole number, got null"),
        ("compilation-config: {cudagraph_mod: NONE}", "Did you mean cudagraph_mode"),
        ("scheduler: {max_num_seqs: 1}", "no flag --scheduler for serve"),
        ("- a\n- b", "needs `flag: value` lines"),
        ("a: [", "not readable as YAML"),
        ("dtype: flot32", "Did you mean float32"),
    ],
)
def test_mistake_in_file_is_named(write, text: str, message: str) -> None:
    with pytest.raises(UserError) as caught:
        composed("serve", "--config", write(text))
    assert message in str(caught.value)
    assert "flags.yaml" in str(caught.value)


def test_file_that_is_no_yaml_or_not_there(write, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"needs a \.yaml"):
        composed("serve", "--config", write("seed: 1", "flags.txt"))
    with pytest.raises(UserError, match="No such file"):
        composed("serve", "--config", str(tmp_path / "none.yaml"))
    with pytest.raises(UserError, match="--config needs"):
        composed("serve", "--config")
