# SPDX-License-Identifier: Apache-2.0
"""pytorch_model.bin: its tensors are read, and nothing else that a pickle may hold."""

import json
import pickle
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from vllmx.exceptions import CheckpointError, UserError
from vllmx.model_loader.pt_file import iterate_pt, pt_file
from vllmx.model_loader.resolve import resolve_model
from vllmx.model_loader.safetensors_loader import iterate_safetensors
from vllmx.model_loader.weights import iterate_weights, with_file

TENSORS = {"a": torch.arange(6.0).view(2, 3), "b": torch.ones(2, dtype=torch.bfloat16)}


class Touch:
    """A pickle that would make a file where it is loaded."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self):
        return Path.touch, (self.path,)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    config = {"architectures": ["GPT2LMHeadModel"], "model_type": "gpt2", "n_positions": 512}
    sizes = {"n_embd": 32, "n_head": 2, "n_layer": 1, "vocab_size": 33}
    (tmp_path / "config.json").write_text(json.dumps(config | sizes))
    return tmp_path


@pytest.mark.parametrize("zipped", [True, False])
def test_tensors_come_as_they_were_saved(folder: Path, config_for, zipped: bool) -> None:
    torch.save(TENSORS, folder / "pytorch_model.bin", _use_new_zipfile_serialization=zipped)
    config = config_for(folder)
    resolve_model(config)
    found = dict(iterate_weights(config))
    assert found.keys() == TENSORS.keys()
    assert all(torch.equal(found[name], TENSORS[name]) for name in TENSORS)
    told = str(with_file(CheckpointError("bad"), config))
    assert told == f"{folder / 'pytorch_model.bin'}: bad"


def test_safetensors_under_its_name_are_told_from_what_is_corrupt(folder: Path) -> None:
    file = folder / "pytorch_model.bin"
    save_file(TENSORS, file)
    with pytest.raises(CheckpointError, match=r"holds safetensors.*rename it to model\.safeten"):
        list(iterate_pt(file))


@pytest.mark.parametrize("zipped", [True, False])
def test_what_torch_saved_under_the_name_of_safetensors_is_told(folder: Path, zipped: bool) -> None:
    file = folder / "model.safetensors"
    torch.save(TENSORS, file, _use_new_zipfile_serialization=zipped)
    with pytest.raises(CheckpointError, match=r"one of torch\.save.*rename it to pytorch_model\.b"):
        list(iterate_safetensors(folder))


def test_safetensors_beside_it_are_taken(folder: Path) -> None:
    torch.save(TENSORS, folder / "pytorch_model.bin")
    assert pt_file(folder) == folder / "pytorch_model.bin"
    save_file(TENSORS, folder / "model.safetensors")
    assert pt_file(folder) is None


@pytest.mark.parametrize("zipped", [True, False])
def test_no_code_of_a_file_is_run(folder: Path, zipped: bool) -> None:
    made, file = folder / "made", folder / "pytorch_model.bin"
    torch.save({"a": Touch(made)}, file, _use_new_zipfile_serialization=zipped)
    with pytest.raises(CheckpointError, match="objects other than tensors"):
        list(iterate_pt(file))
    file.write_bytes(pickle.dumps(Touch(made)))
    with pytest.raises(CheckpointError, match=r"pytorch_model\.bin"):
        list(iterate_pt(file))
    assert not made.exists()


@pytest.mark.parametrize("content", [[torch.ones(1)], {"a": 1.0}])
def test_what_is_no_mapping_of_tensors_is_refused(folder: Path, content: object) -> None:
    torch.save(content, folder / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match="no mapping of names to tensors"):
        list(iterate_pt(folder / "pytorch_model.bin"))


@pytest.mark.parametrize("kept", [0, 3, 200])
def test_a_truncated_file_is_named(folder: Path, kept: int) -> None:
    file = folder / "pytorch_model.bin"
    torch.save(TENSORS, file)
    file.write_bytes(file.read_bytes()[:kept])
    with pytest.raises(CheckpointError, match=r"pytorch_model\.bin is .*corrupt"):
        list(iterate_pt(file))


def test_the_format_can_be_asked_for(folder: Path, config_for) -> None:
    torch.save(TENSORS, folder / "pytorch_model.bin")
    resolve_model(config_for(folder, load_format="pt"))
    with pytest.raises(UserError, match=r"load_format=safetensors, but .* is of format pt"):
        resolve_model(config_for(folder, load_format="safetensors"))
