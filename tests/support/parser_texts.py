"""Texts with two calls, or two thoughts, in the format of each of the engines' parsers."""

import json

CALLS = (
    ("get_weather", {"city": 'Zürich "West"', "days": 3}),
    ("get_time", {"zone": "Europe/Paris", "tags": ["a", "b, c"]}),
)
KINDS = {"city": "string", "days": "integer", "zone": "string", "tags": "array"}


def _tool(name, arguments):
    kinds = {key: {"type": KINDS[key]} | ({"items": {"type": "string"}} if key == "tags" else {}) for key in arguments}
    return {"type": "function", "function": {"name": name, "parameters": {"type": "object", "properties": kinds}}}


TOOLS = [_tool(*call) for call in CALLS]


def _each(form, between=""):
    """`form(name, arguments)` of each call, or a text with them."""
    if isinstance(form, str):
        texts = [{"name": name, "at": _index(name), "json": _json(arguments)} for name, arguments in CALLS]
        return between.join(form % {**text, "object": _object(*call)} for text, call in zip(texts, CALLS, strict=True))
    return between.join(form(name, arguments) for name, arguments in CALLS)


def _pairs(form, arguments, between=""):
    """`form(name, value)` of each argument, or a text with both."""
    if isinstance(form, str):
        return _pairs(lambda *pair: form % pair, arguments, between)
    values = ((key, value if isinstance(value, str) else json.dumps(value)) for key, value in arguments.items())
    return between.join(form(key, value) for key, value in values)


def _json(value):
    return json.dumps(value, ensure_ascii=False)


def _object(name, arguments, key="arguments"):
    return _json({"name": name, key: arguments})


def _index(name):
    return [each for each, _ in CALLS].index(name)


def _function(name, arguments):
    values = _pairs("<parameter=%s>\n%s\n</parameter>\n", arguments)
    return f"<tool_call>\n<function={name}>\n{values}</function>\n</tool_call>"


def _arguments(name, arguments, after="\n", between="\n"):
    values = _pairs(f"<arg_key>%s</arg_key>{between}<arg_value>%s</arg_value>{after}", arguments)
    return f"<tool_call>{name}{after}{values}</tool_call>"


def _invoke(name, arguments, prefix=""):
    values = _pairs(f'<{prefix}parameter name="%s">%s</{prefix}parameter>\n', arguments)
    return f'<{prefix}invoke name="{name}">\n{values}</{prefix}invoke>\n'


def _muse(name, arguments):
    calls = f"<atem:function_calls>\n{_invoke(name, arguments, 'atem:')}</atem:function_calls>"
    return f" to={name}<|message|>\n{calls}<|eom|>"


def _marked(name, arguments, mark="｜DSML｜"):
    def argument(key, value):
        text = _json(isinstance(arguments[key], str))
        return f'<{mark}parameter name="{key}" string="{text}">{value}</{mark}parameter>\n'

    return f'<{mark}invoke name="{name}">\n{_pairs(argument, arguments)}</{mark}invoke>\n'


def _dsml(block, space=""):
    mark = f"｜DSML｜{space}"
    return f"Look.\n\n<{mark}{block}>\n{_each(lambda n, a: _marked(n, a, mark))}</{mark}{block}>"


def _python(name, arguments):
    return f"{name}({', '.join(f'{key}={value!r}' for key, value in arguments.items())})"


def _minimax_m3(name, arguments):
    mark = "]<]minimax[>["

    def argument(key, value):
        if isinstance(arguments[key], list):
            value = "".join(f"{mark}<item>{item}{mark}</item>" for item in arguments[key])
        return f"{mark}<{key}>{value}{mark}</{key}>"

    return f'{mark}<invoke name="{name}">{_pairs(argument, arguments)}{mark}</invoke>'


def _kimi_k3(name, arguments):
    def argument(key, value):
        kind = KINDS[key].replace("integer", "number")
        return f'<|open|>argument key="{key}" type="{kind}"<|sep|>{value}<|close|>argument<|sep|>'

    call = f'<|open|>call tool="{name}" index="{_index(name) + 1}"<|sep|>'
    return f"{call}{_pairs(argument, arguments)}<|close|>call<|sep|>"


def _gemma4(name, arguments):
    def value_of(value):
        if isinstance(value, str):
            return f'<|"|>{value}<|"|>'
        return f"[{','.join(map(value_of, value))}]" if isinstance(value, list) else json.dumps(value)

    return f"<|tool_call>call:{name}{{{','.join(f'{k}:{value_of(v)}' for k, v in arguments.items())}}}<tool_call|>"


def _plamo(name, arguments):
    marks = "<|plamo:begin_tool_arguments:plamo|><|plamo:constrain|>json<|plamo:msg|>"
    call = f"<|plamo:begin_tool_name:plamo|>{name}<|plamo:end_tool_name:plamo|>{marks}{_json(arguments)}"
    return f"<|plamo:begin_tool_request:plamo|>{call}<|plamo:end_tool_arguments:plamo|><|plamo:end_tool_request:plamo|>"


def _deepseek(call, between=""):
    begin, end = "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>"
    return f"Look.<｜tool▁calls▁begin｜>{_each(begin + call + end, between)}<｜tool▁calls▁end｜>"


HERMES = "Look.\n" + _each("<tool_call>\n%(object)s\n</tool_call>", "\n")
FUNCTIONS = "Look.\n" + _each(_function, "\n")
ARGUMENTS = _each(_arguments, "\n")
LIST = f"[{_each(_object, ', ')}]"
PYTHON = f"[{_each(_python, ', ')}]"
STEP3 = "<｜tool_call_begin｜>function<｜tool_sep｜>"
COHERE = _each(lambda n, a: _json({"tool_call_id": str(_index(n)), "tool_name": n, "parameters": a}), ", ")
LLAMA3 = "<|python_tag|>" + _each(lambda n, a: _object(n, a, "parameters"), "; ")

TOOL_TEXTS = {
    "apertus": f"Look. <|tools_prefix|>[{_each(lambda n, a: _json({n: a}), ', ')}]<|tools_suffix|> Done.",
    "cohere_command4": f"<|START_ACTION|>[{COHERE}]<|END_ACTION|>",
    "deepseek_v3": _deepseek("function<｜tool▁sep｜>%(name)s\n```json\n%(json)s\n```", "\n"),
    "deepseek_v31": _deepseek("%(name)s<｜tool▁sep｜>%(json)s"),
    "deepseek_v32": _dsml("function_calls"),
    "deepseek_v4": _dsml("tool_calls"),
    "gemma4": f"Look.{_each(_gemma4)}",
    "gigachat3": f"Look.<|message_sep|>\n\nfunction call<|role_sep|>\n{_object(*CALLS[0])}",  # no second call
    "glm45": f"Look.\n{ARGUMENTS}",
    "glm47": "Look." + _each(lambda n, a: _arguments(n, a, after="", between="")),
    "hermes": HERMES,
    "k2_horizon": f"Look.\n<tool_calls>{ARGUMENTS}</tool_calls>".replace("<", "<ifm|").replace("<ifm|/", "</ifm|"),
    "kimi_k2": "Look.<|tool_calls_section_begin|>"
    + _each("<|tool_call_begin|>functions.%(name)s:%(at)s<|tool_call_argument_begin|>%(json)s<|tool_call_end|>")
    + "<|tool_calls_section_end|>",
    "kimi_k3": "<|open|>response<|sep|>Look.<|close|>response<|sep|><|open|>tools<|sep|>"
    + _each(_kimi_k3)
    + "<|close|>tools<|sep|>",
    "lfm2": f"Look.<|tool_call_start|>{PYTHON}<|tool_call_end|> Done.",
    "ling3": f"Look.\n{ARGUMENTS}",
    "mimo": FUNCTIONS,
    "minicpm5": "Look.\n"
    + _each(lambda n, a: f'<function name="{n}">' + _pairs('<param name="%s">%s</param>', a) + "</function>", "\n"),
    "minimax_m3": f"Look.\n]<]minimax[>[<tool_call>\n{_each(_minimax_m3, chr(10))}]<]minimax[>[</tool_call>",
    "poolside_v1": f"Look.\n{ARGUMENTS}",
    "pythonic": PYTHON,
    "qwen3_coder": FUNCTIONS,
    "step3": "Look.<｜tool_calls_begin｜>"
    + _each(lambda n, a: f"\n{STEP3}{_invoke(n, a, 'steptml:').rstrip()}<｜tool_call_end｜>")
    + "\n<｜tool_calls_end｜>",
    "step3p5": FUNCTIONS,
}
VLLM_TOOL_TEXTS = TOOL_TEXTS | {
    "cohere_command3": TOOL_TEXTS["cohere_command4"],
    "deepseek_v41": _dsml("calls", " "),
    "dots": "Look.\n" + _each(lambda n, a: f"<dots_function_call>\n{_invoke(n, a)}</dots_function_call>\n"),
    "ernie45": "Look.\n</think>\n\n" + _each("\n<tool_call>\n%(object)s\n</tool_call>\n"),
    "functiongemma": _each(
        lambda n, a: f"<start_function_call>call:{n}{{{_pairs('%s:<escape>%s<escape>', a, ',')}}}<end_function_call>"
    ),
    "granite": f"<|tool_call|> {LIST}",
    "granite4": f"{HERMES}\nDone.",
    "granite-20b-fc": _each("<function_call> %(object)s", "\n"),
    "hermes": f"{HERMES}\nDone.",
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
    "llama3_json": LLAMA3,
    "llama4_json": LLAMA3,
    "llama4_pythonic": f"<|python_start|>{PYTHON}<|python_end|>",
    "longcat": HERMES.replace("tool_call", "longcat_tool_call"),
    "minimax_m2": f"Look.\n<minimax:tool_call>\n{_each(_invoke)}</minimax:tool_call>",
    "mistral": f"Look.[TOOL_CALLS] {LIST}",
    "muse_glimmer": _each(_muse, "<|start|>assistant"),
    "olmo3": f"<function_calls>{_each(_python, chr(10))}</function_calls>",
    "phi4_mini_json": f"functools{LIST}",
    "plamo3": f"Look.<|plamo:begin_tool_requests:plamo|>{_each(_plamo)}<|plamo:end_tool_requests:plamo|>",
    "qwen3_json": HERMES,
    "qwen3_xml": FUNCTIONS,
    "seed_oss": FUNCTIONS.replace("tool_call", "seed:tool_call"),
    "xlam": LIST,
}
_SAME = """apertus2509=apertus deepseekv3=deepseek_v3 deepseekv31=deepseek_v31 deepseekv32=deepseek_v32
deepseekv4=deepseek_v4 deepseekv41=deepseek_v41 glm=glm45 hunyuan=hy_v3 iquest_q1=glm47 minimax-m2=minimax_m2
minimax-m3=minimax_m3 nanbeige=qwen3_coder qwen=hf qwen25=hf spark25=glm45"""
SGLANG_TOOL_TEXTS = VLLM_TOOL_TEXTS | {
    name: VLLM_TOOL_TEXTS[of] for name, _, of in (word.partition("=") for word in _SAME.split())
}


BEAM = '<rfl:parameter name="%s">\n%s\n</rfl:parameter>'
CALL = "<|start|>assistant<|channel|>commentary to=functions.%(name)s<|constrain|>json<|message|>%(json)s<|call|>"
SGLANG_TOOL_TEXTS |= {
    "beam": _each(
        lambda n, a: f" to={n}<|channel|>analysis <|constrain|>xml<|message|>{_pairs(BEAM, a)}",
        "<|end|><|start|>assistant",
    )
    + "<|call|>",
    "gigachat35": f"Look.<｜GCML｜tool_calls>\n{_each(lambda n, a: _marked(n, a, '｜GCML｜'))}</｜GCML｜tool_calls>",
    "gpt-oss": "<|channel|>analysis<|message|>Look it up.<|end|>" + _each(CALL),
    "hermes": "Look.\n" + _each("<tool_call>%(object)s</tool_call>", "\n"),
    "interns1": "Look."
    + _each(lambda n, a: f"<|action_start|> <|plugin|>\n{_object(n, a, 'parameters')}<|action_end|>", "\n"),
    "iquest_q1": VLLM_TOOL_TEXTS["glm47"].replace("tool_call", "iquest_tool_call"),
    "llama3": LLAMA3.replace("; ", ";"),
    "mimo": FUNCTIONS.replace(">\n", ">").replace("\n<", "<"),
    "mistral": "Look. " + _each("[TOOL_CALLS]%(name)s[ARGS]%(json)s"),
    "muse": " to=functions<|message|><atem:function_calls>\n"
    + _each(lambda n, a: _invoke(n, a, "atem:"))
    + "</atem:function_calls><|eom|><|start|>assistant to=user<|message|>Done.<|eot|>",
    "trinity": f"<think>Look it up.</think>{HERMES}",
}
SGLANG_TOOL_TEXTS["response_template"] = SGLANG_TOOL_TEXTS["beam"]

THOUGHTS = "Look\nit up.{end}\n\nDone. {start}Again, {end} quoted.{end} End."
HARMONY = " to=self<|message|>Look\nit up.<|eom|><|start|>assistant to=user<|message|>Done.<|eom|>"
VLLM_THOUGHT_TEXTS = {
    "granite": "Here is my thought process: Look\nit up. Here is my response: Done. Here is my response: End.",
    "inkling": "<|message_model|><|content_thinking|>Look\nit up.<|end_message|><|message_model|><|content_text|>Done."
    "<|end_message|><|message_model|><|content_thinking|>Again.<|end_message|><|content_model_end_sampling|>",
    "ernie45": "Look\nit up.\n</think>\n\n<response>\nDone. <think>Again.\n</think> End.\n</response>\n",
    "kimi_k3": "<|open|>think<|sep|>Look\nit up.<|close|>think<|sep|><|open|>response<|sep|>Done. <|open|>think<|sep|>"
    "Again.<|close|>think<|sep|> End.<|close|>response<|sep|>",
    "muse_glimmer": HARMONY + HARMONY.replace(" to=self", "<|start|>assistant to=self"),
    "gemma4": "<|channel>thought\nLook\nit up.<channel|>Done. <|channel>thought\nAgain.<channel|> End.",
}
SGLANG_THOUGHT_TEXTS = {name: VLLM_THOUGHT_TEXTS[name] for name in ("kimi_k3", "inkling")} | {
    "beam": "<|channel|>analysis<|message|>Look\nit up.<|end|><|start|>assistant<|channel|>final<|message|>Done.",
    "muse": VLLM_THOUGHT_TEXTS["muse_glimmer"],
}
SGLANG_THOUGHT_TEXTS |= dict.fromkeys(("gpt-oss", "response_template"), SGLANG_THOUGHT_TEXTS["beam"])
OTHER_MARKS = {"seed_oss": "seed:think", "minimax_m3": "mm:think", "k2_horizon": "ifm|think"}
# The text opens the first thought itself.
OPENED = ["mistral", "minimax_m3", "hf", "olmo3", "plamo3", "minicpmv", "mimo"]


def vllm_thought_text(name):
    if name in VLLM_THOUGHT_TEXTS:
        return VLLM_THOUGHT_TEXTS[name]
    mark = OTHER_MARKS.get(name, "think")
    start, end = {
        "mistral": ("[THINK]", "[/THINK]"),
        "plamo3": ("<|plamo:begin_think:plamo|>", "<|plamo:end_think:plamo|>"),
        "cohere_command3": ("<|START_THINKING|>", "<|END_THINKING|>"),
        "cohere_command4": ("<|START_THINKING|>", "<|END_THINKING|>"),
    }.get(name, (f"<{mark}>", f"</{mark}>"))
    return (start if name in OPENED else "") + THOUGHTS.format(start=start, end=end)


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
TOOL_CALLS = {"open": "<tool_call>", "close": "</tool_call>", "content": "json", "repeats": True}
TOOL_CALLS |= {"transform": {"type": "function", "function": "{content}"}}
FIELDS = {"thinking": {"open": "<think>", "close": "</think>", "content": "text"}, "tool_calls": TOOL_CALLS}
FIELDS |= {"content": {"content": "text"}}
TEMPLATE = {
    "version": 1,
    "defaults": {"role": "assistant"},
    "start_anchor": "<|im_start|>assistant\n",
    "fields": FIELDS,
}
