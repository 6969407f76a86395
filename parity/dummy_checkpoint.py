# SPDX-License-Identifier: Apache-2.0
"""A seeded checkpoint of any size for timing, with weights scaled as a trained model's are.

    python -m parity.dummy_checkpoint CONFIG_FOLDER FOLDER [--device cuda]

CONFIG_FOLDER has a config.json of a Llama, Qwen3 or Gemma 3. Every matrix is normal with variance
1 / fan-in, so that activations keep their size from layer to layer; the rows of the output head are
longer, so that logits spread over several nats and the likeliest token is rarely a tie. bfloat16.
Drawn from torch's generator, seeded per tensor: the same on one kind of device and torch.
"""

from __future__ import annotations

import argparse
import json
import zlib
from pathlib import Path

import torch
from safetensors.torch import save_file

from vllmx.tiny.tensors import shapes

HEAD_SPREAD = 3.0
"""Standard deviation of a logit, nats."""
SHARD = 4 << 30


def tensor(name: str, shape: tuple[int, ...], gemma: bool, device: str) -> torch.Tensor:
    """One weight, bfloat16, on the CPU."""
    generator = torch.Generator(device).manual_seed(zlib.crc32(name.encode()))
    values = torch.randn(shape, generator=generator, device=device)
    if len(shape) == 1:
        values = values * 0.1 + (0.0 if gemma else 1.0)
    else:
        head = name.startswith(("model.embed_tokens", "lm_head"))
        values *= (HEAD_SPREAD if head else 1.0) / shape[-1] ** 0.5
    return values.to(torch.bfloat16).cpu()


def save(config: dict, folder: Path, device: str) -> None:
    """Write config.json and the shards with their index."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    gemma = config["model_type"].startswith("gemma")
    shards: list[dict[str, tuple[int, ...]]] = [{}]
    size = 0
    for name, shape in shapes(config).items():
        bytes_ = 2 * torch.Size(shape).numel()
        if size and size + bytes_ > SHARD:
            shards.append({})
            size = 0
        shards[-1][name] = shape
        size += bytes_
    index: dict[str, str] = {}
    for number, names in enumerate(shards, 1):
        file = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        tensors = {name: tensor(name, shape, gemma, device) for name, shape in names.items()}
        save_file(tensors, str(folder / file), {"format": "pt"})
        index |= dict.fromkeys(names, file)
    text = json.dumps({"metadata": {}, "weight_map": index}, indent=1)
    (folder / "model.safetensors.index.json").write_text(text + "\n")


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("config", type=Path)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    args = parser.parse_args()
    config = json.loads((args.config / "config.json").read_text())
    save(config, args.folder, args.device)


if __name__ == "__main__":
    main()
