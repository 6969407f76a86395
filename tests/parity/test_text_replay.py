# SPDX-License-Identifier: Apache-2.0
"""Texts are upstream's, faults in them are found, and a golden that is not sound proves nothing."""

import copy
import json
import shutil
from pathlib import Path

import pytest

from parity import budget, golden, replay, text_replay
from parity.digests import canonical
from parity.oracle_process import OracleBlocked
from parity.text_cases import TEXTS, VOCABULARY, specs
from parity.text_replay import TextLane, differences, golden_name
from vllmx.compose import compose_run
from vllmx.core import block_hash as hashes
from vllmx.engine.token_pieces import PieceDecoder
from vllmx.entrypoints import chat_utils
from vllmx.model_loader.fetch import fetch
from vllmx.model_loader.tokenizer import Tokenizer

SPECS = {spec["name"]: spec for spec in specs()}
HASHES = SPECS["block_hash/sha256_cbor"]


@pytest.fixture(scope="module", autouse=True)
def models():
    """The models whose tokenizers are asked, fetched where they are absent."""
    for name in VOCABULARY:
        source = compose_run([f"model={name}"]).model.source
        assert source is not None
        fetch(source, progress=False, name=name)


def facts_of(name: str) -> dict:
    return golden.read(golden.TEXT / f"{name}.json").facts


@pytest.mark.parametrize("name", SPECS)
def test_texts_are_upstreams(name):
    row = TextLane().row(SPECS[name])
    assert row["verdict"] == "pass", row.get("reason")
    assert row["teeth"] and all(row["teeth"].values())
    assert row["checks"]["cases"] == {"measured": 0.0, "limit": 0.0, "headroom": 1e6}
    assert row["details"]["cases"] >= len(SPECS[name]["cases"])
    assert row["oracle"] == {"name": "vllm", "version": "0.25.0", "lane": "text"}
    assert row["proof"]["selected"] == "vllmx" and row["proof"]["tokenizers"]


# ---------------------------------------------------------------------- what is recorded


def test_goldens_say_where_they_come_from_and_keep_to_their_budget():
    assert golden.files(golden.TEXT) == sorted(golden_name(spec) for spec in specs())
    for name, spec in SPECS.items():
        facts = facts_of(name)
        assert facts["spec"] == spec and facts["oracle"]["reps"] == 2
        assert {"python", "transformers", "tokenizers", "cbor2"} <= facts["oracle"].keys()
        assert (facts["source_sha256"] == "none") == (spec["model"] is None)
    (usage,) = (part for part in budget.usage() if part.name == "text")
    assert usage.size < 512 * 1024 and usage.faults() == []


def test_cases_do_what_their_names_say():
    for model in VOCABULARY:
        answers = facts_of(f"tokenizer/{model}")["answers"]
        assert answers["text.empty"]["plain_ids"] == []
        if model == "gemma3-270m":  # SmolLM2 has no token for some bytes
            for name in TEXTS.keys() - {"byte_spelling"}:
                assert answers[f"text.{name}"]["decoded"] == f"<bos>{TEXTS[name]}"
        assert answers["bytes.euro"]["decoded"] == "€"
        assert "\ufffd" in answers["bytes.cut_then_ascii"]["decoded"]
        assert answers["special"]["shown"] != answers["special"]["decoded"]
        assert answers["unknown"]["decoded"] == "\n\n"
        streams = facts_of(f"detokenizer/{model}")["answers"]
        assert streams["text.astral"]["deltas"].count("") > 5
        assert streams["stop.within"]["stop"] == "ran"
        assert streams["stop.never"]["stop"] is None
    chats = facts_of("chat/smollm2-135m")["answers"]
    assert sum("error" in answer for answer in chats.values()) >= 5
    assert chats["tools.continue"]["text"].endswith("One, two,")
    cbor, pickled = (facts_of(f"block_hash/{f}")["answers"] for f in ("sha256_cbor", "sha256"))
    chains = [tuple(answer["blocks"]) for a in (cbor, pickled) for answer in a.values()]
    full = [chain for chain in chains if chain]
    assert len(set(full)) == len(full) == len(chains) - 2
    assert cbor["seed.1"]["none"] != cbor["seed.other"]["none"]
    assert cbor["short.32"]["blocks"] == []


# ---------------------------------------------------------------------- faults


def _encode(self, text, add_special_tokens=True):
    return self.backend.encode(text, add_special_tokens=False).ids


def _decode(self, ids, skip_special_tokens=False):
    return self.backend.decode(list(ids), skip_special_tokens=False)


def _no_salt(request, start, end, mm_idx):
    keys, mm_idx = EXTRA_KEYS(request, start, end, mm_idx)
    kept = tuple(key for key in keys or () if not isinstance(key, str))
    return kept or None, mm_idx


def _no_chain(function, parent, tokens, extra_keys=None):
    return HASH_TOKENS(function, None, tokens, extra_keys)


def _late(self, token_id):
    held, self.partial = PUSH(self, token_id), self.partial
    return held if len(held) != 1 else held + "\u200b"


EXTRA_KEYS = hashes.generate_block_hash_extra_keys
HASH_TOKENS = hashes.hash_block_tokens
PUSH = PieceDecoder.push
FAULTS = {
    "bos is left out": (
        Tokenizer,
        "encode",
        _encode,
        "tokenizer/gemma3-270m",
        "text.astral.decoded",
    ),
    "special tokens are shown": (Tokenizer, "decode", _decode, "tokenizer/smollm2-135m", "special"),
    "a character is doubled": (PieceDecoder, "push", _late, "detokenizer/smollm2-135m", ""),
    "the prompt's end is cut": (
        *(chat_utils, "_cut_at_mark", lambda text: text.partition(chat_utils.END_MARK)[0][:-1]),
        *("chat/smollm2-135m", "own.continue"),
    ),
    "text is escaped": (
        *(chat_utils, "_to_json", lambda value, **options: json.dumps(value)),
        *("chat/smollm2-135m", "tools"),
    ),
    "a developer is no system": (
        *(chat_utils, "_developer_to_system", lambda conversation: conversation),
        *("chat/smollm2-135m", "own.developer"),
    ),
    "the salt is ignored": (
        *(hashes, "generate_block_hash_extra_keys", _no_salt),
        *("block_hash/sha256_cbor", "salt"),
    ),
    "blocks are not chained": (
        *(hashes, "hash_block_tokens", _no_chain),
        *("block_hash/sha256", "block.keys.blocks[1]"),
    ),
    "the seed is ignored": (
        *(hashes.platform, "hash_seed", lambda: "0"),
        *("block_hash/sha256_cbor", "seed.1"),
    ),
    "numbers are of the first bytes": (
        *(hashes, "maybe_convert_block_hash", lambda value: int.from_bytes(value[:8], "big")),
        *("block_hash/sha256_cbor", "external"),
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_turns_its_cell_red(fault, monkeypatch):
    owner, attribute, replacement, name, words = FAULTS[fault]
    monkeypatch.setattr(owner, attribute, replacement)
    chat_utils._environment.cache_clear()
    chat_utils._compile.cache_clear()
    row = TextLane().row(SPECS[name])
    monkeypatch.undo()
    chat_utils._environment.cache_clear()
    chat_utils._compile.cache_clear()
    assert row["verdict"] == "fail" and words in row["reason"], row
    assert row["checks"]["cases"]["measured"] >= 1 and replay.exit_code([row]) == 1


def test_what_raises_is_an_error_of_its_own_cell_only(monkeypatch):
    monkeypatch.setattr(hashes, "hash_block_tokens", lambda *args: 1 / 0)
    rows = replay.replay_texts("text.block_hash,text.chat/gemma3")
    assert [row["verdict"] for row in rows] == ["pass", "error", "error"]
    assert "ZeroDivisionError" in rows[1]["reason"]


# ---------------------------------------------------------------------- the comparison


def stream(*deltas: str, stop=None) -> dict:
    return {"a": {"deltas": list(deltas), "stop": stop, "text": "".join(deltas)}}


@pytest.mark.parametrize(
    ("want", "got", "equal"),
    [
        (stream("a", "b"), stream("a", "b"), True),
        (stream("", "", " é"), stream(" ", "", "é"), True),
        (stream("", " é", "x"), stream("", " ", "éx"), False),
        (stream("a", "b"), stream("ab", ""), False),
        (stream("a", "b"), stream("", "ab"), False),
        (stream("a", ""), stream("a"), False),
        (stream("a", "b"), stream("a", "c"), False),
        (stream("a"), stream("a", stop="b"), False),
        ({"a": {"error": "no"}}, {"a": {"error": "refused: no"}}, True),
        ({"a": {"error": "no"}}, {"a": {"error": "yes"}}, False),
        ({"a": {"error": ""}}, {"a": {"error": ""}}, False),
        ({"a": {"error": "no"}}, {"a": {"text": "no", "ids": []}}, False),
        ({"a": {"text": "", "ids": []}}, {"a": {"error": "no"}}, False),
        ({"a": {"ids": [1]}}, {"a": {"ids": [True]}}, False),
        ({"a": {"ids": [1]}}, {}, False),
        ({"a": {"ids": [1]}}, {"a": {"ids": [1]}, "b": {}}, False),
    ],
)
def test_what_counts_as_equal(want, got, equal):
    spec = {"cases": [{"id": "a", "params": {"stop": []}}]}
    assert (differences(spec, want, got) == []) == equal


def test_a_refusal_may_have_words_of_its_own_only_where_the_case_says_so():
    want, got = {"a": {"error": "no"}}, {"a": {"error": "yes"}}
    assert differences({"cases": [{"id": "a", "own_words": True}]}, want, got) == []
    assert differences({"cases": [{"id": "a", "own_words": False}]}, want, got) != []


# ---------------------------------------------------------------------- bad goldens


@pytest.fixture
def folder(tmp_path):
    """A copy of the goldens."""
    shutil.copytree(golden.TEXT, tmp_path / "text")
    return tmp_path / "text"


def _edited(facts: dict) -> dict:
    changed = copy.deepcopy(facts)
    blocks = changed["answers"]["plain.4"]["blocks"]
    blocks[0] = blocks[0][::-1]
    return changed


def _damage(what: str, path: Path) -> None:
    data, facts = path.read_bytes(), golden.read(path).facts
    at = data.index(b'"blocks":["') + 20
    damaged = {
        "cut": data[:-200],
        "empty": b"",
        "a changed byte": data[:at]
        + (b"0" if data[at : at + 1] != b"0" else b"1")
        + data[at + 1 :],
        "an edited answer": canonical(_edited(facts)) + b"\n",
        "an edited answer with its hash": golden.pack_json(_edited(facts)),
        "another layout": json.dumps(facts, indent=1, sort_keys=True).encode(),
        "no golden": b"[]",
        "provenance lost": canonical({**facts, "oracle": {}}),
    }
    path.write_bytes(damaged[what])


@pytest.mark.parametrize(
    "what",
    [
        *("cut", "empty", "a changed byte", "an edited answer", "an edited answer with its hash"),
        *("another layout", "no golden", "provenance lost"),
    ],
)
def test_a_golden_that_is_not_sound_is_invalid(what, folder):
    path = folder / golden_name(HASHES)
    assert TextLane(folder).row(HASHES)["verdict"] == "pass"
    _damage(what, path)
    row = TextLane(folder).row(HASHES)
    assert row["verdict"] == "invalid" and row["reason"], what
    assert replay.exit_code([row]) == 2
    assert text_replay.problem(golden_name(HASHES), folder)


def test_an_edited_answer_that_is_indexed_too_is_red(folder):
    _damage("an edited answer with its hash", folder / golden_name(HASHES))
    golden.write_index(folder)
    row = TextLane(folder).row(HASHES)
    assert row["verdict"] == "fail" and "plain.4.blocks[0]" in row["reason"]


def test_a_golden_of_other_cases_or_another_model_is_invalid(folder, monkeypatch):
    other = copy.deepcopy(HASHES)
    other["cases"][0]["block_size"] = 8
    row = TextLane(folder).row(other)
    assert row["verdict"] == "invalid" and "block_size" in row["reason"]
    monkeypatch.setattr(text_replay, "weights_sha", lambda entry: "0" * 64)
    row = TextLane(folder).row(SPECS["chat/gemma3-270m"])
    assert row["verdict"] == "invalid" and "model here" in row["reason"]
    (folder / golden.INDEX).unlink()
    assert "index" in TextLane(folder).row(HASHES)["reason"]


def test_a_missing_golden_is_invalid_and_a_file_too_many_is_told(folder):
    (folder / golden_name(HASHES)).unlink()
    (folder / "chat" / "old.json").write_text("{}")
    lane = TextLane(folder)
    assert "no golden sha256_cbor.json" in lane.row(HASHES)["reason"]
    (stray,) = lane.strays()
    assert stray["verdict"] == "invalid" and "chat/old.json" in stray["reason"]


def test_a_model_that_is_not_here_blocks(monkeypatch):
    def absent(entry):
        raise OracleBlocked(f"{entry.name} is not here; run `vllmx fetch {entry.name}`")

    monkeypatch.setattr("parity.model_golden.weights_file", absent)
    rows = replay.replay_texts("text.tokenizer/")
    assert {row["verdict"] for row in rows} == {"skip"} and replay.exit_code(rows) == 3
    assert "vllmx fetch" in rows[0]["reason"]
