"""The part that translates: what a scheduler needs to talk to the daemon."""
