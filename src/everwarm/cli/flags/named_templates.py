"""llama.cpp's names of chat templates (``--chat-template chatml``), as data, and the Jinja text of each. Pure.

A test compares what they make of conversations with libllama's own. Names that are not here follow rules of their own.
"""

from __future__ import annotations

from typing import NamedTuple

from everwarm.errors import BadRequest

Around = tuple[str, str]  # the texts before and after a message


class NamedTemplate(NamedTuple):
    user: Around
    assistant: Around
    system: Around
    reply: str | None = None  # what asks for a reply; None: what comes before each
    head: str = ""
    merges: bool = False  # the system's text stands inside the first message of the user
    trims: str = ""  # first letters of the roles whose messages lose the space around them

    def jinja(self) -> str:
        rows = {name: self._message(name, around) for name, around in (("user", self.user), ("system", self.system))}
        merged = "{% set ns.system = " + f"{_quoted(self.system[0])} ~ text ~ {_quoted(self.system[1])}" + " %}"
        system = merged if self.merges else rows["system"]
        return (
            f"{{{{ {_quoted(self.head)} }}}}{{% set ns = namespace(system='') %}}"
            "{% for message in messages %}{% set text = message.content or '' %}"
            "{% if message.role == 'system' %}" + self._trimmed("s") + system + "{% elif message.role == 'assistant' %}"
            f"{self._trimmed('a')}{{{{ {_quoted(self.assistant[0])} ~ text ~ {_quoted(self.assistant[1])} }}}}"
            "{% else %}" + self._trimmed("u") + rows["user"] + "{% endif %}{% endfor %}"
            f"{{% if add_generation_prompt %}}{{{{ {_quoted(self._reply)} }}}}{{% endif %}}"
        )

    @property
    def _reply(self) -> str:
        return self.assistant[0] if self.reply is None else self.reply

    def _message(self, name: str, around: Around) -> str:
        inner = "ns.system ~ text" if name == "user" and self.merges else "text"
        after = "{% set ns.system = '' %}" if name == "user" and self.merges else ""
        return f"{{{{ {_quoted(around[0])} ~ {inner} ~ {_quoted(around[1])} }}}}{after}"

    def _trimmed(self, letter: str) -> str:
        return "{% set text = text | trim %}" if letter in self.trims else ""


def _quoted(text: str) -> str:
    """A string of Jinja."""
    escaped = text.replace("\\", "\\\\").replace("'", "\\'").replace("\n", "\\n")
    return f"'{escaped}'"


def named_template(name: str) -> str:
    """The Jinja text of a template that llama.cpp has a name for."""
    if name not in TEMPLATES:
        raise BadRequest(
            f"--chat-template is {name[:80]!r}; give Jinja text, --chat-template-file, or one of {', '.join(TEMPLATES)}"
        )
    return TEMPLATES[name].jinja()


TEMPLATES = {
    "bailing": NamedTemplate(("<role>HUMAN</role>", ""), ("<role>ASSISTANT</role>", ""), ("<role>SYSTEM</role>", "")),
    "bailing-think": NamedTemplate(
        ("<role>HUMAN</role>", ""),
        ("<role>ASSISTANT</role>", ""),
        ("<role>SYSTEM</role>", ""),
        reply="<role>ASSISTANT</role><think>",
    ),
    "chatglm3": NamedTemplate(
        ("<|user|>\n ", ""), ("<|assistant|>\n ", ""), ("<|system|>\n ", ""), reply="<|assistant|>", head="[gMASK]sop"
    ),
    "chatglm4": NamedTemplate(("<|user|>\n", ""), ("<|assistant|>\n", ""), ("<|system|>\n", ""), head="[gMASK]<sop>"),
    "chatml": NamedTemplate(
        ("<|im_start|>user\n", "<|im_end|>\n"),
        ("<|im_start|>assistant\n", "<|im_end|>\n"),
        ("<|im_start|>system\n", "<|im_end|>\n"),
    ),
    "command-r": NamedTemplate(
        ("<|START_OF_TURN_TOKEN|><|USER_TOKEN|>", "<|END_OF_TURN_TOKEN|>"),
        ("<|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|>", "<|END_OF_TURN_TOKEN|>"),
        ("<|START_OF_TURN_TOKEN|><|SYSTEM_TOKEN|>", "<|END_OF_TURN_TOKEN|>"),
        trims="sua",
    ),
    "deepseek": NamedTemplate(("### Instruction:\n", "\n"), ("### Response:\n", "\n<|EOT|>\n"), ("", "")),
    "deepseek-ocr": NamedTemplate(("", ""), ("", ""), ("", "")),
    "deepseek2": NamedTemplate(
        ("User: ", "\n\n"), ("Assistant: ", "<｜end▁of▁sentence｜>"), ("", "\n\n"), reply="Assistant:"
    ),
    "deepseek3": NamedTemplate(("<｜User｜>", ""), ("<｜Assistant｜>", "<｜end▁of▁sentence｜>"), ("", "\n\n")),
    "exaone-moe": NamedTemplate(
        ("<|user|>\n", "<|endofturn|>\n"),
        ("<|assistant|>\n", "<|endofturn|>\n"),
        ("<|system|>\n", "<|endofturn|>\n"),
        trims="sua",
    ),
    "exaone3": NamedTemplate(
        ("[|user|]", "\n"), ("[|assistant|]", "[|endofturn|]\n"), ("[|system|]", "[|endofturn|]\n"), trims="sua"
    ),
    "exaone4": NamedTemplate(
        ("[|user|]", "\n"), ("[|assistant|]", "[|endofturn|]\n"), ("[|system|]", "[|endofturn|]\n"), trims="sua"
    ),
    "falcon3": NamedTemplate(("<|user|>\n", "\n"), ("<|assistant|>\n", "\n"), ("<|system|>\n", "\n")),
    "gemma": NamedTemplate(
        ("<start_of_turn>user\n", "<end_of_turn>\n"),
        ("<start_of_turn>model\n", "<end_of_turn>\n"),
        ("", "\n\n"),
        merges=True,
        trims="sua",
    ),
    "gigachat": NamedTemplate(
        ("user<|role_sep|>", "<|message_sep|>available functions<|role_sep|>[]<|message_sep|>"),
        ("assistant<|role_sep|>", "<|message_sep|>"),
        ("", "<|message_sep|>"),
        head="<s>",
    ),
    "glmedge": NamedTemplate(("<|user|>\n", ""), ("<|assistant|>\n", ""), ("<|system|>\n", ""), reply="<|assistant|>"),
    "gpt-oss": NamedTemplate(
        ("<|start|>user<|message|>", "<|end|>"),
        ("<|start|>assistant<|message|>", "<|return|>"),
        ("<|start|>system<|message|>", "<|end|>"),
        reply="<|start|>assistant",
    ),
    "granite": NamedTemplate(
        ("<|start_of_role|>user<|end_of_role|>", "<|end_of_text|>\n"),
        ("<|start_of_role|>assistant<|end_of_role|>", "<|end_of_text|>\n"),
        ("<|start_of_role|>system<|end_of_role|>", "<|end_of_text|>\n"),
    ),
    "granite-4.0": NamedTemplate(
        ("<|start_of_role|>user<|end_of_role|>", "<|end_of_text|>\n"),
        ("<|start_of_role|>assistant<|end_of_role|>", "<|end_of_text|>\n"),
        ("<|start_of_role|>system<|end_of_role|>", "<|end_of_text|>\n"),
    ),
    "granite-4.1": NamedTemplate(
        ("<|start_of_role|>user<|end_of_role|>", "<|end_of_text|>\n"),
        ("<|start_of_role|>assistant<|end_of_role|>", "<|end_of_text|>\n"),
        ("<|start_of_role|>system<|end_of_role|>", "<|end_of_text|>\n"),
    ),
    "grok-2": NamedTemplate(
        ("Human: ", "<|separator|>\n\n"),
        ("Assistant: ", "<|separator|>\n\n"),
        ("System: ", "<|separator|>\n\n"),
        reply="Assistant:",
        trims="su",
    ),
    "hunyuan-dense": NamedTemplate(
        ("<｜hy_User｜>", "<｜hy_Assistant｜>"),
        ("<｜hy_Assistant｜>", "<｜hy_place▁holder▁no▁2｜>"),
        ("", "<｜hy_place▁holder▁no▁3｜>"),
        reply="",
    ),
    "hunyuan-moe": NamedTemplate(
        ("<|startoftext|>", "<|extra_0|>"), ("", "<|eos|>"), ("", "<|extra_4|><|startoftext|>"), merges=True
    ),
    "hunyuan-vl": NamedTemplate(
        ("", "<｜hy_User｜>"),
        ("", "<｜hy_Assistant｜>"),
        ("", "<｜hy_place▁holder▁no▁3｜>"),
        head="<｜hy_begin▁of▁sentence｜>",
    ),
    "kimi-k2": NamedTemplate(
        ("<|im_user|>user<|im_middle|>", "<|im_end|>"),
        ("<|im_assistant|>assistant<|im_middle|>", "<|im_end|>"),
        ("<|im_system|>system<|im_middle|>", "<|im_end|>"),
    ),
    "llama2": NamedTemplate(("[INST] ", " [/INST]"), ("", "</s>"), ("", "\n"), merges=True),
    "llama2-sys": NamedTemplate(("[INST] ", " [/INST]"), ("", "</s>"), ("<<SYS>>\n", "\n<</SYS>>\n\n"), merges=True),
    "llama2-sys-strip": NamedTemplate(
        ("[INST] ", " [/INST]"), ("", "</s>"), ("<<SYS>>\n", "\n<</SYS>>\n\n"), merges=True, trims="sua"
    ),
    "llama3": NamedTemplate(
        ("<|start_header_id|>user<|end_header_id|>\n\n", "<|eot_id|>"),
        ("<|start_header_id|>assistant<|end_header_id|>\n\n", "<|eot_id|>"),
        ("<|start_header_id|>system<|end_header_id|>\n\n", "<|eot_id|>"),
        trims="sua",
    ),
    "llama4": NamedTemplate(
        ("<|header_start|>user<|header_end|>\n\n", "<|eot|>"),
        ("<|header_start|>assistant<|header_end|>\n\n", "<|eot|>"),
        ("<|header_start|>system<|header_end|>\n\n", "<|eot|>"),
        trims="sua",
    ),
    "megrez": NamedTemplate(
        ("<|role_start|>user<|role_end|>", "<|turn_end|>"),
        ("<|role_start|>assistant<|role_end|>", "<|turn_end|>"),
        ("<|role_start|>system<|role_end|>", "<|turn_end|>"),
    ),
    "minicpm": NamedTemplate(("<用户>", "<AI>"), ("", ""), ("", ""), trims="sua"),
    "mistral-v1": NamedTemplate((" [INST] ", " [/INST]"), (" ", "</s>"), ("", "\n\n"), reply="", merges=True),
    "mistral-v3": NamedTemplate(("[INST] ", "[/INST]"), (" ", "</s>"), ("", "\n\n"), reply="", merges=True, trims="a"),
    "mistral-v3-tekken": NamedTemplate(("[INST]", "[/INST]"), ("", "</s>"), ("", "\n\n"), merges=True),
    "mistral-v7": NamedTemplate(
        ("[INST] ", "[/INST]"), (" ", "</s>"), ("[SYSTEM_PROMPT] ", "[/SYSTEM_PROMPT]"), reply=""
    ),
    "mistral-v7-tekken": NamedTemplate(("[INST]", "[/INST]"), ("", "</s>"), ("[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]")),
    "openchat": NamedTemplate(
        ("GPT4 Correct User: ", "<|end_of_turn|>"),
        ("GPT4 Correct Assistant: ", "<|end_of_turn|>"),
        ("", "<|end_of_turn|>"),
        reply="GPT4 Correct Assistant:",
    ),
    "orion": NamedTemplate(("Human: ", "\n\nAssistant: </s>"), ("", "</s>"), ("", "\n\n"), merges=True),
    "phi3": NamedTemplate(("<|user|>\n", "<|end|>\n"), ("<|assistant|>\n", "<|end|>\n"), ("<|system|>\n", "<|end|>\n")),
    "phi4": NamedTemplate(
        ("<|im_start|>user<|im_sep|>", "<|im_end|>"),
        ("<|im_start|>assistant<|im_sep|>", "<|im_end|>"),
        ("<|im_start|>system<|im_sep|>", "<|im_end|>"),
    ),
    "rwkv-world": NamedTemplate(
        ("User: ", "\n\nAssistant:"), (" ", "\n\n"), ("System: ", "\n\n"), reply="", trims="sua"
    ),
    "seed_oss": NamedTemplate(
        ("<seed:bos>user\n", "<seed:eos>"),
        ("<seed:bos>assistant\n", "<seed:eos>"),
        ("<seed:bos>system\n", "<seed:eos>"),
        trims="a",
    ),
    "smolvlm": NamedTemplate(
        ("User: ", "<end_of_utterance>\n"),
        ("Assistant: ", "<end_of_utterance>\n"),
        ("", "\n\n"),
        reply="Assistant:",
        head="<|im_start|>",
    ),
    "solar-open": NamedTemplate(
        ("<|begin|>user<|content|>", "<|end|>"),
        ("<|begin|>assistant<|content|>", "<|end|>"),
        ("<|begin|>system<|content|>", "<|end|>"),
        reply="<|begin|>assistant",
    ),
    "vicuna": NamedTemplate(("USER: ", "\n"), ("ASSISTANT: ", "</s>\n"), ("", "\n\n"), reply="ASSISTANT:"),
    "vicuna-orca": NamedTemplate(("USER: ", "\n"), ("ASSISTANT: ", "</s>\n"), ("SYSTEM: ", "\n"), reply="ASSISTANT:"),
    "zephyr": NamedTemplate(
        ("<|user|>\n", "<|endoftext|>\n"), ("<|assistant|>\n", "<|endoftext|>\n"), ("<|system|>\n", "<|endoftext|>\n")
    ),
}
