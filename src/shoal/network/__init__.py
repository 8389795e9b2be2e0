"""How members find and reach each other: addresses, names, firewall."""
