"""llama-server's prompts as digests, recorded by ``python -m bench.compat.prompts``, and ours for the same requests."""

from __future__ import annotations

import datetime
import functools
import hashlib
import json
from pathlib import Path
from typing import Any
from unittest import mock

import msgspec

from everwarm.errors import BadRequest
from everwarm.gateway.chat import jinja_template
from everwarm.gateway.chat.chat_template import ChatTemplate
from everwarm.gateway.chat.prepare import prepare_chat
from everwarm.gateway.openai.schema import ChatBody

TEMPLATES = Path(__file__).parents[2] / "build" / "templates"
RECORDED = Path(__file__).parent / "prompt_digests.json"
REFUSED = "refused"


class Recorded(msgspec.Struct, frozen=True):
    """``digests``: by template, in the order of the shapes."""

    date: str
    bos: str
    eos: str
    shapes: list[str]
    digests: dict[str, list[str]]

    def as_json(self) -> str:
        about = {"date": self.date, "bos": self.bos, "eos": self.eos, "shapes": self.shapes}
        lines = [f'"digests": {json.dumps({name: " ".join(found) for name, found in self.digests.items()}, indent=1)}']
        return json.dumps(about, ensure_ascii=False, indent=1)[:-2] + ",\n" + "".join(lines) + "\n}\n"


def recorded() -> Recorded:
    data = json.loads(RECORDED.read_text())
    return Recorded(**data | {"digests": {name: found.split() for name, found in data["digests"].items()}})


def digest(prompt: str | None) -> str:
    return REFUSED if prompt is None else hashlib.blake2b(prompt.encode(), digest_size=5).hexdigest()


def our_prompt(path: Path, body: dict[str, Any], *, bos: str, eos: str, today: datetime.date) -> str | None:
    """None: it is refused."""
    chat = msgspec.convert(body, ChatBody)
    noon = datetime.datetime.combine(today, datetime.time(12))
    with mock.patch.object(jinja_template, "now", return_value=noon):
        try:
            return prepare_chat(chat, _template(path, bos, eos), _no_image, adds_bos=False, canonicalise=False).text
        except BadRequest:
            return None


@functools.cache
def _template(path: Path, bos: str, eos: str) -> ChatTemplate:
    return ChatTemplate(path.read_text(), bos=bos, eos=eos)


def _no_image(part: Any) -> str:
    raise AssertionError(part)
