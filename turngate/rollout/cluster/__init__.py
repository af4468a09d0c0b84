"""Run the attempts of a batch on the nodes of a Ray cluster: one cell on each node, placed by Ray, with PostgreSQL as the shared store."""
