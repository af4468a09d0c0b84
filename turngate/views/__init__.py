"""Read models for people and APIs: sessions, traces, rollouts, groups and trends, read from the store.
The only read side: servers, command line and trainers show and hand out what is built here."""
