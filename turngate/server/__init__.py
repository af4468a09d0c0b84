"""The HTTP server: the app, its routes and its processes."""
