# SPDX-License-Identifier: Apache-2.0
"""The C kernels: how they are built, what happens without a compiler, and the sizes that matter."""

from pathlib import Path

import pytest
import torch

from vllmx.attention.backends.native import NativeBackend
from vllmx.config import KernelConfig
from vllmx.ir.ops.attention import paged_attention
from vllmx.ir.select import OpTable
from vllmx.kernels import native_library
from vllmx.kernels.native_library import library


@pytest.fixture
def fresh(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    """A machine that has compiled nothing yet."""
    monkeypatch.setattr(native_library.Path, "home", lambda: tmp_path)
    library.cache_clear()
    yield tmp_path
    library.cache_clear()


def choices(*ops: str) -> dict[str, str]:
    table = OpTable(KernelConfig(), "cpu", torch.float32)
    return {op: table.choose(op).provider for op in ops}


def test_it_is_compiled_once_and_found_again(fresh: Path) -> None:
    assert not isinstance(library(), str)
    (built,) = (fresh / ".cache/vllmx/kernels").iterdir()
    changed = built.stat().st_mtime_ns
    library.cache_clear()
    assert not isinstance(library(), str)
    assert [p.stat().st_mtime_ns for p in built.parent.iterdir()] == [changed]


def test_a_build_begun_early_is_the_one_that_is_used(fresh: Path) -> None:
    native_library.start_build()
    assert not isinstance(library(), str)
    assert len(list((fresh / ".cache/vllmx/kernels").iterdir())) == 1


def test_without_a_compiler_other_providers_serve_and_the_reason_is_told(
    fresh: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(native_library.shutil, "which", lambda name: None)
    native_library.start_build()
    table = OpTable(KernelConfig(), "cpu", torch.float32)
    assert table.choose("rms_norm").provider == "cpu"
    assert table.choose("paged_attention").provider == "sdpa"
    assert "there is no cc or gcc or clang" in table.choices["rms_norm"].refused["native"]


def test_a_compiler_that_fails_is_quoted(fresh: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    broken = fresh / "broken.c"
    broken.write_text("int main( {")
    monkeypatch.setattr(native_library, "SOURCE", broken)
    reason = library()
    assert isinstance(reason, str) and "cannot compile broken.c" in reason and "error" in reason
    assert choices("silu_and_mul") == {"silu_and_mul": "cpu"}
    assert list((fresh / ".cache/vllmx/kernels").iterdir()) == []


def test_its_threads_are_those_of_torch() -> None:
    threads = torch.get_num_threads()
    try:
        for count in (1, 2, 3):
            torch.set_num_threads(count)
            assert library().native_max_threads() == count
    finally:
        torch.set_num_threads(threads)


BIG = {
    "rms_norm": {"x": (300, 576), "weight": (576,), "epsilon": 1e-5},
    "fused_add_rms_norm": {
        "x": (300, 576),
        "x_residual": (300, 576),
        "weight": (576,),
        "epsilon": 1e-5,
    },
    "silu_and_mul": {"x": (100, 3072)},
    "gelu_and_mul": {"x": (100, 3072), "approximate": "tanh"},
}


def filled(shapes: dict, scale: float = 2.0) -> dict:
    generator = torch.Generator().manual_seed(1)
    return {
        name: torch.randn(value, generator=generator) * scale if isinstance(value, tuple) else value
        for name, value in shapes.items()
    }


def run(op_name: str, provider: str, inputs: dict) -> tuple[torch.Tensor, ...]:
    op = OpTable(KernelConfig(), "cpu", torch.float32).registry[op_name]
    copies = {k: v.clone() if isinstance(v, torch.Tensor) else v for k, v in inputs.items()}
    result = op.impls[provider].fn(**copies)
    return result if isinstance(result, tuple) else (result,)


@pytest.mark.parametrize("op_name", BIG)
def test_rows_shared_between_threads_are_right(op_name: str) -> None:
    inputs = filled(BIG[op_name])
    for got, want in zip(run(op_name, "native", inputs), run(op_name, "torch", inputs)):
        torch.testing.assert_close(got, want, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("op_name", BIG)
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf"), 1e30, -200.0])
def test_what_is_no_number_or_a_huge_one_comes_out_as_torch_has_it(
    op_name: str, value: float
) -> None:
    inputs = filled(BIG[op_name])
    inputs["x"][3, 5] = value
    for got, want in zip(run(op_name, "native", inputs), run(op_name, "torch", inputs)):
        torch.testing.assert_close(got, want, atol=1e-5, rtol=1e-5, equal_nan=True)


def test_rows_that_lie_apart_are_read_where_they_lie() -> None:
    wide = filled({"x": (5, 1000)})["x"]
    part = wide[:, 100:676]
    got = run("rms_norm", "native", {"x": part, "weight": None, "epsilon": 1e-6})
    want = run("rms_norm", "torch", {"x": part.contiguous(), "weight": None, "epsilon": 1e-6})
    torch.testing.assert_close(got, want)


@pytest.mark.parametrize("block_size", [16, 512])
@pytest.mark.parametrize("window", [None, 300])
@pytest.mark.parametrize("lengths", [[700], [700, 1, 333]])
def test_long_contexts_and_blocks_longer_than_a_tile(
    block_size: int, window: int | None, lengths: list[int]
) -> None:
    generator = torch.Generator().manual_seed(0)
    width = -(-max(lengths) // block_size)
    cache = torch.randn(width * len(lengths) + 1, block_size, 2, 2, 512, generator=generator)
    inputs = {
        "query": torch.randn(len(lengths), 4, 512, generator=generator),
        "key_cache": cache[:, :, 0],
        "value_cache": cache[:, :, 1],
        "block_table": (1 + torch.arange(width * len(lengths)).view(-1, width)).int(),
        "query_start_loc": torch.arange(len(lengths) + 1).int(),
        "seq_lens": torch.tensor(lengths, dtype=torch.int32),
        "scale": 512**-0.5,
        "sliding_window": window,
    }
    got, want = NativeBackend.op_call(**inputs), paged_attention.fn(**inputs)
    torch.testing.assert_close(got, want, atol=2e-5, rtol=1e-4)


def test_a_head_longer_than_the_kernel_holds_goes_to_torch() -> None:
    table = OpTable(KernelConfig(), "cpu", torch.float32)
    assert table.choose("paged_attention", head_size=576).provider == "sdpa"
    assert "at most 512 elements" in table.choices["paged_attention"].refused["native"]
