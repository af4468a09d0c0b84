"""The web page's API, login and files."""
