"""Every method of planning on one simulator, and how well the simulator predicts; begin in `run`.

`grid` draws the cells, `methods` plans and simulates one, `figures` reads the records and `table` writes the page.
`exact` and `accuracy` are programs of their own.
"""
