"""A cell: one machine's gateway that ships its sessions to the shared store and serves only while it holds a lease there."""
