"""Recording rules and alerts as data, and the files of them: `python -m holdfast.cluster.rules --out FOLDER`."""
