"""The error tree. An error names the boundary where it arose, its HTTP status and whether a retry is safe.

Errors may be raised anywhere. `server/` renders them, in the caller's own wire format.
"""

from __future__ import annotations

from typing import ClassVar, Literal

Boundary = Literal["client", "engine", "store", "config", "gateway", "sandbox", "agent", "task"]


class TurngateError(Exception):
    """Base of all errors that a caller may see. `message` is safe to show: it holds no secrets and no other session's data."""

    boundary: ClassVar[Boundary] = "gateway"
    status: ClassVar[int] = 500
    kind: ClassVar[str] = "internal_error"
    retry_safe: ClassVar[bool] = False

    def __init__(self, message: str, *, param: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param


class ConfigError(TurngateError):
    """A setting, file or folder is wrong. Raised before serving starts."""

    boundary = "config"
    kind = "config_error"


class DataFolderInUse(ConfigError):
    """Another gateway is using the data folder."""


class BadRequest(TurngateError):
    boundary = "client"
    status = 400
    kind = "invalid_request_error"


class ContextOverflow(BadRequest):
    """The prompt does not fit. Every dialect must phrase this as its provider does, so that agents compact."""

    kind = "context_length_exceeded"

    def __init__(
        self, message: str, *, param: str | None = None, limit: int | None = None, size: int | None = None
    ) -> None:
        super().__init__(message, param=param)
        self.limit = limit  # tokens that fit; None if only the engine knows
        self.size = size  # tokens in the prompt; None if only the engine knows


class Unauthorized(TurngateError):
    boundary = "client"
    status = 401
    kind = "invalid_api_key"


class Forbidden(TurngateError):
    """The caller is known, but is not allowed to do this from where it is."""

    boundary = "client"
    status = 403
    kind = "permission_error"


class TooManyRequests(TurngateError):
    """The caller sends requests too fast. `wait_s`: seconds until the next one may succeed."""

    boundary = "client"
    status = 429
    kind = "rate_limit_exceeded"
    retry_safe = True

    def __init__(self, message: str, *, param: str | None = None, wait_s: float = 1.0) -> None:
        super().__init__(message, param=param)
        self.wait_s = wait_s


class NotFound(TurngateError):
    boundary = "client"
    status = 404
    kind = "not_found"


class Conflict(TurngateError):
    """The session's state forbids this: cancelled, sealed, completed, or an id that is taken."""

    boundary = "client"
    status = 409
    kind = "conflict"


class Gone(TurngateError):
    """The resource existed but is no longer available."""

    boundary = "client"
    status = 410
    kind = "gone"


class TooLarge(TurngateError):
    boundary = "client"
    status = 413
    kind = "request_too_large"


class Unprocessable(TurngateError):
    """422, for the compatibility API whose contract requires it."""

    boundary = "client"
    status = 422
    kind = "invalid_request_error"


class Busy(TurngateError):
    """All slots and queue places are taken. The same call may succeed later."""

    boundary = "client"
    status = 429
    kind = "rate_limit_exceeded"
    retry_safe = True


class Stopping(TurngateError):
    """The gateway is stopping. The same call will succeed once it is running again."""

    status = 503
    kind = "gateway_stopping"
    retry_safe = True


class EngineError(TurngateError):
    """The engine failed or sent an invalid reply."""

    boundary = "engine"
    status = 502
    kind = "engine_error"


class EngineRejected(EngineError):
    """The engine rejected the request as invalid; sending it again would not help."""

    status = 400
    kind = "invalid_request_error"


class EngineBusy(EngineError):
    status = 429
    kind = "rate_limit_exceeded"
    retry_safe = True


class EngineUnavailable(EngineError):
    """No replica could be reached, or the connection was lost before the first token."""

    status = 503
    kind = "engine_unavailable"
    retry_safe = True


class EngineTimeout(EngineError):
    status = 504
    kind = "engine_timeout"
    retry_safe = True


class StoreError(TurngateError):
    """The turn cannot be recorded, so the call is refused."""

    boundary = "store"
    status = 503
    kind = "store_error"


class SandboxError(TurngateError):
    """The sandbox failed. This is not the agent's fault and is never scored as if it were."""

    boundary = "sandbox"
    kind = "sandbox_error"
    retry_safe = True


class SandboxUnavailable(SandboxError):
    """This kind of sandbox cannot be created here. The message says what is missing and how to get it."""

    retry_safe = False


class SandboxFileMissing(SandboxError):
    """The file does not exist in the sandbox."""

    retry_safe = False


class SandboxGone(SandboxError):
    """The sandbox ended by itself. A process inside it can cause that."""


class SandboxStuck(SandboxGone):
    """A process in the sandbox cannot be stopped. The sandbox is treated as gone, and its own processes caused it."""


class SandboxTooLarge(SandboxError):
    """The sandbox holds more data than may be copied out. Its own processes caused it."""

    retry_safe = False


class AgentError(TurngateError):
    """The agent's spec is invalid, or the agent cannot be installed or started."""

    boundary = "agent"
    kind = "agent_error"


class TaskError(TurngateError):
    """The task's spec is invalid, or its setup failed."""

    boundary = "task"
    kind = "task_error"
