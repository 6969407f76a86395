# SPDX-License-Identifier: Apache-2.0
"""The wrapper, and tokenizers from a folder with tokenizer.json."""

import json

import pytest
from tokenizers import AddedToken, decoders, models, pre_tokenizers, processors
from tokenizers import Tokenizer as Backend

from vllmx.exceptions import CheckpointError, ModelNotFoundError, UserError, VLLMValidationError
from vllmx.model_loader.tokenizer import get_tokenizer, load_chat_template, tokenizer_from_folder

WORDS = {"<unk>": 0, "hello": 1, "world": 2, "<eos>": 3, "<s>": 4}


@pytest.fixture
def folder(tmp_path):
    backend = Backend(models.WordLevel(WORDS, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    backend.decoder = decoders.Fuse()
    backend.add_special_tokens([AddedToken("<s>", special=True)])
    backend.add_tokens([AddedToken("<think>", special=False)])
    backend.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", 4)]
    )
    backend.enable_truncation(2)
    backend.enable_padding(length=9)
    backend.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text(
        json.dumps(
            {
                "bos_token": {"content": "<s>"},
                "eos_token": "<eos>",
                "add_bos_token": True,
                "chat_template": "from config",
            }
        )
    )
    return tmp_path


def test_folder_s_tokenizer_neither_pads_nor_truncates(folder) -> None:
    tokenizer = tokenizer_from_folder(folder)
    assert tokenizer.encode("hello world hello") == [4, 1, 2, 1]
    assert tokenizer.encode("hello", add_special_tokens=False) == [1]
    assert tokenizer_from_folder(folder / "tokenizer.json").encode("world") == [4, 2]


def test_named_special_tokens_are_hidden_though_only_the_config_names_them(folder) -> None:
    tokenizer = tokenizer_from_folder(folder)
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id) == (4, 3)
    assert tokenizer.all_special_ids == {3, 4}
    assert tokenizer.decode([4, 1, 5, 3]) == "<s>hello<think><eos>"
    assert tokenizer.decode([4, 1, 5, 3], skip_special_tokens=True) == "hello<think>"
    assert tokenizer.vocab_size == len(tokenizer) == 6
    assert tokenizer.max_token_id == 5


def test_unknown_ids_decode_to_nothing(folder) -> None:
    tokenizer = tokenizer_from_folder(folder)
    assert tokenizer.decode([1, 99, 1]) == "hellohello"
    assert tokenizer.decode([99]) == ""
    assert tokenizer.convert_ids_to_tokens([1, 99]) == ["hello", ""]
    assert tokenizer.convert_tokens_to_ids("absent") is None


def test_lone_surrogate_is_a_bad_request(folder) -> None:
    with pytest.raises(VLLMValidationError, match="lone surrogate"):
        tokenizer_from_folder(folder).encode("\ud800")


def test_chat_template_files_win_in_order(folder) -> None:
    assert tokenizer_from_folder(folder).chat_template == "from config"
    (folder / "chat_template.jinja").write_text("from file")
    extra = folder / "additional_chat_templates"
    extra.mkdir()
    (extra / "tool_use.jinja").write_text("tools")
    templates = tokenizer_from_folder(folder).chat_templates
    assert templates == {"default": "from file", "tool_use": "tools"}


def test_list_of_named_templates_is_understood(folder) -> None:
    entries = [{"name": "default", "template": "D"}, {"name": "tool_use", "template": "T"}]
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": entries}))
    assert tokenizer_from_folder(folder).chat_templates == {"default": "D", "tool_use": "T"}
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": 7}))
    with pytest.raises(CheckpointError, match="chat_template is a int"):
        tokenizer_from_folder(folder)


def test_missing_and_broken_files_are_named(tmp_path) -> None:
    with pytest.raises(ModelNotFoundError, match=r"has no tokenizer\.json"):
        tokenizer_from_folder(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(CheckpointError, match=r"tokenizer\.json cannot be read"):
        tokenizer_from_folder(tmp_path)


def test_get_tokenizer_obeys_the_config(folder, config_for, tmp_path) -> None:
    config = config_for(folder)
    assert get_tokenizer(config).chat_template == "from config"
    config.model_config.skip_tokenizer_init = True
    assert get_tokenizer(config) is None
    template = tmp_path / "mine.jinja"
    template.write_text("mine")
    other = tmp_path / "elsewhere"
    other.mkdir()
    config = config_for(other, tokenizer=str(folder), chat_template=str(template))
    assert get_tokenizer(config).chat_template == "mine"
    with pytest.raises(UserError, match="no such file"):
        load_chat_template(str(tmp_path / "absent.jinja"))
    assert load_chat_template("{{ messages }}") == "{{ messages }}"
