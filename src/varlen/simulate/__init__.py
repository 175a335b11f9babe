"""A step in time: the task graph, dispatching, the event engine, memory and timelines; kernels with references."""
