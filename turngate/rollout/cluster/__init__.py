"""Run the attempts of a batch on a Ray cluster: Ray places one cell on each node, and PostgreSQL is the shared store."""
