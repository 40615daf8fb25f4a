"""The part that moves bytes: layouts, fences, devices, the host tier and the mover process."""
