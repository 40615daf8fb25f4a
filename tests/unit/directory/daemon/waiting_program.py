"""A program that does nothing until it is killed, in the place of a publisher."""

import signal

if __name__ == "__main__":
    signal.pause()
