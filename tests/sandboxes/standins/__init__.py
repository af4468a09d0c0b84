"""Local stand-ins for the remote services: they implement enough of each protocol for its official SDK, and really run commands."""
