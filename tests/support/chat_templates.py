"""Chat templates as checkpoints have them, one or more for each format of calls: whole ones, in words of our own.

Each writes system prompt, tools, users, thoughts, calls and results where the public template of that family does, in
its markers, so that what tells a format is found among all that else stands there.
"""

from collections.abc import Mapping

from holdfast.replicas.text.calls.formats import ToolFormat

_CHATML_TOOLS = r"""{%- if tools -%}
{{- '<|im_start|>system\n' -}}
{%- if messages[0].role == 'system' -%}{{- messages[0].content + '\n\n' -}}{%- endif -%}
{{- "# Tools\n\nThese functions may help you. Their signatures stand in <tools></tools>:\n<tools>" -}}
{%- for tool in tools -%}{{- '\n' + tool | tojson -}}{%- endfor -%}
{{- '\n</tools>\n\n' + INSTRUCTION + '<|im_end|>\n' -}}
{%- elif messages[0].role == 'system' -%}
{{- '<|im_start|>system\n' + messages[0].content + '<|im_end|>\n' -}}
{%- endif -%}
{%- for message in messages -%}
{%- if message.role == 'user' or (message.role == 'system' and not loop.first) -%}
{{- '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>\n' -}}
{%- elif message.role == 'assistant' -%}
{%- set thought = message.reasoning_content or '' -%}
{%- set said = message.content -%}
{%- if not thought and '</think>' in said -%}
{%- set thought = said.split('</think>')[0].split('<think>')[-1].strip('\n') -%}
{%- set said = said.split('</think>')[-1].lstrip('\n') -%}
{%- endif -%}
{{- '<|im_start|>assistant\n' -}}
{%- if thought -%}{{- '<think>\n' + thought + '\n</think>\n\n' -}}{%- endif -%}
{{- said -}}
CALLS
{{- '<|im_end|>\n' -}}
{%- elif message.role == 'tool' -%}
{%- if loop.first or loop.previtem.role != 'tool' -%}{{- '<|im_start|>user' -}}{%- endif -%}
{{- '\n<tool_response>\n' + message.content + '\n</tool_response>' -}}
{%- if loop.last or loop.nextitem.role != 'tool' -%}{{- '<|im_end|>\n' -}}{%- endif -%}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}
{{- '<|im_start|>assistant\n' -}}
{%- if enable_thinking is defined and not enable_thinking -%}{{- '<think>\n\n</think>\n\n' -}}{%- endif -%}
{%- endif -%}"""


def _chatml(instruction: str, calls: str) -> str:
    return _CHATML_TOOLS.replace("INSTRUCTION", instruction).replace("CALLS", calls)


HERMES = _chatml(
    r"""'For each call return its name and arguments as JSON between <tool_call></tool_call>:\n<tool_call>\n'
    + '{"name": <function-name>, "arguments": <args-json-object>}\n</tool_call>' """,
    r"""{%- for call in message.tool_calls or [] -%}
{%- if message.content or not loop.first -%}{{- '\n' -}}{%- endif -%}
{{- '<tool_call>\n{"name": "' + call.function.name + '", "arguments": ' -}}
{%- if call.function.arguments is string -%}{{- call.function.arguments -}}
{%- else -%}{{- call.function.arguments | tojson -}}{%- endif -%}
{{- '}\n</tool_call>' -}}
{%- endfor -%}""",
)

QWEN3_CODER = _chatml(
    r'''"To call one, write nothing behind it but this:\n\n<tool_call>\n<function=example_function_name>\n"
    + "<parameter=example_parameter_1>\nvalue_1\n</parameter>\n<parameter=example_parameter_2>\nof several\nlines\n"
    + "</parameter>\n</function>\n</tool_call>\n\n<IMPORTANT>\n- <function=...></function> stands in <tool_call>"
    + " </tool_call> tags\n</IMPORTANT>"''',
    r"""{%- for call in message.tool_calls or [] -%}
{%- if message.content or not loop.first -%}{{- '\n' -}}{%- endif -%}
{{- '<tool_call>\n<function=' + call.function.name + '>\n' -}}
{%- for key, value in call.function.arguments | items -%}
{{- '<parameter=' + key + '>\n' -}}
{%- if value is string -%}{{- value -}}{%- else -%}{{- value | tojson -}}{%- endif -%}
{{- '\n</parameter>\n' -}}
{%- endfor -%}
{{- '</function>\n</tool_call>' -}}
{%- endfor -%}""",
)

_LLAMA = r"""{{- bos_token -}}
{%- if custom_tools is defined -%}{%- set tools = custom_tools -%}{%- endif -%}
{%- if not tools_in_user_message is defined -%}{%- set tools_in_user_message = true -%}{%- endif -%}
{%- if messages[0].role == 'system' -%}
{%- set system = messages[0].content | trim -%}{%- set messages = messages[1:] -%}
{%- else -%}{%- set system = '' -%}{%- endif -%}
{{- 'OPENsystemCLOSE' -}}
{%- if builtin_tools is defined or tools -%}{{- 'Environment: ipython\n' -}}{%- endif -%}
{{- 'Cutting Knowledge Date: December 2023\n\n' + system + 'EOT' -}}
{%- if tools and tools_in_user_message -%}
{%- set first = messages[0].content | trim -%}{%- set messages = messages[1:] -%}
{{- 'OPENuserCLOSE' -}}
{{- INSTRUCTION -}}
{{- '\n\n' -}}
{%- for tool in tools -%}{{- tool | tojson(indent=4) + '\n\n' -}}{%- endfor -%}
{{- first + 'EOT' -}}
{%- endif -%}
{%- for message in messages -%}
{%- if message.role in ('ipython', 'tool') -%}
{{- 'OPENipythonCLOSE' + message.content | tojson + 'EOT' -}}
{%- elif message.tool_calls -%}
{{- 'OPENassistantCLOSE' -}}
CALLS
{{- 'EOT' -}}
{%- else -%}
{{- 'OPEN' + message.role + 'CLOSE' + message.content | trim + 'EOT' -}}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- 'OPENassistantCLOSE' -}}{%- endif -%}"""


def _llama(instruction: str, calls: str, fourth: bool = False) -> str:
    marks = ("<|header_start|>", "<|header_end|>\\n\\n", "<|eot|>")
    if not fourth:
        marks = ("<|start_header_id|>", "<|end_header_id|>\\n\\n", "<|eot_id|>")
    text = _LLAMA.replace("INSTRUCTION", instruction).replace("CALLS", calls)
    for word, mark in zip(("OPEN", "CLOSE", "EOT"), marks, strict=True):
        text = text.replace(word, mark)
    return text


_LLAMA_JSON = r"""'Given these functions, answer with JSON for a call that serves the prompt best.\n\n'
+ 'Respond in the format {"name": function name, "parameters": dictionary of argument name and its value}.'
+ ' Do not use variables.'"""
_LLAMA_CALL = r"""{%- set call = message.tool_calls[0].function -%}
{{- '{"name": "' + call.name + '", "parameters": ' + call.arguments | tojson + '}' -}}"""

LLAMA31 = _llama(
    _LLAMA_JSON,
    r"""{%- if builtin_tools is defined and message.tool_calls[0].function.name in builtin_tools -%}
{{- '<|python_tag|>' + message.tool_calls[0].function.name + '.call()' -}}
{%- else -%}"""
    + _LLAMA_CALL
    + "{%- endif -%}",
)
LLAMA32 = _llama(_LLAMA_JSON, _LLAMA_CALL)
LLAMA_FUNCTION = _llama(
    r"""'To call one, reply with <function=name>{"argument": value}</function> alone.'""",
    r"""{%- for call in message.tool_calls -%}
{{- '<function=' + call.function.name + '>' + call.function.arguments | tojson + '</function>' -}}
{%- endfor -%}""",
)
LLAMA4 = _llama(
    _LLAMA_JSON,
    r"""{%- if message.content -%}{{- '<|python_start|>' + message.content + '<|python_end|>' -}}{%- endif -%}
{%- for call in message.tool_calls -%}
{{- '{"name": "' + call.function.name + '", "parameters": ' + call.function.arguments | tojson + '}' -}}
{%- endfor -%}""",
    fourth=True,
)
_PYTHON = r"""{{- '[' -}}
{%- for call in message.tool_calls -%}
{{- call.function.name + '(' -}}
{%- for key, value in call.function.arguments | items -%}
{{- key + '=' + value | tojson -}}{%- if not loop.last -%}{{- ', ' -}}{%- endif -%}
{%- endfor -%}
{{- ')' -}}{%- if not loop.last -%}{{- ', ' -}}{%- endif -%}
{%- endfor -%}
{{- ']' -}}"""
_PYTHON_WORDS = r"""'If you call any, you MUST write them as '
+ '[func_name1(params_name1=params_value1, params_name2=params_value2...), func_name2(params)]'
+ ' and nothing beside that.'"""
PYTHONIC3 = _llama(_PYTHON_WORDS, _PYTHON)
PYTHONIC4 = _llama(_PYTHON_WORDS, "{{- '<|python_start|>' -}}" + _PYTHON + "{{- '<|python_end|>' -}}", fourth=True)

_MISTRAL = r"""{{- bos_token -}}
{%- for message in messages -%}
{%- if message.role == 'user' -%}
{%- if tools and loop.last -%}{{- '[AVAILABLE_TOOLS] ' + tools | tojson + '[/AVAILABLE_TOOLS]' -}}{%- endif -%}
{{- '[INST] ' + message.content + '[/INST]' -}}
{%- elif message.role == 'system' -%}{{- '[SYSTEM_PROMPT]' + message.content + '[/SYSTEM_PROMPT]' -}}
{%- elif message.tool_calls -%}
CALLS
{{- eos_token -}}
{%- elif message.role == 'assistant' -%}{{- ' ' + message.content + eos_token -}}
{%- elif message.role == 'tool' -%}
{{- '[TOOL_RESULTS] {"content": ' + message.content | tojson + ', "call_id": "' + message.tool_call_id -}}
{{- '"}[/TOOL_RESULTS]' -}}
{%- endif -%}
{%- endfor -%}"""
MISTRAL_LIST = _MISTRAL.replace(
    "CALLS",
    r"""{{- '[TOOL_CALLS] [' -}}
{%- for call in message.tool_calls -%}
{{- '{"name": "' + call.function.name + '", "arguments": ' + call.function.arguments | tojson -}}
{{- ', "id": "' + call.id + '"}' -}}{%- if not loop.last -%}{{- ', ' -}}{%- endif -%}
{%- endfor -%}
{{- ']' -}}""",
)
MISTRAL = _MISTRAL.replace(
    "CALLS",
    r"""{%- for call in message.tool_calls -%}
{{- '[TOOL_CALLS]' + call.function.name + '[ARGS]' + call.function.arguments | tojson -}}
{%- endfor -%}""",
)

_DEEPSEEK = r"""{%- if not thinking is defined -%}{%- set thinking = false -%}{%- endif -%}
{{- bos_token -}}
{%- for message in messages if message.role == 'system' -%}{{- message.content + '\n\n' -}}{%- endfor -%}
{%- if tools -%}
{{- '## Tools\n\nYou have these tools.\nIMPORTANT: write a call as follows:\n' -}}
{{- HOW -}}
{%- for tool in tools -%}{{- '\n### ' + tool.function.name + '\n' + tool.function.parameters | tojson -}}{%- endfor -%}
{%- endif -%}
{%- for message in messages -%}
{%- if message.role == 'user' -%}{{- '<｜User｜>' + message.content -}}
{%- elif message.role == 'assistant' -%}
{{- '<｜Assistant｜>' -}}
{%- if '</think>' in message.content -%}{{- message.content.split('</think>', 1)[1] -}}
{%- else -%}{{- message.content -}}{%- endif -%}
{%- if message.tool_calls -%}
CALLS
{%- endif -%}
{{- '<｜end▁of▁sentence｜>' -}}
{%- elif message.role == 'tool' -%}
{{- '<｜tool▁output▁begin｜>' + message.content + '<｜tool▁output▁end｜>' -}}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<｜Assistant｜>' -}}{{- '<think>' if thinking else '</think>' -}}{%- endif -%}"""


def _deepseek(how: str, before: str, behind: str) -> str:
    calls = r"""{{- '<｜tool▁calls▁begin｜>' -}}
{%- for call in message.tool_calls -%}
{{- '<｜tool▁call▁begin｜>' + BEFORE + call.function.arguments | tojson + BEHIND + '<｜tool▁call▁end｜>' -}}
{%- endfor -%}
{{- '<｜tool▁calls▁end｜>' -}}"""
    calls = calls.replace("BEFORE", before).replace("BEHIND", behind)
    return _DEEPSEEK.replace("CALLS", calls).replace("HOW", how)


DEEPSEEK_V3 = _deepseek(
    "''", "'function' + '<｜tool▁sep｜>' + call.function.name + '\\n' + '```json' + '\\n'", "'\\n' + '```'"
)
DEEPSEEK_V31 = _deepseek(
    "'<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>name<｜tool▁sep｜>arguments<｜tool▁call▁end｜>"
    "<｜tool▁calls▁end｜>, the arguments being valid JSON'",
    "call.function.name + '<｜tool▁sep｜>'",
    "''",
)
DEEPSEEK_V32 = _DEEPSEEK.replace(
    "HOW",
    '\'<｜DSML｜function_calls>\\n<｜DSML｜invoke name="$NAME">\\n'
    '<｜DSML｜parameter name="$KEY" string="true|false">$VALUE</｜DSML｜parameter>\\n'
    "...\\n</｜DSML｜invoke>\\n</｜DSML｜function_calls>'",
).replace(
    "CALLS",
    r"""{{- '\n\n<｜DSML｜function_calls>\n' -}}
{%- for call in message.tool_calls -%}
{{- '<｜DSML｜invoke name="' + call.function.name + '">\n' -}}
{%- for key, value in call.function.arguments | items -%}
{{- '<｜DSML｜parameter name="' + key + '" string="' + ('true' if value is string else 'false') + '">' -}}
{{- (value if value is string else value | tojson) + '</｜DSML｜parameter>\n' -}}
{%- endfor -%}
{{- '</｜DSML｜invoke>\n' -}}
{%- endfor -%}
{{- '</｜DSML｜function_calls>' -}}""",
)

KIMI_K2 = r"""{%- macro calls_of(message) -%}
{{- '<|tool_calls_section_begin|>' -}}
{%- for call in message.tool_calls -%}
{{- '<|tool_call_begin|>' + call.id + '<|tool_call_argument_begin|>' -}}
{%- if call.function.arguments is string -%}{{- call.function.arguments -}}
{%- else -%}{{- call.function.arguments | tojson -}}{%- endif -%}
{{- '<|tool_call_end|>' -}}
{%- endfor -%}
{{- '<|tool_calls_section_end|>' -}}
{%- endmacro -%}
{%- if tools -%}{{- '<|im_system|>tool_declare<|im_middle|>' + tools | tojson + '<|im_end|>' -}}{%- endif -%}
{%- for message in messages -%}
{%- if loop.first and message.role != 'system' -%}
{{- '<|im_system|>system<|im_middle|>You help.<|im_end|>' -}}
{%- endif -%}
{{- '<|im_' + {'user': 'user', 'assistant': 'assistant'}.get(message.role, 'system') + '|>' -}}
{{- (message.name or message.role) + '<|im_middle|>' -}}
{%- if message.role == 'tool' -%}{{- '## Return of ' + message.tool_call_id + '\n' -}}{%- endif -%}
{{- message.content -}}
{%- if message.tool_calls -%}{{- calls_of(message) -}}{%- endif -%}
{{- '<|im_end|>' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|im_assistant|>assistant<|im_middle|>' -}}{%- endif -%}"""

GLM = r"""{{- '[gMASK]<sop>' -}}
{%- if tools -%}
{{- '<|system|>\n# Tools\n\nSignatures in <tools></tools>:\n<tools>\n' -}}
{%- for tool in tools -%}{{- tool | tojson(ensure_ascii=False) + '\n' -}}{%- endfor -%}
{{- '</tools>\n\nFor each call:\n<tool_call>{function-name}\n<arg_key>{arg-key-1}</arg_key>\n' -}}
{{- '<arg_value>{arg-value-1}</arg_value>\n...\n</tool_call>' -}}
{%- endif -%}
{%- set ask = namespace(last=-1) -%}
{%- for message in messages -%}
{%- if message.role == 'user' -%}{%- set ask.last = loop.index0 -%}{%- endif -%}
{%- endfor -%}
{%- for message in messages -%}
{%- if message.role == 'user' -%}
{{- '<|user|>\n' + message.content + ('/nothink' if enable_thinking is defined and not enable_thinking else '') -}}
{%- elif message.role == 'assistant' -%}
{%- set thought = message.reasoning_content if loop.index0 > ask.last else '' -%}
{{- '<|assistant|>\n<think>' + (thought or '') + '</think>' -}}
{%- if message.content -%}{{- '\n' + message.content -}}{%- endif -%}
{%- for call in message.tool_calls or [] -%}
{{- '\n<tool_call>' + call.function.name + '\n' -}}
{%- for key, value in call.function.arguments | items -%}
{{- '<arg_key>' + key + '</arg_key>\n<arg_value>' + (value if value is string else value | tojson) -}}
{{- '</arg_value>\n' -}}
{%- endfor -%}
{{- '</tool_call>' -}}
{%- endfor -%}
{%- elif message.role == 'tool' -%}
{{- '<|observation|>\n<tool_response>\n' + message.content + '\n</tool_response>' -}}
{%- elif message.role == 'system' -%}{{- '<|system|>\n' + message.content -}}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}
{{- '<|assistant|>' + ('\n<think></think>' if enable_thinking is defined and not enable_thinking else '') -}}
{%- endif -%}"""

MINIMAX = r"""{{- '<begin_of_document>' -}}
{%- set system = messages[0].content if messages[0].role == 'system' else 'You help.' -%}
{{- '<beginning_of_sentence>system ai_setting=assistant\n' + system + '<end_of_sentence>\n' -}}
{%- if tools -%}
{{- '<beginning_of_sentence>system tool_setting=tools\nThese tools are there:\n<tools>\n' -}}
{%- for tool in tools -%}{{- tool | tojson + '\n' -}}{%- endfor -%}
{{- '</tools>\nIf you use some, answer with:\n<tool_calls>\n' -}}
{{- '{"name": <tool-name>, "arguments": <args-json-object>}\n...\n</tool_calls><end_of_sentence>\n' -}}
{%- endif -%}
{%- for message in messages -%}
{%- if message.role == 'user' -%}
{{- '<beginning_of_sentence>user name=user\n' + message.content + '<end_of_sentence>\n' -}}
{%- elif message.role == 'assistant' -%}
{{- '<beginning_of_sentence>ai name=assistant\n' + message.content -}}
{%- if message.tool_calls -%}
{{- '<tool_calls>\n' -}}
{%- for call in message.tool_calls -%}
{{- '{"name": "' + call.function.name + '", "arguments": ' + call.function.arguments | tojson + '}\n' -}}
{%- endfor -%}
{{- '</tool_calls>' -}}
{%- endif -%}
{{- '<end_of_sentence>\n' -}}
{%- elif message.role == 'tool' -%}
{{- '<beginning_of_sentence>tool name=tools\ntool result: ' + message.content + '<end_of_sentence>\n' -}}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<beginning_of_sentence>ai name=assistant\n' -}}{%- endif -%}"""

MINIMAX_M2 = r"""{%- set opener = '<minimax:tool_call>' -%}
{%- set closer = '</minimax:tool_call>' -%}
{{- ']~!b[]~b]system\nYou help.' -}}
{%- if tools -%}
{{- '\n\n# Tools\nCall tools where they help, in this XML:\n\n<tools>' -}}
{%- for tool in tools -%}{{- '\n<tool>' + tool.function | tojson + '</tool>' -}}{%- endfor -%}
{{- '\n</tools>\n\n' + opener + '\n<invoke name="tool-name-1">\n<parameter name="param-key-1">param-value-1' -}}
{{- '</parameter>\n...\n</invoke>\n' + closer -}}
{%- endif -%}
{{- '[e~[\n' -}}
{%- for message in messages -%}
{%- if message.role == 'assistant' -%}
{{- ']~b]ai\n' -}}
{%- if message.reasoning_content -%}{{- '<think>\n' + message.reasoning_content + '\n</think>\n\n' -}}{%- endif -%}
{{- message.content -}}
{%- if message.tool_calls -%}
{{- '\n' + opener + '\n' -}}
{%- for call in message.tool_calls -%}
{{- '<invoke name="' + call.function.name + '">\n' -}}
{%- for key, value in call.function.arguments | items -%}
{{- '<parameter name="' + key + '">' + (value if value is string else value | tojson) + '</parameter>\n' -}}
{%- endfor -%}
{{- '</invoke>\n' -}}
{%- endfor -%}
{{- closer -}}
{%- endif -%}
{{- '[e~[\n' -}}
{%- elif message.role == 'tool' -%}{{- ']~b]tool\n<response>' + message.content + '</response>[e~[\n' -}}
{%- elif message.role == 'user' -%}{{- ']~b]user\n' + message.content + '[e~[\n' -}}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- ']~b]ai\n<think>\n' -}}{%- endif -%}"""

HARMONY = r"""{%- macro tool_namespace(name, tools) -%}
{{- '## ' + name + '\n\nnamespace ' + name + ' {\n\n' -}}
{%- for tool in tools -%}
{{- '// ' + tool.function.description | default('') + '\ntype ' + tool.function.name + ' = (_: ' -}}
{{- tool.function.parameters | default({}) | tojson + ') => any;\n\n' -}}
{%- endfor -%}
{{- '} // namespace ' + name -}}
{%- endmacro -%}
{{- '<|start|>system<|message|>You answer.\n\nReasoning: ' + reasoning_effort | default('medium') -}}
{{- '\n\n# Valid channels: analysis, commentary, final. Channel must be included for every message.' -}}
{%- if tools -%}{{- '\nCalls to these tools go to the commentary channel: functions.' -}}{%- endif -%}
{{- '<|end|>' -}}
{%- if messages[0].role == 'system' -%}
{%- set told = messages[0].content -%}{%- set messages = messages[1:] -%}
{%- else -%}{%- set told = '' -%}{%- endif -%}
{%- if told or tools -%}
{{- '<|start|>developer<|message|>' -}}
{%- if told -%}{{- '# Instructions\n\n' + told + '\n\n' -}}{%- endif -%}
{%- if tools -%}{{- '# Tools\n\n' + tool_namespace('functions', tools) -}}{%- endif -%}
{{- '<|end|>' -}}
{%- endif -%}
{%- set last = namespace(called=none) -%}
{%- for message in messages -%}
{%- if message.role == 'assistant' and message.tool_calls -%}
{%- if message.content and message.thinking -%}
{{- raise_exception('content and thinking in one message with calls: put them in one of the two') -}}
{%- elif message.content or message.thinking -%}
{{- '<|start|>assistant<|channel|>analysis<|message|>' + (message.thinking or message.content) + '<|end|>' -}}
{%- endif -%}
{%- set call = message.tool_calls[0].function -%}
{{- '<|start|>assistant to=functions.' + call.name + '<|channel|>commentary json<|message|>' -}}
{{- call.arguments | tojson + '<|call|>' -}}
{%- set last.called = call.name -%}
{%- elif message.role == 'assistant' -%}
{%- if 'thinking' in message and loop.last and not add_generation_prompt -%}
{{- '<|start|>assistant<|channel|>analysis<|message|>' + message.thinking + '<|end|>' -}}
{%- endif -%}
{{- '<|start|>assistant<|channel|>final<|message|>' + message.content -}}
{{- '<|end|>' if add_generation_prompt or not loop.last else '<|return|>' -}}
{%- elif message.role == 'tool' -%}
{%- if last.called is none -%}{{- raise_exception('a result without a call') -}}{%- endif -%}
{{- '<|start|>functions.' + last.called + ' to=assistant<|channel|>commentary<|message|>' -}}
{{- message.content | tojson + '<|end|>' -}}
{%- else -%}
{{- '<|start|>' + message.role + '<|message|>' + message.content + '<|end|>' -}}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|start|>assistant' -}}{%- endif -%}"""

GEMMA4 = r"""{%- macro put(value) -%}
{%- if value is none -%}{{- 'null' -}}
{%- elif value is string -%}{{- '<|"|>' + value + '<|"|>' -}}
{%- elif value is boolean -%}{{- 'true' if value else 'false' -}}
{%- elif value is mapping -%}{{- '{' -}}{{- pairs(value) -}}{{- '}' -}}
{%- elif value is sequence -%}{{- '[' -}}
{%- for item in value -%}{{- put(item) -}}{%- if not loop.last -%}{{- ',' -}}{%- endif -%}{%- endfor -%}{{- ']' -}}
{%- else -%}{{- value -}}{%- endif -%}
{%- endmacro -%}
{%- macro pairs(members) -%}
{%- for key, value in members | dictsort -%}
{{- key + ':' -}}{{- put(value) -}}{%- if not loop.last -%}{{- ',' -}}{%- endif -%}
{%- endfor -%}
{%- endmacro -%}
{%- set thinks = enable_thinking | default(false) -%}
{{- '<bos>' -}}
{%- set told = messages[0].content if messages[0].role == 'system' else '' -%}
{%- if thinks or tools or told -%}
{{- '<|turn>system\n' + ('<|think|>\n' if thinks else '') + told | trim -}}
{%- for tool in tools or [] -%}
{{- '<|tool>declaration:' + tool.function.name + '{' -}}{{- pairs(tool.function.parameters or {}) -}}{{- '}<tool|>' -}}
{%- endfor -%}
{{- '<turn|>\n' -}}
{%- endif -%}
{%- set ask = namespace(last=-1, role='') -%}
{%- for message in messages -%}
{%- if message.role == 'user' -%}{%- set ask.last = loop.index0 -%}{%- endif -%}
{%- endfor -%}
{%- for message in messages -%}
{%- if message.role == 'tool' -%}
{{- '<|tool_response>response:f{value:' -}}{{- put(message.content) -}}{{- '}<tool_response|>' -}}
{%- elif message.role == 'assistant' -%}
{%- if ask.role != 'tool' -%}{{- '<|turn>model\n' -}}{%- endif -%}
{%- if message.reasoning_content and loop.index0 > ask.last -%}
{{- '<|channel>thought\n' + message.reasoning_content + '\n<channel|>' -}}
{%- endif -%}
{%- for call in message.tool_calls or [] -%}
{{- '<|tool_call>call:' + call.function.name + '{' -}}{{- pairs(call.function.arguments) -}}{{- '}<tool_call|>' -}}
{%- endfor -%}
{{- message.content | trim -}}
{%- if not message.tool_calls -%}{{- '<turn|>\n' -}}{%- endif -%}
{%- elif not (loop.first and told) -%}
{{- '<|turn>' + message.role + '\n' + message.content | trim + '<turn|>\n' -}}
{%- endif -%}
{%- set ask.role = message.role -%}
{%- endfor -%}
{%- if add_generation_prompt -%}
{%- if ask.role != 'tool' -%}
{{- '<|turn>model\n' + ('' if thinks else '<|channel>thought\n<channel|>') -}}
{%- elif thinks -%}{{- '<|channel>thought\n' -}}
{%- endif -%}
{%- endif -%}"""

MUSE = r"""{{- bos_token -}}
{%- macro told() -%}
{{- '\n\nReasoning strength: ' + reasoning_strength | default('high') + '.' -}}
{%- if tools -%}
{{- '\n\nTo call a function write such a block:\n<atem:function_calls>\n<atem:invoke name="$NAME">\n' -}}
{{- '<atem:parameter name="$KEY">$VALUE</atem:parameter>\n...\n</atem:invoke>\n</atem:function_calls>\n' -}}
{%- for tool in tools -%}{{- '\n' + tool.function | tojson -}}{%- endfor -%}
{%- endif -%}
{{- '\n\n# Valid recipients: "self", ' -}}
{%- for tool in tools or [] -%}{{- '"' + tool.function.name + '.*", ' -}}{%- endfor -%}
{{- '"user".<|eot|>' -}}
{%- endmacro -%}
{%- if messages[0].role != 'system' -%}{{- '<|start|>system<|message|>You help.' -}}{{- told() -}}{%- endif -%}
{%- for message in messages -%}
{%- if message.role == 'system' -%}{{- '<|start|>system<|message|>' + message.content -}}{{- told() -}}
{%- elif message.role == 'user' -%}{{- '<|start|>user<|message|>' + message.content + '<|eot|>' -}}
{%- elif message.role == 'tool' -%}
{{- '<|start|>tool f<|message|><tool_output name="f">\n' + message.content + '\n</tool_output><|eot|>' -}}
{%- else -%}
{%- if message.reasoning_content -%}
{{- '<|start|>assistant to=self<|message|>' + message.reasoning_content + '<|eom|>' -}}
{%- endif -%}
{%- for call in message.tool_calls or [] -%}
{%- set function = call.function -%}
{%- if function.arguments is not mapping -%}{{- raise_exception('arguments must be a mapping') -}}{%- endif -%}
{{- '<|start|>assistant to=' + function.name + '<|message|><atem:function_calls>\n' -}}
{{- '<atem:invoke name="' + function.name + '">\n' -}}
{%- for key, value in function.arguments | items -%}
{{- '<atem:parameter name="' + key + '">' + (value if value is string else value | tojson) + '</atem:parameter>\n' -}}
{%- endfor -%}
{{- '</atem:invoke>\n</atem:function_calls>' + ('<|eot|>' if loop.last else '<|eom|>') -}}
{%- endfor -%}
{%- if not message.tool_calls -%}
{{- '<|start|>assistant to=user<|message|>' + message.content + '<|eot|>' -}}
{%- endif -%}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|start|>assistant' -}}{%- endif -%}"""

NEMOTRON3 = r"""{%- set thinks = enable_thinking if enable_thinking is defined else true -%}
{%- set brief = low_effort if low_effort is defined else false -%}
{%- set told = messages[0].content if messages[0].role == 'system' else '' -%}
{%- set rest = messages[1:] if messages[0].role == 'system' else messages -%}
{{- '<|im_start|>system\n' + told -}}
{%- if tools -%}
{{- '\n\n# Tools\n\n<tools>' -}}
{%- for tool in tools -%}
{{- '\n<function>\n<name>' + tool.function.name + '</name>\n<parameters>' -}}
{{- tool.function.parameters | default({}) | tojson + '</parameters>\n</function>' -}}
{%- endfor -%}
{{- '\n</tools>\n\nA call has this form:\n<tool_call>\n<function=example_function_name>\n' -}}
{{- '<parameter=example_parameter_1>\nvalue_1\n</parameter>\n</function>\n</tool_call>' -}}
{%- endif -%}
{{- '<|im_end|>\n' -}}
{%- set ask = namespace(last=-1) -%}
{%- for message in rest -%}
{%- if message.role == 'user' -%}{%- set ask.last = loop.index0 -%}{%- endif -%}
{%- endfor -%}
{%- for message in rest -%}
{%- if message.role == 'assistant' -%}
{%- set thought = message.reasoning_content if loop.index0 > ask.last else '' -%}
{{- '<|im_start|>assistant\n' + ('<think>\n' + thought + '\n</think>\n' if thought else '<think></think>') -}}
{{- message.content -}}
{%- if message.tool_calls and message.content -%}{{- '\n' -}}{%- endif -%}
{%- for call in message.tool_calls or [] -%}
{{- '<tool_call>\n<function=' + call.function.name + '>\n' -}}
{%- for key, value in call.function.arguments | items -%}
{{- '<parameter=' + key + '>\n' + (value if value is string else value | tojson) + '\n</parameter>\n' -}}
{%- endfor -%}
{{- '</function>\n</tool_call>\n' -}}
{%- endfor -%}
{{- '<|im_end|>\n' -}}
{%- elif message.role == 'tool' -%}
{%- if loop.previtem is not defined or loop.previtem.role != 'tool' -%}{{- '<|im_start|>user\n' -}}{%- endif -%}
{{- '<tool_response>\n' + message.content + '\n</tool_response>\n' -}}
{%- if loop.last or loop.nextitem.role != 'tool' -%}{{- '<|im_end|>\n' -}}{%- endif -%}
{%- else -%}
{{- '<|im_start|>' + message.role + '\n' + message.content -}}
{%- if brief and loop.index0 == ask.last -%}{{- '\n\n{reasoning effort: low}' -}}{%- endif -%}
{{- '<|im_end|>\n' -}}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}
{{- '<|im_start|>assistant\n' + ('<think>\n' if thinks else '<think></think>') -}}
{%- endif -%}"""

_GLM47 = r"""{{- 'BEGIN' -}}
{%- set thinks = enable_thinking if enable_thinking is defined else DEFAULT -%}
{%- if tools -%}
{{- 'SYSTEM# Tools\n<tools>\n' -}}
{%- for tool in tools -%}{{- tool | tojson + '\n' -}}{%- endfor -%}
{{- '</tools>\n<tool_call>{name}<arg_key>{key}</arg_key><arg_value>{value}</arg_value>...</tool_call>/SYSTEM' -}}
{%- endif -%}
{%- set ask = namespace(last=-1) -%}
{%- for message in messages -%}
{%- if message.role == 'user' -%}{%- set ask.last = loop.index0 -%}{%- endif -%}
{%- endfor -%}
{%- for message in messages -%}
{%- if message.role == 'user' -%}{{- 'USER' + message.content + '/USER' -}}
{%- elif message.role == 'system' -%}{{- 'SYSTEM' + message.content + '/SYSTEM' -}}
{%- elif message.role == 'tool' -%}
{%- if loop.first or loop.previtem.role != 'tool' -%}{{- 'RESULTS' -}}{%- endif -%}
{{- '<tool_response>' + message.content + '</tool_response>' -}}
{%- else -%}
{{- 'REPLY' -}}
{%- if message.reasoning_content and KEPT -%}
{{- '<think>' + message.reasoning_content + '</think>' -}}
{%- else -%}{{- '</think>' -}}{%- endif -%}
{{- message.content -}}
{%- for call in message.tool_calls or [] -%}
{{- '<tool_call>' + call.function.name -}}
{%- for key, value in call.function.arguments | items -%}
{{- '<arg_key>' + key + '</arg_key><arg_value>' + (value if value is string else value | tojson) + '</arg_value>' -}}
{%- endfor -%}
{{- '</tool_call>' -}}
{%- endfor -%}
{{- '/REPLY' -}}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- 'REPLY' + ('<think>' if thinks else '</think>') -}}{%- endif -%}"""


def _glm(**words: str) -> str:
    text = _GLM47
    for word in ("/SYSTEM", "/USER", "/REPLY", *words):
        text = text.replace(word, words.get(word, ""))
    return text


GLM47 = _glm(
    BEGIN="[gMASK]<sop>",
    DEFAULT="true",
    SYSTEM="<|system|>",
    USER="<|user|>",
    REPLY="<|assistant|>",
    RESULTS="<|observation|>",
    KEPT="loop.index0 > ask.last",
)
LAGUNA = _glm(
    BEGIN="〈|EOS|〉",
    DEFAULT="false",
    **{"/SYSTEM": "</system>\\n", "/USER": "</user>\\n", "/REPLY": "</assistant>\\n"},
    SYSTEM="<system>",
    USER="<user>",
    REPLY="<assistant>",
    RESULTS="",
    KEPT="thinks",
)

QWEN38 = (
    r"""{%- if enable_thinking is undefined or enable_thinking -%}
{%- set level = reasoning_effort | default('xhigh') -%}
{%- if level not in ('xhigh', 'medium', 'low') -%}{{- raise_exception('no such effort: ' + level) -}}{%- endif -%}
{%- if level != 'medium' -%}{{- '<|im_start|>system\nThink: ' + level + '<|im_end|>\n' -}}{%- endif -%}
{%- endif -%}"""
    + QWEN3_CODER.removesuffix("{%- endif -%}")
    + r"""{%- if enable_thinking is undefined or enable_thinking -%}{{- '<think>\n' -}}{%- endif -%}
{%- endif -%}"""
)

TEMPLATES: Mapping[str, tuple[ToolFormat, str]] = {
    "Qwen 3, Hermes": (ToolFormat.HERMES, HERMES),
    "Qwen3-Coder": (ToolFormat.QWEN3_CODER, QWEN3_CODER),
    "Llama 3.1": (ToolFormat.LLAMA3, LLAMA31),
    "Llama 3.2": (ToolFormat.LLAMA3, LLAMA32),
    "Llama 3 prompted for functions": (ToolFormat.LLAMA3_FUNCTION, LLAMA_FUNCTION),
    "Llama 4": (ToolFormat.LLAMA4, LLAMA4),
    "Llama 3.2 prompted for Python, ToolACE": (ToolFormat.PYTHONIC, PYTHONIC3),
    "Llama 4 prompted for Python": (ToolFormat.PYTHONIC, PYTHONIC4),
    "Mistral 7B 0.3": (ToolFormat.MISTRAL, MISTRAL_LIST),
    "Mistral Small 3.2": (ToolFormat.MISTRAL, MISTRAL),
    "DeepSeek V3": (ToolFormat.DEEPSEEK_V3, DEEPSEEK_V3),
    "DeepSeek V3.1": (ToolFormat.DEEPSEEK_V31, DEEPSEEK_V31),
    "DeepSeek V3.2": (ToolFormat.DEEPSEEK_V32, DEEPSEEK_V32),
    "Kimi K2": (ToolFormat.KIMI_K2, KIMI_K2),
    "GLM 4.5": (ToolFormat.GLM, GLM),
    "MiniMax M1": (ToolFormat.MINIMAX, MINIMAX),
    "MiniMax M2": (ToolFormat.MINIMAX_M2, MINIMAX_M2),
    "gpt-oss": (ToolFormat.HARMONY, HARMONY),
    "Gemma 4": (ToolFormat.GEMMA4, GEMMA4),
    "Muse Glimmer": (ToolFormat.MUSE, MUSE),
    "Nemotron 3": (ToolFormat.QWEN3_CODER, NEMOTRON3),
    "GLM 4.7": (ToolFormat.GLM, GLM47),
    "Laguna": (ToolFormat.GLM, LAGUNA),
    "Qwen 3.8": (ToolFormat.QWEN3_CODER, QWEN38),
}
