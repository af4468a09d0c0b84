"""Clients for a gateway, its feeds and its gate, and the typed protocol they use."""
