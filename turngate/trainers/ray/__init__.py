"""Integration with trainers on Ray: complete groups as an async iterator that any task or actor of the cluster can use."""
