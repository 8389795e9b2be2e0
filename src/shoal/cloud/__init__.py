"""Renting machines at cloud providers while jobs need them.

`providers` has the API clients, `rental` and `status_file` the types that others share, `service` what runs on the
controller. All but `service` stay below `roles`; `service` may import everything up to `plan`.
"""
