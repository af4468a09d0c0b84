"""HTTP: the app, its routes and its processes."""
