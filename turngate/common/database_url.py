"""The address of a shared store, such as `postgresql://user@host:5432/database`."""

from __future__ import annotations

import hashlib
import re
from pathlib import Path
from urllib.parse import parse_qsl, urlsplit, urlunsplit

import msgspec

from turngate.errors import ConfigError

_SCHEMES = ("postgresql", "postgres")
_PROJECTS = "projects"
ENCODE_HINT = "percent-encode special characters in the user name and the password (% as %25, @ as %40, / as %2F)"
_PROJECT_PATH = re.compile(rf"/?([^/]+)/{_PROJECTS}/([a-z0-9](?:[a-z0-9-]{{0,38}}[a-z0-9])?)/?")


class DatabaseUrl(msgspec.Struct, frozen=True):
    """The parsed address of a shared store. `value` may contain a password; `name` never does."""

    value: str
    name: str
    has_password: bool
    project: str = ""  # the project that the store belongs to, from `postgresql://host/database/projects/NAME`

    @property
    def schema(self) -> str:
        """The schema of the project's tables. Empty for the main store, which uses the default schema of the database user."""
        return f"project_{self.project}" if self.project else ""

    def locate_project(self, project: str) -> str:
        """Return the address of a project's store in the same database."""
        parts = urlsplit(self.value)
        database = parts.path.strip("/") or dict(parse_qsl(parts.query))["dbname"]
        return urlunsplit(parts._replace(path=f"/{database}/{_PROJECTS}/{project}"))

    @property
    def folder(self) -> Path:
        """The local folder in which a gateway on this store keeps its admin key and its address."""
        return Path("turngate-data") / f"shared-{hashlib.sha256(self.name.encode()).hexdigest()[:12]}"

    def __repr__(self) -> str:
        return f"DatabaseUrl({self.name})"


def is_database_url(data: str) -> bool:
    """Return whether `data` is the address of a shared store rather than a folder."""
    return data.partition("://")[0] in _SCHEMES and "://" in data


def parse_database_url(data: str) -> DatabaseUrl:
    try:
        parts = urlsplit(data)
        host, port, user = parts.hostname or "", parts.port, parts.username or ""
        options = dict(parse_qsl(parts.query, keep_blank_values=True))
        if parts.netloc.count("@") > 1 or "@" in parts.path:  # an unencoded "@" or "/" in the password
            raise ValueError
    except ValueError:  # its message may quote a part of the password
        raise _invalid(f"is not a valid URL; {ENCODE_HINT}") from None
    if parts.scheme not in _SCHEMES:
        raise _invalid("does not start with postgresql://")
    if parts.path.strip("/") == "" and "dbname" not in options:
        raise _invalid("names no database")
    place = (f"[{host}]" if ":" in host else host) + (f":{port}" if port else "")
    name = f"postgresql://{user}@{place}" if user else f"postgresql://{place}"
    has_password = bool(parts.password) or "password" in options
    named = f"{name}/{parts.path.strip('/') or options['dbname']}"
    if (found := _PROJECT_PATH.fullmatch(parts.path)) is None:
        return DatabaseUrl(data, named, has_password)
    return DatabaseUrl(urlunsplit(parts._replace(path=f"/{found[1]}")), named, has_password, found[2])


def refuse_password_flag(data: str) -> None:
    """Raise `ConfigError` if the value of --data contains a password, because other users of the machine can see the command line."""
    if is_database_url(data) and parse_database_url(data).has_password:
        raise ConfigError(
            "data: do not pass the database password on the command line, where other users of this machine can see it; "
            "set PGPASSWORD, set PGPASSFILE to a .pgpass file that contains the password, or, if the command accepts --config, put the "
            "full database URL into the config file",
            param="data",
        )


def _invalid(why: str) -> ConfigError:
    # The address is not repeated: it may contain a password.
    return ConfigError(
        f"data: the address of the shared store {why}; use postgresql://user@host/database", param="data"
    )
