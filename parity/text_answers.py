# SPDX-License-Identifier: Apache-2.0
"""What vllmx answers to the specs of parity/text_cases.py, in the form that oracles/vllm_text.py
describes."""

from __future__ import annotations

import functools
import hashlib
import json
from collections.abc import Callable, Iterator
from typing import Any

from oracles.vllm_text import tuples
from vllmx.core import block_hash as hashes
from vllmx.engine import EngineCoreRequest
from vllmx.engine.detokenizer import IncrementalDetokenizer
from vllmx.entrypoints.chat_utils import render_chat
from vllmx.exceptions import VLLMValidationError
from vllmx.model_loader.gguf_reader import GGUFReader
from vllmx.model_loader.gguf_tokenizer import tokenizer_from_gguf
from vllmx.model_loader.tokenizer import Tokenizer
from vllmx.multimodal import MultiModalFeatureSpec, PlaceholderRange
from vllmx.request import Request
from vllmx.sampling_params import SamplingParams

from .checkpoints import gguf_file
from .model_table import MODELS
from .replay_schedule import hash_seed
from .text_cases import Spec

Answers = dict[str, Any]


@functools.cache
def load_tokenizer(model: str) -> Tokenizer:
    """The tokenizer of a fetched model; OracleBlocked where it is not here."""
    return tokenizer_from_gguf(GGUFReader(gguf_file(MODELS[model])))


def tokenizer(spec: Spec) -> Iterator[tuple[str, Answers]]:
    """Ids of texts and texts of ids."""
    tok = load_tokenizer(spec["model"])
    special = sorted(tok.all_special_ids)
    yield (
        "vocabulary",
        {
            "size": tok.vocab_size,
            "sha256": _sha(tok.convert_ids_to_tokens(range(tok.vocab_size))),
            "special_sha256": _sha(special),
            "num_special": len(special),
            "bos": tok.bos_token_id,
            "eos": tok.eos_token_id,
        },
    )
    for case in spec["cases"]:
        answer: Answers = {}
        ids = case.get("ids")
        if ids is None:
            ids = answer["ids"] = tok.encode(case["text"])
            answer["plain_ids"] = tok.encode(case["text"], add_special_tokens=False)
        else:
            answer["tokens"] = tok.convert_ids_to_tokens(ids)
        answer["decoded"] = tok.decode(ids)
        answer["shown"] = tok.decode(ids, skip_special_tokens=True)
        yield case["id"], answer


def _sha(value: Any) -> str:
    return hashlib.sha256(json.dumps(value).encode()).hexdigest()


def detokenizer(spec: Spec) -> Iterator[tuple[str, Answers]]:
    """Streams of text, step by step."""
    tok = load_tokenizer(spec["model"])
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
        stream = IncrementalDetokenizer.from_new_request(tok, request)
        steps = [[i] for i in tok.encode(case["text"] or "", add_special_tokens=False)]
        steps += case["steps"]
        deltas, stop = [], None
        for number, ids in enumerate(steps, 1):
            last = number == len(steps)
            stop = stream.update(ids, last and case["stop_terminated"])
            deltas.append(stream.get_next_output_text(last or stop is not None, delta=True))
            if stop is not None:
                break
        text = stream.get_next_output_text(True, delta=False)
        yield case["id"], {"deltas": deltas, "stop": stop, "text": text}


def chat(spec: Spec) -> Iterator[tuple[str, Answers]]:
    """Prompts of conversations."""
    tok = load_tokenizer(spec["model"])
    for case in spec["cases"]:
        try:
            text = render_chat(
                tok,
                case["messages"],
                chat_template=case["template"],
                add_generation_prompt=case["add_generation_prompt"],
                continue_final_message=case["continue_final_message"],
                tools=case["tools"],
                template_kwargs=case["template_kwargs"],
            )
        except VLLMValidationError as error:
            yield case["id"], {"error": str(error)}
        else:
            yield case["id"], {"text": text, "ids": tok.encode(text, add_special_tokens=False)}


def block_hash(spec: Spec) -> Iterator[tuple[str, Answers]]:
    """Hashes of requests' blocks."""
    function = hashes.get_hash_fn_by_name(spec["name"].rpartition("/")[2])
    for case in spec["cases"]:
        with hash_seed(case["PYTHONHASHSEED"]):
            hashes.init_none_hash(function)
            none = hashes.NONE_HASH.hex()
            made = _single(case, function) if "tokens" in case else _request(case, function)
        yield case["id"], {"none": none, **made}


def _single(case: Answers, function: Callable[[Any], bytes]) -> Answers:
    keys = None if case["extra_keys"] is None else tuples(case["extra_keys"])
    block = hashes.hash_block_tokens(function, None, case["tokens"], keys)
    follower = hashes.hash_block_tokens(function, block, case["tokens"], keys)
    return {"blocks": [block.hex(), follower.hex()]}


def _request(case: Answers, function: Callable[[Any], bytes]) -> Answers:
    import torch

    items = [
        MultiModalFeatureSpec(None, "image", name, PlaceholderRange(offset, length))
        for name, offset, length in case["items"]
    ]
    size = case["block_size"]
    params = SamplingParams()
    request = Request(
        "r",
        case["prompt"],
        params,
        None,
        prompt_embeds=None if case["embeds"] is None else torch.tensor(case["embeds"]),
        mm_features=items or None,
        cache_salt=case["cache_salt"],
        block_hasher=hashes.get_request_block_hasher(size, function),
    )
    for token in case["output"]:
        request.append_output_token_ids(token)
    found = request.block_hashes
    keys = [hashes.make_block_hash_with_group_id(h, g) for h in found[-1:] for g in (0, 258)]
    return {
        "blocks": [h.hex() for h in found],
        "large": [h.hex() for h in hashes.BlockHashListWithBlockSize(found, size, 2 * size)],
        "keys": [key.hex() for key in keys],
        "external": [hashes.maybe_convert_block_hash(h) for h in found[:2]],
    }


KINDS: dict[str, Callable[[Spec], Iterator[tuple[str, Answers]]]] = {
    "tokenizer": tokenizer,
    "detokenizer": detokenizer,
    "chat": chat,
    "block_hash": block_hash,
}
