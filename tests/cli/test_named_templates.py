"""llama.cpp's names of chat templates make the prompts that libllama makes of them."""

import json
import subprocess
import sys

import pytest

from everwarm.cli.flags.named_templates import TEMPLATES, named_template
from everwarm.errors import BadRequest
from everwarm.gateway.chat.chat_template import ChatTemplate

CONVERSATIONS = [
    [("user", "Hello")],
    [("system", "Be brief."), ("user", "Hello")],
    [("system", " Be 'brief'.\n"), ("user", "\n Hello "), ("assistant", " Well \n"), ("user", " then")],
    [("user", "a"), ("assistant", "b"), ("user", "c"), ("assistant", "d"), ("user", "e")],
]
THEIRS = """
import ctypes, glob, json, os, sys, xllamacpp
library = ctypes.CDLL(glob.glob(os.path.join(os.path.dirname(xllamacpp.__file__), "*.so"))[0])
class Message(ctypes.Structure):
    _fields_ = [("role", ctypes.c_char_p), ("content", ctypes.c_char_p)]
apply = library.llama_chat_apply_template
apply.argtypes = (ctypes.c_char_p, ctypes.POINTER(Message), ctypes.c_size_t, ctypes.c_bool, ctypes.c_char_p, ctypes.c_int)
def applied(name, messages):
    given = (Message * len(messages))(*(Message(role.encode(), text.encode()) for role, text in messages))
    buffer = ctypes.create_string_buffer(1 << 14)
    n = apply(name.encode(), given, len(messages), True, buffer, len(buffer))
    return buffer.raw[:n].decode()
names, conversations = json.load(sys.stdin)
print(json.dumps({name: [applied(name, messages) for messages in conversations] for name in names}))
"""


@pytest.fixture(scope="module")
def theirs() -> dict[str, list[str]]:
    asked = json.dumps([list(TEMPLATES), CONVERSATIONS])
    done = subprocess.run([sys.executable, "-c", THEIRS], input=asked, capture_output=True, text=True, check=True)
    return dict(json.loads(done.stdout))


@pytest.mark.parametrize("name", TEMPLATES)
def test_a_named_template_makes_libllamas_prompt(theirs, name):
    template = ChatTemplate(named_template(name))
    for messages, wanted in zip(CONVERSATIONS, theirs[name], strict=True):
        assert template.render([{"role": role, "content": text} for role, text in messages]) == wanted


def test_another_name_is_refused_with_those_there_are():
    with pytest.raises(BadRequest, match="chatml, command-r"):
        named_template("no such template")
