"""Describe PostgreSQL errors in plain words, and suggest what to do."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import psycopg

# By SQLSTATE, or by its class (the first two characters).
_BY_STATE = {
    "25006": "{name} is read-only; connect to the primary server, as a role that may write",
    "28": "{name} refused the login ({error}); check the role, its password (PGPASSWORD, or a .pgpass file that PGPASSFILE names), and "
    "that pg_hba.conf allows the connection",
    "3D000": "{name} does not exist; create the database first, for example with `createdb`",
    "42501": "{name} refused access ({error}); grant the role the privileges that it needs in this database",
    "53100": "{name} has no disk space left; free up space on the database server",
    "53300": "{name} has no free connection; raise max_connections, or connect through PgBouncer",
    "55P03": "another process has held a lock in {name} for too long; try again",
    "57014": "{name} canceled a statement ({error}); try again, or raise statement_timeout on the server",
    "57": "{name} is stopping or starting ({error}); gateways reconnect automatically; run any other command again",
}
# libpq reports a failed connection without a SQLSTATE.
_BY_TEXT = (
    ("password authentication failed", "28"),
    ("no password supplied", "28"),
    ("no pg_hba.conf entry", "28"),
    ("role ", "28"),
    ("too many clients", "53300"),
    ("remaining connection slots", "53300"),
    ("too many connections", "53300"),
    ("no more connections allowed", "53300"),
    ("starting up", "57"),
    ("shutting down", "57"),
)
_REJECTED_VALUES = ("22", "54")  # classes of SQLSTATE: invalid data, and limits such as the size of an index entry
_UNREACHABLE = "cannot reach {name} ({error}); check that PostgreSQL runs there and accepts connections"


def describe_error(error: psycopg.Error, name: str) -> str:
    """Describe an error in one line without passwords. `name` is the database's address without its password."""
    text = _first_line(error)
    state = error.sqlstate or _guess_state(text)
    template = _BY_STATE.get(state) or _BY_STATE.get(state[:2])
    if template is None:
        template = "{error}" if error.sqlstate else _UNREACHABLE
    return template.format(name=name, error=text)


def is_rejected_value(error: BaseException | None) -> bool:
    """Return whether PostgreSQL rejected a value, for example a null character in text. In that case, retrying does not help."""
    return (getattr(error, "sqlstate", None) or "")[:2] in _REJECTED_VALUES


def _guess_state(text: str) -> str:
    if "database " in text and "does not exist" in text:
        return "3D000"
    return next((state for part, state in _BY_TEXT if part in text), "")


def _first_line(error: psycopg.Error) -> str:
    """Return the error's message on one line. If the message contains `FATAL:`, return only what follows."""
    text = " ".join(str(error).split())
    _, fatal, rest = text.partition("FATAL: ")
    return (rest if fatal else text).strip() or type(error).__name__
