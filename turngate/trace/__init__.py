"""The recorded tree of one session: locating a call in it, causes of forks, roles, training rows. No I/O."""
