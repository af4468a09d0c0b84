"""The address of a shared store, which is defined in `common/` because settings contain it."""

from turngate.common.database_url import DatabaseUrl, is_database_url, parse_database_url

__all__ = ["DatabaseUrl", "is_database_url", "parse_database_url"]
