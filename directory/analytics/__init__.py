"""Analytics: the access log, readers of public traces, reuse curves, miss causes, reports."""
