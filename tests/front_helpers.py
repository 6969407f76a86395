# SPDX-License-Identifier: Apache-2.0
"""Tokenizers, configs and engines for tests of the front end; nothing here needs a model."""

import time
from functools import partial

from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, trainers
from tokenizers import Tokenizer as Backend

from vllmx.config import RunConfig, VllmConfig, finalize
from vllmx.engine import EngineCoreOutput, EngineCoreRequest, FinishReason
from vllmx.engine import async_llm as async_llm_module
from vllmx.engine import front as front_module
from vllmx.engine.output_processor import OutputProcessor
from vllmx.engine.token_pieces import _BYTE_OF_CHAR
from vllmx.entrypoints.llm import LLM
from vllmx.model_loader.tokenizer import Tokenizer
from vllmx.models.hf_config import HFConfig
from vllmx.sampling_params import SamplingParams
from vllmx.worker.null_runner import NullWorker

CHAR_OF_BYTE = {byte: char for char, byte in _BYTE_OF_CHAR.items()}
EOS = "<|end|>"
TEXTS = [
    "ďábelské ódy",
    "🔥👩‍👩‍👧",
    "日本語テスト",
    "ကမ္ဘာ",
    "plain ascii, with  spaces\n\n\tand tabs",
    "mixed – “quotes” ½ é",
    "",
    " lead",
]


def byte_level_tokenizer() -> Tokenizer:
    """GPT-2 style: most characters outside ASCII take several tokens."""
    backend = Backend(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=[EOS],
        show_progress=False,
    )
    backend.train_from_iterator(
        ["hello world the quick brown fox jumps over " * 3, "日本"], trainer
    )
    return Tokenizer(backend, special_tokens_map={"eos_token": EOS})


def llama_style_tokenizer() -> Tokenizer:
    """SentencePiece style: spaces are U+2581, unknown characters fall back to byte tokens."""
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    tokens += ["▁", *"abcdefghijklmnopqrstuvwxyz0123456789.,", "▁h", "el", "▁hel", "lo"]
    merges = [("▁", "h"), ("e", "l"), ("▁h", "el"), ("l", "o")]
    backend = Backend(
        models.BPE(
            vocab={token: i for i, token in enumerate(tokens)},
            merges=merges,
            unk_token="<unk>",
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    backend.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    backend.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    backend.add_special_tokens(["<s>", "</s>"])
    return Tokenizer(backend, special_tokens_map={"bos_token": "<s>", "eos_token": "</s>"})


def wordpiece_tokenizer() -> Tokenizer:
    """BERT style: the decoder looks at neighbours, so there are no pieces."""
    tokens = ["[UNK]", "[SEP]", "hello", "world", "##ly", "!", "good", "\ufffd"]
    backend = Backend(
        models.WordPiece(vocab={t: i for i, t in enumerate(tokens)}, unk_token="[UNK]")
    )
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    backend.decoder = decoders.WordPiece(prefix="##")
    backend.add_special_tokens([AddedToken("[SEP]", special=True)])
    return Tokenizer(backend, special_tokens_map={"eos_token": "[SEP]"})


def piece_tokenizer(*pieces: str | bytes) -> Tokenizer:
    """Token i has exactly the bytes of pieces[i]; the last id is EOS."""
    spelled = []
    for piece in pieces:
        data = piece.encode() if isinstance(piece, str) else piece
        spelled.append("".join(CHAR_OF_BYTE[byte] for byte in data))
    vocab = {token: i for i, token in enumerate(spelled)}
    assert len(vocab) == len(pieces), "pieces must differ"
    backend = Backend(models.BPE(vocab=vocab, merges=[]))
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([EOS])
    return Tokenizer(backend, special_tokens_map={"eos_token": EOS})


def make_request(
    request_id: str = "r", prompt_token_ids: list[int] | None = None, **params
) -> EngineCoreRequest:
    """A request as it leaves the input processor, its external id equal to `request_id`."""
    return EngineCoreRequest(
        request_id=request_id,
        prompt_token_ids=[] if prompt_token_ids is None else prompt_token_ids,
        mm_features=None,
        sampling_params=SamplingParams(**{"max_tokens": 1000, **params}),
        pooling_params=None,
        arrival_time=time.time(),
        lora_request=None,
        cache_salt=None,
        data_parallel_rank=None,
        external_req_id=request_id,
    )


def run_processor(
    processor: OutputProcessor,
    request: EngineCoreRequest,
    steps: list[list[int]],
    finish_reason: FinishReason | None = FinishReason.LENGTH,
):
    """Feed `steps` (token ids a step); the last has `finish_reason`. All outputs, aborted ids."""
    processor.add_request(request, None)
    outputs, aborted = [], []
    for number, token_ids in enumerate(steps):
        last = number == len(steps) - 1
        result = processor.process_outputs(
            [
                EngineCoreOutput(
                    request.request_id, token_ids, finish_reason=finish_reason if last else None
                )
            ]
        )
        outputs += result.request_outputs
        aborted += result.reqs_to_abort
        if aborted:
            break
    return outputs, aborted


def vllm_config(
    vocab_size: int = 1000, max_model_len: int = 256, script=None, **overrides
) -> VllmConfig:
    """A config with a NullWorker and no checkpoint. `overrides`: "node.field" with __ for the dot,
    worker__NAME for arguments of NullWorker.

    The engine core stays in this process, where tests can look at it, unless they say otherwise."""
    run = RunConfig()
    run.parallel.enable_multiprocessing = False
    worker_args = {} if script is None else {"script": script}
    for key, value in overrides.items():
        node, field = key.split("__")
        if node == "worker":
            worker_args[field] = value
        else:
            setattr(getattr(run, node), field, value)
    run.model.max_model_len = max_model_len
    config = finalize(run)
    config.parallel_config.worker_cls = partial(NullWorker, **worker_args)
    config.model_config.hf_config = HFConfig(
        {"architectures": ["LlamaForCausalLM"], "vocab_size": vocab_size}
    )
    return config


def make_llm(monkeypatch, tokenizer: Tokenizer | None, config: VllmConfig, **kwargs) -> LLM:
    """An LLM with a NullWorker and a tokenizer made by the test."""
    monkeypatch.setattr(front_module, "get_tokenizer", lambda config: tokenizer)
    return LLM(config=config, **kwargs)


def make_async_llm(monkeypatch, tokenizer: Tokenizer | None, config: VllmConfig, **kwargs):
    """An AsyncLLM with a NullWorker and a tokenizer made by the test."""
    monkeypatch.setattr(front_module, "get_tokenizer", lambda config: tokenizer)
    return async_llm_module.AsyncLLM.from_vllm_config(config, **kwargs)


def script_of(*tokens: int, prompt_len: int, then: int = 0):
    """A NullWorker script: these tokens after a prompt of `prompt_len`, then `then` for ever."""

    def script(req_id: str, position: int) -> int:
        step = position - prompt_len
        return tokens[step] if step < len(tokens) else then

    return script
