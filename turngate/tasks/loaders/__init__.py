"""Loaders that build tasks from Harbor folders, rows in our own format, and rows of SWE data sets."""
