"""Agent programs on simulated replicas: the real engines over a cost model, and a virtual clock."""
