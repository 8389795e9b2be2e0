"""Plans: what differs between the spec and the hosts, what each change costs, and its application.

`observe` reads the hosts, `diff` compares them with the documents of `roles`, `apply` makes the changes.
May import roles and below; proof, the rental service and verbs import it.
"""
