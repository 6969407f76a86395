# SPDX-License-Identifier: Apache-2.0
# upstream: vllm/model_executor/models/utils.py @ v0.25.0
"""What models share: building stacks of layers and putting checkpoint weights into them."""

from __future__ import annotations

import difflib
import logging
import re
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from vllmx.exceptions import CheckpointError, WeightError
from vllmx.layers.attention import attention_layers
from vllmx.layers.kv_scales import KVScales
from vllmx.layers.parameter import WeightHolder

logger = logging.getLogger(__name__)


def maybe_prefix(prefix: str, name: str) -> str:
    """`name` below `prefix`, which may be empty."""
    return f"{prefix}.{name}" if prefix else name


def make_layers(count: int, make: Callable[[str], nn.Module], prefix: str) -> nn.ModuleList:
    """`count` layers, each built from its own prefix."""
    return nn.ModuleList(make(f"{prefix}.{i}") for i in range(count))


ROTARY_BUFFERS = (
    "rotary_emb.cos_cached",
    "rotary_emb.inv_freq",
    "rotary_emb.sin_cached",
    "rotary_pos_emb.inv_freq",
)
"""What older checkpoints keep of a rotation, which is computed from the config."""
SHOWN = 20
"""How many weights of a kind an error names."""
_EXPERT = re.compile(r"(?P<layer>.+\.experts)\.(?P<number>\d+)\.(?P<part>\w+)\.weight")


@dataclass
class WeightsMapper:
    """How a checkpoint's names become a model's.

    stacked: part of a checkpoint name -> (part of ours, shard id);
    skip: parts of names that carry nothing we need, beside ROTARY_BUFFERS;
    skip_starts: how such names begin, where a part alone would take others too;
    starts: how names begin in checkpoints of the model without its head -> how they begin in those
    of the whole, before all else;
    renamed: part of a checkpoint name -> ours, one after the other, before the rest;
    apart: part of a name that the model makes -> that of the checkpoint's matrix it is made from,
    where a model takes matrices apart before it loads them.
    A matrix of one expert becomes a part of its layer, with the expert's number for a shard id.
    """

    stacked: dict[str, tuple[str, str]] = field(default_factory=dict)
    skip: tuple[str, ...] = ()
    skip_starts: tuple[str, ...] = ()
    starts: dict[str, str] = field(default_factory=dict)
    renamed: dict[str, str] = field(default_factory=dict)
    apart: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._skipped_parts = (*self.skip, *ROTARY_BUFFERS)

    def map_name(self, name: str) -> tuple[str, str | None] | None:
        """(our name, shard id), or None for a weight that is left out."""
        if name.startswith(self.skip_starts) or any(part in name for part in self._skipped_parts):
            return None
        name = self.rename(name)
        if expert := _EXPERT.fullmatch(name):
            return f"{expert['layer']}.{expert['part']}", expert["number"]
        for part, (ours, shard_id) in self.stacked.items():
            if part in name:
                return name.replace(part, ours), shard_id
        return name, None

    def source_name(self, name: str, shard_id: str | None) -> str:
        """The checkpoint's name of a shard of our layer `name`, for messages: where it has all
        shards as one matrix under a name of its own, that."""
        last = name.rpartition(".")[2]
        if any(ours.endswith(f".{last}.") for ours in self.renamed.values()):
            shard_id = None
        for part, (ours, shard) in self.stacked.items():
            if shard == shard_id and ours.strip(".") == last:
                name = name.removesuffix(last) + self.apart.get(part, part).strip(".")
                break
        return self._unrenamed(f"{name}.").removesuffix(".")

    def _unrenamed(self, name: str) -> str:
        """What is renamed to `name`; of several, what the longest parts of it stand for."""
        found = {name: 0}
        for _ in self.renamed:
            for known, replaced in list(found.items()):
                for part, ours in self.renamed.items():
                    if ours in known:
                        found.setdefault(known.replace(ours, part), replaced + len(ours))
            if len(found) > 64:
                break
        fits = [known for known in found if self.rename(known) == name]
        return max(fits, key=found.__getitem__, default=name)

    def headless(self, name: str) -> str:
        """`name` of a whole model as checkpoints of the one without its head have it."""
        for start, whole in self.starts.items():
            if name.startswith(whole):
                return start + name.removeprefix(whole)
        return name

    def rename(self, name: str) -> str:
        """`name` as our layers are called, shards apart."""
        for start, whole in self.starts.items():
            if name.startswith(start):
                name = whole + name.removeprefix(start)
                break
        for part, ours in self.renamed.items():
            name = name.replace(part, ours)
        return name


def headless_starts(prefix: str, *parts: str) -> dict[str, str]:
    """WeightsMapper.starts of a model whose `parts` lie under `prefix` if it has its head."""
    return {part: prefix + part for part in parts}


LLAMA_MAPPER = WeightsMapper(
    stacked={
        ".q_proj.": (".qkv_proj.", "q"),
        ".k_proj.": (".qkv_proj.", "k"),
        ".v_proj.": (".qkv_proj.", "v"),
        ".gate_proj.": (".gate_up_proj.", "0"),
        ".up_proj.": (".gate_up_proj.", "1"),
    }
)
"""The names of Llama and its many relatives."""
PLAIN_STACKED = {part: LLAMA_MAPPER.stacked[part] for part in (".q_proj.", ".k_proj.", ".v_proj.")}
"""What is stacked where the MLP has no gate."""


def layer_index(prefix: str) -> int:
    """Which layer of the stack `prefix` is in: the first number among its parts."""
    return next(int(part) for part in prefix.split(".") if part.isdigit())


def by_head(weight: Tensor, group: int, head_dim: int) -> Tensor:
    """A stacked matrix or bias whose rows come key head by key head, `group` heads of queries, then
    key and value, as all queries, all keys and all values one after another."""
    rows = weight.unflatten(0, (-1, group + 2, head_dim))
    parts = (rows[:, :group], rows[:, group], rows[:, group + 1])
    return torch.cat([part.reshape(-1, *weight.shape[1:]) for part in parts])


def warn_of_own_head(
    weights: Iterable[tuple[str, Any]], mapper: WeightsMapper, origin: str
) -> Iterator[tuple[str, Any]]:
    """The weights of a model whose head is its embedding, with a warning where the checkpoint
    has a head of its own that is another: it is left out, as upstream leaves it out.

    origin: the config's file.
    """
    head: Any = None
    own = ""
    embedding: Any = None
    for name, weight in weights:
        ours = mapper.map_name(name)
        if ours == ("lm_head.weight", None):
            head, own = weight, name
        elif ours == ("model.embed_tokens.weight", None):
            embedding = weight
        yield name, weight
    if head is not None and embedding is not None and not _same_values(head, embedding):
        logger.warning(
            "%s: %s is not the embedding and is left out, as tie_word_embeddings is true: if it is "
            "meant, set tie_word_embeddings to false in config.json.",
            origin,
            own,
        )


def _same_values(head: Any, embedding: Any) -> bool:
    """Whether two weights are one; of those that are quantised, whether they are stored alike."""
    if isinstance(head, Tensor) and isinstance(embedding, Tensor):
        return torch.equal(head, embedding.to(head.dtype))
    if isinstance(head, Tensor) or isinstance(embedding, Tensor):
        return False
    return head.qtype == embedding.qtype and torch.equal(head.data, embedding.data)


class AutoWeightsLoader:
    """Gives each weight of a checkpoint to its layer, and accepts no missing or unknown one."""

    def __init__(self, model: nn.Module, skip_prefixes: tuple[str, ...] = ()) -> None:
        self.holders: dict[str, WeightHolder] = {
            name: module
            for name, module in model.named_modules()
            if isinstance(module, WeightHolder)
        }
        self.skip_prefixes = skip_prefixes
        self.whole: set[str] = set()  # what the checkpoint has all shards of in one matrix
        self.is_headless = False
        self.faults: list[WeightError] = []
        self.refused: set[tuple[str, str, str | None]] = set()  # layer, parameter and shard of each
        self.kv_scales = KVScales(attention_layers(model))

    def load_weights(self, weights: Iterable[tuple[str, Any]], mapper: WeightsMapper) -> None:
        """Load (checkpoint name, tensor) pairs; CheckpointError names all that do not fit, up to
        SHOWN of them.

        Layers are packed side by side, one thread each: expanding and packing a weight is many
        small ops, which several threads at once slow down rather than speed up.
        """
        threads = torch.get_num_threads()
        torch.set_num_threads(1)
        try:
            with ThreadPoolExecutor(threads) as pool:
                packing = [pool.submit(h.pack) for h in self._complete_holders(weights, mapper)]
                for task in packing:
                    task.result()
        finally:
            torch.set_num_threads(threads)
        self._check_complete(mapper)
        self.kv_scales.finish()

    def _complete_holders(
        self, weights: Iterable[tuple[str, Any]], mapper: WeightsMapper
    ) -> Iterator[WeightHolder]:
        """Hand out the weights and yield each layer when it has got its last one; none any more
        once a weight did not fit, as all that is left then is to find the others."""
        for source_name, tensor in weights:
            mapped = mapper.map_name(source_name)
            if mapped is None or self.kv_scales.take(mapper.rename(source_name), tensor):
                continue
            self.is_headless |= source_name.startswith(tuple(mapper.starts))
            name, shard_id = mapped
            if name.startswith(self.skip_prefixes) and self.skip_prefixes:
                continue
            module_name, _, param = name.rpartition(".")
            holder = self.holders.get(module_name)
            if holder is None:
                self.faults.append(
                    WeightError(self._unexpected(source_name, module_name), source_name)
                )
                continue
            if shard_id is None:
                self.whole.add(module_name.rpartition(".")[2])
            try:
                complete = holder.load_weight(param, shard_id, tensor, source_name)
            except WeightError as error:
                self.faults.append(error)
                self.refused.add((module_name, param, shard_id))
                continue
            if complete and not self.faults:
                yield holder

    def _unexpected(self, source_name: str, module_name: str) -> str:
        if len(self.faults) >= SHOWN:  # it is counted only
            return ""
        near = difflib.get_close_matches(module_name, self.holders, n=1)
        hint = f"; the nearest layer is {near[0]}" if near else ""
        return f"weight {source_name} has no place in this architecture{hint}."

    def _check_complete(self, mapper: WeightsMapper) -> None:
        missing = self._missing(mapper)
        told = [str(fault) for fault in self.faults[:SHOWN]]
        if more := len(self.faults) - len(told):
            told.append(f"{more} more do not fit.")
        if missing:
            shown = ", ".join(missing[:SHOWN])
            more = len(missing) - SHOWN
            told.append(f"the checkpoint lacks {shown}{f' and {more} more' if more > 0 else ''}.")
        if self.faults:
            raise WeightError(" ".join(told), self.faults[0].weight)
        if told:
            raise CheckpointError(" ".join(told))

    def _missing(self, mapper: WeightsMapper) -> list[str]:
        """The checkpoint's names of what no weight came for."""
        missing = []
        for name, holder in self.holders.items():
            skipped = self.skip_prefixes and f"{name}.".startswith(self.skip_prefixes)
            if holder.is_loaded or skipped:
                continue
            have = holder.loaded or {}
            for param, shard in holder.expected_weights():
                refused = {(name, param, shard), (name, param, None)} & self.refused
                if (param, shard) in have or refused:
                    continue
                own = holder.checkpoint_name(param, shard)
                part = None if name.rpartition(".")[2] in self.whole else shard
                source = f"{mapper.source_name(name, part)}.{param}"
                missing.append(source if own is None else mapper.source_name(f"{name}.{own}", None))
        if self.is_headless:
            missing = [mapper.headless(source) for source in missing]
        return list(dict.fromkeys(missing))  # a matrix of several shards is one
