"""After a reply, offers the engine what the next turn will begin with, for its idle time.

Only while no request runs: a busy server has no idle time, and a client in a tool loop continues at once. The engine
decides whether and when the text is read.

With ``--workspace`` that includes the probable results of tool calls that name a file, read while a client runs its tools.
A guess changes speed, never results: the next prompt is compared with it token by token. Only files below one folder are
opened, and only for one namespace.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import re
import stat
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import msgspec

from everwarm.engine.process import messages as m
from everwarm.gateway.access.auth import own_namespace
from everwarm.gateway.access.limits import AdmissionLimits
from everwarm.gateway.chat.chat_template import ChatTemplate
from everwarm.gateway.chat.content import parts_as_text
from everwarm.gateway.chat.prepare import PreparedChat
from everwarm.gateway.chat.reply_memory import RememberedReply
from everwarm.gateway.parsing.output_parser import OutputParser
from everwarm.router.supervise.supervisor import Supervisor
from everwarm.types import Json

log = logging.getLogger("everwarm.gateway")

SETTLE_S = 0.05
MAX_CALLS = 4  # of a reply; the results of more are not guessed
MAX_FILE_BYTES = 256 << 10
MAX_ARGUMENTS = 16 << 10  # characters of JSON
MAX_NAMES = 8  # texts among the arguments of a call that may be the name of a file
MAX_NAME = 4096  # characters
_NUMBERED = re.compile(r"( *)1(\t|→)[^\n]*(?:\n *2\2|\s*\Z)")

Parser = Callable[[], OutputParser]
Recall = Callable[[Json, str], RememberedReply | None]
NextText = Callable[[], m.Prewarm | None]  # what the next prompt begins with


class NextTurnPrewarmer:
    def __init__(self, limits: AdmissionLimits, *, is_on: bool) -> None:
        self._limits = limits
        self._is_on = is_on
        self._tasks: dict[asyncio.Task[None], str] = {}  # with the namespaces they are for

    def offer(self, supervisor: Supervisor, submit: m.Submit, next_text: NextText) -> None:
        """``submit``: the request that was answered; ``next_text`` renders, so it runs on a thread."""
        if self._is_on:
            task = asyncio.create_task(self._offer(supervisor, submit, next_text))
            self._tasks[task] = submit.namespace
            task.add_done_callback(self._tasks.pop)

    def forget(self, namespace: str) -> None:
        """Cancels the offers of namespaces with this prefix."""
        for task in [task for task, own in self._tasks.items() if own.startswith(namespace)]:
            task.cancel()

    async def _offer(self, supervisor: Supervisor, submit: m.Submit, next_text: NextText) -> None:
        await asyncio.sleep(SETTLE_S)
        if self._limits.n_requests:
            return
        try:
            turn = await asyncio.to_thread(next_text)
        except Exception:
            log.exception("the beginning of the next turn could not be rendered")
            return
        if turn is not None and not self._limits.n_requests:
            own = {"add_special": submit.add_special, "namespace": submit.namespace, "session": submit.session}
            supervisor.tell(msgspec.structs.replace(turn, **own))


# what the next turn begins with


def next_text_of(
    chat: PreparedChat,
    template: ChatTemplate,
    parser: Parser,
    recall: Recall,
    workspace: str | None,
    text: str,
) -> m.Prewarm | None:
    reply = parser().message(text)
    found = recall(reply, text)
    sure = None
    if found is None or found.as_text is None:  # after calls as text nothing is sure, and results come at once
        message = reply if found is None else found.message(with_reasoning=True)
        sure = template.after_reply(chat.messages, message, **chat.options)
    guess = None
    if workspace is not None and found is not None and chat.continues is None:
        guess = _guess(chat, template, reply, found, workspace)
    if guess is None:
        return m.Prewarm(sure) if sure else None
    return m.Prewarm(guess, n_sure=len(sure) if sure and guess.startswith(sure) else None)


def _guess(
    chat: PreparedChat, template: ChatTemplate, reply: Json, found: RememberedReply, workspace: str
) -> str | None:
    """The next prompt up to the end of the results that are probable. Thinking comes back if it did before."""
    results = probable_results(workspace, chat.messages, reply.get("tool_calls") or ())
    if not results:
        return None
    earlier = [message for message in chat.messages if message.get("role") == "assistant"]
    thinks = not earlier or any(message.get("reasoning_content") for message in earlier)
    message = found.message(with_reasoning=thinks)
    return template.after_results(chat.messages, message, reply, results, **chat.options)


# results of tool calls


def workspace_of(root: str | None, api_key: str | None, namespace: str) -> str | None:
    """The folder, if its files may be read for requests of this namespace."""
    return root if root is not None and namespace == own_namespace(api_key) else None


def probable_results(root: str, messages: Sequence[Json], calls: Sequence[Json]) -> list[str]:
    """What the first of these calls will probably give, as far as each of them names a file below the folder."""
    found = []
    for call in calls[:MAX_CALLS]:
        function = call["function"]
        texts = (read_below(root, name) for name in file_names(function["arguments"]))
        text = next((text for text in texts if text is not None), None)
        if text is None:
            break
        found.append(as_shown(text, latest_result(messages, function["name"])))
    return found


def file_names(arguments: str) -> list[str]:
    """Texts that may be the name of the file that a call is about. None if it has numbers, which choose a part of one."""
    if len(arguments) > MAX_ARGUMENTS:
        return []
    try:
        given = json.loads(arguments)
    except (ValueError, RecursionError):
        return []
    values = list(given.values()) if isinstance(given, dict) else []
    if any(isinstance(value, int | float) and not isinstance(value, bool) for value in values):
        return []
    texts = (value for value in values if isinstance(value, str) and 0 < len(value) <= MAX_NAME)
    return [text for text in texts if not {"\0", "\n"} & set(text)][:MAX_NAMES]


def latest_result(messages: Sequence[Json], tool: str) -> str | None:
    """What this tool gave last in the conversation."""
    ids = set()
    for message in messages:
        calls = message.get("tool_calls")
        for call in calls if isinstance(calls, list) else ():
            function = call.get("function") if isinstance(call, dict) else None
            if isinstance(function, dict) and function.get("name") == tool and isinstance(call.get("id"), str):
                ids.add(call["id"])
    for message in reversed(messages):
        id = message.get("tool_call_id")
        if message.get("role") == "tool" and isinstance(id, str) and id in ids:
            content = message.get("content")
            return str(parts_as_text({}, content)["content"]) if isinstance(content, list) else str(content or "")
    return None


def as_shown(text: str, earlier: str | None) -> str:
    """The text of a file as a tool shows it: with numbered lines, if that is how its earlier result looked."""
    found = None if earlier is None else _NUMBERED.match(earlier)
    if found is None:
        return text
    width, separator = len(found[1]) + 1, found[2]
    lines = text.removesuffix("\n").split("\n")
    return "\n".join(f"{i:>{width}}{separator}{line}" for i, line in enumerate(lines, 1))


def read_below(root: str, name: str) -> str | None:
    """The text of a regular file below a folder, which is a real path; None if there is none, it is too large, or no text.
    A link may lead to another place below the folder, and never out of it."""
    try:
        parts = Path(os.path.realpath(os.path.join(root, name), strict=True)).relative_to(root).parts
        with _opened(root, parts) as file:
            about = os.fstat(file)
            if not stat.S_ISREG(about.st_mode) or about.st_size > MAX_FILE_BYTES:
                return None
            with os.fdopen(os.dup(file), "rb") as reader:
                data = reader.read(MAX_FILE_BYTES + 1)
        text = data.decode()
    except (OSError, ValueError):
        return None
    return None if len(data) > MAX_FILE_BYTES or "\0" in text else text


@contextlib.contextmanager
def _opened(root: str, parts: Sequence[str]) -> Iterator[int]:
    """Opens folder by folder and follows no link: what was a folder when the path was resolved may be one by now."""
    at = os.open(root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        for i, part in enumerate(parts):
            kind = os.O_NONBLOCK | os.O_NOCTTY if i == len(parts) - 1 else os.O_DIRECTORY
            below = os.open(part, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | kind, dir_fd=at)
            os.close(at)
            at = below
        yield at
    finally:
        os.close(at)
