"""Loaders that build tasks from Harbor folders, rows of SWE data sets and JSON lines."""
