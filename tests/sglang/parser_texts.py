"""A text with two calls for each of SGLang's tool parsers, with two thoughts for each of its reasoning parsers, in the
format of the model that the parser is for."""

from __future__ import annotations

import json

CALLS = (
    ("get_weather", {"city": 'Zürich "West"', "days": 3}),
    ("get_time", {"zone": "Europe/Paris", "tags": ["a", "b, c"]}),
)
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "parameters": {
                "type": "object",
                "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
            },
        },
    },
    {
        "type": "function",
        "function": {
            "name": "get_time",
            "parameters": {
                "type": "object",
                "properties": {"zone": {"type": "string"}, "tags": {"type": "array", "items": {"type": "string"}}},
            },
        },
    },
]


def _each(form, between="", calls=CALLS):
    """`form(name, arguments)` of each call."""
    return between.join(form(name, arguments) for name, arguments in calls)


def _pairs(form, arguments, between=""):
    values = ((key, value if isinstance(value, str) else json.dumps(value)) for key, value in arguments.items())
    return between.join(form(key, value) for key, value in values)


def _json(arguments):
    return json.dumps(arguments, ensure_ascii=False)


def _object(name, arguments, key="arguments", name_key="name"):
    return json.dumps({name_key: name, key: arguments}, ensure_ascii=False)


def _python(name, arguments):
    return f"{name}({', '.join(f'{key}={value!r}' for key, value in arguments.items())})"


def _xml_function(name, arguments):
    parameters = _pairs(lambda key, value: f"<parameter={key}>\n{value}\n</parameter>\n", arguments)
    return f"<tool_call>\n<function={name}>\n{parameters}</function>\n</tool_call>"


def _mimo(name, arguments):
    parameters = _pairs(lambda key, value: f"<parameter={key}>{value}</parameter>\n", arguments)
    return f"<tool_call>\n<function={name}>\n{parameters}</function>\n</tool_call>"


def _spark25(name, arguments):
    pairs = _pairs(lambda key, value: f"<arg_key>{key}</arg_key><arg_value>{value}</arg_value>\n", arguments)
    return f"<tool_call>{name}\n{pairs}</tool_call>"


def _arg_pairs(name, arguments, tag="tool_call", after="\n", between="\n"):
    pairs = _pairs(
        lambda key, value: f"<arg_key>{key}</arg_key>{between}<arg_value>{value}</arg_value>{between}", arguments
    )
    return f"<{tag}>{name}{after}{pairs}</{tag}>"


def _dsml(block, space=""):
    def call(name, arguments):
        def parameter(key, value):
            text = "true" if isinstance(arguments[key], str) else "false"
            return f'<｜DSML｜{space}parameter name="{key}" string="{text}">{value}</｜DSML｜{space}parameter>\n'

        body = _pairs(parameter, arguments)
        return f'<｜DSML｜{space}invoke name="{name}">\n{body}</｜DSML｜{space}invoke>\n'

    return f"Let me look.\n\n<｜DSML｜{space}{block}>\n{_each(call)}</｜DSML｜{space}{block}>"


def _gcml(name, arguments):
    def parameter(key, value):
        text = "true" if isinstance(arguments[key], str) else "false"
        return f'<｜GCML｜parameter name="{key}" string="{text}">{value}</｜GCML｜parameter>\n'

    return f'<｜GCML｜invoke name="{name}">\n{_pairs(parameter, arguments)}</｜GCML｜invoke>\n'


def _invoke(name, arguments, prefix=""):
    parameters = _pairs(lambda key, value: f'<{prefix}parameter name="{key}">{value}</{prefix}parameter>\n', arguments)
    return f'<{prefix}invoke name="{name}">\n{parameters}</{prefix}invoke>\n'


def _kimi_k3(name, arguments):
    def argument(key, value):
        kind = "string" if isinstance(arguments[key], str) else "array" if value[0] == "[" else "number"
        return f'<|open|>argument key="{key}" type="{kind}"<|sep|>{value}<|close|>argument<|sep|>'

    index = [each for each, _ in CALLS].index(name) + 1
    return f'<|open|>call tool="{name}" index="{index}"<|sep|>{_pairs(argument, arguments)}<|close|>call<|sep|>'


def _gemma4(name, arguments):
    def value_of(value):
        if isinstance(value, str):
            return f'<|"|>{value}<|"|>'
        return f"[{','.join(map(value_of, value))}]" if isinstance(value, list) else json.dumps(value)

    return f"<|tool_call>call:{name}{{{','.join(f'{k}:{value_of(v)}' for k, v in arguments.items())}}}<tool_call|>"


def _minimax_m3(name, arguments):
    ns = "]<]minimax[>["

    def parameter(key, value):
        if isinstance(arguments[key], list):
            value = "".join(f"{ns}<item>{item}{ns}</item>" for item in arguments[key])
        return f"{ns}<{key}>{value}{ns}</{key}>"

    return f'{ns}<invoke name="{name}">{_pairs(parameter, arguments)}{ns}</invoke>'


def _beam(name, arguments):
    parameters = _pairs(lambda key, value: f'<rfl:parameter name="{key}">\n{value}\n</rfl:parameter>', arguments)
    return f" to={name}<|channel|>analysis <|constrain|>xml<|message|>{parameters}"


def _step3(name, arguments):
    parameters = _pairs(lambda k, v: f'<steptml:parameter name="{k}">{v}</steptml:parameter>\n', arguments)
    invoke = f'<steptml:invoke name="{name}">\n{parameters}</steptml:invoke>'
    return f"<｜tool_call_begin｜>function<｜tool_sep｜>{invoke}<｜tool_call_end｜>"


_XML_FUNCTIONS = f"Let me look.\n{_each(_xml_function, chr(10))}"
_QWEN = f"Let me look.\n{_each(lambda n, a: f'<tool_call>{chr(10)}{_object(n, a)}{chr(10)}</tool_call>', chr(10))}"
_ARG_PAIRS = f"Let me look.\n{_each(_arg_pairs, chr(10))}"

TOOL_TEXTS = {
    "apertus2509": "Let me look. <|tools_prefix|>["
    + _each(lambda n, a: json.dumps({n: a}, ensure_ascii=False), ", ")
    + "]<|tools_suffix|> Done.",
    "beam": _each(_beam, "<|end|><|start|>assistant") + "<|call|>",
    "cohere_command4": "<|START_ACTION|>["
    + _each(lambda n, a: json.dumps({"tool_call_id": "0", "tool_name": n, "parameters": a}, ensure_ascii=False), ",\n")
    + "]<|END_ACTION|>",
    "deepseekv3": "Let me look.<｜tool▁calls▁begin｜>"
    + _each(
        lambda n, a: f"<｜tool▁call▁begin｜>function<｜tool▁sep｜>{n}\n```json\n{_json(a)}\n```<｜tool▁call▁end｜>",
        "\n",
    )
    + "<｜tool▁calls▁end｜>",
    "deepseekv31": "Let me look.<｜tool▁calls▁begin｜>"
    + _each(lambda n, a: f"<｜tool▁call▁begin｜>{n}<｜tool▁sep｜>{_json(a)}<｜tool▁call▁end｜>")
    + "<｜tool▁calls▁end｜>",
    "deepseekv32": _dsml("function_calls"),
    "deepseekv4": _dsml("tool_calls"),
    "deepseekv41": _dsml("tool_calls", " "),
    "dots": f"Let me look.\n<dots_function_call>\n{_each(_invoke)}</dots_function_call>",
    "glm": _ARG_PAIRS,
    "glm45": _ARG_PAIRS,
    "glm47": "Let me look." + _each(lambda n, a: _arg_pairs(n, a, after="", between="")),
    "gpt-oss": "<|channel|>analysis<|message|>Look it up.<|end|>"
    + _each(
        lambda n, a: (
            f"<|start|>assistant<|channel|>commentary to=functions.{n}<|constrain|>json<|message|>{_json(a)}<|call|>"
        )
    ),
    "k2_horizon": "Let me look.\n<ifm|tool_calls>"
    + _each(
        lambda n, a: (
            f"<ifm|tool_call>{n}\n"
            + _pairs(lambda k, v: f"<ifm|arg_key>{k}</ifm|arg_key>\n<ifm|arg_value>{v}</ifm|arg_value>\n", a)
            + "</ifm|tool_call>"
        ),
        "\n",
    )
    + "</ifm|tool_calls>",
    "kimi_k2": "Let me look.<|tool_calls_section_begin|>"
    + _each(
        lambda n, a: (
            f"<|tool_call_begin|>functions.{n}:{[c[0] for c in CALLS].index(n)}"
            f"<|tool_call_argument_begin|>{_json(a)}<|tool_call_end|>"
        )
    )
    + "<|tool_calls_section_end|>",
    "kimi_k3": "<|open|>response<|sep|>Let me look.<|close|>response<|sep|><|open|>tools<|sep|>"
    + _each(_kimi_k3)
    + "<|close|>tools<|sep|>",
    "lfm2": f"Let me look.<|tool_call_start|>[{_each(_python, ', ')}]<|tool_call_end|> Done.",
    "ling3": _ARG_PAIRS,
    "llama3": "<|python_tag|>" + _each(lambda n, a: _object(n, a, "parameters"), ";"),
    "mimo": f"Let me look.\n{_each(_mimo, chr(10))}",
    "minicpm5": "Let me look.\n"
    + _each(
        lambda n, a: (
            f'<function name="{n}">' + _pairs(lambda k, v: f'<param name="{k}">{v}</param>', a) + "</function>"
        ),
        "\n",
    ),
    "mistral": "Let me look. " + _each(lambda n, a: f"[TOOL_CALLS]{n}[ARGS]{_json(a)}"),
    "muse": " to=functions<|message|><atem:function_calls>\n"
    + _each(lambda n, a: _invoke(n, a, "atem:"))
    + "</atem:function_calls><|eom|><|start|>assistant to=user<|message|>Done.<|eot|>",
    "poolside_v1": _ARG_PAIRS,
    "pythonic": f"[{_each(_python, ', ')}]",
    "qwen": _QWEN,
    "qwen25": _QWEN,
    "qwen3_coder": _XML_FUNCTIONS,
    "spark25": f"Let me look.\n{_each(_spark25, chr(10))}",
    "step3": f"Let me look.<｜tool_calls_begin｜>\n{_each(_step3, chr(10))}\n<｜tool_calls_end｜>",
    "step3p5": _XML_FUNCTIONS,
    "minimax-m2": "Let me look.\n"
    + _each(lambda n, a: f"<minimax:tool_call>\n{_invoke(n, a)}</minimax:tool_call>", "\n"),
    "minimax-m3": f"Let me look.\n]<]minimax[>[<tool_call>\n{_each(_minimax_m3, chr(10))}]<]minimax[>[</tool_call>",
    "nanbeige": _XML_FUNCTIONS,
    "trinity": f"<think>Look it up.</think>{_QWEN}",
    "interns1": "Let me look."
    + _each(lambda n, a: f"<|action_start|> <|plugin|>\n{_object(n, a, 'parameters')}<|action_end|>", "\n"),
    "hermes": "Let me look.\n" + _each(lambda n, a: f"<tool_call>{_object(n, a)}</tool_call>", "\n"),
    "hunyuan": "Let me look.\n<tool_calls>\n"
    + _each(
        lambda n, a: (
            f"<tool_call>{n}<tool_sep>\n"
            + _pairs(lambda k, v: f"<arg_key>{k}</arg_key>\n<arg_value>{v}</arg_value>\n", a)
            + "</tool_call>\n"
        )
    )
    + "</tool_calls>",
    "gigachat3": f"Let me look.<|message_sep|>\n\nfunction call<|role_sep|>\n{_object(*CALLS[0])}</s>",  # one call
    "gigachat35": f"Let me look.<｜GCML｜tool_calls>\n{_each(_gcml)}</｜GCML｜tool_calls>",
    "gemma4": f"Let me look.{_each(_gemma4)}",
    "inkling": _each(
        lambda n, a: f"<|message_model|>{n}<|content_invoke_tool_json|>{_object(n, a, 'args')}<|end_message|>"
    ),
    "iquest_q1": "Let me look.\n"
    + _each(lambda n, a: _arg_pairs(n, a, tag="iquest_tool_call", after="", between=""), "\n"),
    "response_template": _each(_beam, "<|end|><|start|>assistant") + "<|call|>",
}

# The markers of formats without one opening and one closing token.
THOUGHT_TEXTS = {
    "beam": "<|channel|>analysis<|message|>Look\nit up.<|end|><|start|>assistant<|channel|>final<|message|>Done."
    "<|return|>",
    "gpt-oss": "<|channel|>analysis<|message|>Look\nit up.<|end|><|start|>assistant<|channel|>analysis<|message|>Again."
    "<|end|><|start|>assistant<|channel|>final<|message|>Done.<|return|>",
    "kimi_k3": "<|open|>think<|sep|>Look\nit up.<|close|>think<|sep|><|open|>response<|sep|>Done. <|open|>think<|sep|>"
    "Again.<|close|>think<|sep|><|close|>response<|sep|>",
    "muse": " to=self<|message|>Look\nit up.<|eom|><|start|>assistant to=user<|message|>Done.<|eom|>"
    "<|start|>assistant to=self<|message|>Again.<|eom|><|start|>assistant to=user<|message|>End.<|eot|>",
    "inkling": "<|message_model|><|content_thinking|>Look\nit up.<|end_message|><|message_model|><|content_text|>Done."
    "<|end_message|><|message_model|><|content_thinking|>Again.<|end_message|><|message_model|><|content_text|>End."
    "<|end_message|><|content_model_end_sampling|>",
    "cohere_command4": "Look\nit up.<|END_THINKING|><|START_TEXT|>Done. <|START_THINKING|>Again.<|END_THINKING|> End."
    "<|END_TEXT|>",
}
THOUGHT_TEXTS["response_template"] = THOUGHT_TEXTS["beam"]


def thought_text(name, start, end, label=""):
    return THOUGHT_TEXTS.get(name) or (
        f"First, {start}{label}look\nit up.{end}\n\nDone. {start}{label}Again, 1 < 2.{end} End."
    )


THOUGHT_BEFORE_CALLS = {
    "beam": "<|channel|>analysis<|message|>Look it up.<|end|><|start|>assistant",
    "gpt-oss": "",  # TOOL_TEXTS has one
    "muse": " to=self<|message|>Look it up.<|eom|><|start|>assistant",
    "inkling": "<|message_model|><|content_thinking|>Look it up.<|end_message|>",
    "cohere_command4": "Look it up.<|END_THINKING|>",
}
THOUGHT_BEFORE_CALLS["response_template"] = THOUGHT_BEFORE_CALLS["beam"]
