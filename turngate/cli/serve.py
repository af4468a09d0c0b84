"""Load the settings of `turngate serve` and `turngate cell`, and run the gateway. `config.py` defines the settings and their defaults."""

from __future__ import annotations

import os

from turngate.cli.options import ServeOptions
from turngate.common.database_url import DatabaseUrl, parse_database_url
from turngate.config import ServeConfig, load_config
from turngate.errors import ConfigError
from turngate.telemetry import logs

SHARED_URL = "TURNGATE_SHARED"


def load_serve_config(options: ServeOptions) -> ServeConfig:
    config = load_config(options.config, dict(options.settings))
    if config.shared:
        raise ConfigError(
            "the setting 'shared' applies only to a cell; start a cell with `turngate cell`, or remove the setting",
            param="shared",
        )
    return config


def load_cell_config(options: ServeOptions) -> ServeConfig:
    """Load the settings of a cell. Raise ConfigError if the URL of the shared store is not set."""
    config = load_optional_cell_config(options)
    if not config.shared:
        raise ConfigError(
            f"the URL of the shared store is not set; pass --shared postgresql://user@host/database or set {SHARED_URL}",
            param="shared",
        )
    return config


def load_optional_cell_config(options: ServeOptions) -> ServeConfig:
    """Load the settings of a gateway, or of a cell if a flag, the config file or the environment sets the shared store's URL."""
    flag = options.settings.get("shared") or ""
    if flag and _parse_shared(flag).has_password:
        raise ConfigError(
            "--shared: the URL contains a password, which would appear in process lists; pass the URL without the password and set "
            f"PGPASSFILE or PGPASSWORD, or put the full URL into {SHARED_URL} or into the config file",
            param="shared",
        )
    config = load_config(options.config, {**options.settings, "shared": flag or os.environ.get(SHARED_URL) or None})
    if config.shared:
        _parse_shared(config.shared)
        if config.is_shared:
            raise ConfigError(
                "data: a cell records to a local folder, not to a database; pass a folder as --data", param="data"
            )
    return config


def run_gateway(config: ServeConfig) -> None:
    """Run the gateway, with its workers if there are several, until it is stopped."""
    if config.workers > 1:
        from turngate.server.workers.front import run
    else:
        from turngate.server.run import run

    with logs.log_to_stderr(config.log_format):
        run(config)


def _parse_shared(url: str) -> DatabaseUrl:
    try:
        return parse_database_url(url)
    except ConfigError as error:
        raise ConfigError(error.message.replace("data: ", "shared: ", 1), param="shared") from None
