"""Grafana dashboards as data, one file each; `grafana` turns them into JSON and alone needs Grafana's SDK."""

from helm.build.dashboards import agents, engine, overview, redis_ray, tenants

BOARDS = (overview.BOARD, agents.BOARD, engine.BOARD, tenants.BOARD, redis_ray.BOARD)
"""In the order in which they link to each other."""
