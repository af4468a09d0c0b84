"""The shared store: the store's tables in PostgreSQL, for many machines (requires the extra `postgres`)."""
