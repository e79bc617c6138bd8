"""Before a command runs: what it will do, what it needs, how long it takes; and how far it is."""
