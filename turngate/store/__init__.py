"""The store of a gateway: one SQLite file in the data folder, or a PostgreSQL database that many machines share."""
