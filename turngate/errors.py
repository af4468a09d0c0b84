"""The error hierarchy, with the HTTP status of each error. An error also states the boundary at which it arose, and if a retry is safe.

Errors can be raised anywhere. `server/` renders them in the caller's wire format.
"""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar, Literal

Boundary = Literal["client", "engine", "store", "config", "gateway", "sandbox", "agent", "task"]


class TurngateError(Exception):
    """Base class of all errors that a caller may see.

    `message` is safe to show: it never contains secrets or another session's data.
    """

    boundary: ClassVar[Boundary] = "gateway"
    status: ClassVar[int] = 500
    kind: ClassVar[str] = "internal_error"
    retry_safe: ClassVar[bool] = False

    def __init__(self, message: str, *, param: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param


class ConfigError(TurngateError):
    """A setting, file or folder is missing or invalid, or cannot be used."""

    boundary = "config"
    kind = "config_error"


class DataFolderInUse(ConfigError):
    """Another Turngate process is using the data folder."""


class NoRecordings(ConfigError):
    """The data folder or database contains no store."""

    @classmethod
    def in_folder(cls, folder: Path) -> NoRecordings:
        return cls(
            f"data: no recordings in {folder.absolute()}; run this command in the folder where you ran `turngate run` or "
            "`turngate serve`, or pass the same --data folder",
            param="data",
        )


class BadRequest(TurngateError):
    boundary = "client"
    status = 400
    kind = "invalid_request_error"


class ContextOverflow(BadRequest):
    """The prompt does not fit into the context, alone or together with the requested reply.

    Every dialect must phrase this error as its provider does, so that agents recognize it and compact their history.
    """

    kind = "context_length_exceeded"

    def __init__(
        self, message: str, *, param: str | None = None, limit: int | None = None, size: int | None = None
    ) -> None:
        super().__init__(message, param=param)
        self.limit = limit  # tokens that fit; None if unknown
        self.size = size  # tokens in the prompt, or in the prompt and the requested reply; None if unknown


class Unauthorized(TurngateError):
    boundary = "client"
    status = 401
    kind = "invalid_api_key"


class Forbidden(TurngateError):
    """The request is not allowed. For example, the key lacks a required scope, or the request comes from a page on a different site."""

    boundary = "client"
    status = 403
    kind = "permission_error"


class TooManyRequests(TurngateError):
    """The caller has made too many requests, or too many streams are open. The next request may succeed after `wait_s` seconds."""

    boundary = "client"
    status = 429
    kind = "rate_limit_exceeded"
    retry_safe = True

    def __init__(self, message: str, *, param: str | None = None, wait_s: float = 1.0) -> None:
        super().__init__(message, param=param)
        self.wait_s = wait_s


class QuotaExceeded(TurngateError):
    """The project has used up a quota, or the gateway has used up its share of one and cannot get more. The agent is not at fault."""

    status = 429
    kind = "insufficient_quota"


class NotFound(TurngateError):
    boundary = "client"
    status = 404
    kind = "not_found"


class Conflict(TurngateError):
    """The request conflicts with existing state: the session has ended, for example, or the id is taken."""

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


class UpgradeRefused(TurngateError):
    """The client asked for a WebSocket on a route that has none. Agents fall back to HTTP after this status."""

    boundary = "client"
    status = 426
    kind = "upgrade_required"


class Unprocessable(TurngateError):
    """An error with status 422, for compatibility APIs that require this status."""

    boundary = "client"
    status = 422
    kind = "invalid_request_error"


class Busy(TurngateError):
    """The gateway or the rollout service cannot accept more work at the moment. The same call may succeed later."""

    boundary = "client"
    status = 429
    kind = "rate_limit_exceeded"
    retry_safe = True


class Stopping(TurngateError):
    """The gateway or the rollout service is stopping, or a part of it is temporarily unavailable. The same call can succeed later."""

    status = 503
    kind = "gateway_stopping"
    retry_safe = True


class LeaseLapsed(Stopping):
    """The cell may not serve at the moment, usually because its lease has lapsed. The same call can succeed once it may serve again."""

    kind = "lease_lapsed"


class EngineError(TurngateError):
    """The engine failed, denied access or sent an invalid reply."""

    boundary = "engine"
    status = 502
    kind = "engine_error"


class EngineRejected(EngineError):
    """The engine rejected the request, usually because it is invalid. Retrying does not help."""

    status = 400
    kind = "invalid_request_error"


class EngineNotFound(EngineRejected):
    """The engine does not have the requested route, or does not serve the requested model."""


class EngineBusy(EngineError):
    status = 429
    kind = "rate_limit_exceeded"
    retry_safe = True


class EngineUnavailable(EngineError):
    """No engine could be reached or used, or an engine ended a reply early."""

    status = 503
    kind = "engine_unavailable"
    retry_safe = True


class EngineTimeout(EngineError):
    status = 504
    kind = "engine_timeout"
    retry_safe = True


class StoreError(TurngateError):
    """Stored data cannot be read or written. A call whose turn cannot be recorded fails with this error."""

    boundary = "store"
    status = 503
    kind = "store_error"


class SandboxError(TurngateError):
    """The sandbox failed. Unless a subclass says otherwise, the agent is not at fault and is not penalized."""

    boundary = "sandbox"
    kind = "sandbox_error"
    retry_safe = True


class SandboxUnavailable(SandboxError):
    """A sandbox cannot be created on this machine or with these settings. The message says why and, where possible, what to do."""

    retry_safe = False


class SandboxFileMissing(SandboxError):
    """The file or folder does not exist in the sandbox."""

    retry_safe = False


class SandboxGone(SandboxError):
    """The sandbox ended unexpectedly, possibly because of a process inside it."""


class SandboxStuck(SandboxGone):
    """A process in the sandbox cannot be stopped, so the sandbox is treated as gone. The sandbox's own processes are at fault."""


class SandboxTooLarge(SandboxError):
    """Files in the sandbox or the output of its processes cannot be handled, usually because they exceed a limit.

    The agent may be at fault.
    """

    retry_safe = False


class AgentError(TurngateError):
    """A problem with an agent. For example, its spec is invalid, or it cannot be installed or started."""

    boundary = "agent"
    kind = "agent_error"


class TaskError(TurngateError):
    """A problem with a task. For example, its spec is invalid, or its setup failed."""

    boundary = "task"
    kind = "task_error"
