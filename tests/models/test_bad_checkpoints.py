# SPDX-License-Identifier: Apache-2.0
"""Every architecture with a tiny checkpoint refuses what it cannot compute: keys of the config that
ask for other maths, and tensors that are missing, too many, of another shape or of another type."""

import json
import re
from copy import deepcopy
from functools import cache
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_folders import in_folder

from vllmx.config import VllmConfig, finalize
from vllmx.engine.arg_utils import engine_args_to_config
from vllmx.exceptions import CheckpointError
from vllmx.ir.select import OpTable
from vllmx.layers.linear import QKVParallelLinear
from vllmx.layers.rotary_embedding import RotaryEmbedding
from vllmx.model_loader.loader import load_model
from vllmx.model_loader.resolve import resolve_model
from vllmx.models.unbuilt import HARMLESS
from vllmx.models.utils import ROTARY_BUFFERS
from vllmx.registry import get_model_cls
from vllmx.tiny.configs import FAMILIES, config_of

NAMES = sorted(name for name in FAMILIES if not name.endswith("-bf16"))
ACTIVATIONS = ("activation", "activation_function", "hidden_act", "hidden_activation")
WITHOUT_ROTATION = ("tiny-bloom", "tiny-gpt2", "tiny-gpt_bigcode", "tiny-mpt", "tiny-opt")
"""Their positions are learned, or slopes."""


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Name -> the folder of a tiny checkpoint, written when it is asked for."""
    return in_folder(tmp_path_factory.mktemp("tiny"))


@cache
def settings() -> VllmConfig:
    run = engine_args_to_config(model="somewhere", skip_tokenizer_init=True)
    run.kernel.default_priority = ["torch"]
    run.load.use_tqdm_on_load = False
    return finalize(run)


def load(folder: Path) -> None:
    config = deepcopy(settings())
    config.model_config.model = str(folder)
    resolve_model(config)
    load_model(config, OpTable(config.kernel_config, "cpu", torch.float32))


def saying(name: str, folder: Path, key: str, value: object, outer: bool = False) -> Path:
    """A folder with the config of a tiny model, which says something else; it has no weights."""
    said = config_of(name)
    (said if outer else said.get("text_config", said))[key] = value
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(said))
    return folder


@pytest.mark.parametrize("name", NAMES)
def test_a_key_that_asks_for_other_maths_stops_the_load(tmp_path, name) -> None:
    """Before a weight is read: what lacks is told of the config and not of the tensors."""
    text = config_of(name).get("text_config", config_of(name))
    kinds = len(text.get("layer_types", range(4)))
    asked = [
        *((key, "swoosh", "swoosh") for key in ACTIVATIONS if key in text),
        ("hidden_act", "swish7", "swish7"),
        ("tie_word_embeddings", "false", "'tie_word_embeddings' is 'false', not of type bool"),
        ("layer_types", ["swirl"] * kinds, "swirl"),
        ("quantization_config", {"quant_method": "fp8"}, "quantization method 'fp8'"),
        ("compression_config", {"quant_method": "squeeze"}, "quantization method 'squeeze'"),
        ("quantization_config", "fp8", "quantization_config is 'fp8', not a JSON object"),
        *((key, "asked for", key) for key in HARMLESS if key != "attention_chunk_size"),
    ]
    if name not in WITHOUT_ROTATION:
        spiral = {"rope_type": "spiral", "rope_theta": 1e4}
        asked += [
            (key, spiral, "rope_type 'spiral'") for key in ("rope_parameters", "rope_scaling")
        ]
    for number, (key, value, words) in enumerate(asked):
        folder = saying(name, tmp_path / str(number), key, value)
        with pytest.raises(CheckpointError, match=re.escape(words)) as caught:
            load(folder)
        assert str(caught.value).startswith(str(folder / "config.json"))


@pytest.mark.parametrize("name", sorted(set(NAMES) - {*WITHOUT_ROTATION, "tiny-chatglm"}))
def test_every_position_of_a_scaled_model_has_its_angles(tmp_path, name) -> None:
    """Whichever class makes the rotation: it is told how long the engine's sequences are."""
    config = deepcopy(settings())
    scaled = {"rope_type": "linear", "factor": 2.0}
    config.model_config.model = str(saying(name, tmp_path / "scaled", "rope_scaling", scaled))
    resolve_model(config)
    build = get_model_cls(config.model_config.hf_config)
    model = build(vllm_config=config, ops=OpTable(config.kernel_config, "cpu", torch.float32))
    ropes = {module for module in model.modules() if isinstance(module, RotaryEmbedding)}
    length = config.model_config.hf_text_config.max_position_embeddings
    times = 1 if "gemma3" in config.model_config.hf_text_config.model_type else 2
    assert config.model_config.max_model_len == times * length
    assert ropes and {len(rope.cos_sin_cache) for rope in ropes} == {times * length}


@pytest.mark.parametrize("told", [True, False])
@pytest.mark.parametrize("name", NAMES)
def test_attention_bias_is_heeded_or_refused(tmp_path, name, told) -> None:
    config = deepcopy(settings())
    config.model_config.model = str(saying(name, tmp_path, "attention_bias", told))
    try:
        resolve_model(config)
        build = get_model_cls(config.model_config.hf_config)
        model = build(vllm_config=config, ops=OpTable(config.kernel_config, "cpu", torch.float32))
    except CheckpointError as error:
        assert re.search("attention_bias|two names of one thing", str(error))
        return
    projections = [m for m in model.modules() if isinstance(m, QKVParallelLinear)]
    if projections:  # latents have none
        assert any(projection.has_bias is told for projection in projections)
    else:
        assert not told


@pytest.mark.parametrize(
    ("name", "key", "value", "words"),
    [
        ("tiny-qwen3", "use_sliding_window", "false", "'use_sliding_window' is 'false'"),
        ("tiny-falcon", "alibi", "false", "'alibi' is 'false', not of type bool"),
        ("tiny-gpt_neox", "use_parallel_residual", "false", "'use_parallel_residual' is 'false'"),
        ("tiny-granite", "logits_scaling", "x", "'logits_scaling' is 'x', not of type float"),
        (
            "tiny-gemma2",
            "hidden_act",
            "relu",
            "hidden_act is 'relu' and hidden_activation",
        ),
        ("tiny-glm4_moe_lite", "scoring_func", "softmax", "scoring_func='softmax'"),
        ("tiny-glm4_moe_lite", "topk_method", "greedy", "topk_method='greedy'"),
        ("tiny-llama", "text_config", [1], r"text_config is \[1\], not a JSON object"),
        ("tiny-llama", "rope_parameters", {"factor": 4.0}, "have factor and no rope_type"),
        ("tiny-llama", "rope_scaling", {"rope_typ": "linear"}, "have rope_typ and no rope_type"),
        ("tiny-gemma3", "rope_scaling", {"factor": 8.0}, "have factor and no rope_type"),
        ("tiny-llama", "hidden_size", 0, "'hidden_size' is 0, it must be positive"),
        ("tiny-deepseek_v3", "moe_layer_freq", 0, "moe_layer_freq is 0, it must be positive"),
        ("tiny-deepseek_v3", "topk_group", 0, "topk_group is 0, of"),
        ("tiny-deepseek_v3", "n_group", 0, "n_group is 0"),
        (
            "tiny-llama",
            "quantization_config",
            {"quant_method": "gguf"},
            "quantization_config says gguf, and the weights are not in a GGUF file",
        ),
    ],
)
def test_a_value_that_says_nothing_stops_the_load(tmp_path, name, key, value, words) -> None:
    with pytest.raises(CheckpointError, match=rf"config\.json.*: .*{words}"):
        load(saying(name, tmp_path, key, value))


@pytest.mark.parametrize(
    ("name", "key"),
    [
        ("tiny-llama", "num_attention_heads"),
        ("tiny-deepseek_v3", "num_attention_heads"),
        ("tiny-gpt2", "n_head"),
    ],
)
def test_a_key_that_others_come_of_is_the_one_that_is_missed(tmp_path, name, key) -> None:
    said = config_of(name)
    del said[key]
    (tmp_path / "config.json").write_text(json.dumps(said))
    with pytest.raises(CheckpointError, match=rf"config\.json has no '{key}'"):
        load(tmp_path)


def test_fewer_experts_than_are_stored_are_told_by_their_number(folders, tmp_path) -> None:
    source = folders("tiny-mixtral")
    said = config_of("tiny-mixtral")
    kept = said["num_local_experts"] - 1
    said["num_local_experts"] = kept
    (tmp_path / "config.json").write_text(json.dumps(said))
    (tmp_path / "model.safetensors").write_bytes((source / "model.safetensors").read_bytes())
    words = rf"is of expert {kept}, counted from 0; the config tells of {kept} experts"
    with pytest.raises(CheckpointError, match=words):
        load(tmp_path)


def test_quantisation_is_refused_wherever_it_is_told(tmp_path) -> None:
    told = {"quantization": {"quant_algo": "FP8"}}
    folder = saying("tiny-llama", tmp_path / "modelopt", "hidden_act", "silu")
    (folder / "hf_quant_config.json").write_text(json.dumps(told))
    words = r"modelopt/hf_quant_config\.json: quantization method 'modelopt' is not supported"
    with pytest.raises(CheckpointError, match=words):
        load(folder)
    folder = saying(
        "tiny-qwen3_5", tmp_path / "outer", "quantization_config", {"quant_method": "fp8"}, True
    )
    with pytest.raises(CheckpointError, match="quantization method 'fp8' is not supported"):
        load(folder)


def faults(tensors: dict[str, torch.Tensor], turn: int) -> list[tuple[str, dict, str]]:
    """(what is wrong, the tensors, the name that has to be told), of tensors by turns."""
    kinds = list({re.sub(r"\d+", "#", name): name for name in sorted(tensors)}.values())

    def pick(offset: int, matrix: bool = False) -> str:
        fit = [name for name in kinds if tensors[name].dim() > 1 or not matrix]
        return fit[(7 * turn + offset) % len(fit)]

    found = []
    for offset in range(0, len(kinds), 5):
        gone = pick(offset)
        found.append(("missing", {k: v for k, v in tensors.items() if k != gone}, gone))
    cut, wide, whole, narrow, lone = pick(1, True), pick(2), pick(3), pick(4), pick(5)
    found += [
        ("cut", {cut: tensors[cut][:-1].contiguous()}, cut),
        ("deeper", {wide: tensors[wide][None].contiguous()}, wide),
        ("whole numbers", {whole: tensors[whole].to(torch.int32)}, whole),
        ("8 bits", {narrow: tensors[narrow].to(torch.float8_e4m3fn)}, narrow),
        ("extra", {f"{lone}.more": torch.ones(3)}, f"{lone}.more"),
    ]
    stacked = [name for name in kinds if re.search(r"qkv|query_key_value|c_attn", name)]
    for name in stacked:
        found.append(("missing", {k: v for k, v in tensors.items() if k != name}, name))
        found.append(("cut", {name: tensors[name][:-1].contiguous()}, name))
    return [
        (what, changed if what == "missing" else tensors | changed, name)
        for what, changed, name in found
    ]


@pytest.mark.parametrize("name", NAMES)
def test_a_tensor_that_does_not_fit_is_named_with_its_file(folders, tmp_path, name) -> None:
    source, file = folders(name), tmp_path / "model.safetensors"
    (tmp_path / "config.json").write_text((source / "config.json").read_text())
    for what, tensors, told in faults(load_file(source / file.name), NAMES.index(name)):
        save_file(tensors, file, {"format": "pt"})
        with pytest.raises(CheckpointError) as error:
            load(tmp_path)
        assert str(error.value).startswith(f"{file}: "), (what, told)
        assert told in str(error.value), (what, told, str(error.value))


@pytest.mark.parametrize("name", NAMES)
def test_what_older_checkpoints_keep_of_rotations_is_left_out(folders, tmp_path, name) -> None:
    source = folders(name)
    tensors = load_file(source / "model.safetensors")
    layer = next(key for key in tensors if ".0." in key).split(".0.")[0] + ".0"
    buffers = {f"{layer}.self_attn.{buffer}": torch.ones(3) for buffer in ROTARY_BUFFERS}
    (tmp_path / "config.json").write_text((source / "config.json").read_text())
    save_file(tensors | buffers, tmp_path / "model.safetensors", {"format": "pt"})
    load(tmp_path)
