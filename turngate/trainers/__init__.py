"""Integrations with trainers. Each trainer's library is imported only by its own integration."""
