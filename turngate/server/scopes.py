"""The scopes of each route. An API key needs one of them to use the route.

A gateway does not start if a route that needs scopes is missing here.

Public routes and lists of models need no scopes. The agent's routes (model calls, `/v1/tools` and stored responses) are not listed. They
require the secret of their session. If the path names the session, they also accept the admin key, and API keys with one of the scopes in
`MODEL_CALLS`.
"""

from __future__ import annotations

from collections.abc import Mapping

from turngate.store.projects import SCOPE_NAMES, ScopeName

Scopes = frozenset[ScopeName]
_READ: Scopes = frozenset({"traces", "admin"})
_RUN: Scopes = frozenset({"sessions", "admin"})
_FEED: Scopes = frozenset({"feed", "admin"})
_FOLLOW: Scopes = frozenset({"sessions", "traces", "admin"})  # to follow the state of sessions, without their messages
_MANAGE: Scopes = frozenset({"admin"})
_ANY: Scopes = frozenset(SCOPE_NAMES)
_OPERATOR: Scopes = frozenset()  # only the admin key

SCOPES: Mapping[tuple[str, str], Scopes] = {
    # sessions
    ("POST", "/admin/sessions"): _RUN,
    ("GET", "/admin/sessions"): _FOLLOW,
    ("GET", "/admin/sessions/{id}"): _FOLLOW,
    ("DELETE", "/admin/sessions/{id}"): _MANAGE,
    ("GET", "/admin/sessions/{id}/trace"): _READ,
    ("GET", "/admin/sessions/{id}/samples"): _READ,
    ("GET", "/admin/sessions/{id}/events"): _FOLLOW,
    ("POST", "/admin/sessions/{id}/seal"): _RUN,
    ("POST", "/admin/sessions/{id}/cancel"): _RUN,
    ("PUT", "/admin/sessions/{id}/outcome"): _RUN,
    ("GET", "/admin/sessions/{id}/tools"): _RUN,
    ("POST", "/admin/sessions/{id}/tools/{call:int}/answer"): _RUN,
    ("GET", "/admin/events"): _FOLLOW,
    ("POST", "/admin/events"): _RUN,
    ("GET", "/admin/attempts"): _FOLLOW,
    ("POST", "/admin/attempts/supersede"): _RUN,
    # feeds
    ("GET", "/admin/feeds"): _FEED,
    ("PUT", "/admin/feeds/{name}"): _FEED,
    ("GET", "/admin/feeds/{name}"): _FEED,
    ("DELETE", "/admin/feeds/{name}"): _FEED,
    ("POST", "/admin/feeds/{name}/reader"): _FEED,
    ("GET", "/admin/feeds/{name}/deliveries"): _FEED,
    ("POST", "/admin/feeds/{name}/commit"): _FEED,
    ("POST", "/admin/feeds/{name}/mismatch"): _FEED,
    ("POST", "/admin/groups/{group:path}/close"): frozenset({"sessions", "feed", "admin"}),
    # shared by all projects
    ("GET", "/admin/fence"): _ANY,
    ("POST", "/admin/fence/pause"): _OPERATOR,
    ("POST", "/admin/fence/resume"): _OPERATOR,
    ("GET", "/admin/weights"): _OPERATOR,
    ("POST", "/admin/weights"): _OPERATOR,
    ("GET", "/admin/engines"): _ANY,
    ("POST", "/admin/engines"): _OPERATOR,
    ("POST", "/admin/engines/drain"): _OPERATOR,
    ("POST", "/admin/engines/remove"): _OPERATOR,
    ("GET", "/admin/gate"): _OPERATOR,
    ("POST", "/admin/gate/take"): _OPERATOR,
    ("POST", "/admin/gate/renew"): _OPERATOR,
    ("POST", "/admin/gate/calls/{call}/answer"): _OPERATOR,
    ("POST", "/admin/gate/calls/{call}/fail"): _OPERATOR,
    ("POST", "/admin/gate/calls/{call}/give_back"): _OPERATOR,
    ("GET", "/metrics"): _READ,
    # projects and keys
    ("GET", "/admin/projects"): _MANAGE,
    ("POST", "/admin/projects"): _OPERATOR,
    ("PUT", "/admin/projects/{name}"): _OPERATOR,
    ("DELETE", "/admin/projects/{name}"): _OPERATOR,
    ("GET", "/admin/keys"): _MANAGE,
    ("POST", "/admin/keys"): _MANAGE,
    ("POST", "/admin/keys/{prefix}/rotate"): _MANAGE,
    ("POST", "/admin/keys/{prefix}/revoke"): _MANAGE,
    ("GET", "/admin/audit"): _MANAGE,
    # prime-rl
    ("POST", "/v1/rollouts/{id}/register"): _RUN,
    ("GET", "/v1/rollouts/{id}/trajectory"): _READ,
    ("POST", "/v1/rollouts/{id}/cancel"): _RUN,
    ("POST", "/v1/rollouts/{id}/unregister"): _RUN,
    # OpenEnv
    ("POST", "/sessions"): _RUN,
    ("GET", "/sessions"): _FOLLOW,
    ("GET", "/sessions/{id}"): _FOLLOW,
    ("DELETE", "/sessions/{id}"): _MANAGE,
    ("GET", "/sessions/{id}/rollout"): _READ,
    ("GET", "/sessions/{id}/trace_entries"): _READ,
    # the page
    ("GET", "/page/api/me"): _READ,
    ("GET", "/page/api/overview"): _READ,
    ("GET", "/page/api/rollouts"): _READ,
    ("GET", "/page/api/groups"): _READ,
    ("GET", "/page/api/group"): _READ,
    ("GET", "/page/api/group/evidence"): _READ,
    ("GET", "/page/api/training"): _READ,
    ("GET", "/page/api/training/entropy"): _READ,
    ("GET", "/page/api/failures"): _READ,
    ("GET", "/page/api/events"): _READ,
    ("GET", "/page/api/export"): _READ,
    ("GET", "/page/api/rollouts/{id}"): _READ,
    ("GET", "/page/api/rollouts/{id}/tree"): _READ,
    ("GET", "/page/api/rollouts/{id}/messages"): _READ,
    ("GET", "/page/api/rollouts/{id}/tokens"): _READ,
    ("GET", "/page/api/rollouts/{id}/events"): _READ,
    ("GET", "/page/api/rollouts/{id}/export"): _READ,
    ("POST", "/page/api/rollouts/{id}/cancel"): _RUN,
    ("POST", "/page/api/rollouts/{id}/seal"): _RUN,
    ("POST", "/page/api/rollouts/{id}/retry"): _RUN,
}
MODEL_CALLS = _RUN  # for model calls with a session in the path, such as /s/{id}/v1/chat/completions


def scopes_of(method: str, path: str) -> Scopes:
    """Return the scopes of a route. An API key with any one of them may use it. If there are none, only the admin key may."""
    return SCOPES[method, path]
