"""Every method of planning on one simulator, and how well the simulator predicts; begin in `run`.

`grid` draws the cells, `methods` plans and simulates one, `figures` reads the records; `table` writes the page, and
`sections` those parts of it that say what the comparison stands on. `delayed` has methods that move documents between
steps, `sharding` what WLB-LLM's choice of sharding brings, `accuracy` steps that really run. `exact` is a program of
its own, and so is the first half of `accuracy`.
"""
