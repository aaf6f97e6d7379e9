"""Grafana dashboards as data, and their JSON: `python -m holdfast.cluster.dashboards --out FOLDER`.

What is shown is in one file a dashboard; `grafana` makes Grafana's JSON of it and is the one file that needs its SDK.
"""
