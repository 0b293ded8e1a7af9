"""Every error Everwarm raises on purpose. Each knows its HTTP status and code; one handler translates them.

EverwarmError
├── BadRequest                 400  the caller's input
│   ├── PromptTooLong          400  does not fit the context, and never will
│   ├── PixelsMissing          400  a picture is needed that was not sent
│   ├── FrameTooLarge          400  does not fit one message between gateway and engine
│   └── FormFailed             400  a form that turned out too complex while it was followed
├── ModelError                 500  the model or the library cannot be used
│   ├── LibraryMismatch             libllama is missing or another build
│   ├── ModelFileError              missing, not a GGUF, damaged, or unknown architecture
│   ├── ModelChanged                a file was overwritten while it was served: open it anew
│   └── ContextTooBig               the context does not fit the memory of this machine
├── MemoryFault                500  libllama refused; the engine recovers, a request never sees these
│   ├── ContextFull                 no free cell; nothing changed
│   ├── TrimRefused                 the tail cannot be cut here; nothing changed
│   ├── StateRejected               a state was not accepted; the sequence has none now
│   └── DecodeFailed                the sequences of the batch are empty now
│       └── WeightsTouched          nothing was wrong with them, but perhaps with the weights
├── ModelNotFound              404  no model of that name
├── ReplicaNotFound            404  of many machines, the one that was meant is gone
├── ResponseNotFound           404  not kept, or not any more
│   └── PreviousNotFound       404  the same of one that is to be gone on from
├── NoRoom                     503  no memory for that model
└── EngineStopped              503  the engine is closing
"""

from __future__ import annotations


class EverwarmError(Exception):
    status = 500
    code = "server_error"


class BadRequest(EverwarmError):
    status = 400
    code = "invalid_request_error"


class PromptTooLong(BadRequest):
    code = "exceed_context_size_error"

    def __init__(self, n_prompt: int, n_context: int, *, is_least: bool = False) -> None:
        super().__init__(
            f"the prompt has {'at least ' if is_least else ''}{n_prompt} tokens but the context holds {n_context}: "
            f"shorten the prompt or start with a context of at least {n_prompt + 1} tokens"
        )
        self.n_prompt = n_prompt
        self.n_context = n_context


class PixelsMissing(BadRequest):
    """The engine needs a picture that it does not know; whoever asked may have it."""

    code = "pixels_missing"


class FrameTooLarge(BadRequest):
    """Of a request to the engine, or of an answer to a question."""

    code = "request_too_large"

    def __init__(self, n_bytes: int, most: int) -> None:
        super().__init__(
            f"the request or its answer takes {n_bytes:,} bytes between gateway and engine, where {most:,} are the most: "
            "shorten the prompt, send fewer or smaller pictures, or ask for less at once"
        )


class ConstraintFailed(BadRequest):
    pass


class ModelError(EverwarmError):
    code = "model_error"


class LibraryMismatch(ModelError):
    pass


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


class DecodeFailed(MemoryFault):
    pass


class WeightsTouched(DecodeFailed):
    pass


class KvMissing(MemoryFault):
    pass


class EngineStopped(EverwarmError):
    status = 503
    code = "unavailable_error"

    def __init__(self, message: str, retry_after_s: int | None = None) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class ModelNotFound(EverwarmError):
    status = 404
    code = "model_not_found"


class ReplicaNotFound(EverwarmError):
    status = 404
    code = "replica_not_found"


class ResponseNotFound(EverwarmError):
    status = 404
    code = "response_not_found"


class PreviousNotFound(ResponseNotFound):
    code = "previous_response_not_found"


class NoRoom(EverwarmError):
    """A model does not fit beside what must stay."""

    status = 503
    code = "no_room_for_model"


class Overloaded(EverwarmError):
    status = 429
    code = "rate_limit_error"

    def __init__(self, message: str, retry_after_s: int = 1) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class Draining(EverwarmError):
    status = 503
    code = "unavailable_error"
    retry_after_s = 5


class Forbidden(EverwarmError):
    def __init__(self, status: int, code: str, message: str) -> None:
        super().__init__(message)
        self.status = status
        self.code = code


class Refused(EverwarmError):
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
        super().__init__(message)
        self.status = status
        self.code = code
        self.n_prompt = n_prompt
        self.n_context = n_context
        self.retry_after_s = retry_after_s
