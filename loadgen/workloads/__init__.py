"""What is asked of a server: seeded scripts of agent programs and the order in which their turns are sent. No I/O."""
