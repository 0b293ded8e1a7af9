"""Every error Everwarm raises on purpose. Each class knows its HTTP status and code; one handler translates them.

EverwarmError                    500  the server's own fault
├── BadRequest                   400  the caller's input
│   ├── PromptTooLong            400  does not fit the context, and never will
│   ├── PixelsMissing            400  the engine needs an image that was not sent
│   ├── FrameTooLarge            400  does not fit one message between gateway and engine
│   └── ConstraintFailed         400  a grammar that turned out too complex while it was followed
├── Unauthorized                 401  no valid key
├── Forbidden                    403  this caller may not do that
│   ├── AdminRequired            403  it takes an admin's key
│   ├── SlotQuotaExceeded        403  too many slot files
│   └── PinQuotaExceeded         403  too many bytes pinned
├── RouteNotFound                404  no such path
├── ModelNotFound                404  no model of that name
├── NodeNotFound                 404  no such node of the prefix tree
├── ReplicaNotFound              404  of many machines, the one that was meant is gone
├── ResponseNotFound             404  not stored, or not any more
│   └── PreviousNotFound         404  the same of one that is to be continued
├── MethodNotAllowed             405  the path has no such method
├── BodyTooSlow                  408  the client did not send its body in time
├── TreeChanged                  409  a place in the prefix tree that is no longer there
├── BodyTooLarge                 413  more bytes than are read
├── UnsupportedMediaType         415  not JSON
├── Overloaded                   429  too many requests, tokens or bytes at once
├── ModelError                   500  the model or the library cannot be used
│   ├── LibraryMismatch          500  libllama is missing or another build
│   ├── ModelFileError           500  missing, not a GGUF, damaged, or unknown architecture
│   ├── ModelChanged             500  a file was overwritten while it was served: open it anew
│   └── ContextTooBig            500  the context does not fit the memory of this machine
├── MemoryFault                  500  libllama refused; the engine recovers, a request never sees these
│   ├── ContextFull              500  no free cell; nothing changed
│   ├── TrimRefused              500  the tail cannot be cut here; nothing changed
│   ├── StateRejected            500  a state was not accepted; the sequence has none now
│   ├── KvMissing                500  the KV that a state needs is not there
│   └── DecodeFailed             500  the sequences of the batch are empty now
│       └── WeightsTouched       500  nothing was wrong with them, but perhaps with the weights
├── NotSupported                 501  an API has it, this server does not
├── NoRoom                       503  no memory for that model
├── EngineStopped                503  the engine is closing, or not loaded
├── Draining                     503  the server is stopping
├── RequestTimedOut              504  took longer than the server allows
└── Refused                      any  an engine's own error, with the status and code that it has there
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
    """The engine needs an image that it does not know; the gateway may have it."""

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


class Unauthorized(EverwarmError):
    status = 401
    code = "invalid_api_key"


class Forbidden(EverwarmError):
    status = 403
    code = "forbidden"


class AdminRequired(Forbidden):
    code = "admin_required"


class SlotQuotaExceeded(Forbidden):
    code = "quota_exceeded"


class PinQuotaExceeded(Forbidden):
    code = "pin_quota_exceeded"


class RouteNotFound(EverwarmError):
    status = 404
    code = "not_found"


class NodeNotFound(EverwarmError):
    status = 404
    code = "node_not_found"


class MethodNotAllowed(EverwarmError):
    status = 405
    code = "invalid_request_error"


class BodyTooSlow(EverwarmError):
    status = 408
    code = "timeout"


class TreeChanged(EverwarmError):
    status = 409
    code = "tree_changed"


class BodyTooLarge(EverwarmError):
    status = 413
    code = "request_too_large"


class UnsupportedMediaType(EverwarmError):
    status = 415
    code = "unsupported_media_type"


class NotSupported(EverwarmError):
    status = 501
    code = "not_supported_error"


class RequestTimedOut(EverwarmError):
    status = 504
    code = "timeout"


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
