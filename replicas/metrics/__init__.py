"""What a replica's metrics are, and where each value stands. `actor` turns them into Prometheus' families."""
