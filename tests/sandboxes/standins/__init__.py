"""Local stand-ins for the remote services: they speak enough of each one's wire for its official SDK, and run commands for real."""
