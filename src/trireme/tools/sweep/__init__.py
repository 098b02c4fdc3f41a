"""`trireme sweep`: a grid of overrides, a run for each point, a table and a plot of what they came to.

`request.py` reads the command line, `directory.py` knows what was done and what is left, `running.py` runs it,
`table.py` writes it down.
"""
