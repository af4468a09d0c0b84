"""The shared store: the store's tables in PostgreSQL, for many machines (extra `postgres`)."""
