# SPDX-License-Identifier: Apache-2.0
"""`vllmx checkpoint tiny`: equal bytes everywhere, a folder that loads, mistakes named."""

import hashlib
import json
from pathlib import Path

import pytest
import tokenizers
from checkpoints import build_engine
from safetensors import safe_open

from vllmx import SamplingParams
from vllmx.cli import main
from vllmx.exceptions import UserError
from vllmx.registry import architectures
from vllmx.tiny.checkpoint import save
from vllmx.tiny.configs import FAMILIES, config_of
from vllmx.tiny.tensors import shapes
from vllmx.tiny.tokenizer import tokenizer_files

GOLDENS = Path(__file__).resolve().parents[2] / "parity" / "goldens" / "models"


def made(capsys, *argv: str, code: int = 0) -> str:
    assert main(["checkpoint", "tiny", *argv]) == code
    return "".join(capsys.readouterr())


@pytest.fixture
def llama(tmp_path, capsys) -> Path:
    folder = tmp_path / "new" / "llama"
    assert made(capsys, "model=llama", f"output_dir={folder}") == f"{folder}\n"
    return folder


def test_the_weights_are_those_that_goldens_were_recorded_from(llama) -> None:
    with safe_open(GOLDENS / "tiny-llama" / "vllm-cpu-f32.safetensors", "numpy") as golden:
        wanted = json.loads(golden.metadata()["vllmx"])["args"]["weights_sha256"]
    assert hashlib.sha256((llama / "model.safetensors").read_bytes()).hexdigest() == wanted


def test_the_folder_loads_and_its_text_is_tokenized(llama) -> None:
    llm = build_engine(llama, skip_tokenizer_init=False)
    (answer,) = llm.generate(["One two"], SamplingParams(temperature=0, max_tokens=3))
    assert answer.prompt_token_ids == [82, 601, 35, 775, 114]
    assert len(answer.outputs[0].token_ids) == 3
    assert llm.get_tokenizer().decode([82, 601, 35, 775, 114]) == "One two"


@pytest.mark.parametrize("size", [260, 1024, 1637])
def test_tokenizers_of_any_size_spell_every_text(size) -> None:
    text = "Zebra naïve — 東京\n\x00"
    file = json.dumps(tokenizer_files(size)["tokenizer.json"])
    tokenizer = tokenizers.Tokenizer.from_str(file)
    assert tokenizer.get_vocab_size() == size
    assert tokenizer.decode(tokenizer.encode(text).ids, skip_special_tokens=False) == text


def test_without_a_folder_it_is_made_here_and_never_over_another(
    tmp_path, monkeypatch, capsys
) -> None:
    monkeypatch.chdir(tmp_path)
    assert made(capsys, "tiny-qwen3") == f"{tmp_path / 'tiny-qwen3'}\n"
    assert "is there and not an empty folder" in made(capsys, "qwen3", code=2)
    (tmp_path / "empty").mkdir()
    made(capsys, "qwen3", "checkpoint.output_dir=empty")
    assert (tmp_path / "empty" / "config.json").is_file()


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        ([], "choose one of tiny-"),
        ([], "tiny-mixtral, tiny-mixtral-bf16,"),
        (["model=lama"], "Did you mean tiny-llama?"),
        (["model=mixtrl-bf16"], "Did you mean tiny-mixtral-bf16?"),
        (["model=llama-bf16"], "has no router whose choice bfloat16 could change"),
    ],
)
def test_a_name_that_is_none_is_answered_with_those_there_are(capsys, argv, words) -> None:
    assert words in made(capsys, *argv, code=2)


@pytest.mark.parametrize("name", FAMILIES)
def test_every_tiny_model_is_of_an_architecture_that_is_served(name) -> None:
    (architecture,) = config_of(name)["architectures"]
    assert architecture in architectures()
    assert shapes(config_of(name))


def test_a_failed_run_leaves_nothing_behind(tmp_path, monkeypatch, capsys) -> None:
    def fail(name: str, folder: Path) -> None:
        save(name, folder)
        raise UserError("the disk is full.")

    monkeypatch.setattr("vllmx.tasks.checkpoint.save", fail)
    made(capsys, "llama", f"output_dir={tmp_path / 'x'}", code=2)
    assert not list(tmp_path.iterdir())
