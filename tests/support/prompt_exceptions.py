"""Where our prompts are not llama-server's, and why. Template and shape may end with ``*``."""

from __future__ import annotations

from fnmatch import fnmatchcase

NOT_A_THINKER = "llama-server puts an empty thought into the reply of a model whose template knows no thinking"
LOST = (
    "llama-server drops the text of a result in parts, or prints the parts as Python writes them; here they are joined"
)
NULL = "llama-server writes nothing for null (and joins lists without commas); the template's authors render None"

EXCEPTIONS = {
    ("Kimi-K2-Instruct", "*to continue*"): NOT_A_THINKER,
    ("moonshotai-Kimi-K2", "*to continue*"): NOT_A_THINKER,
    ("LFM2-8B-A1B", "*to continue*"): NOT_A_THINKER,
    ("LFM2.5-Instruct", "*to continue*"): NOT_A_THINKER,
    ("unsloth-mistral-Devstral-Small-2507", "*to continue*"): NOT_A_THINKER,
    ("llama-cpp-rwkv-world", "*to continue*"): "llama-server opens the thinking twice",
    ("CohereForAI-c4ai-command-r7b-*", "reply to continue, no thinking"): "llama-server writes the empty thought twice",
    ("microsoft-Phi-3.5-mini-instruct", "*to continue*"): "llama-server ends the text before the reply to continue",
    ("GLM-4.*", "result in parts"): LOST,
    ("Mistral-Small-3.2-*", "result in parts"): LOST,
    ("Spark2.5", "result in parts"): LOST,
    ("moonshotai-Kimi-K2", "result in parts"): LOST,
    ("unsloth-mistral-Devstral-*", "result in parts"): LOST,
    ("google-gemma-4-*", "parallel calls"): NULL,
    ("google-gemma-4-*", "two steps"): NULL,
    ("openbmb-MiniCPM5-1B", "parallel calls"): NULL,
    ("openbmb-MiniCPM5-1B", "two steps"): NULL,
    ("google-translategemma-4b-it", "parts in system and reply"): "llama-server fails on system text in parts",
}


def exception(template: str, shape: str) -> str | None:
    """Why the prompts differ; None: they must not."""
    found = (
        why for (name, kind), why in EXCEPTIONS.items() if fnmatchcase(template, name) and fnmatchcase(shape, kind)
    )
    return next(found, None)
