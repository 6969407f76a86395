# SPDX-License-Identifier: Apache-2.0
"""resolve_model finds the checkpoint, reads its metadata, and refuses bad input in one line."""

import json
import subprocess
import sys

import numpy as np
import pytest

from vllmx.compose import compose_run
from vllmx.exceptions import CheckpointError, ModelNotFoundError, UserError
from vllmx.model_loader.resolve import resolve_model
from vllmx.registry import architectures

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 10,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
}


@pytest.fixture
def folder(tmp_path):
    def make(**changes):
        (tmp_path / "config.json").write_text(json.dumps(CONFIG | changes))
        return tmp_path

    return make


def test_folder_is_resolved(config_for, folder) -> None:
    config = config_for(folder())
    resolve_model(config)
    model = config.model_config
    assert model.hf_config.hidden_size == 32
    assert (model.max_model_len, model.max_model_len_pinned) == (64, False)
    assert model.generation_config_dict == {}


@pytest.mark.parametrize(
    ("fields", "names"),
    [
        ({}, ["./m"]),
        ({"name": "short"}, ["short"]),
        ({"served_model_name": ["one", "two"]}, ["one", "two"]),
    ],
)
def test_served_name_is_as_given_although_the_path_becomes_absolute(
    config_for, folder, tmp_path, monkeypatch, fields, names
) -> None:
    (folder() / "config.json").rename(tmp_path / "moved")
    (tmp_path / "m").mkdir()
    (tmp_path / "moved").rename(tmp_path / "m" / "config.json")
    monkeypatch.chdir(tmp_path)
    config = config_for("./m")
    for name, value in fields.items():
        setattr(config.model_config, name, value)
    resolve_model(config)
    assert config.model_config.model == str(tmp_path / "m")
    assert config.model_config.served_names == names


def test_gguf_is_resolved_by_suffix_and_by_content(config_for, write_gguf, sizes) -> None:
    embed = {"token_embd.weight": np.zeros((10, 32), np.float32)}
    metadata = sizes | {"tokenizer.ggml.eos_token_id": 2}
    for name in ("m.gguf", "blob-without-suffix"):
        config = config_for(write_gguf(embed, metadata, name=name), max_model_len=-1)
        resolve_model(config)
        assert config.model_config.hf_config.num_key_value_heads == 2
        assert config.model_config.generation_config_dict == {"eos_token_id": [2]}
        assert config.model_config.max_model_len == 128


def test_pinned_length_is_kept_and_a_longer_one_refused(config_for, folder) -> None:
    config = config_for(folder(), max_model_len=64)
    resolve_model(config)
    assert (config.model_config.max_model_len, config.model_config.max_model_len_pinned) == (
        64,
        True,
    )
    with pytest.raises(UserError, match=r"max_model_len=65 is longer than the 64 tokens"):
        resolve_model(config_for(folder(), max_model_len=65))
    with pytest.raises(UserError, match="at least 1"):
        resolve_model(config_for(folder(), max_model_len=0))


YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}
LONG = {"rope_type": "longrope", "short_factor": [1.0] * 4, "long_factor": [2.0] * 4}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}


@pytest.mark.parametrize(
    ("said", "usual", "longest"),
    [
        ({"rope_scaling": YARN}, 128, 128),
        ({"rope_scaling": {"type": "yarn", "factor": 4.0}}, 256, 256),
        ({"model_type": "qwen2", "rope_scaling": YARN}, 128, 128),
        ({"rope_parameters": YARN | {"rope_theta": 1e6}}, 128, 128),
        ({"rope_parameters": {"full_attention": YARN, "sliding_attention": {}}}, 128, 128),
        ({"rope_scaling": {"type": "linear", "factor": 2.5}}, 160, 160),
        ({"rope_scaling": {"type": "dynamic", "factor": 2}}, 128, 128),
        ({"rope_scaling": {"type": "dynamic", "alpha": 1000.0, "factor": 1.0}}, 64, 64),
        ({"rope_scaling": {"type": "linear", "factor": None}}, 64, 64),
        ({"rope_scaling": LLAMA3}, 64, 64),
        ({"rope_scaling": {"type": "mrope", "mrope_section": [2, 1, 1]}}, 64, 64),
        ({"rope_scaling": LONG | {"factor": 4.0}}, 64, 64),
        ({"rope_scaling": LONG, "original_max_position_embeddings": 16}, 16, 64),
        ({"rope_scaling": LONG | {"original_max_position_embeddings": 16}}, 64, 64),
        (
            {"model_type": "phi3", "rope_scaling": LONG, "max_position_embeddings": 131072},
            4096,
            131072,
        ),
        (
            {
                "model_type": "phimoe",
                "num_key_value_heads": 4,
                "rope_scaling": LONG | {"original_max_position_embeddings": 16},
            },
            16,
            64,
        ),
        ({"model_type": "gemma3_text", "rope_scaling": {"type": "linear", "factor": 8.0}}, 64, 64),
        ({"model_max_length": 256}, 256, 256),
        ({"seq_length": 48}, 48, 48),
        ({"sliding_window": 16, "rope_scaling": {"type": "linear", "factor": 2.0}}, 128, 128),
    ],
)
def test_the_length_is_upstreams(config_for, folder, said, usual, longest) -> None:
    """Unless a length is told, that of LongRoPE's short factors; told, up to the scaled length."""
    for given, taken in ((None, usual), (-1, usual), (longest, longest)):
        config = config_for(folder(**said), max_model_len=given)
        resolve_model(config)
        assert config.model_config.max_model_len == taken
    with pytest.raises(
        UserError, match=f"max_model_len={longest + 1} is longer than the {longest}"
    ):
        resolve_model(config_for(folder(**said), max_model_len=longest + 1))


@pytest.mark.parametrize(
    ("said", "words"),
    [
        ({"factor": "4"}, "factor is '4'; a number above zero"),
        ({"factor": -1.0}, "factor is -1.0; a number above zero"),
        ({"factor": True}, "factor is True; a number above zero"),
        ({"original_max_position_embeddings": "32"}, "original_max_position_embeddings is '32'"),
    ],
)
def test_a_scaling_that_is_no_number_is_named(config_for, folder, said, words) -> None:
    with pytest.raises(CheckpointError, match=rf"config\.json: .*{words}"):
        resolve_model(config_for(folder(rope_scaling=YARN | said)))


@pytest.mark.parametrize(("given", "name"), [("half", "float16"), ("float", "float32")])
def test_dtype_aliases_are_spelled_out(config_for, folder, given, name) -> None:
    config = config_for(folder(), dtype=given)
    resolve_model(config)
    assert config.model_config.dtype == name


def test_disabled_sliding_window_caps_the_length(config_for, folder) -> None:
    config = config_for(folder(sliding_window=16), disable_sliding_window=True)
    resolve_model(config)
    assert config.model_config.max_model_len == 16


def test_overrides_replace_keys_before_values_are_derived(config_for, folder) -> None:
    config = config_for(folder(), hf_overrides={"num_attention_heads": 2})
    resolve_model(config)
    assert config.model_config.hf_config.head_dim == 16


def test_generation_config_sources(config_for, folder, tmp_path) -> None:
    path = folder()
    (path / "generation_config.json").write_text('{"temperature": 0.6, "top_k": 20}')
    config = config_for(path, override_generation_config={"top_k": 5})
    resolve_model(config)
    assert config.model_config.generation_config_dict == {"temperature": 0.6, "top_k": 5}
    config = config_for(path, generation_config="vllm")
    resolve_model(config)
    assert config.model_config.generation_config_dict == {}
    config = config_for(path, generation_config=str(path))
    resolve_model(config)
    assert config.model_config.generation_config_dict["top_k"] == 20
    with pytest.raises(UserError, match="there is no"):
        resolve_model(config_for(path, generation_config=str(tmp_path / "absent")))


def test_unknown_architecture_is_named_with_the_nearest(config_for, folder) -> None:
    with pytest.raises(UserError, match=r"'LlammaForCausalLM' is not supported.*Llama") as caught:
        resolve_model(config_for(folder(architectures=["LlammaForCausalLM"])))
    told = str(caught.value)
    assert "Nearest by name: LlamaForCausalLM, " in told
    assert told.count("ForCausalLM") < 8
    assert f"{len(architectures())} are: vllmx.ModelRegistry.get_supported_archs()" in told


@pytest.mark.parametrize("outer", ["qwen3_6", None])
@pytest.mark.parametrize("inner", [{}, {"model_type": ""}])
def test_a_text_config_of_no_family_is_refused(config_for, folder, outer, inner) -> None:
    """What it leaves out would be guessed."""
    text = {key: value for key, value in CONFIG.items() if key != "model_type"} | inner
    path = folder(text_config=text, model_type=outer)
    words = rf"\(text_config\): 'model_type' is missing, and the outer one, {outer!r}"
    with pytest.raises(CheckpointError, match=words):
        resolve_model(config_for(path))


def test_remote_code_is_never_the_answer(config_for, folder) -> None:
    changes = {"architectures": ["MineForCausalLM"], "auto_map": {"AutoModel": "mine.Mine"}}
    with pytest.raises(UserError, match="brings its own code"):
        resolve_model(config_for(folder(**changes)))


def test_bad_places_are_named(config_for, folder, tmp_path) -> None:
    with pytest.raises(ModelNotFoundError, match=r"'smollm2-135': .*Did you mean smollm2-135m"):
        resolve_model(config_for("smollm2-135"))
    with pytest.raises(CheckpointError, match=r"has no config\.json"):
        resolve_model(config_for(tmp_path))
    with pytest.raises(CheckpointError, match="'architectures' is missing"):
        resolve_model(config_for(folder(architectures=[])))
    with pytest.raises(ModelNotFoundError, match="No model is set"):
        resolve_model(config_for(""))
    note = tmp_path / "note.txt"
    note.write_text("hello")
    with pytest.raises(CheckpointError, match="neither a folder nor a GGUF"):
        resolve_model(config_for(note))


def test_truncated_gguf_is_refused(config_for, write_gguf, sizes) -> None:
    path = write_gguf({"token_embd.weight": np.zeros((10, 32), np.float32)}, sizes)
    path.write_bytes(path.read_bytes()[:-500])
    with pytest.raises(CheckpointError, match=r"tiny\.gguf.*'token_embd\.weight'.*ends at byte"):
        resolve_model(config_for(path))


def test_load_format_must_fit_the_checkpoint(config_for, folder) -> None:
    with pytest.raises(UserError, match=r"load_format=gguf, but .* is of format safetensors"):
        resolve_model(config_for(folder(), load_format="gguf"))


def test_offline_model_says_what_to_run(config_for, tmp_path) -> None:
    config = config_for(offline=True, download_dir=str(tmp_path))
    config.model_config.name = "smollm2-135m"
    config.model_config.source = compose_run(["model=smollm2-135m"]).model.source
    with pytest.raises(ModelNotFoundError, match="run `vllmx fetch smollm2-135m`"):
        resolve_model(config)


def test_resolving_imports_no_torch() -> None:
    code = "import sys, vllmx.model_loader.resolve; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
