# SPDX-License-Identifier: Apache-2.0
"""Oracle: what transformers and upstream vLLM make of texts, tokens, chats and blocks of tokens.

`python -m oracles.vllm_text JOB OUT`, in the environment of `nox -s oracle`. JOB is JSON: `specs`
(parity/text_cases.py), and `files`: model -> its GGUF file. OUT is JSON: `oracle`, what computed,
and `answers`: name of a spec -> `callable`, `source_sha256` of the GGUF file ("" without one),
`repeat`, whether a second pass gave the same, and `cases`: id -> answer:

    tokenizer    of a text: ids with and without special tokens, and the text of the ids with and
                 without them; of ids: their spellings, and those two texts. And `vocabulary`.
    detokenizer  the text that each step of a stream brings, the stop string that ended it, all text
    chat         the prompt's text and ids, or `error`, the message
    block_hash   hashes in hex: of what comes before the first block, of each block, of blocks twice
                 as large; the keys of two groups, and the numbers that KV events carry

transformers drops SmolLM2's pre-tokenizer when it reads a GGUF file; the one of the model's own
tokenizer.json (digits one by one, then byte level) is put back.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.metadata
import json
import os
import platform
import sys
import tempfile
from collections.abc import Callable
from functools import cached_property
from pathlib import Path
from typing import Any

from oracles.vllm_pin import VERSION, available

SETTINGS = {
    "HF_HUB_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "VLLM_LOGGING_LEVEL": "CRITICAL",
    "VLLM_CPU_KVCACHE_SPACE": "1",
}
LIBRARIES = ("transformers", "tokenizers", "gguf", "jinja2", "cbor2", "torch", "numpy")
CALLABLES = {
    "tokenizer": "transformers.AutoTokenizer",
    "detokenizer": "vllm.v1.engine.detokenizer.IncrementalDetokenizer",
    "chat": "vllm.renderers.hf.safe_apply_chat_template",
    "block_hash": "vllm.v1.core.kv_cache_utils.get_request_block_hasher",
}
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_hidden_layers": 2,
    "vocab_size": 512,
    "max_position_embeddings": 4096,
    "torch_dtype": "float32",
}
"""Of a model without weights, as chat messages are parsed for one."""

Case = dict[str, Any]


class Model:
    """The tokenizer of a GGUF file."""

    def __init__(self, name: str, path: Path) -> None:
        self.name = name
        self.path = path

    @cached_property
    def sha256(self) -> str:
        """sha256 of the file."""
        with self.path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()

    @cached_property
    def tokenizer(self) -> Any:
        """transformers' tokenizer."""
        from tokenizers import pre_tokenizers
        from transformers import AutoTokenizer

        found = AutoTokenizer.from_pretrained(str(self.path.parent), gguf_file=self.path.name)
        if self.name.startswith("smollm"):
            found.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
                [
                    pre_tokenizers.Digits(individual_digits=True),
                    pre_tokenizers.ByteLevel(add_prefix_space=False),
                ]
            )
        return found


def tokenizer(spec: Case, model: Model) -> dict[str, Any]:
    """Ids of texts and texts of ids."""
    tok = model.tokenizer
    backend = tok.backend_tokenizer
    found: dict[str, Any] = {"vocabulary": _vocabulary(tok)}
    for case in spec["cases"]:
        answer: dict[str, Any] = {}
        ids = case.get("ids")
        if ids is None:
            ids = answer["ids"] = tok.encode(case["text"])
            answer["plain_ids"] = tok.encode(case["text"], add_special_tokens=False)
        else:
            answer["tokens"] = [backend.id_to_token(i) or "" for i in ids]
        answer["decoded"] = tok.decode(ids, skip_special_tokens=False)
        answer["shown"] = tok.decode(ids, skip_special_tokens=True)
        found[case["id"]] = answer
    return found


def _vocabulary(tok: Any) -> dict[str, Any]:
    backend = tok.backend_tokenizer
    size = backend.get_vocab_size(with_added_tokens=True)
    spellings = [backend.id_to_token(i) or "" for i in range(size)]
    added = backend.get_added_tokens_decoder()
    special = sorted(i for i, token in added.items() if token.special)
    return {
        "size": size,
        "sha256": hashlib.sha256(json.dumps(spellings).encode()).hexdigest(),
        "special_sha256": hashlib.sha256(json.dumps(special).encode()).hexdigest(),
        "num_special": len(special),
        "bos": tok.bos_token_id,
        "eos": tok.eos_token_id,
    }


def detokenizer(spec: Case, model: Model) -> dict[str, Any]:
    """Streams of text."""
    from vllm.sampling_params import SamplingParams
    from vllm.v1.engine import EngineCoreRequest
    from vllm.v1.engine.detokenizer import FastIncrementalDetokenizer, IncrementalDetokenizer

    found = {}
    for case in spec["cases"]:
        request = EngineCoreRequest(
            request_id="r",
            prompt_token_ids=case["prompt"],
            mm_features=None,
            sampling_params=SamplingParams(**case["params"]),
            pooling_params=None,
            arrival_time=0.0,
            lora_request=None,
            cache_salt=None,
            data_parallel_rank=None,
        )
        stream = IncrementalDetokenizer.from_new_request(model.tokenizer, request)
        if not isinstance(stream, FastIncrementalDetokenizer):
            raise TypeError("upstream would take its slow detokenizer")
        text = case["text"] or ""
        steps = [[i] for i in model.tokenizer.encode(text, add_special_tokens=False)]
        steps += case["steps"]
        deltas, stop = [], None
        for number, ids in enumerate(steps, 1):
            last = number == len(steps)
            stop = stream.update(ids, last and case["stop_terminated"])
            finished = last or stop is not None
            deltas.append(stream.get_next_output_text(finished, True))
            if stop is not None:
                break
        found[case["id"]] = {"deltas": deltas, "stop": stop, "text": stream.output_text}
    return found


def chat(spec: Case, model: Model) -> dict[str, Any]:
    """Prompts of conversations."""
    from jinja2 import TemplateError
    from vllm.config import ModelConfig
    from vllm.entrypoints.chat_utils import parse_chat_messages
    from vllm.renderers import hf

    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(CONFIG))
        config = ModelConfig(model=folder, dtype="float32", skip_tokenizer_init=True)

        def render(case: Case, tokenize: bool) -> Any:
            messages = json.loads(json.dumps(case["messages"]))
            template, tools = case["template"], case["tools"]
            form = hf.resolve_chat_template_content_format(
                template, tools, "auto", model.tokenizer, model_config=config
            )
            conversation, _, _ = parse_chat_messages(messages, config, form)
            return hf.safe_apply_chat_template(
                config,
                model.tokenizer,
                conversation,
                tools=tools,
                chat_template=template,
                tokenize=tokenize,
                add_generation_prompt=case["add_generation_prompt"],
                continue_final_message=case["continue_final_message"],
                **case["template_kwargs"],
            )

        for case in spec["cases"]:
            try:
                found[case["id"]] = {"text": render(case, False), "ids": render(case, True)}
            except (ValueError, TemplateError) as error:
                found[case["id"]] = {"error": str(error)}
    return found


def block_hash(spec: Case, model: Model | None) -> dict[str, Any]:
    """Hashes of requests' blocks."""
    import torch
    from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange
    from vllm.sampling_params import SamplingParams
    from vllm.utils import hashing
    from vllm.v1.core import kv_cache_utils as utils
    from vllm.v1.request import Request

    function = getattr(hashing, spec["name"].rpartition("/")[2])
    before = os.environ.get("PYTHONHASHSEED")

    def answer(case: Case) -> dict[str, Any]:
        os.environ["PYTHONHASHSEED"] = case["PYTHONHASHSEED"]
        utils.init_none_hash(function)
        none = utils.NONE_HASH
        if "tokens" in case:
            keys = None if case["extra_keys"] is None else tuples(case["extra_keys"])
            block = utils.hash_block_tokens(function, None, case["tokens"], keys)
            follower = utils.hash_block_tokens(function, block, case["tokens"], keys)
            return {"none": none.hex(), "blocks": [block.hex(), follower.hex()]}
        items = [
            MultiModalFeatureSpec(None, "image", name, PlaceholderRange(offset, length))
            for name, offset, length in case["items"]
        ]
        embeds = None if case["embeds"] is None else torch.tensor(case["embeds"])
        size = case["block_size"]
        request = Request(
            "r",
            case["prompt"],
            SamplingParams(),
            None,
            prompt_embeds=embeds,
            mm_features=items or None,
            cache_salt=case["cache_salt"],
            block_hasher=utils.get_request_block_hasher(size, function),
        )
        for token in case["output"]:
            request.append_output_token_ids(token)
        hashes = request.block_hashes
        large = utils.BlockHashListWithBlockSize(hashes, size, 2 * size)
        keys = [utils.make_block_hash_with_group_id(h, g) for h in hashes[-1:] for g in (0, 258)]
        return {
            "none": none.hex(),
            "blocks": [h.hex() for h in hashes],
            "large": [h.hex() for h in large],
            "keys": [key.hex() for key in keys],
            "external": [utils.maybe_convert_block_hash(h) for h in hashes[:2]],
        }

    try:
        return {case["id"]: answer(case) for case in spec["cases"]}
    finally:
        os.environ.pop("PYTHONHASHSEED")
        if before is not None:
            os.environ["PYTHONHASHSEED"] = before


def tuples(value: Any) -> Any:
    """Lists, which JSON made of tuples, as tuples again, at any depth."""
    return tuple(tuples(v) for v in value) if isinstance(value, list) else value


KINDS: dict[str, Callable[[Case, Any], dict[str, Any]]] = {
    "tokenizer": tokenizer,
    "detokenizer": detokenizer,
    "chat": chat,
    "block_hash": block_hash,
}


def describe() -> dict[str, Any]:
    """What computed: nothing that differs from run to run."""
    return {
        "name": "vllm",
        "version": VERSION,
        "python": platform.python_version(),
        **{name: importlib.metadata.version(name) for name in LIBRARIES},
        "lane": "text",
        "device": "cpu",
        "command": "python -m oracles.vllm_text",
        "reps": 2,
    }


def answers(job: dict[str, Any]) -> dict[str, Any]:
    """The content of OUT."""
    models = {name: Model(name, Path(path)) for name, path in job["files"].items()}
    found = {}
    for spec in job["specs"]:
        model = models[spec["model"]] if spec["model"] else None
        first, again = (KINDS[spec["kind"]](spec, model) for _ in range(2))
        found[spec["name"]] = {
            "callable": CALLABLES[spec["kind"]],
            "source_sha256": model.sha256 if model else "",
            "repeat": first == again,
            "cases": first,
        }
    return {"oracle": describe(), "answers": found}


def main() -> int:
    """0 answered, 2 not available here (the reason on stderr)."""
    parser = argparse.ArgumentParser(description="Answers cases of texts, chats and block hashes.")
    parser.add_argument("--available", action="store_true", help="only say whether it can run")
    parser.add_argument("job", type=Path, nargs="?")
    parser.add_argument("out", type=Path, nargs="?")
    args = parser.parse_args()
    ready = available()
    if ready is not True:
        print(ready, file=sys.stderr)
        return 2
    if args.available:
        print(f"vllm_text {VERSION}")
        return 0
    if args.job is None or args.out is None:
        parser.error("give JOB and OUT")
    for name, value in SETTINGS.items():
        os.environ.setdefault(name, value)
    args.out.write_text(json.dumps(answers(json.loads(args.job.read_text())), sort_keys=True))
    return 0


if __name__ == "__main__":
    sys.exit(main())
