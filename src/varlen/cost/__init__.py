"""What a slice costs: model shapes, hardware, FLOPs, seconds and bytes, for the planner and the simulator alike."""
