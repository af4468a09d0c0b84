"""The store of a project: a SQLite file in a folder, or tables in a PostgreSQL database that many machines share."""
