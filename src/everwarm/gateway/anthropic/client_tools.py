"""Anthropic's tools that the client runs: a shell, a text editor, a memory folder. They come as a type without a schema.

The model is offered a function of that name with the fields that the client reads. Pure.
"""

from __future__ import annotations

from everwarm.types import Json

_PATH = {"type": "string", "description": "The file or folder."}
_EDITS: Json = {
    "file_text": {"type": "string", "description": "create: the content of the new file."},
    "old_str": {"type": "string", "description": "str_replace: the text to replace; it must occur exactly once."},
    "new_str": {"type": "string", "description": "str_replace: the text to put there."},
    "insert_line": {
        "type": "integer",
        "description": "insert: the line after which the text goes; 0: at the beginning.",
    },
    "insert_text": {"type": "string", "description": "insert: the text."},
    "view_range": {
        "type": "array",
        "items": {"type": "integer"},
        "description": "view: the first and the last line; -1 as the last: to the end.",
    },
}
_BASH: Json = {
    "command": {"type": "string", "description": "The command line to run."},
    "restart": {"type": "boolean", "description": "Starts the shell anew, without a command."},
}
_MEMORY: Json = {
    **_EDITS,
    "old_path": {"type": "string", "description": "rename: the file or folder as it is called now."},
    "new_path": {"type": "string", "description": "rename: its new name."},
}

# the beginning of a type → the tool's name if the client gives none, what it does, its commands, the other fields
_TOOLS: dict[str, tuple[str, str, tuple[str, ...], Json]] = {
    "bash_": ("bash", "Runs a command in a shell that keeps its state between calls.", (), _BASH),
    "text_editor_": (
        "str_replace_based_edit_tool",
        "Shows and changes text files.",
        ("view", "create", "str_replace", "insert"),
        {"path": _PATH, **_EDITS},
    ),
    "memory_": (
        "memory",
        "Keeps notes in files below /memories that last beyond this conversation.",
        ("view", "create", "str_replace", "insert", "delete", "rename"),
        {"path": _PATH, **_MEMORY},
    ),
}


def client_function(type: str | None, name: str) -> Json | None:
    """The function that stands for a typed tool; None: the type is not known."""
    found = next((tool for beginning, tool in _TOOLS.items() if (type or "").startswith(beginning)), None)
    if found is None:
        return None
    usual_name, description, commands, fields = found
    command: Json = {"command": {"type": "string", "enum": list(commands)}} if commands else {}
    schema: Json = {"type": "object", "properties": {**command, **fields}}
    if commands:
        schema["required"] = ["command"]
    return {"name": name or usual_name, "description": description, "parameters": schema}
