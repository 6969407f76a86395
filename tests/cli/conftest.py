# SPDX-License-Identifier: Apache-2.0
"""A tiny model with a tokenizer and a chat template; its weights are random (load_format=dummy)."""

import json
from pathlib import Path

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 258,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "bos_token_id": 256,
    "eos_token_id": 257,
    "torch_dtype": "float32",
}


def write_model(folder: Path, chat_template: str | None = TEMPLATE) -> Path:
    """A checkpoint folder without weights: config, byte-level tokenizer, chat template."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(CONFIG))
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(models.BPE({letter: i for i, letter in enumerate(letters)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<bos>", "<eos>"])
    backend.save(str(folder / "tokenizer.json"))
    settings = {"bos_token": "<bos>", "eos_token": "<eos>"}
    if chat_template is not None:
        settings["chat_template"] = chat_template
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Folder of the tiny model."""
    return str(write_model(tmp_path_factory.mktemp("models") / "tiny"))


@pytest.fixture(scope="session")
def tiny_model_without_template(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The same without a chat template."""
    return str(write_model(tmp_path_factory.mktemp("models") / "plain", None))


@pytest.fixture(scope="session")
def tiny(tiny_model: str) -> list[str]:
    """Arguments that run the tiny model quickly and repeatably."""
    return [tiny_model, *QUICK]


QUICK = [
    *["--load-format", "dummy", "--device", "cpu", "--num-threads", "1"],
    *["--kv-cache-memory-bytes", "4M", "--no-use-tqdm-on-load"],
]
