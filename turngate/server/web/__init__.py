"""The web page's API, login and static files."""
