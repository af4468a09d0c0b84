"""A cell: one machine's gateway, which ships its sessions to the shared store and serves only while it holds a lease there."""
