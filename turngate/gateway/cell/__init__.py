"""A cell: the gateway of one machine, which ships its sessions to the shared store and serves only while it holds a lease there."""
