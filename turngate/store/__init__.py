"""A gateway's own store: one SQLite file in the data folder."""
