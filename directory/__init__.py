"""The part that decides: the authoritative tree and the daemon around it."""
