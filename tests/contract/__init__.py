"""Contract suites: the same tests over the fake and the real of one interface."""
