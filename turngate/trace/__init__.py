"""The recorded tree of one session, and everything derived from it: call locations, fork causes, roles, training rows. No I/O."""
