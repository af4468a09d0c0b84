"""Run the attempts of a batch on a Ray cluster: one cell runs on each node, and PostgreSQL is the shared store."""
