"""Tests of the runs with a real pair on a GPU, as far as they need neither."""
