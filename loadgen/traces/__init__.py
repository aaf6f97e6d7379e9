"""Traces of agent programs: recorded, read, written, converted and replayed. No HTTP: the client drives the replay."""
