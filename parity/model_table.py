# SPDX-License-Identifier: Apache-2.0
"""The models that have goldens, and the sequences each of them is asked.

A few prompts are continued greedily by the oracle, and stand for decoding; sequences of random ids
around the lengths at which blocks, chunks and windows end stand for prefill. Together at least 816
positions, the number at which a fault on one position in two hundred is rarely missed.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from vllmx.tiny.configs import HYBRIDS
from vllmx.tiny.dense_configs import DENSE_FAMILIES
from vllmx.tiny.latent import LATENT_FAMILIES
from vllmx.tiny.margins import SUFFIX
from vllmx.tiny.sparse_configs import MORE_SPARSE
from vllmx.tiny.twins import TWIN_FAMILIES

from .inputs import Maker


@dataclass(frozen=True)
class Lane:
    """Who computes a lane, and in what."""

    oracle: str
    dtype: str


LANES = {
    "vllm-cpu-f32": Lane("vllm_model", "float32"),
    "hf-cpu-f32": Lane("hf_model", "float32"),
    "vllm-cpu-bf16": Lane("vllm_model", "bfloat16"),
    "hf-cpu-bf16": Lane("hf_model", "bfloat16"),
}
FLOAT32 = ("vllm-cpu-f32", "hf-cpu-f32")
"""Lanes of a model: the golden, then the one whose distance from it is the floor. With a third lane
the floor is the distance of the second from that: what bfloat16 costs."""
BFLOAT16 = ("vllm-cpu-bf16", "hf-cpu-bf16", "hf-cpu-f32")
"""Lanes of a hybrid in bfloat16, where upstream is as it is."""
GOLDEN_LANE, FLOOR_LANE = FLOAT32
TOP_K = 32
SKETCH_TOKENS = 8
POSITIONS = 816
MODES = ("bs1", "batch", "chunked", "prefix")
GPU_MODES = (*MODES, "eager", "straddle")
"""On a GPU a batch's decode steps are CUDA graphs; `eager` has none, and `straddle` asks batches on
both sides of a graph's size."""
STRADDLED = (8, 9, 16, 17)
PROVIDERS = {"torch": ["torch"], "auto": []}
"""Provider of a cell -> kernel.default_priority: every op by its definition, or what is default."""

ANTIBODIES = [
    [31, 26, 8, 22, 18, 14, 22, 8, 20, 10, 10, 10],
    [31, 26, 18, 22, 18, 14, 22, 18, 20, 10, 5, 8, 22, 13, 13, 17, 10, 5, 20],
    [32, 26, 7, 12, 18, 15, 21, 18, 20, 17, 20, 20],
    [32, 27, 7, 12, 22, 15, 21, 18],
    [31, 25, 18, 22, 18, 14, 18, 8, 20, 10, 10, 10, 20, 22, 18, 5, 10, 10],
    [31, 28, 18, 20, 22, 8, 8, 20],
    [32, 30, 8, 12, 22, 14, 21, 18, 20, 17, 5, 21, 14, 20, 14, 20, 17, 10, 8, 19, 5, 21, 14, 20, 6],
    [31, 27, 8],
]
"""Beginnings of antibodies: the kind of chain, the species, residues of known frameworks."""
QWEN2_TEXTS = [
    [785, 6722, 315, 9625, 374],
    [750, 75698, 1445, 982],
    [12522, 5193, 264, 882, 11, 304, 264, 2613, 14126, 553, 279, 9396, 11],
    [28253, 88955, 518],
    [852, 2326, 5711, 315, 264, 5567, 7974, 510, 16, 13],
    [785, 3974, 13876, 38835],
    [641, 220, 16, 24, 21, 24, 11, 279, 1156, 12677],
    [48, 25, 3555, 374, 220, 16, 17, 3039, 220, 16, 17, 5267, 32, 25],
]
"""What TEXT has of them, in the tokens of Qwen2."""
TEXT = {
    "smollm2-135m": [
        [504, 3575, 282, 4649, 314],
        [1604, 3987, 46477, 24, 94, 727, 198],
        [6403, 1980, 253, 655, 28, 281, 253, 1165, 6560, 411, 260, 3426, 28],
        [12615, 36411, 418],
        [6106, 1296, 2925, 282, 253, 1941, 14194, 42, 198, 33, 30],
        [504, 2365, 6354, 16438],
        [788, 216, 33, 41, 38, 41, 28, 260, 808, 2973],
        [65, 42, 1812, 314, 216, 33, 34, 1711, 216, 33, 34, 47, 198, 49, 42],
    ],
    "gemma3-270m": [
        [2, 818, 5279, 529, 7001, 563],
        [2, 2063, 10779, 78113, 236769, 236749, 1473, 107],
        [2, 14946, 3324, 496, 990, 236764, 528, 496, 1944, 9744, 684, 506, 5442, 236764],
        [2, 17390, 104264, 657],
        [2, 1613, 1806, 6178, 529, 496, 3627, 13758, 236787, 107, 236770, 236761],
        [2, 818, 3823, 8864, 37423],
        [2, 902, 236743, 236770, 236819, 236825, 236819, 236764, 506, 1171, 14464],
        [
            2,
            236935,
            236787,
            2900,
            563,
            236743,
            236770,
            236778,
            2782,
            236743,
            236770,
            236778,
            236881,
        ],
    ],
    "qwen2.5-coder-0.5b": QWEN2_TEXTS,
    "qwen2.5-coder-1.5b": QWEN2_TEXTS,
    "iglm": ANTIBODIES,
    "iglm-s": ANTIBODIES,
}
"""Eight beginnings of texts as each tokenizer has them ("The capital of France is", ...)."""


@dataclass(frozen=True)
class ModelEntry:
    """One model: where its weights come from, and the lengths of its random sequences.

    tiny: seeded weights that vllmx/tiny writes; else a model of conf/model, quantised or not.
    longest: tokens that a sequence may have. large: decoding one by one takes minutes.
    """

    name: str
    vocab_size: int
    tiny: bool
    prompt_lengths: tuple[int, ...]
    forced_lengths: tuple[int, ...]
    max_tokens: int
    top_k: int = TOP_K
    lanes: tuple[str, ...] = FLOAT32
    quantised: bool = False
    longest: int = 1024
    large: bool = False

    @property
    def dtype(self) -> str:
        """What ours computes in: as the golden's lane does."""
        return LANES[self.lanes[0]].dtype

    @property
    def feature(self) -> str:
        """What evidence rows call it."""
        return f"model.{self.name}"

    @property
    def names(self) -> tuple[str, str]:
        """What it is called in `select=`."""
        return self.feature, self.name

    def golden(self, lane: str) -> str:
        """Path of a lane's golden under goldens/models."""
        return f"{self.name}/{lane}.safetensors"

    def prompts(self) -> list[list[int]]:
        """What is continued greedily."""
        return TEXT.get(self.name) or self._random("prompt", self.prompt_lengths)

    def forced(self) -> list[list[int]]:
        """What is only scored."""
        return self._random("forced", self.forced_lengths)

    def job(self, folder: str) -> dict[str, Any]:
        """The job that the oracle of the golden's lane is given."""
        return {
            "folder": folder,
            "prompts": self.prompts(),
            "forced": self.forced(),
            "max_tokens": self.max_tokens,
            "top_k": self.top_k,
            "sketch_tokens": SKETCH_TOKENS,
            "dtype": self.dtype,
            "longest": self.longest,
        }

    def _random(self, name: str, lengths: tuple[int, ...]) -> list[list[int]]:
        make = Maker("model", self.name, "f32")
        return [
            make.integers(f"{name}{i}", 3, self.vocab_size, length).tolist()
            for i, length in enumerate(lengths)
        ]


REAL: dict[str, Any] = {
    "tiny": False,
    "quantised": True,
    "prompt_lengths": (),
    "forced_lengths": (16, 17, 33, 97, 140),
    "max_tokens": 64,
}
ANTIBODY = REAL | {"quantised": False, "longest": 512, "top_k": 16}
TINY: dict[str, Any] = {
    "tiny": True,
    "vocab_size": 1024,
    "prompt_lengths": (1, 5, 9, 16, 17, 25, 33, 41),
    "forced_lengths": (15, 16, 17, 49, 130, 257),
    "max_tokens": 64,
}
BREADTH = TINY | {"top_k": 10}
"""Many families: shorter lists make smaller goldens."""
FAMILIES_WITH_MORE = MORE_SPARSE | LATENT_FAMILIES | TWIN_FAMILIES
"""With experts, with latents, or without a class in transformers."""
DENSE = sorted(DENSE_FAMILIES)
"""Dense families. oracles/vllm_model.py says what upstream 0.25.0 has to be told of Apertus and of
Olmo3 to compute them in float32."""
SPARSE = TINY | {"top_k": 16}
HYBRID = SPARSE | {"prompt_lengths": (1, 9, 25, 33, 49, 65, 81, 97)}
"""Blocks of models with recurrent layers are longer: here of 32 or 48 tokens."""
HALF = {**HYBRID, "lanes": BFLOAT16, "prompt_lengths": (1, 9, 33, 65, 81, 97, 113, 129)}
"""In bfloat16. A class of few positions says little where each is off by a rounding."""
MORE_TOKENS = {"tiny-qwen3_next": {"max_tokens": 128}}
"""With 64 its prompts of half an answer leave five first tokens of a block, whose mean came to .019
on one processor and to .021 on another, of .02 allowed; with 128 to .012 at most."""
MODELS = {
    entry.name: entry
    for entry in (
        ModelEntry("smollm2-135m", vocab_size=49152, **REAL),
        ModelEntry("gemma3-270m", vocab_size=262144, **REAL),
        ModelEntry("qwen2.5-coder-0.5b", vocab_size=151936, **REAL),
        ModelEntry("qwen2.5-coder-1.5b", vocab_size=151936, large=True, **REAL),
        ModelEntry("iglm", vocab_size=33, **ANTIBODY),
        ModelEntry("iglm-s", vocab_size=33, **ANTIBODY),
        ModelEntry("tiny-llama", **TINY),
        ModelEntry("tiny-qwen3", **TINY),
        ModelEntry("tiny-gemma3", **TINY),
        *(ModelEntry(name, **BREADTH) for name in DENSE),
        ModelEntry("tiny-qwen3_5", **HYBRID),
        ModelEntry("tiny-qwen3_5_moe", **HYBRID),
        ModelEntry("tiny-qwen3_next", **HYBRID),
        *(ModelEntry(name + SUFFIX, **HALF | MORE_TOKENS.get(name, {})) for name in HYBRIDS),
        ModelEntry("tiny-mixtral", **SPARSE),
        ModelEntry("tiny-qwen3_moe", **SPARSE),
        ModelEntry("tiny-glm4_moe", **SPARSE),
        ModelEntry("tiny-olmoe", **SPARSE),
        ModelEntry("tiny-qwen2_moe", **BREADTH),
        ModelEntry("tiny-granitemoe", **BREADTH),
        *(ModelEntry(name, **BREADTH) for name in sorted(FAMILIES_WITH_MORE)),
    )
}


@dataclass(frozen=True)
class ModelCell:
    """One model, provider, mode and device."""

    entry: ModelEntry
    provider: str
    mode: str
    device: str = "cpu"

    @property
    def feature(self) -> str:
        """What evidence rows call the model."""
        return self.entry.feature


def modes_of(entry: ModelEntry, provider: str, device: str = "cpu") -> tuple[str, ...]:
    """The modes of a model with a provider.

    The definitions expand quantised weights on every call: decoding would take minutes, and the
    tiny models show it. A large model is asked in batches alone, as it is served. A GPU computes
    what its golden is of, float32, with the tiny models only.
    """
    if device == "cuda":
        float32 = entry.tiny and entry.dtype == "float32"
        return GPU_MODES if float32 and provider == "auto" else ()
    if entry.large:
        return ("batch",) if provider == "auto" else ()
    return ("bs1",) if provider == "torch" and entry.quantised else MODES


def chosen(select: str | None) -> list[ModelEntry]:
    """The models that `select` names: prefixes of model.NAME/ or NAME/, by comma; None: all."""
    words = [word.strip() for word in (select or "").split(",")]
    return [
        entry
        for entry in MODELS.values()
        if any(f"{name}/".startswith(word) for name in entry.names for word in words)
    ]


def expected(
    select: str | None = None, provider: str | None = None, device: str = "cpu"
) -> Iterator[ModelCell]:
    """Every cell of a device that `select` (see `chosen`) and `provider` leave."""
    for entry in chosen(select):
        for name in PROVIDERS:
            if provider in (None, name):
                modes = modes_of(entry, name, device)
                yield from (ModelCell(entry, name, mode, device) for mode in modes)
