"""What each mechanism is worth: turn latencies with everything on, and with one mechanism off."""
