"""The pure state machine: events in, actions out, no clock, socket, thread or randomness."""
