# SPDX-License-Identifier: Apache-2.0
"""The table of architectures is that of the files it is made of."""

import pytest

from parity import architectures
from vllmx.registry import own_architectures


def test_the_table_is_current() -> None:
    assert architectures.main(["--check"]) == 0


def test_a_stale_table_is_told(tmp_path, monkeypatch, capsys) -> None:
    monkeypatch.setattr(architectures, "REPORT", tmp_path / "architectures.md")
    assert architectures.main(["--check"]) == 1
    assert "is stale: python -m parity.architectures" in capsys.readouterr().err
    assert architectures.main([]) == 0
    assert architectures.main(["--check"]) == 0


def test_it_lists_what_the_registry_finds_and_nothing_else() -> None:
    assert architectures.ours().keys() == own_architectures().keys()


def test_names_are_read_from_upstreams_registry(tmp_path) -> None:
    file = tmp_path / "registry.py"
    file.write_text('_TEXT_GENERATION_MODELS = {"B": ("b", "C"), "a": ("a", "A")}\n')
    assert architectures.read_upstream(file) == ["a\ta\tA", "B\tb\tC"]
    backed = '{"b2": ("transformers", "T"), "c": ("transformers", "TransformersMultiModal")}'
    with file.open("a") as more:
        more.write(f"_TRANSFORMERS_SUPPORTED_MODELS = {backed}\n")
    assert architectures.read_upstream(file)[2:] == ["b2\ttransformers\tT"]
    file.write_text("X = {}\n")
    with pytest.raises(ValueError, match="has no _TEXT_GENERATION_MODELS"):
        architectures.read_upstream(file)


def test_a_class_without_a_body_of_its_own_is_told_as_another_name() -> None:
    known = architectures.ours()
    assert known["StableLMEpochForCausalLM"].same_as == "StableLmForCausalLM"
    assert known["LlamaForCausalLM"].same_as is None
