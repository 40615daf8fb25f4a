"""The control process: sockets and supervision around the core; never torch or cuda."""
