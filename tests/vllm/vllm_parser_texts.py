"""Texts with two calls, or two thoughts, in the format of each of vLLM's parsers."""

from __future__ import annotations

import json

CALLS = (("get_weather", {"city": "Zürich", "days": 3}), ("get_time", {"zone": "UTC"}))
KINDS = {"city": "string", "days": "integer", "zone": "string"}
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": name,
            "parameters": {"type": "object", "properties": {key: {"type": KINDS[key]} for key in arguments}},
        },
    }
    for name, arguments in CALLS
]

# Marks that are single tokens of the models that the parsers are for.
MARKS = """
<think> </think> <tool_call> </tool_call> <tool_calls> </tool_calls> <tool_sep> <arg_key> </arg_key> <arg_value>
</arg_value> <response> </response> <answer> </answer> <assistant> <|im_start|> <|im_end|> <mm:think> </mm:think>
]<]minimax[>[ <minimax:tool_call> </minimax:tool_call> <seed:think> </seed:think> <seed:tool_call> </seed:tool_call>
<|tool_call|> <function_call> <|function_call|> <|role_sep|> <|message_sep|> <|python_tag|> <|python_start|>
<|python_end|> [TOOL_CALLS] [THINK] [/THINK] <|tools_prefix|> <|tools_suffix|> <|action_start|> <|plugin|>
<|action_end|> <|tool_call_start|> <|tool_call_end|> <longcat_tool_call> </longcat_tool_call> <start_function_call>
<end_function_call> <escape> <|tool_calls_section_begin|> <|tool_calls_section_end|> <|tool_call_begin|>
<|tool_call_argument_begin|> <|open|> <|close|> <|sep|> <ifm|think> </ifm|think> <ifm|tool_calls> </ifm|tool_calls>
<ifm|tool_call> </ifm|tool_call> <ifm|arg_key> </ifm|arg_key> <ifm|arg_value> </ifm|arg_value> <|message_model|>
<|content_thinking|> <|content_text|> <|content_invoke_tool_json|> <|end_message|> <|content_model_end_sampling|>
<|channel> <channel|> <|tool_call> <tool_call|> <|"|> <|start|> <|message|> <|eom|> <|eot|> <|plamo:begin_
<|plamo:end_ :plamo|> <｜tool▁calls▁begin｜> <｜tool▁calls▁end｜> <｜tool▁call▁begin｜> <｜tool▁call▁end｜>
<｜tool▁sep｜> <｜DSML｜ <｜tool_calls_begin｜> <｜tool_calls_end｜> <｜tool_call_begin｜>
<｜tool_call_end｜> <｜tool_sep｜> <|START_THINKING|>
<|END_THINKING|> <|START_ACTION|> <|END_ACTION|> <|START_RESPONSE|> <|END_RESPONSE|> <|START_TEXT|> <|END_TEXT|>
"""
THINKING = {"thinking": True, "enable_thinking": True, "reasoning_effort": "high"}
# For the parser "hf", which reads the format from the tokenizer.
TEMPLATE = {
    "version": 1,
    "defaults": {"role": "assistant"},
    "start_anchor": "<|im_start|>assistant\n",
    "fields": {
        "thinking": {"open": "<think>", "close": "</think>", "content": "text"},
        "tool_calls": {
            "open": "<tool_call>",
            "close": "</tool_call>",
            "content": "json",
            "repeats": True,
            "transform": {"type": "function", "function": "{content}"},
        },
        "content": {"content": "text"},
    },
}


def _each(form, between=""):
    return between.join(form(name, arguments) for name, arguments in CALLS)


def _pairs(form, arguments, between=""):
    return between.join(form(key, value) for key, value in arguments.items())


def _json(value):
    return json.dumps(value, ensure_ascii=False)


def _object(name, arguments, key="arguments"):
    return _json({"name": name, key: arguments})


def _function(name, arguments, begin="<tool_call>\n", end="\n</tool_call>"):
    values = _pairs(lambda key, value: f"<parameter={key}>\n{value}\n</parameter>\n", arguments)
    return f"{begin}<function={name}>\n{values}</function>{end}"


def _arguments(name, arguments, after="\n"):
    values = _pairs(lambda k, v: f"<arg_key>{k}</arg_key>{after}<arg_value>{v}</arg_value>{after}", arguments)
    return f"<tool_call>{name}{after}{values}</tool_call>"


def _invoke(name, arguments, prefix=""):
    values = _pairs(lambda k, v: f'<{prefix}parameter name="{k}">{v}</{prefix}parameter>\n', arguments)
    return f'<{prefix}invoke name="{name}">\n{values}</{prefix}invoke>\n'


def _dsml(block, space=""):
    mark = f"｜DSML｜{space}"

    def call(name, arguments):
        def argument(key, value):
            return f'<{mark}parameter name="{key}" string="{_json(isinstance(value, str))}">{value}</{mark}parameter>\n'

        return f'<{mark}invoke name="{name}">\n{_pairs(argument, arguments)}</{mark}invoke>\n'

    return f"Look.\n\n<{mark}{block}>\n{_each(call)}</{mark}{block}>"


def _python(name, arguments):
    return f"{name}({_pairs(lambda key, value: f'{key}={value!r}', arguments, ', ')})"


def _minimax_m3(name, arguments):
    mark = "]<]minimax[>["
    return (
        f'{mark}<invoke name="{name}">{_pairs(lambda k, v: f"{mark}<{k}>{v}{mark}</{k}>", arguments)}{mark}</invoke>\n'
    )


def _kimi_k3(name, arguments):
    def argument(key, value):
        return f'<|open|>argument key="{key}" type="{KINDS[key]}"<|sep|>{value}<|close|>argument<|sep|>'

    return f'<|open|>call tool="{name}" index="1"<|sep|>{_pairs(argument, arguments)}<|close|>call<|sep|>'


def _gemma4(name, arguments):
    values = _pairs(lambda k, v: f'{k}:<|"|>{v}<|"|>' if isinstance(v, str) else f"{k}:{v}", arguments, ",")
    return f"<|tool_call>call:{name}{{{values}}}<tool_call|>"


def _plamo(name, arguments):
    marks = "<|plamo:begin_tool_arguments:plamo|><|plamo:constrain|>json<|plamo:msg|>"
    call = f"<|plamo:begin_tool_name:plamo|>{name}<|plamo:end_tool_name:plamo|>{marks}{_json(arguments)}"
    return f"<|plamo:begin_tool_request:plamo|>{call}<|plamo:end_tool_arguments:plamo|><|plamo:end_tool_request:plamo|>"


def _step3(name, arguments):
    call = _invoke(name, arguments, "steptml:")
    return f"<｜tool_call_begin｜>function<｜tool_sep｜>{call}<｜tool_call_end｜>"


HERMES = "Look.\n" + _each(lambda n, a: f"<tool_call>\n{_object(n, a)}\n</tool_call>", "\n") + "\nDone."
FUNCTIONS = "Look.\n" + _each(_function, "\n")
ARGUMENTS = "Look.\n" + _each(_arguments, "\n")
LIST = f"[{_each(_object, ', ')}]"
PYTHON = f"[{_each(_python, ', ')}]"
COHERE = '<|START_ACTION|>[{"tool_call_id": "0", "tool_name": "get_weather", "parameters": {"city": "Zürich"}}, '
COHERE += '{"tool_call_id": "1", "tool_name": "get_time", "parameters": {"zone": "UTC"}}]<|END_ACTION|>'
DEEPSEEK = ("Look.<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>", "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>")
TOOL_TEXTS = {
    "apertus": f"Look. <|tools_prefix|>[{_each(lambda n, a: _json({n: a}), ', ')}]<|tools_suffix|> Done.",
    "cohere_command3": COHERE,
    "cohere_command4": COHERE,
    "deepseek_v3": DEEPSEEK[0]
    + _each(lambda n, a: f"{DEEPSEEK[2]}function<｜tool▁sep｜>{n}\n```json\n{_json(a)}\n```{DEEPSEEK[3]}", "\n")
    + DEEPSEEK[1],
    "deepseek_v31": DEEPSEEK[0]
    + _each(lambda n, a: f"{DEEPSEEK[2]}{n}<｜tool▁sep｜>{_json(a)}{DEEPSEEK[3]}")
    + DEEPSEEK[1],
    "deepseek_v32": _dsml("function_calls"),
    "deepseek_v4": _dsml("tool_calls"),
    "deepseek_v41": _dsml("calls", " "),
    "dots": "Look.\n" + _each(lambda n, a: f"<dots_function_call>\n{_invoke(n, a)}</dots_function_call>\n"),
    "ernie45": "Look.\n</think>\n\n" + _each(lambda n, a: f"\n<tool_call>\n{_object(n, a)}\n</tool_call>\n"),
    "functiongemma": _each(
        lambda n, a: (
            f"<start_function_call>call:{n}{{{_pairs(lambda k, v: f'{k}:<escape>{v}<escape>', a, ',')}}}"
            "<end_function_call>"
        )
    ),
    "gemma4": f"Look.{_each(_gemma4)}",
    "gigachat3": f"Look.<|message_sep|>\n\nfunction call<|role_sep|>\n{_object(*CALLS[0])}",  # no second call
    "glm45": ARGUMENTS,
    "glm47": "Look." + _each(lambda n, a: _arguments(n, a, "")),
    "granite": f"<|tool_call|> {LIST}",
    "granite4": HERMES,
    "granite-20b-fc": _each(lambda n, a: f"<function_call> {_object(n, a)}", "\n"),
    "hermes": HERMES,
    "hf": HERMES,
    "hunyuan_a13b": f"<tool_calls>{LIST}</tool_calls>",
    "hy_v3": "Look.\n<tool_calls>\n"
    + _each(lambda n, a: _arguments(n, a).replace(f"{n}\n", f"{n}<tool_sep>\n"), "\n")
    + "\n</tool_calls>",
    "hy_v4": f"Look.\n<tool_calls>\n{_each(_arguments, chr(10))}\n</tool_calls>",
    "inkling": _each(
        lambda n, a: f"<|message_model|><|content_invoke_tool_json|>{_object(n, a, 'args')}<|end_message|>"
    ),
    "internlm": f"Look.<|action_start|><|plugin|>\n{_object(*CALLS[0], 'parameters')}<|action_end|>",  # no second call
    "jamba": f"Look.\n<tool_calls>{LIST}</tool_calls>",
    "k2_horizon": "Look.\n<ifm|tool_calls>"
    + _each(
        lambda n, a: (
            f"<ifm|tool_call>{n}\n"
            + _pairs(lambda k, v: f"<ifm|arg_key>{k}</ifm|arg_key>\n<ifm|arg_value>{v}</ifm|arg_value>\n", a)
            + "</ifm|tool_call>\n"
        )
    )
    + "</ifm|tool_calls>",
    "kimi_k2": "Look.<|tool_calls_section_begin|>"
    + _each(lambda n, a: f"<|tool_call_begin|>functions.{n}:0<|tool_call_argument_begin|>{_json(a)}<|tool_call_end|>")
    + "<|tool_calls_section_end|>",
    "kimi_k3": "<|open|>response<|sep|>Look.<|close|>response<|sep|><|open|>tools<|sep|>"
    + _each(_kimi_k3)
    + "<|close|>tools<|sep|>",
    "lfm2": f"Look.<|tool_call_start|>{PYTHON}<|tool_call_end|> Done.",
    "ling3": ARGUMENTS,
    "llama3_json": "<|python_tag|>" + _each(lambda n, a: _object(n, a, "parameters"), "; "),
    "llama4_json": "<|python_tag|>" + _each(lambda n, a: _object(n, a, "parameters"), "; "),
    "llama4_pythonic": f"<|python_start|>{PYTHON}<|python_end|>",
    "longcat": HERMES.replace("tool_call", "longcat_tool_call"),
    "mimo": FUNCTIONS,
    "minicpm5": "Look.\n"
    + _each(
        lambda n, a: (
            f'<function name="{n}">' + _pairs(lambda k, v: f'<param name="{k}">{v}</param>', a) + "</function>\n"
        )
    ),
    "minimax_m2": f"Look.\n<minimax:tool_call>\n{_each(_invoke)}</minimax:tool_call>",
    "minimax_m3": f"Look.\n]<]minimax[>[<tool_call>\n{_each(_minimax_m3)}]<]minimax[>[</tool_call>",
    "mistral": f"Look.[TOOL_CALLS] {LIST}",
    "muse_glimmer": _each(
        lambda n, a: (
            f" to={n}<|message|>\n<atem:function_calls>\n{_invoke(n, a, 'atem:')}</atem:function_calls><|eom|>"
        ),
        "<|start|>assistant",
    ),
    "olmo3": f"<function_calls>{_each(_python, chr(10))}</function_calls>",
    "phi4_mini_json": f"functools{LIST}",
    "plamo3": f"Look.<|plamo:begin_tool_requests:plamo|>{_each(_plamo)}<|plamo:end_tool_requests:plamo|>",
    "poolside_v1": ARGUMENTS,
    "pythonic": PYTHON,
    "qwen3_coder": FUNCTIONS,
    "qwen3_json": HERMES,
    "qwen3_xml": FUNCTIONS,
    "seed_oss": FUNCTIONS.replace("tool_call", "seed:tool_call"),
    "step3": f"Look.<｜tool_calls_begin｜>{_each(_step3)}<｜tool_calls_end｜>",
    "step3p5": FUNCTIONS,
    "xlam": LIST,
}

THOUGHTS = "Look\nit up.{end}\n\nDone. {start}Again, {end} quoted.{end} End."
HARMONY = " to=self<|message|>Look\nit up.<|eom|><|start|>assistant to=user<|message|>Done.<|eom|>"
THOUGHT_TEXTS = {
    "granite": "Here is my thought process: Look\nit up. Here is my response: Done. Here is my response: End.",
    "inkling": "<|message_model|><|content_thinking|>Look\nit up.<|end_message|><|message_model|><|content_text|>Done."
    "<|end_message|><|message_model|><|content_thinking|>Again.<|end_message|><|content_model_end_sampling|>",
    "ernie45": "Look\nit up.\n</think>\n\n<response>\nDone. <think>Again.\n</think> End.\n</response>\n",
    "kimi_k3": "<|open|>think<|sep|>Look\nit up.<|close|>think<|sep|><|open|>response<|sep|>Done. <|open|>think<|sep|>"
    "Again.<|close|>think<|sep|> End.<|close|>response<|sep|>",
    "muse_glimmer": HARMONY + HARMONY.replace(" to=self", "<|start|>assistant to=self"),
    "gemma4": "<|channel>thought\nLook\nit up.<channel|>Done. <|channel>thought\nAgain.<channel|> End.",
}
OTHER_MARKS = {"seed_oss": "seed:think", "minimax_m3": "mm:think", "k2_horizon": "ifm|think"}
OPENED = (
    "mistral",
    "minimax_m3",
    "hf",
    "olmo3",
    "plamo3",
    "minicpmv",
    "mimo",
)  # the text opens the first thought itself
# Ids of "<think>\n", "\n</think>\n<answer>\n" and "\n</answer>" in the only vocabulary that "hunyuan_a13b" knows.
HUNYUAN = ([14023, 771, 397], [198, 524, 27963, 397, 27, 9399, 397], [198, 524, 9399, 29])


def thought_text(name):
    if name in THOUGHT_TEXTS:
        return THOUGHT_TEXTS[name]
    mark = OTHER_MARKS.get(name, "think")
    start, end = {
        "mistral": ("[THINK]", "[/THINK]"),
        "plamo3": ("<|plamo:begin_think:plamo|>", "<|plamo:end_think:plamo|>"),
        "cohere_command3": ("<|START_THINKING|>", "<|END_THINKING|>"),
        "cohere_command4": ("<|START_THINKING|>", "<|END_THINKING|>"),
    }.get(name, (f"<{mark}>", f"</{mark}>"))
    return (start if name in OPENED else "") + THOUGHTS.format(start=start, end=end)
