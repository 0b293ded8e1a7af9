"""The JSON that clients expect, from what the engine said: usage, timings, choices, chunks. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence

from everwarm.engine.process import messages as m
from everwarm.gateway.chat.generate import Choice
from everwarm.gateway.explain import cache_reason
from everwarm.gateway.parsing.output_parser import OutputParser
from everwarm.types import Json

_LOWEST = -3.4e38  # JSON knows no infinity


def usage(choices: Sequence[m.Done]) -> Json:
    """OpenAI's accounting; ``cached_tokens`` is part of ``prompt_tokens``."""
    first = choices[0]
    n_reply = sum(done.n_reply for done in choices)
    return {
        "prompt_tokens": first.n_prompt,
        "completion_tokens": n_reply,
        "total_tokens": first.n_prompt + n_reply,
        "prompt_tokens_details": {"cached_tokens": first.n_cached, "cache_write_tokens": cache_reason.n_written(first)},
    }


def timings(done: m.Done) -> Json:
    """llama-server's accounting; ``cache_n + prompt_n`` is always the whole prompt."""
    n_read = done.n_prompt - done.n_cached
    prompt_ms = 1e3 * (done.restore_s + done.prefill_s)
    decode_ms = 1e3 * done.decode_s
    return {
        "cache_n": done.n_cached,
        "prompt_n": n_read,
        "prompt_ms": prompt_ms,
        "prompt_per_token_ms": prompt_ms / max(1, n_read),
        "prompt_per_second": 1e3 * n_read / prompt_ms if prompt_ms else 0.0,
        "predicted_n": done.n_reply,
        "predicted_ms": decode_ms,
        "predicted_per_token_ms": decode_ms / max(1, done.n_reply),
        "predicted_per_second": 1e3 * done.n_reply / decode_ms if decode_ms else 0.0,
        "queue_ms": 1e3 * done.queue_s,
        "restore_ms": 1e3 * done.restore_s,
        "keep_ms": 1e3 * done.keep_s,
        "kept": done.kept,
        "cache": cache_reason.cache(done),
    }


def finish_reason(done: m.Done) -> str:
    return "stop" if done.finish == "stop" else "length"


def progress(read: m.PromptRead) -> Json:
    return {"total": read.n_prompt, "cache": read.n_cached, "processed": read.n_read, "time_ms": 1e3 * read.seconds}


def logprobs(probs: Sequence[m.TokenProb]) -> Json:
    """OpenAI's chat shape, with llama-server's ids."""
    return {"content": [_token_prob(prob) for prob in probs]}


def _token_prob(prob: m.TokenProb) -> Json:
    return {
        "id": prob.token,
        "token": _text(prob.piece),
        "bytes": list(prob.piece),
        "logprob": _finite(prob.logprob),
        "top_logprobs": [
            {"id": token, "token": _text(piece), "bytes": list(piece), "logprob": _finite(logprob)}
            for token, piece, logprob in prob.top
        ],
    }


def legacy_logprobs(probs: Sequence[m.TokenProb]) -> Json:
    """OpenAI's older completions shape."""
    offsets, at = [], 0
    for prob in probs:
        offsets.append(at)
        at += len(_text(prob.piece))
    return {
        "tokens": [_text(prob.piece) for prob in probs],
        "token_logprobs": [_finite(prob.logprob) for prob in probs],
        "top_logprobs": [{_text(piece): _finite(logprob) for _, piece, logprob in prob.top} for prob in probs],
        "text_offset": offsets,
    }


def chat_finish_reason(done: m.Done, reader: OutputParser) -> str:
    reason = finish_reason(done)
    return "tool_calls" if reader.n_calls and reason == "stop" else reason


def chat_completion(
    frame: Json, choices: Sequence[Choice], readers: Sequence[OutputParser], *, with_probs: bool, prefix: str = ""
) -> Json:
    listed = [
        {
            "index": i,
            "message": reader.message(prefix + choice.text),
            "logprobs": logprobs(choice.probs) if with_probs else None,
            "finish_reason": chat_finish_reason(choice.done, reader),
        }
        for i, (choice, reader) in enumerate(zip(choices, readers, strict=True))
    ]
    dones = [choice.done for choice in choices]
    return {
        **frame,
        "object": "chat.completion",
        "choices": listed,
        "usage": usage(dones),
        "timings": timings(dones[0]),
    }


def text_completion(
    frame: Json, choices: Sequence[Choice], _readers: Sequence[OutputParser], *, with_probs: bool, prefix: str = ""
) -> Json:
    listed = [
        {
            "index": i,
            "text": prefix + choice.text,
            "logprobs": legacy_logprobs(choice.probs) if with_probs else None,
            "finish_reason": finish_reason(choice.done),
        }
        for i, choice in enumerate(choices)
    ]
    dones = [choice.done for choice in choices]
    return {
        **frame,
        "object": "text_completion",
        "choices": listed,
        "usage": usage(dones),
        "timings": timings(dones[0]),
    }


def llama_completion(model: str, choice: Choice, *, with_tokens: bool, with_probs: bool) -> Json:
    """llama-server's own shape."""
    done = choice.done
    answer = {
        "index": 0,
        "content": choice.text,
        "tokens": choice.tokens if with_tokens else [],
        **llama_end(model, done),
    }
    if with_probs:
        answer["completion_probabilities"] = logprobs(choice.probs)["content"]
    return answer


def llama_end(model: str, done: m.Done) -> Json:
    stop_type = "word" if done.stop_text is not None else "eos" if done.finish == "stop" else "limit"
    return {
        "id_slot": done.slot,
        "stop": True,
        "model": model,
        "tokens_predicted": done.n_reply,
        "tokens_evaluated": done.n_prompt,
        "tokens_cached": done.n_cached,
        "truncated": False,
        "stop_type": stop_type,
        "stopping_word": done.stop_text or "",
        "timings": timings(done),
    }


def _text(piece: bytes) -> str:
    return piece.decode("utf-8", "replace")


def _finite(value: float) -> float:
    return value if math.isfinite(value) else _LOWEST
