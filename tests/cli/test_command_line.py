# SPDX-License-Identifier: Apache-2.0
"""What a command line means: values, models, sweeps and mistakes, without an engine."""

import re
from pathlib import Path

import pytest

from vllmx.cli import COMMANDS, compose_runs, main, parse
from vllmx.config import RunConfig
from vllmx.exceptions import UserError

ODD_TEXTS = [
    "It's",
    'say "hi", x=y',
    "f(n) {a} [b] ${model.model} $(x)",
    "line one\nline two\ttab",
    "café 日本語 — em dash 🙂",
    "-starts with a dash",
    "--looks-like=a flag",
    "None",
    "null",
    " spaces ",
    "\\n is not a newline",
    "a=b",
    "+a=b",
]


def composed(*argv: str) -> RunConfig:
    ((_, run),) = compose_runs(parse(list(argv)))
    return run


def error_of(capsys: pytest.CaptureFixture, *argv: str) -> str:
    """The single line on stderr of a command line that is wrong; checks exit code 2."""
    assert main(list(argv)) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("vllmx: error: ") and err.count("\n") == 1, err
    return err


@pytest.mark.parametrize("text", ODD_TEXTS)
@pytest.mark.parametrize("joined", [True, False])
def test_prompt_arrives_byte_for_byte(text: str, joined: bool) -> None:
    argv = [f"--prompt={text}"] if joined else ["--prompt", text]
    assert composed("generate", *argv).prompt == text


@pytest.mark.parametrize("flag", ["--prompt-file", "--tokenizer", "--download-dir"])
def test_path_arrives_byte_for_byte(flag: str) -> None:
    text = "/a b/c,d=é/${x}'{y}\""
    run = composed("generate", flag, text)
    values = (run.prompt_file, run.model.tokenizer, run.load.download_dir)
    assert text in values


@pytest.mark.parametrize("path", ["/a/b", "./dir", "/path,with=odd", "../é${x}", "noname"])
def test_model_that_is_no_name_is_a_path(path: str) -> None:
    for argv in ([path], ["--model", path], [f"--model={path}"], [f"model={path}"]):
        run = composed("generate", *argv)
        assert (run.model.model, run.model.name) == (path, None)


def test_model_that_is_a_name_selects_its_file() -> None:
    for argv in (["smollm2-135m"], ["--model", "smollm2-135m"], ["model=smollm2-135m"]):
        run = composed("generate", *argv)
        assert run.model.name == "smollm2-135m"
        assert run.model.model == "" and run.model.source is not None


def test_flags_in_all_spellings() -> None:
    for argv in (
        ["--max-num-seqs", "4"],
        ["--max-num-seqs=4"],
        ["--max_num_seqs", "4"],
        ["scheduler.max_num_seqs=4"],
    ):
        assert composed("serve", *argv).scheduler.max_num_seqs == 4
    assert composed("serve", "-tp", "1").parallel.tensor_parallel_size == 1
    assert composed("serve", "-q", "gguf").model.quantization == "gguf"


def test_switches() -> None:
    assert composed("serve", "--enforce-eager").model.enforce_eager is True
    assert composed("serve", "--no-enforce-eager").model.enforce_eager is False
    assert composed("serve", "--enforce-eager=false").model.enforce_eager is False
    assert composed("serve", "--disable-log-stats").observability.log_stats is False
    assert composed("serve", "--no-async-scheduling").scheduler.async_scheduling is False
    assert composed("serve").scheduler.async_scheduling is None


def test_lists_end_at_the_next_flag_or_override() -> None:
    run = composed(
        *["generate", "--served-model-name", "a", "b=c"],
        *["--stop-token-ids", "1", "2", "scheduler.max_num_seqs=3"],
    )
    assert run.model.served_model_name == ["a", "b=c"]
    assert run.sampling.stop_token_ids == [1, 2]
    assert run.scheduler.max_num_seqs == 3


def test_a_small_budget_lowers_the_number_of_requests_that_nobody_gave(caplog) -> None:
    small = ["--max-num-batched-tokens", "32"]
    assert composed("serve", *small).scheduler.max_num_seqs == 32
    (told,) = caplog.records
    words = "scheduler.max_num_seqs is 32, not 128, as scheduler.max_num_batched_tokens is."
    assert told.getMessage() == words
    caplog.clear()
    for given in (["--max-num-seqs", "128"], ["scheduler.max_num_seqs=128"]):
        assert composed("serve", *small, *given).scheduler.max_num_seqs == 128
    assert composed("serve", *small, "scheduler=throughput").scheduler.max_num_seqs == 256
    assert composed("serve", "--max-num-batched-tokens", "4K").scheduler.max_num_seqs == 128
    assert not caplog.records


def test_json_flags_whole_and_dotted() -> None:
    run = composed("serve", "--hf-overrides", '{"a": 1}', "--hf-overrides.b.c", "x")
    assert run.model.hf_overrides == {"a": 1, "b": {"c": "x"}}
    run = composed("serve", "-cc.cudagraph_mode", "NONE")
    assert run.compilation.cudagraph_mode == "NONE"
    run = composed("serve", "--compilation-config", '{"cudagraph_capture_sizes": []}')
    assert run.compilation.cudagraph_capture_sizes == []


def test_open_mappings_take_new_keys_as_overrides() -> None:
    run = composed(
        "serve", "kernel.ir_op_priority.rms_norm=[torch]", "model.hf_overrides.rope.theta=2"
    )
    assert run.kernel.ir_op_priority == {"rms_norm": ["torch"]}
    assert run.model.hf_overrides == {"rope": {"theta": 2}}


def test_last_of_flag_and_override_wins() -> None:
    run = composed("serve", "--max-num-seqs", "4", "scheduler.max_num_seqs=5")
    assert run.scheduler.max_num_seqs == 5
    run = composed("serve", "scheduler.max_num_seqs=5", "--max-num-seqs", "4")
    assert run.scheduler.max_num_seqs == 4
    run = composed("serve", "--max-num-seqs", "4", "scheduler=throughput")
    assert run.scheduler.max_num_seqs == 4


def test_a_server_logs_its_cache_and_its_throughput_unless_told() -> None:
    assert composed("serve").debug.log_level == "info"
    assert composed("serve", "debug.log_level=error").debug.log_level == "error"
    assert composed("serve", "debug=full").debug.log_level == "debug"
    assert composed("generate").debug.log_level == "warning"


def test_bench_turns_prefix_caching_off_unless_told() -> None:
    assert composed("bench", "latency").cache.enable_prefix_caching is False
    assert composed("bench", "--enable-prefix-caching").cache.enable_prefix_caching is True
    assert composed("bench", "cache.enable_prefix_caching=true").cache.enable_prefix_caching
    assert composed("bench", "throughput", "smollm2-135m").bench.kind == "throughput"
    assert composed("bench", "smollm2-135m", "overhead").bench.kind == "overhead"


def test_sweep_runs_every_combination_with_labels() -> None:
    argv = ["generate", "-m", "model=smollm2-135m,gemma3-270m", "scheduler.max_num_seqs=1,8"]
    runs = list(compose_runs(parse([*argv, "--sampling-seed", "3,4", "--seed", "5"])))
    seen = [(r.model.name, r.scheduler.max_num_seqs, r.sampling.seed) for _, r in runs]
    assert len(set(seen)) == 8
    assert runs[0][0] == "model=smollm2-135m scheduler.max_num_seqs=1 sampling.seed=3"
    assert all(r.model.seed == 5 for _, r in runs)


def test_group_sweep() -> None:
    runs = list(compose_runs(parse(["generate", "-m", "scheduler=latency,throughput"])))
    assert [r.scheduler.max_num_seqs for _, r in runs] == [8, 256]


def test_sweep_over_one_path_with_a_comma(tmp_path: Path) -> None:
    folder = tmp_path / "a,b"
    folder.mkdir()
    ((_, run),) = compose_runs(parse(["generate", "-m", f"model={folder}"]))
    assert run.model.model == str(folder)


MISTAKES = [
    (["generat"], "Did you mean generate?"),
    (["serve", "--guided-decoding-backend", "xgrammar"], "--structured-outputs-config"),
    (["serve", "--guided-decoding-disable-fallback"], "--structured-outputs-config"),
    (["generate", "--max-num-sek", "3"], "Did you mean --max-num-seqs?"),
    (["generate", "--enable-prefix-cachin"], "Did you mean --enable-prefix-caching?"),
    (["generate", "max_num_seqs=3"], "Did you mean scheduler.max_num_seqs?"),
    (["generate", "scheduler.max_num_seq=3"], "Did you mean scheduler.max_num_seqs?"),
    (["generate", "schedulr=latency"], "Did you mean scheduler?"),
    (["generate", "scheduler=latenc"], "Did you mean latency?"),
    (["generate", "kernel=tritn"], "Did you mean triton?"),
    (["generate", "scheduler.max_num_seqs=abc"], "could not be converted to Integer"),
    (["generate", "scheduler.max_num_seqs=1.5"], "could not be converted to Integer"),
    (["generate", "scheduler.max_num_seqs=null"], "is not Optional"),
    (["generate", "scheduler.max_num_seqs=0"], "must be at least 1"),
    (["generate", "--max-num-seqs", "0"], "must be at least 1"),
    (["generate", "--max-num-seqs", "abc"], "needs a whole number"),
    (["generate", "--max-num-seqs"], "needs a value"),
    (["generate", "--max-num-seqs", "--seed"], "needs a value"),
    (["generate", "--gpu-memory-utilization", "nan"], "must be a finite number"),
    (["generate", "cache.gpu_memory_utilization=.nan"], "could not be"),
    (["generate", "cache.gpu_memory_utilization=nan"], "must be a finite number"),
    (["generate", "--gpu-memory-utilization", "1.5"], "must be at most 1"),
    (["generate", "--dtype", "flot32"], "Did you mean float32?"),
    (["generate", "model.dtype=flot32"], "choose one of auto, half"),
    (["generate", "--hf-overrides", "{"], "needs a JSON object"),
    (["generate", "--hf-overrides", "[1]"], "needs a JSON object"),
    (["generate", "+foo=1"], "can't add"),
    (["generate", "++scheduler.max_num_seqs=1"], "Did you mean scheduler.max_num_seqs?"),
    (["generate", "~scheduler.max_num_seqs"], "can't add or remove"),
    (["generate", "hydra.run.dir=/x"], "no key"),
    (["generate", "scheduler.max_num_seqs=1,2"], "add -m"),
    (["generate", "--max-num-seqs", "1,2"], "add -m"),
    (["generate", "prompt=It's"], "--prompt takes any text"),
    (["generate", "--no-max-num-seqs", "3"], "not a switch"),
    (["generate", "--port", "1"], "is a flag of serve"),
    (["serve", "--temperature", "0"], "is a flag of bench, chat, complete, generate"),
    (["generate", "a", "b"], "given twice"),
    (["generate", "smollm2-135m", "model.model=/x"], "given twice: 'smollm2-135m' and '/x'"),
    (["generate", "model.model=/x", "/y"], "given twice: '/y' and '/x'"),
    (["generate", "model.model=/x", "--model", "/y"], "given twice"),
    (["generate", "model=/y", "model.model=/x"], "given twice"),
    (["generate", "model="], "the model is empty"),
    (["generate", "--cfg", "hydra"], "only `--cfg job`"),
    (["generate", "-z"], "no flag -z"),
    (["generate", "--enable-eplb"], "no flag --enable-eplb for generate. Upstream has it"),
    (["serve", "--no-enable-eplb"], "Upstream has it, vllmx hasn't built it"),
    (["serve", "--eplb-config.window_size", "3"], "Upstream has it, vllmx hasn't built it"),
    (["serve", "-dcp", "2"], "no flag -dcp for serve. Upstream has it"),
    (["serve", "--max-num-sqes", "2"], "Did you mean --max-num-seqs"),
    (["bench", "latenc"], "Did you mean latency?"),
    (["generate", "--trust-remote-code"], "never runs code"),
    (["generate", "-tp", "2"], "must be 1"),
    (["generate", "--prompt", "x"], "no model is given: name one of"),
    (["generate", "smollm2-135m"], "give --prompt TEXT or --prompt-file"),
    (["generate", "smollm2-135m", "--prompt", ""], "prompt is empty"),
    (["generate", "smollm2-135m", "--prompt", "a", "--prompt-file", "b"], "choose one"),
    (["generate", "smollm2-135m", "--prompt", "a", "--temperature", "-1"], "temperature"),
    (["generate", "smollm2-135m", "--prompt", "a", "--temperature", "nan"], "temperature"),
    (["generate", "smollm2-135m", "--prompt", "a", "--n", "0"], "n must be"),
    (["generate", "smollm2-135m", "--prompt", "a", "--logprobs", "2"], "--output json"),
    (["fetch"], "choose one of"),
    (["fetch", "smolm2-135m"], "Did you mean smollm2-135m?"),
    (["serve"], "no model is given"),
    (["chat", "--url", "nohost", "--prompt", "x"], "needs http://"),
]


@pytest.mark.parametrize(("argv", "message"), MISTAKES, ids=lambda v: " ".join(v)[:60])
def test_mistake_is_one_line_with_the_cure(capsys, argv: list[str], message: str) -> None:
    assert message in error_of(capsys, *argv)


def test_mistake_in_the_second_run_of_a_sweep_stops_the_first(capsys) -> None:
    assert "must be at least 1" in error_of(
        capsys, "generate", "-m", "scheduler.max_num_seqs=1,0", "--prompt", "x", "smollm2-135m"
    )


def test_model_model_is_the_model_unless_another_is_given(tmp_path: Path) -> None:
    assert composed("generate", "model.model=/x").model.model == "/x"
    assert composed("generate", "model.model=/x", "/x").model.model == "/x"
    file = tmp_path / "flags.yaml"
    file.write_text("model: /from-file\n")
    assert composed("serve", "--config", str(file)).model.model == "/from-file"
    assert composed("serve", "--config", str(file), "model.model=/x").model.model == "/x"


TRACEBACK = [
    *(["debug.traceback=true"], ["debug.traceback=True"], ["debug=full"]),
    ["debug.traceback=false", "debug.traceback=true"],
]
NO_TRACEBACK = [
    *([], ["debug.traceback=false"], ["debug=default"], ["debug=full", "debug.traceback=false"]),
    ["--prompt", "debug.traceback=true", "--top-k=-7"],
    ["--prompt", "debug=full", "--top-k=-7"],
]


@pytest.mark.parametrize("wrong", ["--max-num-seqs=0", "scheduler.max_num_seqs=x", "--logprobs=2"])
@pytest.mark.parametrize("argv", [*TRACEBACK, *NO_TRACEBACK], ids=" ".join)
def test_traceback_if_the_config_says_so(capsys, argv: list[str], wrong: str) -> None:
    """Above the line that always comes; also for mistakes found before there is a config."""
    assert main(["generate", "smollm2-135m", *argv, wrong]) == 2
    *above, line = capsys.readouterr().err.splitlines()
    assert line.startswith("vllmx: error: ")
    assert bool(above) == (argv in TRACEBACK)
    assert not above or above[0].startswith("Traceback")


def test_fault_of_vllmx_itself_is_exit_1_and_says_how_to_see_more(capsys, monkeypatch) -> None:
    monkeypatch.setattr("vllmx.tasks.info.run", lambda *_: {}["missing"])
    assert main(["info"]) == 1
    expected = "vllmx: error: KeyError: 'missing' (debug.traceback=true shows where)\n"
    assert capsys.readouterr().err == expected
    assert main(["info", "debug.traceback=true"]) == 1
    assert "in <lambda>" in capsys.readouterr().err


@pytest.mark.parametrize("command", COMMANDS)
def test_help_of_each_command(capsys, command: str) -> None:
    assert main([command, "--help"]) == 0
    out = capsys.readouterr().out
    assert out.startswith(f"usage: vllmx {command}")
    if command == "serve":
        assert "--max-num-seqs" in out and "Most requests that run at once." in out
        assert "--temperature" not in out and "--port" in out
    if command in ("generate", "bench"):
        assert "--temperature" in out and "--port" not in out


def test_help_can_be_searched(capsys) -> None:
    main(["serve", "--help=max-model"])
    out = capsys.readouterr().out
    assert "--max-model-len" in out and "4K is 4096" in out and "--port" not in out


def test_overview(capsys) -> None:
    assert main(["--help"]) == 0
    out = capsys.readouterr().out
    assert all(command in out for command in COMMANDS)
    assert main([]) == 2


def test_cfg_job_prints_what_was_given(capsys) -> None:
    import yaml

    text = 'odd "text" = ${x}, é'
    assert main(["generate", "smollm2-135m", "--cfg", "job", "--prompt", text, "--seed=3"]) == 0
    shown = yaml.safe_load(capsys.readouterr().out)
    assert shown["prompt"] == text and shown["model"]["seed"] == 3


@pytest.mark.parametrize(
    ("codes", "worst"),
    [((0, 0), 0), ((3, 0), 3), ((2, 3), 2), ((1, 3), 1), ((0, 1, 2), 1), ((130,), 130)],
)
def test_a_sweep_ends_with_the_worst_of_its_codes(codes, worst, monkeypatch) -> None:
    """A failed run is not hidden by a blocked one, though 3 is more than 1."""
    from vllmx import cli
    from vllmx.tasks import info

    left = iter(codes)
    monkeypatch.setattr(info, "run", lambda run, started: next(left))
    assert cli.execute("info", [("", RunConfig())] * len(codes)) == worst


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--compilation-config", '{"cudagraph_mode": "FULLL"}'), "'FULLL' is not one of"),
        (("--compilation-config", '{"cudagraph_mod": "FULL"}'), "no field 'cudagraph_mod'"),
        (("--kv-transfer-config", '{"kv_role": "kv_bth"}'), "'kv_bth' is not one of"),
        (("--compilation-config", '{"cudagraph_mode"'), "needs a JSON object"),
        (("--compilation-config", "[1]"), "needs a JSON object"),
    ],
)
def test_what_is_wrong_within_json_is_named(arguments, words) -> None:
    with pytest.raises(UserError, match=re.escape(words)):
        composed("generate", *arguments)
