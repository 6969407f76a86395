# SPDX-License-Identifier: Apache-2.0
# upstream: vllm/entrypoints/chat_utils.py, vllm/renderers/hf.py @ v0.25.0
"""Chat messages to the text of a prompt, by the model's Jinja template in a sandbox.

Whatever a template or a message does wrong is the request's fault: a VLLMValidationError.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from datetime import datetime
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Literal, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

from vllmx.exceptions import VLLMValidationError

if TYPE_CHECKING:
    from jinja2.parser import Parser

    from vllmx.model_loader.tokenizer import Tokenizer

ContentFormat = Literal["string", "openai"]

TEXT_PARTS = {
    "text": "text",
    "input_text": "text",
    "output_text": "text",
    "refusal": "refusal",
    "thinking": "thinking",
}
"""Type of a content part -> the key that holds its text."""

END_MARK = "vllmxEndOfFinalMessage"
RESERVED_KWARGS = {
    "messages",
    "tools",
    "add_generation_prompt",
    "continue_final_message",
    "chat_template",
    "tokenize",
}


def render_chat(
    tokenizer: Tokenizer,
    messages: list[dict[str, Any]],
    *,
    chat_template: str | None = None,
    add_generation_prompt: bool = True,
    continue_final_message: bool = False,
    tools: list[dict[str, Any]] | None = None,
    template_kwargs: dict[str, Any] | None = None,
    content_format: Literal["auto", "string", "openai"] = "auto",
) -> str:
    """Text of the prompt for `messages`; encode it with add_special_tokens=False.

    `chat_template` is Jinja source in place of the tokenizer's. continue_final_message leaves
    the last message open, so that generation goes on with it. Raises VLLMValidationError with
    the template's own message when it refuses the conversation.
    """
    if continue_final_message and add_generation_prompt:
        raise VLLMValidationError(
            "Cannot set both `continue_final_message` and `add_generation_prompt` to True.",
            parameter="continue_final_message",
        )
    if taken := RESERVED_KWARGS & set(template_kwargs or {}):
        raise VLLMValidationError(
            f"chat_template_kwargs must not set {', '.join(sorted(taken))}.",
            parameter="chat_template_kwargs",
        )
    template = chat_template or _templates_own(tokenizer, tools)
    if content_format == "auto":
        content_format = detect_content_format(template)
    conversation = parse_messages(messages, content_format)
    if "developer" not in template:
        conversation = _developer_to_system(conversation)
    if continue_final_message:
        _mark_end(conversation)
    variables = {
        **tokenizer.special_tokens_map,
        "bos_token": tokenizer.bos_token,
        "eos_token": tokenizer.eos_token,
        "documents": None,
        **(template_kwargs or {}),
        "messages": conversation,
        "tools": tools or None,
        "add_generation_prompt": add_generation_prompt,
    }
    text = _render(template, variables)
    return _cut_at_mark(text) if continue_final_message else text


def parse_messages(
    messages: list[dict[str, Any]], content_format: ContentFormat
) -> list[dict[str, Any]]:
    """Messages as a template expects them; the input is not changed.

    Text parts are joined with line ends for a "string" template and kept as a list of
    {"type": "text", "text": ...} for an "openai" one. Arguments of tool calls become dicts.
    Raises VLLMValidationError for a part that isn't text.
    """
    if not messages:
        raise VLLMValidationError("messages must not be empty.", parameter="messages")
    return [_parse_message(i, message, content_format) for i, message in enumerate(messages)]


@lru_cache(maxsize=64)
def detect_content_format(chat_template: str) -> ContentFormat:
    """ "openai" where the template loops over a message's content, else "string"."""
    try:
        tree = _environment().parse(chat_template)
    except jinja2.TemplateError:
        return "string"  # rendering reports it
    names = {"content"}
    for assign in tree.find_all(nodes.Assign):
        if _is_content(assign.node, names) and isinstance(assign.target, nodes.Name):
            names.add(assign.target.name)
    loops = (_is_content(loop.iter, names) for loop in tree.find_all(nodes.For))
    return "openai" if any(loops) else "string"


def _is_content(node: nodes.Node, names: set[str]) -> bool:
    """Whether `node` stands for a message's content: a name for it, `m.content`, `m["content"]`."""
    while isinstance(node, nodes.Filter) and node.node is not None:
        node = node.node
    if isinstance(node, nodes.Name):
        return node.name in names
    if isinstance(node, nodes.Getattr):
        return node.attr == "content"
    if isinstance(node, nodes.Getitem):
        return isinstance(node.arg, nodes.Const) and node.arg.value == "content"
    return False


def _templates_own(tokenizer: Tokenizer, tools: list[dict[str, Any]] | None) -> str:
    if tools and "tool_use" in tokenizer.chat_templates:
        return tokenizer.chat_templates["tool_use"]
    if tokenizer.chat_template is None:
        raise VLLMValidationError(
            "The model has no chat template: set model.chat_template (flag --chat-template) to a "
            "Jinja file, or send a plain prompt to the completions endpoint instead.",
            parameter="messages",
        )
    return tokenizer.chat_template


def _parse_message(index: int, message: Any, content_format: ContentFormat) -> dict[str, Any]:
    where = f"messages[{index}]"
    if not isinstance(message, dict) or not isinstance(message.get("role"), str):
        raise VLLMValidationError(f"{where} must be an object with a role.", parameter="messages")
    role = message["role"]
    texts = list(_texts(message.get("content"), where))
    result: dict[str, Any] = {"role": role}
    if content_format == "string" or role == "tool":  # templates take a tool's answer as text
        result["content"] = "\n".join(texts)
    else:
        result["content"] = [{"type": "text", "text": text} for text in texts]
    if role == "assistant":
        if message.get("tool_calls"):
            result["tool_calls"] = _tool_calls(message["tool_calls"], where)
        reasoning = message.get("reasoning") or message.get("reasoning_content")
        if reasoning is not None:
            result["reasoning"] = result["reasoning_content"] = reasoning
    for key in ("name", "tool_call_id", "tools"):
        if message.get(key) is not None:
            result[key] = message[key]
    return result


def _texts(content: Any, where: str) -> Iterator[str]:
    """The texts of a message's content: none, a string, or a list of parts."""
    if content is None:
        return
    if isinstance(content, str):
        yield content
        return
    if not isinstance(content, list):
        _refuse_part(f"{where}.content must be a string or a list of parts.")
    for number, part in enumerate(content):
        at = f"{where}.content[{number}]"
        if isinstance(part, str):
            yield part
            continue
        if not isinstance(part, dict):
            _refuse_part(f"{at} must be an object.")
        kind = part.get("type")
        if kind not in TEXT_PARTS:
            _refuse_part(
                f"Unsupported chat content part type: {kind!r} ({at}); this model takes text: "
                f"{', '.join(TEXT_PARTS)}."
            )
        text = part.get(TEXT_PARTS[kind])
        if not isinstance(text, str):
            _refuse_part(f"{at} of type {kind!r} needs a string {TEXT_PARTS[kind]!r}.")
        yield text


def _refuse_part(problem: str) -> NoReturn:
    raise VLLMValidationError(problem, parameter="messages")


def _tool_calls(calls: Any, where: str) -> list[dict[str, Any]]:
    """Copy of tool calls whose JSON arguments are parsed, as templates expect."""
    result = []
    for number, call in enumerate(calls if isinstance(calls, list) else [calls]):
        at = f"{where}.tool_calls[{number}]"
        if not isinstance(call, dict) or not isinstance(call.get("function"), dict):
            _refuse_part(f"{at} must be an object with a function.")
        function = dict(call["function"])
        arguments = function.get("arguments")
        if isinstance(arguments, str) and arguments.strip():
            try:
                arguments = json.loads(arguments)
            except json.JSONDecodeError as error:
                _refuse_part(f"{at}.function.arguments is not JSON: {error}.")
        function["arguments"] = arguments or {}
        result.append({**call, "function": function})
    return result


def _developer_to_system(conversation: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """For templates that don't know developers: their messages join one leading system message."""
    if all(message["role"] != "developer" for message in conversation):
        return conversation
    texts: list[str] = []
    others = []
    for message in conversation:
        if message["role"] not in ("developer", "system"):
            others.append(message)
            continue
        content = message["content"]
        parts = [content] if isinstance(content, str) else [part["text"] for part in content]
        texts += [text for text in parts if text]
    listed = isinstance(conversation[0]["content"], list)
    joined = "\n\n".join(texts)
    content = [{"type": "text", "text": joined}] if listed else joined
    return [{"role": "system", "content": content}, *others]


def _mark_end(conversation: list[dict[str, Any]]) -> None:
    """Append a mark to the last message's text, to find its end in the rendered prompt.

    A copy of the text itself may occur earlier, and the template may trim or cut it. The blank
    after the mark tells whether the template trims the end.
    """
    final = conversation[-1]
    content = final["content"]
    if isinstance(content, str) and content:
        final["content"] = f"{content}{END_MARK} "
    elif isinstance(content, list) and content:
        content[-1]["text"] += f"{END_MARK} "
    else:
        raise VLLMValidationError(
            "continue_final_message is set, but the final message has no text to continue.",
            parameter="continue_final_message",
        )


def _cut_at_mark(text: str) -> str:
    at = text.rfind(END_MARK)
    if at < 0:
        raise VLLMValidationError(
            "continue_final_message is set, but the chat template drops the end of the final "
            "message, so there is nothing to continue.",
            parameter="continue_final_message",
        )
    trimmed = not text.startswith(f"{END_MARK} ", at)
    return text[:at].rstrip() if trimmed else text[:at]


def _render(template: str, variables: dict[str, Any]) -> str:
    try:
        return _compile(template).render(variables)
    except Exception as error:  # templates run arbitrary expressions: any error is theirs
        raise VLLMValidationError(
            f"The chat template failed: {error or type(error).__name__}", parameter="messages"
        ) from error


@lru_cache(maxsize=64)
def _compile(template: str) -> jinja2.Template:
    return _environment().from_string(template)


@lru_cache(maxsize=1)
def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


class _GenerationTag(Extension):
    """`{% generation %}` marks the assistant's text for training; here it is its body alone."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON without HTML escapes, other scripts kept as they are."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _strftime_now(form: str) -> str:
    return datetime.now().strftime(form)
