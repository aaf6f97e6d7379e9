"""All dashboards, in the order in which they link to each other."""

from holdfast.cluster.dashboards import agents, engine, overview, redis_ray, tenants

BOARDS = (overview.BOARD, agents.BOARD, engine.BOARD, tenants.BOARD, redis_ray.BOARD)
