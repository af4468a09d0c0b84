"""The typed protocol between a gateway and its clients, and the clients for the gateway, its feeds and its gate."""
