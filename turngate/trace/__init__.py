"""The recorded tree of one session, and what is derived from it: call locations, fork causes, roles, training rows. No I/O."""
