"""Orders of requests and retention policies that Holdfast's own are compared with: the baselines of the papers.

A server runs one by its `module:Class` (docs/scheduling.md). The tables here are the short names of the command line.
"""

ORDERS = {
    "plas": "holdfast.loadgen.policies.plas:Plas",
    "infercept": "holdfast.loadgen.policies.infercept:ArrivalOfProgram",
}
RETENTION = {
    "fixed": "holdfast.loadgen.policies.fixed:Fixed",
    "bernstein": "holdfast.loadgen.policies.bernstein:Bernstein",
    "restore-cost": "holdfast.loadgen.policies.restore_cost:RestoreTime",
}
