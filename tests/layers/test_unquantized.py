# SPDX-License-Identifier: Apache-2.0
"""Float weights are packed to float16 where that loses nothing, or where the user asks for it."""

import json
import logging

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_folders import in_folder

from vllmx.config import KernelConfig, finalize
from vllmx.engine.arg_utils import engine_args_to_config
from vllmx.exceptions import CheckpointError
from vllmx.ir.ggml import GGMLType
from vllmx.ir.select import OpTable
from vllmx.kernels.fbgemm_ops import OF_THE_LARGEST, UNDERFLOW, rounding
from vllmx.layers.linear import LinearBase
from vllmx.layers.vocab_parallel_embedding import weight_formats
from vllmx.model_loader.gguf_loader import GGUFTensor
from vllmx.model_loader.loader import load_model
from vllmx.model_loader.resolve import resolve_model
from vllmx.quantization.unquantized import LinearMethod, exact_provider

FINE = torch.randn(96, 64, generator=torch.Generator().manual_seed(0)) * 0.05
HALF = FINE.half().float()
BF16 = FINE.to(torch.bfloat16).float()


def table(**kernel: object) -> OpTable:
    return OpTable(KernelConfig(**kernel), "cpu", torch.float32)


def chosen(*weights: object, **kernel: object) -> str:
    return exact_provider(list(weights), table(**kernel)).provider


def test_float16_holds_what_comes_back_the_same() -> None:
    assert rounding(HALF) == rounding(HALF.half()) == rounding(HALF.double()) == 0.0
    loss = rounding(FINE)
    assert loss == float((HALF - FINE).abs().max()) > UNDERFLOW


def test_a_bfloat16_weight_that_underflows_is_held_and_a_float32_one_of_its_size() -> None:
    small = BF16.clone()
    small[3, 5] = 2.0**-20 + 2.0**-25
    lost = float((small.half().float() - small).abs().max())
    assert 0 < lost <= UNDERFLOW
    assert rounding(small) == rounding(small.to(torch.bfloat16)) == 0.0
    small[3, 5] = 2.0**-11 + 2.0**-23  # as much again, at a size where bfloat16 has no such weight
    assert rounding(small) == 2.0**-23


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_matrix_of_small_weights_is_held_to_its_largest(dtype) -> None:
    tiny = (BF16 * 1e-5).to(dtype)
    loss = rounding(tiny)
    assert UNDERFLOW >= loss > OF_THE_LARGEST * float(tiny.abs().max())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_weight_beyond_float16_goes_to_another_provider(dtype) -> None:
    large = HALF.to(dtype, copy=True)
    large[0, 0] = 1e5
    assert rounding(large) == float("inf")
    assert chosen(large) == "torch"


def test_a_weight_that_is_no_number_is_refused_by_name() -> None:
    broken = HALF.clone()
    broken[0, 0] = float("nan")
    with pytest.raises(CheckpointError, match="a weight of magnitude nan does not fit fp16"):
        LinearMethod(None).pack([broken], None, table())


def test_the_provider_goes_by_all_weights_of_a_layer() -> None:
    assert chosen(HALF, BF16) == "fbgemm"
    assert chosen(HALF, FINE) == chosen(FINE.double()) == "torch"
    assert chosen(FINE, default_priority=["fbgemm", "torch"]) == "torch"
    assert chosen(FINE, ir_op_priority={"linear": ["fbgemm"]}) == "fbgemm"
    blocks = GGUFTensor("a", GGMLType.Q8_0, (1, 32), torch.zeros(1, 34, dtype=torch.uint8))
    assert chosen(blocks) == "fbgemm"
    assert chosen(blocks, FINE) == "torch"


def test_a_layer_computes_with_the_weights_of_the_checkpoint() -> None:
    x = torch.randn(5, 64, generator=torch.Generator().manual_seed(1))
    bias = torch.linspace(-1, 1, 96)
    packed = LinearMethod(None).pack([FINE], [bias], table())
    assert torch.equal(packed.apply(x), torch.nn.functional.linear(x, FINE, bias))
    assert packed.format == "float32 (from float32)"
    forced = LinearMethod(None).pack([FINE], [bias], table(ir_op_priority={"linear": ["fbgemm"]}))
    assert forced.format == "fp16 packed by fbgemm (from float32)"
    off = (forced.apply(x) - packed.apply(x)).abs().max()
    assert 1e-6 < float(off) < 1e-2


def test_who_takes_over_and_why_is_told_once(caplog) -> None:
    ops = table()
    with caplog.at_level(logging.INFO):
        for weight in (HALF, FINE, FINE):
            exact_provider([weight], ops)
    (line,) = [r.getMessage() for r in caplog.records]
    assert "fbgemm would round run in torch: fp16 doesn't hold weights of the check" in line
    assert "kernel.ir_op_priority.linear=[fbgemm] rounds them" in line


def formats_of(folder) -> dict[str, int]:
    run = engine_args_to_config(model=str(folder), skip_tokenizer_init=True)
    run.load.use_tqdm_on_load = False
    config = finalize(run)
    resolve_model(config)
    model = load_model(config, OpTable(config.kernel_config, "cpu", torch.float32))
    assert any(isinstance(module, LinearBase) for module in model.modules())
    return {name: count for name, (count, _) in weight_formats(model).items()}


def test_a_tiny_checkpoint_is_packed_until_its_weights_are_finer(tmp_path) -> None:
    folder = in_folder(tmp_path)("tiny-llama")
    packed, plain = "fp16 packed by fbgemm (from float32)", "float32 (from float32)"
    layers = formats_of(folder)[packed]
    assert plain not in formats_of(folder)
    tensors = load_file(folder / "model.safetensors")
    name = "model.layers.1.mlp.down_proj.weight"
    tensors[name] = tensors[name] * 1.001
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    assert formats_of(folder)[packed] == layers - 1
    assert formats_of(folder)[plain] == 1
    said = json.loads((folder / "config.json").read_text())
    assert said["dtype"] == "float32"
