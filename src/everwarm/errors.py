"""Every error Everwarm raises on purpose. Each class knows its HTTP status and code; one handler translates them.

EverwarmError                    500  the server's own fault
├── BadRequest                   400  the caller's input
│   ├── PromptTooLong            400  does not fit the context, and never will
│   └── FrameTooLarge            400  does not fit one message between gateway and engine
├── Forbidden                    403  this caller may not do that; the code says why
├── NotFound                     404  no such route, model, node, response …; the code says what
├── TreeChanged                  409  a place in the prefix tree that is no longer there
├── Overloaded                   429  too many requests, tokens or bytes at once
├── ModelError                   500  the model or the library cannot be used
│   ├── ModelFileError           500  missing, not a GGUF, damaged, or unknown architecture
│   ├── ModelChanged             500  a file was overwritten while it was served: open it anew
│   └── ContextTooBig            500  the context does not fit the memory of this machine
├── MemoryFault                  500  libllama refused. The engine recovers; a request gets one when it has failed too often
│   ├── ContextFull              500  no free cell; nothing changed
│   ├── TrimRefused              500  the tail cannot be cut here; nothing changed
│   ├── StateRejected            500  a state was not accepted; the sequence has none now
│   ├── KvMissing                500  the KV that a state needs is not there
│   └── DecodeFailed             500  the sequences of the batch are empty now
│       └── WeightsTouched       500  nothing was wrong with them, but perhaps with the weights
├── Damaged                      500  an object is not what it should be: that is a miss; of state.store
│   ├── Unreadable               500  it may be whole, but the file could not be read
│   └── UnknownOrigin            500  a slot file that nothing vouches for
├── DirectoryTaken               500  another engine holds the state directory; of state.store
├── StoreFault                   500  the remote store refused, or did not answer: that is a miss; of state.remote
├── NotSupported                 501  an API has it, this server does not
├── EngineStopped                503  the engine or the server is closing, or a model is not loaded; the code says why
└── HttpError                    any  what only HTTP knows: no valid key, a body that is too large, too slow or no JSON …
    └── Refused                  any  an engine's own error, with the status and code that it has there
"""

from __future__ import annotations

PIXELS_MISSING = "pixels_missing"  # the engine needs an image that it does not know; the gateway may have it
THREAD_UNSUPPORTED = "thread_unsupported_request"  # Anthropic's client then sends the whole conversation


class EverwarmError(Exception):
    status = 500
    code = "server_error"


class BadRequest(EverwarmError):
    status = 400
    code = "invalid_request_error"

    def __init__(self, message: str, code: str | None = None) -> None:
        super().__init__(message)
        if code is not None:
            self.code = code


class PromptTooLong(BadRequest):
    code = "exceed_context_size_error"

    def __init__(self, n_prompt: int, n_context: int, *, is_least: bool = False) -> None:
        super().__init__(
            f"the prompt has {'at least ' if is_least else ''}{n_prompt} tokens but the context holds {n_context}: "
            f"shorten the prompt or start with a context of at least {n_prompt + 1} tokens"
        )
        self.n_prompt = n_prompt
        self.n_context = n_context


class FrameTooLarge(BadRequest):
    """Of a request to the engine, or of an answer to a question."""

    code = "request_too_large"

    def __init__(self, n_bytes: int, most: int) -> None:
        super().__init__(
            f"the request or its answer takes {n_bytes:,} bytes between gateway and engine, where {most:,} are the most: "
            "shorten the prompt, send fewer or smaller images, or ask for less at once"
        )


class Forbidden(EverwarmError):
    status = 403

    def __init__(self, message: str, code: str = "forbidden") -> None:
        super().__init__(message)
        self.code = code


class NotFound(EverwarmError):
    status = 404

    def __init__(self, message: str, code: str = "not_found") -> None:
        super().__init__(message)
        self.code = code


class TreeChanged(EverwarmError):
    status = 409
    code = "tree_changed"


class Overloaded(EverwarmError):
    status = 429
    code = "rate_limit_error"

    def __init__(self, message: str, retry_after_s: int = 1) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class ModelError(EverwarmError):
    code = "model_error"


class ModelFileError(ModelError):
    pass


class ModelChanged(ModelError):
    pass


class ContextTooBig(ModelError):
    pass


class MemoryFault(EverwarmError):
    pass


class ContextFull(MemoryFault):
    pass


class TrimRefused(MemoryFault):
    pass


class StateRejected(MemoryFault):
    pass


class KvMissing(MemoryFault):
    pass


class DecodeFailed(MemoryFault):
    pass


class WeightsTouched(DecodeFailed):
    pass


class NotSupported(EverwarmError):
    status = 501
    code = "not_supported_error"


class EngineStopped(EverwarmError):
    status = 503
    code = "unavailable_error"

    def __init__(self, message: str, retry_after_s: int | None = None, *, code: str = "unavailable_error") -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s
        self.code = code


class HttpError(EverwarmError):
    """Raised where HTTP is spoken and caught nowhere else, so its status and code are all there is to it."""

    def __init__(self, status: int, code: str, message: str) -> None:
        super().__init__(message)
        self.status = status
        self.code = code


class Refused(HttpError):
    """An engine's own error, as the gateway hands it on."""

    def __init__(
        self,
        status: int,
        code: str,
        message: str,
        n_prompt: int | None = None,
        n_context: int | None = None,
        retry_after_s: int | None = None,
    ) -> None:
        super().__init__(status, code, message)
        self.n_prompt = n_prompt
        self.n_context = n_context
        self.retry_after_s = retry_after_s
