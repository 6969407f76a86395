# SPDX-License-Identifier: Apache-2.0
# upstream: vllm/entrypoints/openai/engine/protocol.py,
#   vllm/entrypoints/openai/chat_completion/protocol.py @ v0.25.0
"""The form that a request wants its answer in: `response_format` and `structured_outputs`."""

from __future__ import annotations

import json
from dataclasses import fields, replace
from typing import Any, Literal

from pydantic import Field

from vllmx.entrypoints.openai.base_model import OpenAIBaseModel
from vllmx.exceptions import VLLMValidationError
from vllmx.sampling_params import StructuredOutputsParams

OLDER_NAMES = {
    "guided_json": "json",
    "guided_regex": "regex",
    "guided_choice": "choice",
    "guided_grammar": "grammar",
    "guided_json_object": "json_object",
    "guided_whitespace_pattern": "whitespace_pattern",
    "guided_decoding_disable_any_whitespace": "disable_any_whitespace",
    "guided_decoding_disable_additional_properties": "disable_additional_properties",
    "structural_tag": "structural_tag",
}
"""Fields of older versions of the API -> what they are called within `structured_outputs`."""
FIELDS = {spec.name for spec in fields(StructuredOutputsParams) if spec.init}
SETTINGS = {"disable_any_whitespace", "disable_additional_properties", "whitespace_pattern"}
"""Those that are no constraint themselves."""


class JsonSchemaResponseFormat(OpenAIBaseModel):
    """Schema of a structured answer."""

    name: str
    description: str | None = None
    json_schema: dict[str, Any] | None = Field(default=None, alias="schema")
    strict: bool | None = None


class ResponseFormat(OpenAIBaseModel):
    """Form of the answer. A structural tag is `format`, or `structures` with `triggers`."""

    type: Literal["text", "json_object", "json_schema", "structural_tag"]
    json_schema: JsonSchemaResponseFormat | None = None
    format: Any = None
    structures: list[dict[str, Any]] | None = None
    triggers: list[str] | None = None


def refuse_older_names(extra: dict[str, Any]) -> None:
    """VLLMValidationError for a field of `extra` that has another name now."""
    for name, new in OLDER_NAMES.items():
        if extra.get(name) is not None:
            raise VLLMValidationError(
                f"`{name}` is not served any more: send `structured_outputs` with `{new}` instead, "
                f'as in {{"structured_outputs": {{"{new}": ...}}}}.',
                parameter=name,
            )
    if extra.get("guided_decoding_backend") is not None:
        raise VLLMValidationError(
            "`guided_decoding_backend` is not served any more: the backend is chosen when the "
            "server starts (--structured-outputs-config).",
            parameter="guided_decoding_backend",
        )
    for name, value in extra.items():
        if name.startswith("guided_") and value is not None:
            raise VLLMValidationError(
                f"`{name}` is not served any more: leave it out. What an answer is held to is "
                f"`structured_outputs`, with {', '.join(sorted(FIELDS))}.",
                parameter=name,
            )


def structured_outputs_of(
    response_format: ResponseFormat | None, structured_outputs: dict[str, Any] | None
) -> StructuredOutputsParams | None:
    """The constraint that a request's two fields ask for, None for none.

    Settings of `structured_outputs` hold for a constraint of `response_format` as well. Raises
    VLLMValidationError for two constraints, unknown settings, and formats that lack something.
    """
    asked = {name: value for name, value in (structured_outputs or {}).items() if value is not None}
    if unknown := sorted(set(asked) - FIELDS):
        raise VLLMValidationError(
            f"`structured_outputs` has no field {unknown[0]!r}; there are "
            f"{', '.join(sorted(FIELDS))}.",
            parameter="structured_outputs",
        )
    if "structural_tag" in asked:
        _check_structural_tag(asked["structural_tag"], "structured_outputs")
    constraint = {} if response_format is None else _constraint(response_format)
    if structured_outputs is None and not constraint:
        return None
    try:
        if not constraint:
            return StructuredOutputsParams(**asked)
        if not SETTINGS.issuperset(asked):
            raise ValueError(
                "You can only use one kind of structured outputs constraint, but "
                "`response_format` and `structured_outputs` have one each."
            )
        return replace(StructuredOutputsParams(**constraint), **asked)
    except ValueError as error:
        raise VLLMValidationError(str(error.args[0]), parameter="structured_outputs") from None


def _constraint(response_format: ResponseFormat) -> dict[str, Any]:
    kind = response_format.type
    if kind == "json_object":
        return {"json_object": True}
    if kind == "json_schema":
        described = response_format.json_schema
        if described is None or described.json_schema is None:
            lacking = "'json_schema'" if described is None else "'schema' of 'json_schema'"
            raise VLLMValidationError(
                f"When response_format type is 'json_schema', the {lacking} field must be "
                "provided.",
                parameter="response_format",
            )
        return {"json": described.json_schema}
    if kind == "structural_tag":
        tag = response_format.model_dump(exclude_none=True)
        _check_structural_tag(tag, "response_format")
        return {"structural_tag": json.dumps(tag, ensure_ascii=False)}
    return {}


def _check_structural_tag(tag: Any, parameter: str) -> None:
    """Refuse here what the engine could only answer with a failure."""
    problem = None
    try:
        tag = json.loads(tag) if isinstance(tag, str) else tag
    except json.JSONDecodeError as error:
        problem = f"it is not JSON: {error}"
    if problem is None and not isinstance(tag, dict):
        problem = "it must be a JSON object"
    elif problem is None and "structures" in tag:
        if not isinstance(tag.get("triggers"), list):
            problem = "`structures` need `triggers`"
        elif not isinstance(tag["structures"], list) or not all(
            isinstance(item, dict) and {"begin", "schema", "end"} <= item.keys()
            for item in tag["structures"]
        ):
            problem = "each of `structures` needs `begin`, `schema` and `end`"
    elif problem is None and tag.get("format") is None:
        problem = "it needs a `format`, or `structures` with `triggers`"
    if problem is not None:
        raise VLLMValidationError(f"Invalid structural tag: {problem}.", parameter=parameter)
