"""Chat requests of every shape that templates treat differently, to compare prompts with llama-server's."""

from __future__ import annotations

from typing import Any

Message = dict[str, Any]


def _tool(name: str, **properties: Any) -> Message:
    parameters = {"type": "object", "properties": properties, "required": list(properties)[:1]}
    function = {"name": name, "description": f'Does "{name}" <quickly> & well.', "parameters": parameters}
    return {"type": "function", "function": function}


TOOLS = [
    _tool("look_up", query={"type": "string", "description": "What: é, 🦉"}, limit={"type": "integer"}),
    _tool("add", numbers={"type": "array", "items": {"type": "number"}}, options={"type": "object"}),
]


def _call(id: str, name: str, arguments: str) -> Message:
    return {"id": id, "type": "function", "function": {"name": name, "arguments": arguments}}


LOOK = _call("call00001", "look_up", '{"query": "owls \\"é\\" 🦉", "limit": 3}')
ADD = _call("call00002", "add", '{"numbers": [1, 2.5], "options": {"deep": {"er": null}}}')
SYSTEM = {"role": "system", "content": "Be brief. "}
ASK = {"role": "user", "content": " What is it?\n"}
SAID = {"role": "assistant", "content": "That, and more."}
THOUGHT = {**SAID, "reasoning_content": "Hm.\nWell."}
MORE = {"role": "user", "content": "And then?"}
FOUND = {"role": "tool", "tool_call_id": "call00001", "name": "look_up", "content": '{"found": ["🦉", 1]}'}
SUM = {"role": "tool", "tool_call_id": "call00002", "name": "add", "content": "three and a half"}
PARTS = [{"type": "text", "text": "First part."}, {"type": "text", "text": "Second part."}]


def _called(*calls: Message, **fields: Any) -> Message:
    return {"role": "assistant", **fields, "tool_calls": list(calls)}


def _loop(first: Message, *, tools: list[Message] | None = TOOLS) -> Message:
    return {"messages": [ASK, first, FOUND], "tools": tools}


SHAPES: dict[str, Message] = {
    "question": {"messages": [ASK]},
    "system": {"messages": [SYSTEM, ASK]},
    "developer": {"messages": [{**SYSTEM, "role": "developer"}, ASK]},
    "turns": {"messages": [SYSTEM, ASK, SAID, MORE]},
    "turns, thinking in the history": {"messages": [ASK, THOUGHT, MORE, THOUGHT, MORE]},
    "parts": {"messages": [{"role": "user", "content": PARTS}]},
    "parts in system and reply": {
        "messages": [{"role": "system", "content": PARTS}, ASK, {"role": "assistant", "content": PARTS}, MORE]
    },
    "one part": {"messages": [{"role": "user", "content": PARTS[:1]}]},
    "tools": {"messages": [ASK], "tools": TOOLS},
    "tools and system": {"messages": [SYSTEM, ASK], "tools": TOOLS},
    "empty list of tools": {"messages": [ASK], "tools": []},
    "call with null content": _loop(_called(LOOK, content=None)),
    "call with empty content": _loop(_called(LOOK, content="")),
    "call without content": _loop(_called(LOOK)),
    "call with text": _loop(_called(LOOK, content="Let me look.")),
    "call with thinking": _loop(_called(LOOK, content=None, reasoning_content="I should look.")),
    "call with text and thinking": _loop(_called(LOOK, content="I look.", reasoning_content="I should look.")),
    "call in the history without tools": _loop(_called(LOOK, content=None), tools=None),
    "parallel calls": {"messages": [ASK, _called(LOOK, ADD, content=None), FOUND, SUM], "tools": TOOLS},
    "two steps": {
        "messages": [SYSTEM, ASK, _called(LOOK, content=None), FOUND, _called(ADD, content=""), SUM],
        "tools": TOOLS,
    },
    "answered loop": {
        "messages": [ASK, _called(LOOK, content=None, reasoning_content="Look."), FOUND, THOUGHT, MORE],
        "tools": TOOLS,
    },
    "result in parts": {
        "messages": [ASK, _called(LOOK, content=None), {**FOUND, "content": PARTS}],
        "tools": TOOLS,
    },
    "no thinking": {"messages": [ASK], "chat_template_kwargs": {"enable_thinking": False}},
    "no thinking, turns": {"messages": [ASK, THOUGHT, MORE], "chat_template_kwargs": {"enable_thinking": False}},
    "thinking asked for": {"messages": [ASK], "chat_template_kwargs": {"enable_thinking": True}},
    "no effort": {"messages": [ASK], "reasoning_effort": "none"},
    "low effort": {"messages": [ASK], "reasoning_effort": "low"},
    "high effort": {"messages": [SYSTEM, ASK], "reasoning_effort": "high", "tools": TOOLS},
    "no generation prompt": {"messages": [ASK], "add_generation_prompt": False},
    "thinking kept": {
        "messages": [ASK, THOUGHT, MORE],
        "chat_template_kwargs": {"preserve_reasoning": True},
    },
    "reply to continue": {"messages": [ASK, {"role": "assistant", "content": "It is"}]},
    "reply to continue, in parts": {"messages": [ASK, {"role": "assistant", "content": PARTS}]},
    "reply to continue, after turns": {"messages": [SYSTEM, ASK, SAID, MORE, {"role": "assistant", "content": "It"}]},
    "reply with thinking to continue": {"messages": [ASK, {**THOUGHT, "content": "It is"}]},
    "thinking to continue": {"messages": [ASK, {**THOUGHT, "content": ""}]},
    "reply to continue, no thinking": {
        "messages": [ASK, {"role": "assistant", "content": "It is"}],
        "chat_template_kwargs": {"enable_thinking": False},
    },
    "reply to continue, with tools": {"messages": [ASK, {"role": "assistant", "content": "It is"}], "tools": TOOLS},
    "reply to continue as asked": {
        "messages": [ASK, {"role": "assistant", "content": "It is"}],
        "continue_final_message": True,
        "add_generation_prompt": False,
    },
}
