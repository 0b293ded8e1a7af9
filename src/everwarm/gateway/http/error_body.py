"""Error bodies in the shape of each dialect, chosen by the path of the request. Pure."""

from __future__ import annotations

from everwarm.errors import THREAD_UNSUPPORTED, EverwarmError, PromptTooLong, Refused
from everwarm.types import Json

OLLAMA = "/api/"
ANTHROPIC = "/v1/messages"

LLAMA_SERVER = (
    "/completion",
    "/infill",
    "/tokenize",
    "/detokenize",
    "/apply-template",
    "/props",
    "/slots",
    "/lora-adapters",
    "/embedding",
    "/rerank",
    "/models",
)

_OPENAI_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    404: "not_found_error",
    429: "rate_limit_error",
}
_LLAMA_SERVER_TYPES = {403: "permission_error", 501: "not_supported_error", 503: "unavailable_error"}
_ANTHROPIC_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}


def error_body(error: EverwarmError, request_id: str, path: str) -> Json:
    """The error in the shape of the path's dialect; OpenAI's by default."""
    if path.startswith(OLLAMA):
        return {"error": str(error)}
    if path.startswith(ANTHROPIC):
        return _anthropic(error, request_id)
    if path.startswith(LLAMA_SERVER):
        return _llama_server(error, request_id)
    return _openai(error, request_id)


def _llama_server(error: EverwarmError, request_id: str) -> Json:
    """OpenAI's error with three differences: ``code`` is the status, ``reason`` is OpenAI's code, and ``type`` is
    llama-server's."""
    about = _openai(error, request_id)["error"]
    known = _LLAMA_SERVER_TYPES.get(error.status, about["type"])
    kind = about["type"] if "n_ctx" in about else known
    return {"error": {**about, "code": error.status, "reason": error.code, "type": kind}}


def _openai(error: EverwarmError, request_id: str) -> Json:
    default = "server_error" if error.status >= 500 else "invalid_request_error"
    about: Json = {
        "message": str(error),
        "type": _OPENAI_TYPES.get(error.status, default),
        "param": None,
        "code": error.code,
        "request_id": request_id,
    }
    if error.code == PromptTooLong.code:
        about["type"] = error.code
    if isinstance(error, Refused) and error.n_prompt is not None:
        about |= {"n_prompt_tokens": error.n_prompt, "n_ctx": error.n_context}
    return {"error": about}


def _anthropic(error: EverwarmError, request_id: str) -> Json:
    """Clients shorten a conversation when its prompt is too long, and recognise that by this exact wording."""
    default = "api_error" if error.status >= 500 else "invalid_request_error"
    message = str(error)
    if isinstance(error, Refused) and error.n_prompt is not None and error.code == PromptTooLong.code:
        message = f"prompt is too long: {error.n_prompt} tokens > {error.n_context} maximum ({message})"
    about: Json = {"type": _ANTHROPIC_TYPES.get(error.status, default), "message": message}
    if error.code == THREAD_UNSUPPORTED:
        about["details"] = {"error_code": error.code}
    return {"type": "error", "error": about, "request_id": request_id}
