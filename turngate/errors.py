"""The error tree. An error names the boundary it arose at, carries its HTTP status and whether a retry is safe.

Errors are raised anywhere and rendered in one place (`server/`), in the caller's own wire format.
"""

from __future__ import annotations

from typing import ClassVar, Literal

Boundary = Literal["client", "engine", "store", "config", "gateway", "sandbox", "agent", "task"]


class TurngateError(Exception):
    """Base of all errors that a caller may see. `message` is safe to show: no secrets, no other session's data."""

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
    """Another gateway has the data folder."""


class BadRequest(TurngateError):
    boundary = "client"
    status = 400
    kind = "invalid_request_error"


class ContextOverflow(BadRequest):
    """The prompt does not fit. Every dialect must say this the way its provider does, so that agents compact."""

    kind = "context_length_exceeded"

    def __init__(
        self, message: str, *, param: str | None = None, limit: int | None = None, size: int | None = None
    ) -> None:
        super().__init__(message, param=param)
        self.limit = limit  # tokens that fit, and tokens that there are; None where only the engine knows
        self.size = size


class Unauthorized(TurngateError):
    boundary = "client"
    status = 401
    kind = "invalid_api_key"


class Forbidden(TurngateError):
    """Whoever asks is known, but may not ask for this from there."""

    boundary = "client"
    status = 403
    kind = "permission_error"


class TooManyRequests(TurngateError):
    """Too often, for now. `wait_s`: when to ask again."""

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
    """It was there, and nobody waits for this any more."""

    boundary = "client"
    status = 410
    kind = "gone"


class TooLarge(TurngateError):
    boundary = "client"
    status = 413
    kind = "request_too_large"


class Unprocessable(TurngateError):
    """422, for the compatibility API whose contract asks for it."""

    boundary = "client"
    status = 422
    kind = "invalid_request_error"


class Busy(TurngateError):
    """As much is under way, and waits, as may. The same call will work later."""

    boundary = "client"
    status = 429
    kind = "rate_limit_exceeded"
    retry_safe = True


class Stopping(TurngateError):
    """The gateway is being stopped; the same call will work when it is up again."""

    status = 503
    kind = "gateway_stopping"
    retry_safe = True


class EngineError(TurngateError):
    """The engine failed or answered nonsense."""

    boundary = "engine"
    status = 502
    kind = "engine_error"


class EngineRejected(EngineError):
    """The engine refused the request as wrong; sending it again would not help."""

    status = 400
    kind = "invalid_request_error"


class EngineBusy(EngineError):
    status = 429
    kind = "rate_limit_exceeded"
    retry_safe = True


class EngineUnavailable(EngineError):
    """No replica could be reached, or it went away before any token came."""

    status = 503
    kind = "engine_unavailable"
    retry_safe = True


class EngineTimeout(EngineError):
    status = 504
    kind = "engine_timeout"
    retry_safe = True


class StoreError(TurngateError):
    """The turn cannot be recorded, so it is refused."""

    boundary = "store"
    status = 503
    kind = "store_error"


class SandboxError(TurngateError):
    """The sandbox failed: not the agent's fault, and never scored as if it were."""

    boundary = "sandbox"
    kind = "sandbox_error"
    retry_safe = True


class SandboxUnavailable(SandboxError):
    """No sandbox of this kind can be made here. The message says what is missing and how to get it."""

    retry_safe = False


class SandboxFileMissing(SandboxError):
    """There is no such file in the sandbox."""

    retry_safe = False


class SandboxGone(SandboxError):
    """It has ended, though nobody stopped it. What runs in a sandbox can do that to it."""


class SandboxStuck(SandboxGone):
    """What runs in it cannot be ended: it is as good as gone, and by the doing of what runs there."""


class SandboxTooLarge(SandboxError):
    """What lies in the sandbox is more than is ever taken out of one. That is the doing of what ran there."""

    retry_safe = False


class AgentError(TurngateError):
    """The agent's description is wrong, or it cannot be installed or started."""

    boundary = "agent"
    kind = "agent_error"


class TaskError(TurngateError):
    """The task's description is wrong, or its setup failed."""

    boundary = "task"
    kind = "task_error"
