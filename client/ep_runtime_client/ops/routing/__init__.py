"""Which experts a token goes to, and the router's product."""
