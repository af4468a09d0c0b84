"""The store of a gateway: one SQLite file in the data folder."""
