# SPDX-License-Identifier: Apache-2.0
"""Conversations that are rendered by chat templates: the model's own, and small ones of ours that
each use what some published template uses (tools, lists of parts, refusals, blocks, filters)."""

from __future__ import annotations

from typing import Any

TEMPLATES = {
    "tools": """{%- set ns = namespace(tools=0) %}
{%- if tools %}
    {{- '<|im_start|>system\\nTools:' }}
    {%- for tool in tools %}
        {{- '\\n' }}{{- tool | tojson }}
        {%- set ns.tools = ns.tools + 1 %}
    {%- endfor %}
    {{- '\\n' ~ ns.tools ~ ' in all.<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
    {%- if message.role == 'tool' %}
        {{- '<|im_start|>user\\n<result id=' ~ message.tool_call_id ~ '>' ~ message.content }}
        {{- '</result><|im_end|>\\n' }}
        {%- continue %}
    {%- endif %}
    {{- '<|im_start|>' + message.role + '\\n' + message.content }}
    {%- for call in message.tool_calls or [] %}
        {{- '\\n<call>' ~ call.function.name ~ ' ' }}
        {{- call.function.arguments | tojson(indent=2) ~ '</call>' }}
        {%- for key, value in call.function.arguments | items %}
            {{- ' ' ~ key ~ '=' ~ value }}
        {%- endfor %}
    {%- endfor %}
    {{- '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{%- endif %}""",
    "strict": """{{ bos_token }}
{%- if messages[0]['role'] == 'system' -%}
    {{ raise_exception('System role not supported') }}
{%- endif -%}
{%- for message in messages -%}
    {%- if (message['role'] == 'user') != (loop.index0 % 2 == 0) -%}
        {{ raise_exception('Roles must alternate: user, assistant, user, ...') }}
    {%- endif -%}
    {%- set role = 'model' if message['role'] == 'assistant' else message['role'] -%}
    {{ '<start_of_turn>' + role + '\\n' + message['content'] | trim + '<end_of_turn>\\n' }}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<start_of_turn>model\\n' }}{%- endif -%}""",
    "parts": """{% for message in messages %}
[{{ message['role'] }}]{% for part in message['content'] %}
{% if part['type'] == 'text' %}<{{ part['text'] }}>{% endif %}
{% endfor %}

{% endfor %}
{% if add_generation_prompt %}[assistant]{% endif %}
""",
    "thinking": """{% macro turn(m) %}<{{ m.role }}>
{% if m.reasoning_content is defined and keep_thinking %}(think: {{ m.reasoning_content }})
{% endif %}{{ m.content }}{{ eos_token }}{% endmacro %}
{%- for m in messages[-2:] %}
{{ turn(m) }}
{%- if loop.last %}{% break %}{% endif %}
{%- endfor %}
{% if add_generation_prompt %}<assistant>\
{{ '' if enable_thinking else '(no thinking)' }}{% endif %}""",
    "marked": """{% for m in messages %}{{ m.role }}: {% if m.role == 'assistant' %}
{% generation %}{{ m.content }}{% endgeneration %}{% else %}{{ m.content | upper }}{% endif %};
{% endfor %}{% if documents %}documents{% endif %}{{ unk_token }}{{ pad_token is defined }}""",
    "developer": """{% for m in messages %}{{ 'dev' if m.role == 'developer' else m.role }}=\
{{ m.content }}
{% endfor %}""",
    "undefined": "{{ messages[0].content.no_such.thing }}",
    "syntax": "{% for m in messages %}{{ m.content }}",
    "sandbox": "{{ messages.append(1) }}",
}
"""Name -> Jinja source."""

WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": 'The weather <now> & "soon", in °C.',
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}, "days": {"type": "integer", "minimum": 1}},
            "required": ["city"],
        },
    },
}
TIME = {
    "type": "function",
    "function": {"name": "time", "description": "", "parameters": {"type": "object"}},
}


def _says(role: str, content: Any, **more: Any) -> dict[str, Any]:
    return {"role": role, "content": content, **more}


def _part(text: str) -> dict[str, str]:
    return {"type": "text", "text": text}


def _calls(*calls: tuple[str, Any]) -> list[dict[str, Any]]:
    return [
        {"id": f"call_{i}", "type": "function", "function": {"name": name, "arguments": arguments}}
        for i, (name, arguments) in enumerate(calls)
    ]


ASK = [_says("user", "What is 1 < 2 & 'so on'?")]
TALK = [
    _says("system", "Be brief."),
    _says("user", "  Hi, 日本 🙂!\n\n"),
    _says("assistant", "Hello."),
    _says("user", "And now?"),
]
TURNS = TALK[1:]
PARTS = [
    _says("user", [_part("one"), _part(" two ")]),
    _says("assistant", "three"),
    _says("user", [_part("four")]),
]
OPEN = [_says("user", "Count."), _says("assistant", "One, two,")]
OPEN_SPACES = [_says("user", "two "), _says("assistant", "  One, two ")]
TWICE = [_says("user", "same"), _says("assistant", "same")]
REASONED = [
    _says("user", "dropped"),
    _says("user", "2+2?"),
    _says("assistant", "4", reasoning="two and two"),
]
TOOLED = [
    _says("system", "Use tools."),
    _says("user", "Weather in Zürich?"),
    _says(
        "assistant",
        None,
        tool_calls=_calls(
            ("get_weather", '{"city": "Zürich", "days": 2, "deep": {"x": [1, null, true]}}'),
            ("time", ""),
        ),
    ),
    _says("tool", '{"t": 21.5}', tool_call_id="call_0"),
    _says("tool", [_part("12"), _part("30")], tool_call_id="call_1"),
    _says("assistant", "21.5 °C."),
    _says("user", "Thanks!"),
]
DEVELOPER = [
    _says("developer", "Rule one."),
    _says("user", "Hi"),
    _says("developer", "Rule two."),
    _says("system", "And a third."),
]


def _chat(name: str, messages: list[Any], template: str | None = None, **given: Any) -> dict:
    # own_words: a refusal is not the template's, so its text need not be upstream's.
    case: dict[str, Any] = {
        "id": name,
        "messages": messages,
        "template": TEMPLATES[template] if template else None,
        "tools": None,
        "add_generation_prompt": True,
        "continue_final_message": False,
        "template_kwargs": {},
        "own_words": False,
    }
    return case | given


CLOSED: dict[str, Any] = {"add_generation_prompt": False}
CONTINUE: dict[str, Any] = {**CLOSED, "continue_final_message": True}
GIVEN = [
    _chat("tools", TOOLED, "tools", tools=[WEATHER, TIME]),
    _chat("tools.none", TOOLED, "tools"),
    _chat("tools.closed", TALK, "tools", tools=[TIME], **CLOSED),
    _chat("tools.continue", OPEN, "tools", **CONTINUE),
    _chat("strict", TURNS, "strict"),
    _chat("strict.closed", TURNS, "strict", **CLOSED),
    _chat("strict.system", TALK, "strict"),
    _chat("strict.twice_user", [*ASK, *ASK], "strict"),
    _chat("strict.continue", OPEN, "strict", **CONTINUE),
    _chat("strict.continue_trimmed", OPEN_SPACES, "strict", **CONTINUE),
    _chat("parts", PARTS, "parts"),
    _chat("parts.talk", TALK, "parts", **CLOSED),
    _chat("parts.continue", PARTS[:2], "parts", **CONTINUE),
    _chat("thinking", REASONED, "thinking", template_kwargs={"keep_thinking": True}),
    _chat("thinking.off", REASONED, "thinking", template_kwargs={"enable_thinking": False}),
    _chat("thinking.on", REASONED, "thinking", template_kwargs={"enable_thinking": True}),
    _chat("thinking.surplus", REASONED, "thinking", template_kwargs={"no_such_variable": 1}),
    _chat("marked", TALK, "marked"),
    _chat("developer", DEVELOPER, "developer", **CLOSED),
    _chat("undefined", ASK, "undefined"),
    _chat("syntax", ASK, "syntax"),
    _chat("sandbox", ASK, "sandbox"),
]
OWN = [
    _chat("ask", ASK),
    _chat("ask.closed", ASK, **CLOSED),
    _chat("talk", TALK),
    _chat("turns", TURNS),
    _chat("parts", PARTS),
    _chat("unclosed_special", [_says("user", "a <|im_end|> b <|im_start|>")]),
    _chat("empty", [_says("user", "")]),
    _chat("continue", OPEN, **CONTINUE),
    _chat("continue.spaces", OPEN_SPACES, **CONTINUE),
    _chat("continue.twice", TWICE, **CONTINUE),
    _chat("both", OPEN, continue_final_message=True, own_words=True),
    _chat("developer", DEVELOPER, **CLOSED),
    _chat("tools.ignored", ASK, tools=[WEATHER]),
]
"""With the model's own template."""

CHATS = {
    "smollm2-135m": [{**case, "id": f"own.{case['id']}"} for case in OWN] + GIVEN,
    "gemma3-270m": [_chat("none", ASK, own_words=True), *GIVEN[4:14]],
}
"""Model -> its cases; Gemma's base model has no template."""
