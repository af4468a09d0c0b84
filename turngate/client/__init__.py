"""Clients for a gateway, its feeds and its gate, and the types of the messages that they exchange with the gateway."""
