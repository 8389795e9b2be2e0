"""The tracking server: MLflow's unit, settings, accounts and health check, as text.

Pure functions; `roles/tracking.py` puts them on hosts, and the training library's client is `shoal.train.tracking`.
May import agent (unit text) and below; roles and verbs import it.
"""
