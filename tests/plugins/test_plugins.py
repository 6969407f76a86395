# SPDX-License-Identifier: Apache-2.0
"""General plugins: loaded once, if allowed, one's failure its own; the models they bring."""

import json
import logging
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from checkpoints import VOCAB, build_engine, save_tiny

from vllmx import LLM, ModelRegistry, SamplingParams
from vllmx.exceptions import UserError
from vllmx.models.llama import LlamaForCausalLM
from vllmx.plugins import load_general_plugins
from vllmx.registry import get_model_cls

COUNTS = "calls = []\ndef one():\n    calls.append('one')\ndef two():\n    calls.append('two')\n"
MODEL = """
from vllmx.models.llama import LlamaForCausalLM
from vllmx.registry import ModelRegistry

class TwiceForCausalLM(LlamaForCausalLM):
    def compute_logits(self, hidden_states):
        return -super().compute_logits(hidden_states)

def register():
    ModelRegistry.register_model("TwiceForCausalLM", "mine:TwiceForCausalLM")
"""


def calls(module: str) -> list[str]:
    return __import__(module).calls


# ------------------------------------------------------------------------------------- plugins


def test_plugins_are_called_once_a_process(install) -> None:
    install("counted", COUNTS, first="one", second="two")
    for _ in range(3):
        load_general_plugins()
    assert sorted(calls("counted")) == ["one", "two"]


@pytest.mark.parametrize(
    ("allowed", "called"), [(None, ["one", "two"]), ([], []), (["second"], ["two"])], ids=str
)
def test_only_allowed_plugins_are_called(install, allowed, called) -> None:
    install("counted", COUNTS, first="one", second="two")
    load_general_plugins(allowed)
    assert sorted(calls("counted")) == called


def test_upstreams_environment_variable_decides_nothing_and_is_told_once(
    install, caplog, monkeypatch
) -> None:
    monkeypatch.setenv("VLLM_PLUGINS", "second")
    install("counted", COUNTS, first="one", second="two")
    with caplog.at_level(logging.WARNING, logger="vllmx.plugins"):
        for _ in range(2):
            load_general_plugins()
    assert sorted(calls("counted")) == ["one", "two"]
    (told,) = [record.getMessage() for record in caplog.records]
    assert told.startswith("VLLM_PLUGINS=second is not read") and "load.plugins" in told


def test_a_list_of_plugins_that_is_given_needs_no_word_of_another(caplog, monkeypatch) -> None:
    monkeypatch.setenv("VLLM_PLUGINS", "second")
    load_general_plugins([])
    assert not caplog.records


def test_a_plugin_that_is_not_allowed_is_not_even_imported(install) -> None:
    install("loud", "raise RuntimeError('imported')\n", loud="f")
    load_general_plugins([])
    assert "loud" not in sys.modules


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        ("import nowhere_to_be_found\n", "ModuleNotFoundError"),
        ("def other():\n    pass\n", "AttributeError"),
        ("def f():\n    raise ValueError('its own fault')\n", "its own fault"),
        ("def f(argument):\n    pass\n", "argument"),
    ],
    ids=["import", "attribute", "call", "signature"],
)
def test_a_failure_is_logged_and_the_others_are_loaded(install, caplog, source, reason) -> None:
    install("broken", source, bad="f")
    install("counted", COUNTS, good="one")
    with caplog.at_level(logging.ERROR, logger="vllmx.plugins"):
        load_general_plugins()
    assert calls("counted") == ["one"]
    assert "Plugin bad (broken:f) failed" in caplog.text and reason in caplog.text


def test_an_allowed_plugin_that_is_not_there_is_named(install, caplog) -> None:
    install("counted", COUNTS, first="one")
    with caplog.at_level(logging.WARNING, logger="vllmx.plugins"):
        load_general_plugins(["frist"])
    assert "frist" in caplog.text and "first" in caplog.text
    assert calls("counted") == []


# -------------------------------------------------------------------------- models from outside


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("outside") / "llama"
    save_tiny("llama", folder)
    return folder


def renamed(folder: Path, target: Path, **values: object) -> Path:
    """The checkpoint under other values of its config."""
    target.mkdir()
    config = json.loads((folder / "config.json").read_text()) | values
    (target / "config.json").write_text(json.dumps(config))
    (target / "model.safetensors").symlink_to(folder / "model.safetensors")
    return target


def first_tokens(engine: LLM) -> list[int]:
    params = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True, logprobs=VOCAB)
    (answer,) = engine.generate({"prompt_token_ids": [5, 6, 7]}, params, use_tqdm=False)
    scores = answer.outputs[0].logprobs[0]
    return sorted(scores, key=lambda token: scores[token].logprob)


def test_a_plugins_model_is_served(install, llama, tmp_path) -> None:
    """Its logits are Llama's with the other sign: the order of tokens is reversed."""
    install("mine", MODEL, mine="register")
    plain = first_tokens(build_engine(llama, max_logprobs=VOCAB))
    folder = renamed(llama, tmp_path / "twice", architectures=["TwiceForCausalLM"])
    turned = build_engine(folder, max_logprobs=VOCAB)
    assert first_tokens(turned) == plain[::-1]


def test_a_plugins_model_is_served_from_a_process_of_its_own(install, llama, tmp_path) -> None:
    site = install("mine", MODEL, mine="register")
    folder = renamed(llama, tmp_path / "twice", architectures=["TwiceForCausalLM"])
    script = tmp_path / "ask.py"
    script.write_text(
        "from vllmx import LLM, SamplingParams\n"
        "if __name__ == '__main__':\n"
        f"    llm = LLM(model={str(folder)!r}, skip_tokenizer_init=True, num_threads=1,\n"
        "              enable_multiprocessing=True)\n"
        "    params = SamplingParams(temperature=0, max_tokens=3, ignore_eos=True)\n"
        "    answer, = llm.generate({'prompt_token_ids': [5, 6, 7]}, params, use_tqdm=False)\n"
        "    print(len(answer.outputs[0].token_ids))\n"
    )
    paths = os.pathsep.join([str(site), *filter(None, sys.path)])
    done = subprocess.run(
        [sys.executable, str(script)],
        env=os.environ | {"PYTHONPATH": paths},
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert (done.returncode, done.stdout) == (0, "3\n"), done.stderr[-2000:]


def test_without_its_plugin_the_model_is_refused_by_name(install, llama, tmp_path) -> None:
    install("mine", MODEL, mine="register")
    folder = renamed(llama, tmp_path / "twice", architectures=["TwiceForCausalLM"])
    with pytest.raises(UserError, match="'TwiceForCausalLM' is not supported"):
        build_engine(folder, plugins=[])


def test_a_registered_class_stands_in_for_vllmxs_own(llama) -> None:
    class Mine(LlamaForCausalLM):
        pass

    ModelRegistry.register_model("LlamaForCausalLM", Mine)
    engine = build_engine(llama)
    core = engine.llm_engine.engine_core.engine_core
    assert type(core.model_executor.driver_worker.model_runner.model) is Mine


def test_who_takes_a_models_place_is_told_with_both_classes(caplog) -> None:
    class Mine(LlamaForCausalLM):
        pass

    with caplog.at_level(logging.WARNING, logger="vllmx.registry"):
        ModelRegistry.register_model("NewForCausalLM", "mine:New")
        ModelRegistry.register_model("NewForCausalLM", "mine:New")
        ModelRegistry.register_model("LlamaForCausalLM", LlamaForCausalLM)
        assert not caplog.records
        ModelRegistry.register_model("LlamaForCausalLM", Mine)
        ModelRegistry.register_model("NewForCausalLM", "mine:Newer")
    first, second = (record.getMessage() for record in caplog.records)
    own = "LlamaForCausalLM, which vllmx.models.llama:LlamaForCausalLM served, is now served by "
    assert own + f"{__name__}:" in first and "<locals>.Mine" in first
    assert "which mine:New served, is now served by mine:Newer" in second


def test_the_first_known_architecture_counts() -> None:
    from vllmx.models.hf_config import HFConfig

    class Other(torch.nn.Module):
        pass

    ModelRegistry.register_model("OtherForCausalLM", Other)
    names = ["UnknownForCausalLM", "OtherForCausalLM", "LlamaForCausalLM"]
    assert get_model_cls(HFConfig({"architectures": names})) is Other
    assert get_model_cls(HFConfig({"architectures": names[::2]})) is LlamaForCausalLM


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        ((3, "a:B"), TypeError),
        (("A", "module.Class"), ValueError),
        (("A", ":B"), ValueError),
        (("A", "a:b:C"), ValueError),
        (("A", object), TypeError),
        (("A", torch.nn.Linear(1, 1)), TypeError),
    ],
    ids=str,
)
def test_what_can_be_no_model_is_refused(arguments, error) -> None:
    with pytest.raises(error, match=r"model_arch|model_cls"):
        ModelRegistry.register_model(*arguments)


@pytest.mark.parametrize(
    ("target", "reason"),
    [
        ("nowhere_to_be_found:Model", "ModuleNotFoundError"),
        ("json:Nothing", "AttributeError"),
        ("json:loads", "no torch module"),
    ],
)
def test_a_registered_class_that_cannot_be_had_is_named(llama, target, reason) -> None:
    ModelRegistry.register_model("LlamaForCausalLM", target)
    with pytest.raises(UserError, match=f"'LlamaForCausalLM' is registered as {target}.*{reason}"):
        build_engine(llama)


class OfUpstream(torch.nn.Module):
    """Built as upstream's models are."""

    def __init__(self, *, vllm_config, prefix=""):
        super().__init__()

    def load_weights(self, weights):
        return set()


class Lazy(LlamaForCausalLM):
    """Takes no weight."""

    def load_weights(self, weights):
        return None


@pytest.mark.parametrize(
    ("cls", "words"),
    [
        (OfUpstream, "OfUpstream has no compute_logits, no constructor argument ops. As those of"),
        (Lazy, "Lazy.load_weights left model.embed_tokens, .* and [0-9]+ more without weights"),
    ],
)
def test_a_class_that_cannot_serve_is_told_what_it_lacks(llama, cls, words) -> None:
    ModelRegistry.register_model("LlamaForCausalLM", cls)
    with pytest.raises(UserError, match=words):
        build_engine(llama)


# ------------------------------------------------------------------------------- what is refused


def test_unknown_architectures_are_refused_with_near_ones(llama, tmp_path) -> None:
    ModelRegistry.register_model("TwiceForCausalLM", "mine:TwiceForCausalLM")
    folder = renamed(llama, tmp_path / "unknown", architectures=["TwizeForCausalLM"])
    with pytest.raises(UserError, match=r"'TwizeForCausalLM' is not supported.*TwiceForCausalLM"):
        build_engine(folder)


def test_code_of_a_checkpoint_is_never_run(llama, tmp_path) -> None:
    auto_map = {"AutoModelForCausalLM": "modeling_mine.MineForCausalLM"}
    names = {"architectures": ["MineForCausalLM"], "auto_map": auto_map}
    folder = renamed(llama, tmp_path / "remote", **names)
    (folder / "modeling_mine.py").write_text("raise SystemExit('run')\n")
    with pytest.raises(UserError, match="brings its own code"):
        build_engine(folder)
    with pytest.raises(UserError, match="never runs code that comes with a checkpoint"):
        build_engine(folder, trust_remote_code=True)
    assert "modeling_mine" not in sys.modules
