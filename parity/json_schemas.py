# SPDX-License-Identifier: Apache-2.0
"""Answers of a small model to the schemas of a public suite: each has to parse and to validate.

    python -m parity.json_schemas --out reports/json_schemas

The JSON-Schema-Test-Suite (MIT licence) comes in the source archive of the package `jsonschema`,
which also judges the answers. A schema that no backend enforces has to be refused with the name of
what it lacks; all others are answered under their grammar.
"""

from __future__ import annotations

import argparse
import json
import re
import tarfile
import time
import urllib.request
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

from vllmx import LLM, SamplingParams
from vllmx.exceptions import UserError, VLLMValidationError
from vllmx.sampling_params import StructuredOutputsParams

from .upstream_tests import cache_folder, find_in_index, sha256_of

ARCHIVE = "jsonschema-4.26.0.tar.gz"
SHA256 = "0c26707e2efad8aa1bfc5b7ce170f3fccc2e4918ff85989ba9ffa9facb2be326"
DRAFTS = ("draft2020-12", "draft2019-09", "draft7", "draft6", "draft4")
PROMPT = """Short JSON values, one a line:
7
["a",2]
"bar"
{"foo":1,"bar":"a"}
[[1],{"foo":2}]
{"foo":"a","bar":[1]}
"""
QUESTION = 'Answer with one short JSON value, like 7 or ["a",2] or {"foo":1}.'
ATTEMPTS = ((48, 0.0, 0.0), (96, 1.0, 0.5), (96, 1.0, 1.0), (320, 1.0, 2.0), (320, 1.0, 2.0))
"""Longest answer, temperature and frequency penalty. The first goes on with PROMPT; what its length
cuts off is asked for again as a chat, which the model knows how to end: the likeliest digit after
a digit is for ever another one, and nothing in PROMPT ends but lines."""


@dataclass(frozen=True)
class Case:
    """A schema of the suite and where it stands."""

    name: str
    draft: str
    schema: Any = field(hash=False)


@dataclass
class Result:
    """What became of some schemas."""

    refused: dict[str, str] = field(default_factory=dict)
    """Case -> the words of the refusal."""
    backends: Counter[str] = field(default_factory=Counter)
    """Backend -> answers."""
    valid: list[str] = field(default_factory=list)
    unfinished: list[str] = field(default_factory=list)
    """Answers that the longest length cut off."""
    wrong: dict[str, str] = field(default_factory=dict)
    """Case -> an answer that does not parse or does not validate."""

    @property
    def answered(self) -> int:
        """Answers in all."""
        return len(self.valid) + len(self.unfinished) + len(self.wrong)


def fetch_suite() -> Path:
    """The archive with the suite, from the cache or pip's index; UserError if it can't be had."""
    path = cache_folder() / ARCHIVE
    if not path.is_file():
        url = find_in_index("jsonschema", ARCHIVE)
        path.parent.mkdir(parents=True, exist_ok=True)
        part = path.with_suffix(".part")
        with urllib.request.urlopen(url.partition("#")[0]) as answer:
            part.write_bytes(answer.read())
        part.replace(path)
    if sha256_of(path) != SHA256:
        raise UserError(f"json_schemas: {path} is not the archive that is pinned; remove it.")
    return path


def read_suite(archive: Path) -> Iterator[Case]:
    """The suite's schemas, draft by draft, each once whatever the draft says of itself."""
    seen: set[str] = set()
    with tarfile.open(archive) as tar:
        names = sorted(tar.getnames())
        for draft in DRAFTS:
            for name in names:
                match = re.search(rf"/json/tests/{draft}/([^/]+)\.json$", name)
                member = tar.extractfile(name) if match else None
                if match is None or member is None:
                    continue
                for i, case in enumerate(json.load(member)):
                    schema = case["schema"]
                    text = json.dumps(schema, sort_keys=True)
                    text = re.sub(r'"\$schema": "[^"]*",? ?', "", text)
                    if text not in seen:
                        seen.add(text)
                        yield Case(f"{draft}/{match[1]}[{i}]", draft, schema)


def validates(case: Case, value: Any) -> bool:
    """Whether `value` is valid by the rules of the case's draft."""
    import jsonschema

    number = case.draft.removeprefix("draft").replace("-", "")
    return getattr(jsonschema, f"Draft{number}Validator")(case.schema).is_valid(value)


def answer(llm: LLM, cases: Iterable[Case], count: int) -> Result:
    """Ask for the first `count` of `cases`, and judge the answers."""
    result = Result()
    chosen: list[tuple[Case, SamplingParams]] = []
    for case in islice(cases, count):
        constraint = StructuredOutputsParams(
            json=json.dumps(case.schema), disable_any_whitespace=True
        )
        params = SamplingParams(temperature=0, structured_outputs=constraint)
        try:
            llm.llm_engine.input_processor.validate_structured_outputs(params)
        except VLLMValidationError as error:
            result.refused[case.name] = str(error)
            continue
        assert params.structured_outputs is not None
        result.backends[str(params.structured_outputs._backend)] += 1
        chosen.append((case, params))
    for seed, (length, temperature, penalty) in enumerate(ATTEMPTS):
        for _, params in chosen:
            params.max_tokens, params.temperature, params.seed = length, temperature, seed
            params.frequency_penalty = penalty
        wanted = [params for _, params in chosen]
        if seed == 0:
            outputs = llm.generate([PROMPT] * len(chosen), wanted)
        else:
            outputs = llm.chat([[{"role": "user", "content": QUESTION}]] * len(chosen), wanted)
        cut = []
        for (case, params), output in zip(chosen, outputs, strict=True):
            if output.outputs[0].finish_reason == "length":
                cut.append((case, params))
            else:
                _judge(result, case, output.outputs[0].text)
        chosen = cut
    result.unfinished = [case.name for case, _ in chosen]
    return result


def _judge(result: Result, case: Case, text: str) -> None:
    try:
        if validates(case, json.loads(text)):
            result.valid.append(case.name)
            return
    except ValueError:
        pass
    result.wrong[case.name] = text


def _feature(words: str) -> str:
    """What a refusal names first: a keyword, or the schema `false`."""
    match = re.search(r"'(\$?\w+)'", words)
    return match[1] if match else "nothing"


def render(result: Result, model: str, seconds: float) -> str:
    """The report as Markdown."""
    lines = [
        "# JSON schemas of a public suite",
        "",
        "Made by `python -m parity.json_schemas`: schemas of the JSON-Schema-Test-Suite "
        f"(`{ARCHIVE}`), answered by {model} without whitespace between parts: greedily, "
        f"and where that is cut off at {ATTEMPTS[0][0]} tokens, as a chat, sampled with a "
        f"frequency penalty, {ATTEMPTS[-1][0]} tokens at most.",
        "",
        "| answers | parse and validate | cut at the longest length | wrong | refused by name |",
        "|---|---|---|---|---|",
        f"| {result.answered} | {len(result.valid)} | {len(result.unfinished)} | "
        f"{len(result.wrong)} | {len(result.refused)} |",
        "",
        "Backends that enforced them: "
        + ", ".join(f"{name} {count}" for name, count in sorted(result.backends.items()))
        + f". {seconds:.0f} s.",
    ]
    named = Counter(_feature(words) for words in result.refused.values())
    if named:
        lines += [
            "",
            "Refused, by the first feature that is named: "
            + ", ".join(f"`{name}` {count}" for name, count in named.most_common())
            + ".",
        ]
    if result.wrong:
        lines += ["", "Wrong:", ""]
        lines += [f"- {name}: `{text[:100]}`" for name, text in result.wrong.items()]
    if result.unfinished:
        lines += ["", "Cut: " + ", ".join(result.unfinished) + "."]
    return "\n".join(lines) + "\n"


def main(argv: list[str] | None = None) -> int:
    """Run the suite; 1 if an answer is wrong."""
    parser = argparse.ArgumentParser(prog="python -m parity.json_schemas", description=__doc__)
    parser.add_argument("--model", default="smollm2-135m", help="name in conf/model, or a folder")
    parser.add_argument("--count", type=int, default=500, help="schemas")
    parser.add_argument("--num-threads", type=int, default=None, help="of the model")
    parser.add_argument("--out", type=Path, help="write NAME.md and NAME.json")
    args = parser.parse_args(argv)
    started = time.monotonic()
    llm = LLM(model=args.model, max_model_len=512, max_num_seqs=64, num_threads=args.num_threads)
    result = answer(llm, read_suite(fetch_suite()), args.count)
    text = render(result, args.model, time.monotonic() - started)
    print(text)
    if args.out is not None:
        args.out.with_suffix(".md").write_text(text, encoding="utf-8")
        known = {**vars(result), "backends": dict(result.backends)}
        args.out.with_suffix(".json").write_text(json.dumps(known, indent=1) + "\n")
    return 1 if result.wrong else 0


if __name__ == "__main__":
    raise SystemExit(main())
